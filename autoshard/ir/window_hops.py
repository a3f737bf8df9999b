"""How far keys go where a window ends their way (`runtime.window_ring`).

A sequence lies on the ranks of an axis in blocks of positions that follow each other: one per rank, or two of
a zigzag. A query attends to keys at less than ``window`` positions from its own, so that keys of a block are
needed in the next ``ceil((window - 1) / size)`` blocks only, and of each on its last way no more than what is
still in reach.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowHops:
    """The way of the keys of one block. size: positions of a block. blocks: of all ranks. window: in
    positions. causal: whether keys go to the blocks behind theirs alone, or also to those before."""

    size: int
    blocks: int
    window: int
    causal: bool

    @classmethod
    def over(cls, positions: int, ways: int, window: int, *, causal: bool, zigzag: bool) -> WindowHops:
        """Of a sequence on so many ranks."""
        blocks = 2 * ways if zigzag else ways
        return cls(positions // blocks, blocks, window, causal)

    @property
    def count(self) -> int:
        """Blocks that keys go on to, one after the other."""
        return min(self.blocks - 1, -(-(self.window - 1) // self.size))

    @property
    def sides(self) -> tuple[int, ...]:
        """Ways from block to block: behind, and before."""
        return (1,) if self.causal else (1, -1)

    def moved(self, hop: int) -> int:
        """Positions of a block whose keys go on in a hop, which are as many as the rows that attend to them.
        hop: from 1 on."""
        return min(self.size, self.window - 1 - (hop - 1) * self.size)

    def pairs(self, hop: int) -> float:
        """Pairs of a row and a key in reach of it, of a block's rows and the keys that came in a hop from all
        sides. hop: 0 for its own keys."""
        if not hop:
            near = min(self.window, self.size)
            return near * (self.size - (near - 1) / 2) * len(self.sides) - (not self.causal) * self.size
        rows = self.moved(hop)
        beyond = max(0, rows - (self.window - hop * self.size + self.size - rows))
        return len(self.sides) * (rows * rows - beyond * (beyond + 1) / 2)
