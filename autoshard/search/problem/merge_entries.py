"""Entries that are the same but for how often they count, made one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from autoshard.search.problem.cost_entries import Busy, Entry, Exchanged, Joined, Recomputed

_COUNTED = Busy | Exchanged | Recomputed | Joined


def merged(entries: Sequence[Entry]) -> list[Entry]:
    """The same in fewer; where many ops decide together, most are about the same variables."""
    by_key: dict[Hashable, Entry] = {}
    for number, entry in enumerate(entries):
        match entry:
            case Busy() | Exchanged() | Recomputed() | Joined():
                key: Hashable = replace(entry, count=0)
            case _:
                key = number
        before = by_key.get(key)
        if isinstance(before, _COUNTED) and isinstance(entry, _COUNTED):
            by_key[key] = replace(before, count=before.count + entry.count)
        else:
            by_key[key] = entry
    return list(by_key.values())
