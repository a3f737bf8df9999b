"""Some cases, one after the other: what a process of `python -m fuzz` is given at a time."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fuzz.case import PLANS, Case, Outcome, analysed


@dataclass(frozen=True)
class Chunk:
    """What became of some cases. ops: those of the rule table that they ran."""

    outcomes: tuple[tuple[int, Outcome], ...]
    ops: frozenset[str]


def run_chunk(numbers: range) -> Chunk:
    """Run the cases with these numbers."""
    warnings.simplefilter("ignore")
    outcomes: list[tuple[int, Outcome]] = []
    ops: set[str] = set()
    for first in range(numbers.start, numbers.stop, PLANS):
        try:
            analysis = analysed(Case.of(first).recipe)
        except Exception as error:  # a recipe that eager runs must be captured: what fails is reported
            outcomes.append((first, Outcome("failed", f"capture {type(error).__name__}", str(error))))
            continue
        ops |= {node.op for graph in analysis.folded.segments.values() for node in graph.nodes}
        outcomes += [(n, Case.of(n).run(analysis)) for n in range(first, min(first + PLANS, numbers.stop))]
    return Chunk(tuple(outcomes), frozenset(ops))
