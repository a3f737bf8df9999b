"""An op that stands for a full call of a repeated layer while the rest of the model is traced.

It never runs: `capture/expand_repeats.py` puts the layer's own graph in its place. ``key`` says what the
fake tensors and the gradients look like: ``call|body|dtype:sizes;...|inputs with a gradient|dropout calls
before|outputs with a gradient``, both by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.capture.joint_trace import recorded, recording
from autoshard.torch_adapters.op_library import LIBRARY

REPEAT, REPEAT_BACKWARD = "autoshard.repeat.default", "autoshard.repeat_backward.default"


@dataclass(frozen=True)
class RepeatKey:
    """call: number of the call in the model. body: which layer graph. outs: dtype and shape per output.

    grads: positions of the inputs that get a gradient. site: dropout calls before this one. tangents:
    positions of the outputs that have a gradient.
    """

    call: int
    body: int
    outs: tuple[tuple[str, tuple[int, ...]], ...]
    grads: tuple[int, ...]
    site: int
    tangents: tuple[int, ...]

    def text(self) -> str:
        outs = ";".join(f"{d}:{','.join(map(str, s))}" for d, s in self.outs)
        grads, tangents = (",".join(map(str, n)) for n in (self.grads, self.tangents))
        return f"{self.call}|{self.body}|{outs}|{grads}|{self.site}|{tangents}"

    @classmethod
    def parse(cls, text: str) -> RepeatKey:
        call, body, outs, grads, site, tangents = text.split("|")
        pairs = [o.split(":") for o in outs.split(";") if o]
        return cls(
            int(call),
            int(body),
            tuple((d, tuple(int(n) for n in s.split(",") if n)) for d, s in pairs),
            tuple(int(g) for g in grads.split(",") if g),
            int(site),
            tuple(int(t) for t in tangents.split(",") if t),
        )


def repeated(tensors: Sequence[torch.Tensor], key: RepeatKey) -> list[torch.Tensor]:
    """The results of a call: of the op while a graph is recorded.

    The runs before that only ask for types, and what has a gradient; tensors like the results say as much
    for less than an op takes.
    """
    tracer = recording()
    if tracer is not None:
        return list(_Recorded.apply(tracer, key, *tensors))
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype)).requires_grad_(trained and k in key.tangents)
        for k, (dtype, shape) in enumerate(key.outs)
    ]


class _Recorded(torch.autograd.Function):
    """A call of the op and of its gradient, as nodes of the graph that is recorded.

    What dispatching the op would do: it passes through every mode there is, which takes ten times as long,
    once for each layer.
    """

    @staticmethod
    def forward(ctx: Any, tracer: Any, key: RepeatKey, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.tracer, ctx.key = tracer, key
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        outs = recorded(tracer, torch.ops.autoshard.repeat.default, (tensors,), key.text(), key.outs)
        ctx.mark_non_differentiable(*(t for k, t in enumerate(outs) if k not in key.tangents))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        tensors, key = ctx.saved_tensors, ctx.key
        full = tuple(
            tensors[0].new_zeros(key.outs[k][1], dtype=getattr(torch, key.outs[k][0]))
            if (grad := grads[k]) is None
            else grad
            for k in key.tangents
        )
        types = [(str(tensors[k].dtype).removeprefix("torch."), tuple(tensors[k].shape)) for k in key.grads]
        op = torch.ops.autoshard.repeat_backward.default
        new = recorded(ctx.tracer, op, (full, tensors), key.text(), types)
        result: list[torch.Tensor | None] = [None] * len(tensors)
        for position, grad in zip(key.grads, new, strict=True):
            result[position] = grad
        return None, None, *result


def _never(*args: Any) -> Any:
    raise AssertionError("a repeated layer stands only in graphs that are not run")


LIBRARY.define("repeat(Tensor[] tensors, str key) -> Tensor[]")
LIBRARY.define("repeat_backward(Tensor[] grads, Tensor[] tensors, str key) -> Tensor[]")
for _name in ("repeat", "repeat_backward"):
    LIBRARY.impl(_name, _never, "CPU")
