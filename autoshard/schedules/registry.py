"""Schedules by the names that people give."""

from __future__ import annotations

from difflib import get_close_matches

from autoshard.errors import UsageError
from autoshard.schedules.named import NAMED, Named
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.searched import search_schedule
from autoshard.schedules.seq1f1b import seq1f1b

SCHEDULES = {
    **NAMED,
    "searched": Named(search_schedule),
    "seq1f1b": Named(seq1f1b, chunks=1, sliced=seq1f1b),
}


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


def check_slices(name: str, slices: int) -> None:
    """Raises UsageError for an unknown name, or more than one slice where the schedule has no slices."""
    if lookup(name).sliced is None and slices != 1:
        able = ", ".join(n for n, found in SCHEDULES.items() if found.sliced)
        raise UsageError(
            f"{name} does not divide sequences, and slices={slices} was asked for",
            where=f"schedule {name}",
            hint=f"leave slices out, or use {able}",
        )


def default_slices(name: str) -> int:
    """Slices of a sequence where nobody says. Raises UsageError for an unknown name."""
    return 1 if lookup(name).sliced is None else 2


def make(name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Schedule:
    """A schedule by name; chunks: stages per rank; slices: of the sequence of a microbatch.

    Raises UsageError for an unknown name, a size below 1, or chunks or slices that the schedule cannot have.
    """
    check_slices(name, slices)
    found = lookup(name)
    if found.sliced is not None:
        return found.sliced(ranks, microbatches, chunks, slices)
    return found.make(ranks, microbatches, chunks)
