"""How many rows a mask chooses: a number that only a run has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class RowCount:
    """How many rows, or elements in them, there are: to be compared with none, or to be counted with.

    counts: the places that count, each ``times`` times; None if they cannot be counted. asked: told the frame
    that compares it with none, and the answer, which is that of rows that exist.
    """

    def __init__(
        self,
        refuse: Callable[[], Exception],
        counts: torch.Tensor | None = None,
        times: int = 1,
        asked: Callable[[FrameType, bool], object] | None = None,
    ) -> None:
        self._refuse, self._counts, self._times, self._asked = refuse, counts, times, asked

    @property
    def value(self) -> torch.Tensor:
        """The number, as a tensor."""
        if self._counts is None:
            raise self._refuse()
        return self._counts.sum() * self._times

    def size_of(self, rows: torch.Tensor) -> int:
        """The size of the dim of rows that are counted, [rows, ...] of all places: what a reshape takes."""
        if self._counts is None or self._times != 1 or len(rows) != len(self._counts):
            raise self._refuse()
        return len(rows)

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.value / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value

    def __float__(self) -> float:
        raise self._refuse()

    __int__ = __index__ = __float__

    def __eq__(self, other: object) -> bool:
        return self._with_none(other, False)

    def __ne__(self, other: object) -> bool:
        return self._with_none(other, True)

    def __gt__(self, other: object) -> bool:
        return self._with_none(other, True)

    def __bool__(self) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def _equals(self, other: RowCount) -> bool:
        return self._counts is not None and self._counts is other._counts and self._times == other._times

    def _with_none(self, other: object, answer: bool) -> bool:
        if isinstance(other, RowCount) and self._equals(other):
            return not answer
        if type(other) is not int or other != 0:
            raise self._refuse()
        if self._asked is not None:
            self._asked(sys._getframe(2), answer)
        return answer
