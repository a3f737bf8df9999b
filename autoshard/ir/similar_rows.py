"""Rows of experts that are grouped where they are alike: how many of them there are, and by which ops."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import UsageError

LSH_GROUPS = "autoshard.lsh_groups.default"
GROUP_CHOICES = "autoshard.group_choices.default"
GROUP_MEANS = "autoshard.group_means.default"
UNGROUP = "autoshard.ungroup.default"
UNGROUP_TO_ROWS = "autoshard.ungroup_to_rows.default"
UNGROUP_TO_WEIGHTS = "autoshard.ungroup_to_weights.default"
UNGROUP_TO_TOKENS = "autoshard.ungroup_to_tokens.default"
#: random directions of a hash, which gives a row one of twice as many numbers
DIRECTIONS = 16
#: of the directions of all hashes
SEED = 0
#: more hashes have no room in a key of 64 bits, beside an expert
MOST_HASHES = 9
_HASHES = 6


@dataclass(frozen=True)
class RowGroups:
    """Rows that go to one expert are grouped by so many hashes. share: of the rows, those that are then left,
    which is expected and not enforced."""

    share: float
    hashes: int = _HASHES

    @staticmethod
    def parse(text: str) -> RowGroups | None:
        """``lsh-moe:0.2`` or ``lsh-moe:0.2:8``; None for "". Raises UsageError."""
        if not text:
            return None
        _, *numbers = text.split(":")
        try:
            share, hashes = float(numbers[0]), int(numbers[1]) if len(numbers) > 1 else _HASHES
        except (ValueError, IndexError):
            share, hashes = 0.0, 0
        if not (len(numbers) < 3 and 1e-4 <= share < 1.0 and 1 <= hashes <= MOST_HASHES):
            raise UsageError(
                f"{text!r} cannot be allowed",
                where="allow",
                hint="lsh-moe:SHARE or lsh-moe:SHARE:HASHES, for instance lsh-moe:0.2:6: the share of rows "
                f"that is expected to travel, and 1 to {MOST_HASHES} hashes",
            )
        return RowGroups(min(round(share, 4), 0.9999), hashes)

    def __str__(self) -> str:
        return f"lsh-moe:{self.share:g}:{self.hashes}"
