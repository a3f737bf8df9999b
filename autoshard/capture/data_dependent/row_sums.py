"""Sums to which a loop over experts adds: they wait until the loop is over, so that all turns can be one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.capture.data_dependent.expert_turns import MatrixSlices, Turn, summed

_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
_EMPTY = frozenset(("empty", "empty_like", "new_empty"))


@dataclass(eq=False)
class _Sum:
    """assigned: whether rows are put there, rather than added: each token has one turn. grad: whether
    gradients were recorded."""

    out: torch.Tensor
    zeros: bool
    assigned: bool
    grad: bool
    turns: list[Turn] = field(default_factory=list)

    def takes(self, turn: Turn, assigned: bool) -> bool:
        """Whether a turn may be one of those that wait."""
        if self.assigned != assigned or self.grad != torch.is_grad_enabled():
            return False
        if not assigned or not self.turns:
            return True
        alike = turn.choice.is_alike(self.turns[0].choice)
        return alike and turn.choice.number not in {t.choice.number for t in self.turns}

    def is_full(self) -> bool:
        """Whether every expert had its turn."""
        return len({t.choice.number for t in self.turns}) == self.turns[0].choice.classes


class RowSums:
    """Tensors of zeros, or of nothing, that only turns have used so far.

    run: runs functions of ours.
    """

    def __init__(self, slices: MatrixSlices, run: Callable[..., Any]) -> None:
        self._slices, self._run = slices, run
        self._new: dict[int, tuple[torch.Tensor, bool]] = {}
        self._waiting: dict[int, _Sum] = {}

    def note(self, name: str, out: Any) -> None:
        """A function gave a tensor."""
        if name in _ZEROS or name in _EMPTY:
            self._new[id(out)] = out, name in _ZEROS

    def waits_for(self, tensor: torch.Tensor) -> bool:
        """Whether something will be added to a tensor, which it does not have yet."""
        return id(tensor) in self._waiting

    def used(self, tensors: Sequence[torch.Tensor]) -> None:
        """Something else is about to be done with tensors: what turns add to them is added before."""
        for t in tensors if self._new or self._waiting else ():
            self._new.pop(id(t), None)
            if id(t) in self._waiting:
                self._finish(self._waiting.pop(id(t)))

    def finish(self) -> None:
        """Nothing else comes."""
        while self._waiting:
            self._finish(self._waiting.popitem()[1])

    def waits(self, out: torch.Tensor, turn: Turn, assigned: bool) -> bool:
        """Whether a turn's rows will be added to a tensor later, or put there."""
        if id(out) in self._new:
            zeros = self._new.pop(id(out))[1]
            if zeros or assigned:
                self._waiting[id(out)] = _Sum(out, zeros, assigned, torch.is_grad_enabled())
        of = self._waiting.get(id(out))
        if of is None:
            return False
        if not of.takes(turn, assigned):
            self._finish(self._waiting.pop(id(out)))
            return False
        of.turns.append(turn)
        if of.is_full():
            self._finish(self._waiting.pop(id(out)))
        return True

    def _finish(self, of: _Sum) -> None:
        kind = of.out.device.type
        with torch.set_grad_enabled(of.grad), torch.autocast(kind, enabled=False):
            sums = self._run(summed, of.turns, self._slices)
            if not of.zeros:
                of.out.zero_()
            for rows in sums:
                of.out.add_(rows.reshape(of.out.shape))
