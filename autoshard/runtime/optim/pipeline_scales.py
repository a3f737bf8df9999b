"""Gradients of a pipeline must be scaled alike on all its ranks: each has the parameters of its own stages.

``torch.nn.utils.clip_grad_norm_`` sees the norm of a rank's stages alone and scales by that, every rank by
another factor: silently another model. So a rank keeps a few elements of its gradients after ``train_step``,
looks by what factor they were scaled when an optimizer steps (torch calls a hook before it), and the next
``train_step`` compares the factors of all ranks, in the message that brings the loss. Ranks whose gradients
were not scaled by one factor (elements clipped, layers scaled apart) say nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from math import inf, isnan
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autoshard.errors import UsageError
from autoshard.runtime.membership import membership_of
from autoshard.runtime.optim.optimizer_hooks import parameters_in
from autoshard.torch_adapters.step_hooks import before_steps

#: parameters that are looked at, and elements of each
_PARAMETERS, _ELEMENTS = 4, 64
#: factors that differ by less are those of rounding: of gradients of single precision, of half
_NEAR, _NEAR_HALF = 1e-3, 2e-2


class Scales:
    """What became of the gradients of one rank since the last step."""

    def __init__(self) -> None:
        self.samples: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.factors: torch.Tensor | None = None
        self._late: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def watch(self) -> None:
        """Measure before the steps of optimizers, as long as this lives."""
        before_steps(self, partial(_before_step, weakref.ref(self)), first=True)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep some of the gradients, which no one has scaled yet."""
        trained = [p for p in parameters if p.grad is not None and _some(p.grad).numel()]
        chosen = trained[:: max(1, (len(trained) - 1) // (_PARAMETERS - 1))][:_PARAMETERS]
        # of one parameter nobody can say whether all were scaled alike
        self.samples = [(p, _some(p.grad).clone()) for p in chosen] if len(chosen) > 1 else []
        self.factors = None

    @torch.no_grad()
    def measure(self) -> None:
        """The least and the largest factor by which they were scaled since."""
        now = [(_some(p.grad), old) for p, old in self.samples if p.grad is not None]
        if len(now) < len(self.samples) or not now or any(g.shape != old.shape for g, old in now):
            return
        after, before = (torch.cat([pair[k].double() for pair in now]) for k in (0, 1))
        # tiny numbers have no digits left that a factor could be seen by
        counts = before.abs() > 1e-3 * before.abs().max()
        ratio = after / before
        ends = ratio.masked_fill(~counts, torch.inf).min(), ratio.masked_fill(~counts, -torch.inf).max()
        half = any(old.dtype in (torch.bfloat16, torch.float16) for _, old in now)
        near = torch.full_like(ends[0], _NEAR_HALF if half else _NEAR)
        self.factors = torch.stack([*ends, near])
        self.samples = []

    def row(self, device: torch.device) -> torch.Tensor:
        """What other ranks are told: the least and largest factor, and what is near; or NaN. [3]"""
        if self.factors is None:
            return torch.full((3,), torch.nan, dtype=torch.float32, device=device)
        return self.factors.to(device=device, dtype=torch.float32)

    def check(self, rows: torch.Tensor) -> None:
        """UsageError, on every rank, if ranks scaled their gradients unlike. rows: of all ranks, [n, 3].

        On a device the numbers of the step before are looked at, so that nobody waits for it.
        """
        if rows.device.type == "cpu":
            _check(rows.tolist())
            return
        late, event = self._late, torch.cuda.Event()
        kept = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
        event.record()
        self._late = kept, event
        if late is not None:
            late[1].synchronize()
            _check(late[0].tolist())


def _some(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.detach().reshape(-1)[:_ELEMENTS]


def _check(rows: list[list[float]]) -> None:
    known = {rank: row for rank, row in enumerate(rows) if not isnan(row[0]) and 0 < row[0] <= row[1] < inf}
    near = max((row[2] for row in known.values()), default=0.0)
    result = {rank: most for rank, (least, most, _) in known.items() if most - least <= near * most}
    if len(result) < 2 or max(result.values()) - min(result.values()) <= near * max(result.values()):
        return
    raise UsageError(
        "the gradients of a pipeline's ranks were scaled unlike before the last optimizer step",
        where=", ".join(f"stage rank {rank}: times {factor:.4g}" for rank, factor in result.items()),
        why="each rank has the parameters of its own stages, whose norm torch.nn.utils.clip_grad_norm_ takes "
        "for that of the model",
        hint="autoshard.clip_grad_norm_(model, max_norm) clips by the norm of all stages; scale by the same "
        "number on every rank; begin again from the last checkpoint",
    )


def _before_step(known: weakref.ref[Scales], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Of every optimizer of the process: those of other models are left alone."""
    scales = known()
    members = map(membership_of, parameters_in(optimizer))
    if scales is not None and any(m is not None and m.scales is scales for m in members):
        scales.measure()
