"""Schedules by the names that people give."""

from __future__ import annotations

from difflib import get_close_matches

from autoshard.errors import UsageError
from autoshard.schedules.dualpipe_v import DUALPIPE_V
from autoshard.schedules.interleaved import INTERLEAVED_OVERLAP
from autoshard.schedules.named import NAMED
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.searched import SEARCHED
from autoshard.schedules.seq1f1b import SEQ1F1B
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes

#: a schedule is its file and its name here
SCHEDULES = {**NAMED, **{spec.name: spec for spec in (INTERLEAVED_OVERLAP, DUALPIPE_V, SEARCHED, SEQ1F1B)}}


def names() -> tuple[str, ...]:
    return tuple(SCHEDULES)


def default_chunks(name: str) -> int:
    """Stages per rank where nobody says: what the schedule needs, or the fewest that make it differ from
    a schedule with one stage per rank. Raises UsageError for an unknown name."""
    return lookup(name).default_chunks


def tried(*, ahead: bool = False) -> dict[str, tuple[int, ...]]:
    """Schedule -> chunks that the planner tries. ahead: also those whose microbatches are under way before
    anyone waits for one, at the price of memory: for ranks that are joined by unlike links."""
    result = {name: spec.tried for name, spec in SCHEDULES.items() if spec.tried}
    if ahead:
        result |= {name: spec.tried_ahead for name, spec in SCHEDULES.items() if spec.tried_ahead}
    return result


def of_published(name: str) -> str | None:
    """The schedule that a published run calls so, None if there is none."""
    return next((n for n, spec in SCHEDULES.items() if name == n or name in spec.also), None)


def lookup(name: str) -> ScheduleSpec:
    """Raises UsageError for an unknown name, with the nearest one."""
    if name not in SCHEDULES:
        near = get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1, cutoff=0.4)
        raise UsageError(
            f"there is no pipeline schedule {name!r}",
            why=f"there are {', '.join(SCHEDULES)}",
            hint=f"did you mean {near[0]}?" if near else "",
        )
    return SCHEDULES[name]


def sliced() -> tuple[str, ...]:
    """Those that divide sequences."""
    return tuple(name for name, spec in SCHEDULES.items() if spec.sliced)


def check_slices(name: str, slices: int) -> None:
    """Raises UsageError for an unknown name, or more than one slice where the schedule has no slices."""
    if slices != 1 and not lookup(name).sliced:
        raise UsageError(
            f"{name} does not divide sequences, and slices={slices} was asked for",
            where=f"schedule {name}",
            hint=f"leave slices out, or use {', '.join(sliced())}",
        )


def default_slices(name: str) -> int:
    """Slices of a sequence where nobody says. Raises UsageError for an unknown name."""
    return 2 if lookup(name).sliced else 1


def make(name: str, ranks: int, microbatches: int, chunks: int = 1, slices: int = 1) -> Schedule:
    """A schedule by name; chunks: stages per rank; slices: of the sequence of a microbatch.

    Raises UsageError for an unknown name, a size below 1, or chunks or slices that the schedule cannot have.
    """
    result = lookup(name)
    check_slices(name, slices)
    return result.make(ranks, microbatches, chunks, *((slices,) if result.sliced else ()))


def ideal_bubble(name: str, size: PipeSize, times: StepTimes | None = None) -> float | None:
    """Idle seconds per rank, from a step's global beginning to its global end, as `Timeline` counts.

    For equal stages and sends that take no time; None where there is no formula.
    """
    return lookup(name).bubble(size, times or StepTimes())


def ideal_bubble_fraction(name: str, size: PipeSize, times: StepTimes | None = None) -> float | None:
    """`ideal_bubble` as a share of the step; None where there is no formula."""
    each = times or StepTimes()
    idle = ideal_bubble(name, size, each)
    return None if idle is None else idle / (idle + size.microbatches * each.total)
