"""Gathers of parameters are issued one call ahead of the call that uses them.

A gather at the start of a segment is on its way while nothing is computed. It becomes a call of its own,
which stands before the call in front (Rajbhandari et al., SC'20, ZeRO; FSDP prefetches in the same way). A
result is waited for where it is used, so nothing else changes. One more layer's parameters are held.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autoshard.ir import Call
from autoshard.ir.comm import ANY_GATHER
from autoshard.ir.lowered import Lowered, Part
from autoshard.ir.statements import Statement, Statements, by_part, regrouped, statements_of
from autoshard.passes.part_names import parts_named


def prefetch(lowered: Lowered, parameters: Collection[str]) -> Lowered:
    """The program with the gathers of every call in front of the call before it.

    parameters: ports whose values are there from the start of a step.
    """
    whole = statements_of(lowered)
    pieces: list[tuple[Part, Sequence[Statement]]] = []
    found = False
    for part, statements in by_part(whole).items():
        items = _items(statements)
        early = {k: _gathers(item, whole, parameters) for k, item in enumerate(items)}
        early = {k: chosen for k, chosen in early.items() if k and chosen and len(chosen) < len(items[k])}
        found |= bool(early)
        pieces += [(part, piece) for piece in _ordered(items, early)] or [(part, [])]
    return parts_named(regrouped(whole, pieces), lowered) if found else lowered


def _items(statements: Sequence[Statement]) -> list[list[Statement]]:
    """The statements of every instruction of main."""
    found: dict[int, list[Statement]] = {}
    for statement in statements:
        found.setdefault(statement.item, []).append(statement)
    return list(found.values())


def _gathers(item: Sequence[Statement], whole: Statements, parameters: Collection[str]) -> list[Statement]:
    """The gathers of parameters in a call, with what is between a parameter and its gather."""
    if not isinstance(whole.lowered.main[item[0].item], Call):
        return []
    if not any(s.node.op in ANY_GATHER for s in item):
        return []
    known: set[str] = set()
    derived: list[Statement] = []
    for statement in item:
        if statement.uses and all(v in parameters or v in known for v in statement.uses):
            derived.append(statement)
            known.update(statement.makes)
    wanted: set[str] = set()
    found: list[Statement] = []
    for statement in reversed(derived):
        if statement.node.op in ANY_GATHER or not wanted.isdisjoint(statement.makes):
            found.append(statement)
            wanted.update(statement.uses)
    return found[::-1]


def _ordered(items: Sequence[list[Statement]], early: dict[int, list[Statement]]) -> list[list[Statement]]:
    """The pieces of a part: what is gathered for a call stands before the call in front of it."""
    found: list[list[Statement]] = []
    for k, item in enumerate(items):
        if k + 1 in early:
            found.append(early[k + 1])
        chosen = {id(s) for s in early.get(k, ())}
        found.append([s for s in item if id(s) not in chosen])
    return found
