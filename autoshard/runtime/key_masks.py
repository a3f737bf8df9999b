"""Which keys rows attend to where keys come from other ranks: none that padding hides, that are of another
document, or that are out of reach of a window.

Rows take a mask of rows by keys, some at a time, and of the keys no more than those from the first to the
last of the documents of these rows. What the numbers of documents say changes no message: keys of other
documents go on, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from autoshard.ops.attention import documents_of

#: rows that take a mask of rows by keys at a time
_ROWS = 512


@dataclass(frozen=True)
class KeyTile:
    """Positions of some rows and of keys. mask: of keys, or of rows by keys, None if all see all."""

    rows: range
    keys: range
    mask: torch.Tensor | None


@dataclass(frozen=True)
class KeyMask:
    """mask: of all keys [.., 1, t], None without one. window: 0 without one. documents: of each position
    [b or 1, t], on the host, if the mask says that."""

    mask: torch.Tensor | None
    window: int
    documents: torch.Tensor | None

    @classmethod
    def of(cls, mask: torch.Tensor | None, window: int = 0) -> KeyMask:
        numbers = documents_of(mask)
        return cls(mask, window, None if numbers is None else numbers.cpu())

    def of_blocks(self, *blocks: range) -> torch.Tensor | None:
        """The mask of the keys of some blocks."""
        if self.mask is None or self.mask.shape[-1] == 1:
            return self.mask
        parts = [self.mask[..., block.start : block.stop] for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def tiles(self, rows: range, keys: range, device: torch.device) -> Iterator[KeyTile]:
        """Some rows at a time, with the keys that they may attend to; all if they attend to all."""
        step = len(rows) if not self.window and self._is_one(rows, keys) else _ROWS
        for at in range(rows.start, rows.stop, step):
            some = range(at, min(at + step, rows.stop))
            near = self._near(some, keys)
            if near:
                yield KeyTile(some, near, self._hidden(some, near, device))

    def _near(self, rows: range, keys: range) -> range:
        """From the first to the last key that may be of a document of the rows, and is in reach."""
        if self.window:
            keys = range(
                max(keys.start, rows.start - self.window + 1), min(keys.stop, rows.stop - 1 + self.window)
            )
        if self.documents is None or not keys:
            return keys
        own = self.documents[:, rows.start : rows.stop]
        of_keys = self.documents[:, keys.start : keys.stop]
        alike = (of_keys >= own.amin(1, True)) & (of_keys <= own.amax(1, True))
        found = alike.any(0).nonzero()
        return range(keys.start + int(found[0]), keys.start + int(found[-1]) + 1) if len(found) else range(0)

    def _is_one(self, rows: range, keys: range) -> bool:
        """Whether rows and keys are of one document, in each sequence."""
        if self.documents is None:
            return False
        both = [self.documents[:, x.start : x.stop] for x in (rows, keys)]
        first = both[0][:, :1]
        return all(bool((x == first).all()) for x in both)

    def _hidden(self, rows: range, keys: range, device: torch.device) -> torch.Tensor | None:
        seen, own = self.of_blocks(keys), self.of_blocks(rows)
        if seen is not None and own is not None and self.documents is not None:
            seen = None if self._is_one(rows, keys) else own.transpose(-1, -2) == seen
        if not self.window or max(rows[-1] - keys[0], keys[-1] - rows[0]) < self.window:
            return seen
        places = [torch.arange(x.start, x.stop, device=device) for x in (rows, keys)]
        near = (places[1] - places[0].unsqueeze(1)).abs() < self.window
        return near if seen is None else seen & near


def moved(positions: range, by: int) -> slice:
    """Positions as a part of what a rank has."""
    return slice(positions.start + by, positions.stop + by)


def without_unseen(lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp, also of rows that attend to none of the keys, of which kernels give any. mask: see
    `KeyTile`."""
    return lse if mask is None else lse.masked_fill(~mask.any(-1), float("-inf"))
