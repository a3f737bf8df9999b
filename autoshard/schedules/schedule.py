"""What each rank of a pipeline computes, in order.

Computing only: what is sent and received follows from which rank owns which stage. An action waits for

- F(s, m): F(s-1, m)
- B(s, m) or I(s, m): F(s, m), and B or I of (s+1, m)
- W(s, m): I(s, m)

A stage takes its microbatches in order, forward and backward (B or I); weight gradients (W) may come later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: forward, whole backward, its input-gradient part, its weight-gradient part
Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage computing one microbatch, forward or backward; ``F3.0`` is stage 3, microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order of work of a pipeline.

    owner: the pipeline rank of each stage. actions: per pipeline rank, in order.
    """

    name: str
    microbatches: int
    owner: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.owner)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward comes in two parts."""
        return any(a.kind in "IW" for row in self.actions for a in row)
