"""Totals in a part of their own, ``count``: they are known before the first microbatch runs.

The part runs for every microbatch before the step, on inputs alone. What it makes is added up, and every
microbatch then takes the sum in place of its own. A stage of a pipeline is given all inputs, so it makes the
totals that it uses by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autoshard.errors import UsageError
from autoshard.ir.lowered import Lowered, StagePart
from autoshard.ir.statements import Statement, by_part, producers_of, regrouped, statements_of
from autoshard.passes.simplify.scale_terms import TOTAL, totals_in


def count_once(lowered: Lowered, ports: Collection[str]) -> Lowered:
    """The program, cut into stages, with a part ``count`` before the forward of each, if there are totals.

    ports: all that may be counted: inputs, buffers and constants.

    Raises UsageError if a total depends on anything else.
    """
    if not totals_in(lowered.segments):
        return lowered
    full = statements_of(lowered)
    of_part = by_part(full)
    maker = {v: s for s in full.all for v in s.makes}
    totals = {v for s in full.all if s.node.op == TOTAL for v in s.makes}
    pieces: list[tuple[StagePart, Sequence[Statement]]] = []
    inside: set[int] = set()
    values = dict(full.values)
    for part in lowered.parts:
        if part.phase != "forward":
            continue
        own = {v for p in lowered.parts if p.stage == part.stage for s in of_part[p] for v in s.uses}
        wanted = own & totals
        chosen = producers_of(full.all, wanted)
        new = {v for s in chosen for v in s.makes}
        for value in {v for s in chosen for v in s.uses} - new - set(ports):
            raise UsageError(
                f"how much a microbatch counts depends on {value}, which is no input",
                where=str(maker.get(value)),
            )
        inside.update(id(s) for s in chosen)
        # other values of the part are no totals: they get names of their own
        names = {v: f"{v}_counted" for v in new - totals}
        values |= {n: full.values[v] for v, n in names.items() if v in full.values}
        copies = [_renamed(s, names) for s in chosen]
        pieces.append((replace(part, phase="count"), copies))
    full = replace(full, values=values)
    left = {p: [s for s in result if s.node.op != TOTAL] for p, result in of_part.items()}
    kept = _used([s for result in left.values() for s in result], set(full.results), inside)
    rest = [(p, [s for s in result if id(s) in kept]) for p, result in left.items()]
    return regrouped(full, [*pieces, *rest])


def _renamed(statement: Statement, names: dict[str, str]) -> Statement:
    uses = tuple(names.get(v, v) for v in statement.uses)
    # counts come before forward, also those that backward divides by
    makes, node = tuple(names.get(v, v) for v in statement.makes), replace(statement.node, backward=False)
    return statement._replace(node=node, uses=uses, makes=makes, backward=False)


def _used(statements: Sequence[Statement], results: set[str], maybe: set[int]) -> set[int]:
    """Identities of the statements that are needed; maybe: those that may not be."""
    wanted = set(results)
    kept: set[int] = set()
    for statement in reversed(statements):
        if id(statement) not in maybe or not wanted.isdisjoint(statement.makes):
            kept.add(id(statement))
            wanted.update(statement.uses)
    return kept
