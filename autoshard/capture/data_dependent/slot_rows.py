"""The rows of one of many experts, as slots: what is computed on them is computed for the rows that exist.

A mask [choices, tokens], or [tokens], says which tokens chose an expert. Where a model takes those rows of a
tensor, multiplies them by the expert's matrices and adds the results up by token, that is a dispatch,
products of one expert, and a combination (`autoshard.ops.experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

import autoshard.ops.experts  # noqa: F401 (defines the ops called here)
from autoshard.capture.data_dependent.expert_choice import ExpertChoice
from autoshard.capture.data_dependent.expert_turns import (
    Dropped,
    Gathered,
    Multiplied,
    ScoredRows,
    Step,
    Turn,
    Weighed,
    dropped,
    gathered,
    weighed,
)

_ops = torch.ops.autoshard


class NoSlotsError(Exception):
    """Chosen rows are used in a way that slots have no form for: the trace starts again without slots."""


class SlotSelection:
    """The places of a mask, one of ``experts`` alike. shape: of the mask, of one or two dims.

    choice: what it says of the tokens' choices. steps: what rows are made of, for the turns of a loop.
    """

    def __init__(self, mask: torch.Tensor, choice: ExpertChoice, steps: dict[int, Step]) -> None:
        self.shape, self.experts, self.choice = tuple(mask.shape), choice.classes, choice
        self._mask, self._steps = mask, steps
        #: of the mask, the axis of tokens; known once something is indexed by it alone
        self._tokens = 0 if mask.dim() == 1 else None
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def counts(self) -> torch.Tensor:
        """Which places of the mask hold."""
        return self._mask

    @property
    def distinct(self) -> bool:
        """Whether no token is in two of its rows."""
        return len(self.shape) == 1 or self.choice.has_choices

    @property
    def is_only(self) -> bool:
        """Whether no token is among those of another expert."""
        return len(self.shape) == 1 and self.choice.has_one_each(self.shape[0])

    def with_tokens(self, axis: int) -> None:
        """An axis of the mask is that of tokens."""
        if self._tokens not in (None, axis):
            raise NoSlotsError
        self._tokens = axis

    @property
    def rows(self) -> int:
        """Rows as a trace counts them: one for each token."""
        if self._tokens is None:
            raise NoSlotsError
        return self.shape[self._tokens]

    def index(self, axis: int) -> torch.Tensor:
        """A tensor that stands for the index of each row along an axis, and is nothing but handed on."""
        return torch.empty(prod(self.shape), dtype=torch.int64)

    def _chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(choices of every token [t, k], 0 of this expert and -1 of others; its slots)."""
        if self._slots is None:
            if self._tokens is None:
                raise NoSlotsError
            mask = self._mask.reshape(-1, 1) if self._mask.dim() == 1 else self._mask
            mask = mask.t() if self._mask.dim() == 2 and self._tokens == 1 else mask
            chosen = _ops.choices(torch.where(mask != 0, 0, -1))
            self._slots = chosen, _ops.route_one(chosen, self.experts)
        return self._slots

    def gather(self, x: torch.Tensor, dim: int, axes: Sequence[int]) -> torch.Tensor:
        """``x`` indexed at dims ``dim``, ... by the indices along these axes: [rows, ...], without what is
        before ``dim``, which is of one element."""
        if len(axes) == 1 and self._tokens in (None, axes[0]):
            self._tokens = axes[0]
        both = len(axes) == 2
        if self._tokens is None or not (both or axes[0] == self._tokens) or prod(x.shape[:dim]) != 1:
            raise NoSlotsError
        x = x.reshape(x.shape[dim:]) if dim else x
        sizes = [self.shape[a] for a in axes]
        if list(x.shape[: len(axes)]) != sizes or x.dim() > 2:
            raise NoSlotsError
        if both:
            return self._weights(x, "choices" if axes[0] == self._tokens else "choices first")
        return self.rows_of(x) if x.dim() == 2 else self._weights(x, "tokens")

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all tokens [..., n] that chose the expert: [rows, n]."""
        rows = gathered(x, *self._chosen())
        self._steps[id(rows)] = Gathered(rows, x)
        return rows

    def scores_of(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Of scores [tokens, experts] those of one expert: [rows]."""
        if x.dim() != 2 or len(x) != self.rows:
            raise NoSlotsError
        scores = self._weights(x[:, number], "tokens")
        if number % x.shape[1] == self.choice.number:
            self._steps[id(scores)] = ScoredRows(scores, x, number)
        return scores

    def dropped(self, rows: torch.Tensor, p: float, seed: torch.Tensor, site: int) -> torch.Tensor:
        """Rows [rows, n] after a dropout."""
        if rows.dim() != 2:
            raise NoSlotsError
        new = dropped(rows, p, seed, site, *self._chosen())
        self._steps[id(new)] = Dropped(new, self._steps[id(rows)], p, seed, site)
        return new

    def _weights(self, x: torch.Tensor, of: str) -> torch.Tensor:
        weights = weighed(x, of, *self._chosen())
        self._steps[id(weights)] = Weighed(weights, x, of)
        return weights

    def added(self, rows: torch.Tensor, axis: int) -> torch.Tensor:
        """What the rows [rows, n] add to each token: [tokens, n]."""
        if axis != self._tokens or rows.dim() != 2:
            raise NoSlotsError
        new: torch.Tensor = _ops.combine(rows, *self._chosen())
        return new

    def turn(self, rows: torch.Tensor, axis: int) -> Turn:
        """The same, as the turn of a loop."""
        if axis != self._tokens or rows.dim() != 2 or id(rows) not in self._steps:
            raise NoSlotsError
        return Turn(self.choice, self.shape, axis, self._steps[id(rows)], lambda: self.added(rows, axis))

    def product(self, rows: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        """rows [rows, k] times weight [k, n], or [n, k] if it is transposed."""
        if rows.dim() != 2 or weight.dim() != 2 or torch.is_autocast_enabled(rows.device.type):
            raise NoSlotsError
        new: torch.Tensor = _ops.expert_mm(rows, self._chosen()[1], weight.unsqueeze(0), transposed)
        self._steps[id(new)] = Multiplied(new, self._steps[id(rows)], weight, transposed)
        return new


def same_rows(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int], lead: int
) -> bool:
    """Whether a reshape gives rows of this shape, [rows, n], once more. lead: dims of one element that the
    model takes them to have before."""
    if kwargs:
        return False
    if name == "squeeze":
        return lead == 1 and args[1:] in ((), (0,)) and 1 not in shape
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if name not in ("view", "reshape") or len(sizes) != len(shape):
        return False
    return all(n in (size, -1) for n, size in zip(sizes, shape, strict=True)) and sizes.count(-1) <= 1
