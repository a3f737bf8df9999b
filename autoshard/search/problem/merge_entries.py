"""Entries that are the same but for how often they count, made one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from autoshard.search.problem.cost_entries import Busy, Circulating, Entry, Exchanged, Joined, Recomputed

_COUNTED = Busy | Circulating | Exchanged | Recomputed | Joined


def merged(entries: Sequence[Entry]) -> list[Entry]:
    """The same in fewer; where many ops decide together, most are about the same variables."""
    by_key: dict[Hashable, Entry] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, _COUNTED):
            by_key[number] = entry
            continue
        key = replace(entry, count=0)
        before = by_key.get(key)
        counted = before.count if isinstance(before, _COUNTED) else 0
        by_key[key] = replace(entry, count=counted + entry.count)
    return list(by_key.values())
