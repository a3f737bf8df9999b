"""Gather once a step what is kept gathered: parameters that the plan stores split and uses whole.

With one microbatch a gather stands where its layer needs it. With several every further gather of the same
parameter is waste (Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023), and the stages of a pipeline
gather while they wait for the first: gathers whose copy is kept until backward go into a part of their own,
``gather``, which runs before the first microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autoshard.ir import Node
from autoshard.ir.collectives import is_collective
from autoshard.ir.lowered import Lowered
from autoshard.ir.statements import Statement, by_part, regrouped, statements_of


def gather_once(lowered: Lowered, kept: Collection[str]) -> Lowered:
    """The program with a part ``gather`` before the forward of every stage, if there is anything in it.

    kept: ports of the parameters whose gathered copies are kept for the full step.
    """
    full = statements_of(lowered)
    of_part = by_part(full)
    early = {part: gathers_of(of_part[part], kept) for part in lowered.parts if part.phase == "forward"}
    if not any(early.values()):
        return lowered
    chosen = {id(s) for statements in early.values() for s in statements}
    left = [(part, [s for s in statements if id(s) not in chosen]) for part, statements in of_part.items()]
    gathers = [(replace(part, phase="gather"), statements) for part, statements in early.items()]
    return regrouped(full, [*gathers, *left])


def gathers_of(
    statements: Sequence[Statement],
    kept: Collection[str],
    gathers: Callable[[Node], bool] = is_collective,
) -> list[Statement]:
    """The gathers of kept parameters, with what is between a parameter and its gather. gathers: whether an op
    is one."""
    known = set(kept)
    derived: list[Statement] = []
    for statement in statements:
        if statement.uses and known.issuperset(statement.uses):
            derived.append(statement)
            known.update(statement.makes)
    wanted: set[str] = set()
    result: list[Statement] = []
    for statement in reversed(derived):
        if gathers(statement.node) or not wanted.isdisjoint(statement.makes):
            result.append(statement)
            wanted.update(statement.uses)
    return result[::-1]
