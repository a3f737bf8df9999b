"""Schedules by the names that people give."""

from __future__ import annotations

from difflib import get_close_matches

from autoshard.errors import UsageError
from autoshard.schedules.named import NAMED, Named
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.searched import searched

SCHEDULES = {**NAMED, "searched": Named(searched)}


def names() -> tuple[str, ...]:
    return tuple(SCHEDULES)


def default_chunks(name: str) -> int:
    """Stages per rank where nobody says: what the schedule needs, or the fewest that make it differ from
    a schedule with one stage per rank. Raises UsageError for an unknown name."""
    found = lookup(name)
    if found.chunks is not None:
        return found.chunks
    return 2 if name in ("interleaved", "breadth-first") else 1


def lookup(name: str) -> Named:
    """Raises UsageError for an unknown name, with the nearest one."""
    if name not in SCHEDULES:
        near = get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1, cutoff=0.4)
        raise UsageError(
            f"there is no pipeline schedule {name!r}",
            why=f"there are {', '.join(SCHEDULES)}",
            hint=f"did you mean {near[0]}?" if near else "",
        )
    return SCHEDULES[name]


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name; chunks: stages per rank.

    Raises UsageError for an unknown name, a size below 1, or chunks that the schedule cannot have.
    """
    return lookup(name).make(ranks, microbatches, chunks)
