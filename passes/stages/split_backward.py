"""Split the backward of every stage in two: what other stages wait for, and the rest.

The first part makes the gradients that are sent to other stages; the rest (most of it the gradients of
weights) fills time in which a stage would wait (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
section 2). A stage that sends nothing keeps its backward in one piece.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.lowered import Lowered, StagePart
from autoshard.ir.statements import Statement, by_part, producers_of, regrouped, statements_of


def split_backward(lowered: Lowered) -> Lowered:
    """The program with a part ``weight`` for every stage, behind its backward."""
    full = statements_of(lowered)
    of_part = by_part(full)
    # value -> the stages that use it
    users: dict[str, set[int]] = {}
    for part, statements in of_part.items():
        for value in {v for s in statements for v in s.uses}:
            users.setdefault(value, set()).add(part.stage)
    pieces: list[tuple[StagePart, list[Statement]]] = []
    for part, statements in of_part.items():
        if part.phase != "backward":
            pieces.append((part, statements))
            continue
        sent = {v for s in statements for v in s.makes if users.get(v, set()) - {part.stage}}
        first = producers_of(statements, sent) if sent else statements
        chosen = {id(s) for s in first}
        pieces.append((part, first))
        pieces.append((replace(part, phase="weight"), [s for s in statements if id(s) not in chosen]))
    return regrouped(full, pieces)
