"""Split the backward of every stage in two: what other stages wait for, and the rest.

The first part makes the gradients that are sent to other stages; the rest (most of it the gradients of
weights) fills time in which a stage would wait (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 2). A stage that sends nothing keeps its backward in one piece.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.lowered import Instruction, Lowered, Part
from autoshard.ir.statements import Statement, Taker, statements_of


def split_backward(lowered: Lowered) -> Lowered:
    """The program with a part ``weight`` for every stage, behind its backward."""
    whole = statements_of(lowered)
    taker = Taker(whole)
    by_item: dict[int, list[Statement]] = {}
    for statement in whole.all:
        by_item.setdefault(statement.item, []).append(statement)
    of_part = {
        part: [s for k in range(part.start, part.stop) for s in by_item.get(k, ())] for part in lowered.parts
    }
    needs = {part: {v for s in statements for v in s.uses} for part, statements in of_part.items()}
    results = set(whole.results)
    main: list[Instruction] = []
    parts: list[Part] = []

    def add(part: Part, statements: list[Statement], elsewhere: set[str]) -> None:
        items = taker.take(statements, elsewhere)
        parts.append(replace(part, start=len(main), stop=len(main) + len(items)))
        main.extend(items)

    for part, statements in of_part.items():
        others = results.union(*(n for p, n in needs.items() if p != part))
        if part.phase != "backward":
            add(part, statements, others)
            continue
        made = {v for s in statements for v in s.makes}
        sent = made.intersection(*[set().union(*(n for p, n in needs.items() if p.stage != part.stage))])
        first = _needed(statements, sent) if sent else statements
        chosen = {id(s) for s in first}
        rest = [s for s in statements if id(s) not in chosen]
        add(part, first, others.union(*(s.uses for s in rest)))
        add(replace(part, phase="weight"), rest, others)
    values = {**taker.values, **{n: p for n, p in lowered.values.items() if n not in taker.values}}
    return replace(
        lowered,
        segments=taker.segments,
        main=tuple(main),
        values=values,
        results=whole.results,
        parts=tuple(parts),
    )


def _needed(statements: list[Statement], values: set[str]) -> list[Statement]:
    """What makes the values, in order."""
    wanted = set(values)
    found: list[Statement] = []
    for statement in reversed(statements):
        if not wanted.isdisjoint(statement.makes):
            found.append(statement)
            wanted.update(statement.uses)
    return found[::-1]
