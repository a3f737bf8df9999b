"""An op that stands for a whole call of a repeated layer while the rest of the model is traced.

It never runs: `passes/expand_repeats.py` puts the layer's own graph in its place. ``key`` says what the
fake tensors and the gradients look like: ``call|body|dtype:sizes;...|inputs with a gradient|dropout calls
before|outputs with a gradient``, both by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
    for less than an op takes. Adapter: ``get_proxy_mode`` of ``torch.fx.experimental.proxy_tensor``.
    """
    if get_proxy_mode() is not None:
        return list(torch.ops.autoshard.repeat(tensors, key.text()))
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype)).requires_grad_(trained and k in key.tangents)
        for k, (dtype, shape) in enumerate(key.outs)
    ]


def _never(*args: Any) -> Any:
    raise AssertionError("a repeated layer stands only in graphs that are not run")


def _repeat_fake(tensors: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    return [
        tensors[0].new_empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in RepeatKey.parse(key).outs
    ]


def _backward_fake(
    grads: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], key: str
) -> list[torch.Tensor]:
    return [tensors[k].new_empty(tensors[k].shape) for k in RepeatKey.parse(key).grads]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.key = inputs
    ctx.save_for_backward(*tensors)
    differentiable = set(RepeatKey.parse(ctx.key).tangents)
    ctx.mark_non_differentiable(*(t for k, t in enumerate(output) if k not in differentiable))


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], None]:
    tensors = list(ctx.saved_tensors)
    key = RepeatKey.parse(ctx.key)
    whole = [
        tensors[0].new_zeros(key.outs[k][1], dtype=getattr(torch, key.outs[k][0]))
        if grads[k] is None
        else grads[k]
        for k in key.tangents
    ]
    made = torch.ops.autoshard.repeat_backward(whole, tensors, ctx.key)
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for position, grad in zip(key.grads, made, strict=True):
        found[position] = grad
    return found, None


LIBRARY.define("repeat(Tensor[] tensors, str key) -> Tensor[]")
LIBRARY.define("repeat_backward(Tensor[] grads, Tensor[] tensors, str key) -> Tensor[]")
for _name, _fake in (("repeat", _repeat_fake), ("repeat_backward", _backward_fake)):
    LIBRARY.impl(_name, _never, "CPU")
    torch.library.register_fake(f"autoshard::{_name}", _fake, lib=LIBRARY)
torch.library.register_autograd("autoshard::repeat", _backward, setup_context=_save, lib=LIBRARY)
