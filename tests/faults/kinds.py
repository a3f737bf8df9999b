"""All kinds of faults, by name."""

from __future__ import annotations

import random

from autoshard.program.program import Program
from faults import (
    calls,
    collectives,
    context,
    experts,
    functions,
    gradients,
    memory,
    messages,
    placements,
    scans,
    schedules,
    slices,
    tiles,
)
from faults.fault import Fault, Kind

KINDS: dict[str, Kind] = {
    **collectives.KINDS,
    **placements.KINDS,
    **functions.KINDS,
    **calls.KINDS,
    **gradients.KINDS,
    **experts.KINDS,
    **messages.KINDS,
    **schedules.KINDS,
    **slices.KINDS,
    **context.KINDS,
    **tiles.KINDS,
    **scans.KINDS,
    **memory.KINDS,
}


def some(kind: Kind, program: Program, most: int, seed: int = 0) -> list[Fault]:
    """At most so many faults of a kind in a program, spread over the places where it can be."""
    found = list(kind.mutate(program))
    return found if len(found) <= most else random.Random(seed).sample(found, most)
