"""Ops that are the same step of a loop, or of layers that differ in numbers alone, and decide together.

Folding finds layers that are equal. Two more kinds of repetition are left inside and between segments: a
recurrent layer is traced step by step, the same few ops again and again; and layers of which each has a
number of its own (the rate of a drop path) are segments of their own. What such ops cost does not depend on
these numbers, so they take the same decisions, as equal layers do, and the search is as large as one step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from autoshard.ir import Folded, Graph, refs_of
from autoshard.ir.flow import Place
from autoshard.ir.graph import Arg, form_of

K = TypeVar("K")
#: segment and number of an op
Op: TypeAlias = tuple[str, int]

#: segments of fewer ops have no loop that is worth it
_LARGE = 400
#: so many steps make a loop
_MANY = 8
#: how far around an op others have to be alike, in uses
_AROUND = 2
#: so many segments that differ in numbers alone decide together
_SEGMENTS = 3


@dataclass(frozen=True)
class TiedDecisions:
    """What may decide with the first of its kind; first ones and what decides alone are left out.

    ops: op -> op. inputs: value that a segment takes -> another one. across: whether some are of several
    segments.
    """

    ops: Mapping[Op, Op]
    inputs: Mapping[Place, Place]
    across: bool

    @staticmethod
    def of(folded: Folded) -> TiedDecisions:
        """Those of a model."""
        ops: dict[Op, Op] = {}
        inputs: dict[Place, Place] = {}
        leaders = _leaders(folded)
        for name, graph in folded.segments.items():
            leader = leaders.get(name, name)
            if leader != name:
                ops.update(((name, k), (leader, k)) for k in range(len(graph.nodes)))
                pairs = zip(graph.inputs, folded.segments[leader].inputs, strict=True)
                inputs.update(((name, value), (leader, first)) for (value, _), (first, _) in pairs)
            elif len(graph.nodes) >= _LARGE:
                same_ops, same_inputs = _steps(graph)
                ops.update(((name, k), (name, first)) for k, first in same_ops.items())
                inputs.update(((name, value), (name, first)) for value, first in same_inputs.items())
        return TiedDecisions(
            _ends(ops), _ends(inputs), any(name != leader for name, leader in leaders.items())
        )


def _ends(first: Mapping[K, K]) -> dict[K, K]:
    """What leads to something that leads further leads there."""
    return {k: first.get(f, f) for k, f in first.items()}


def _leaders(folded: Folded) -> dict[str, str]:
    """Segments that are the same but for numbers -> the first of them, itself among them."""
    by_size: dict[tuple[int, int], list[str]] = {}
    for name in dict.fromkeys(c.segment for c in folded.calls if c.label):
        graph = folded.segments[name]
        by_size.setdefault((len(graph.nodes), len(graph.inputs)), []).append(name)
    groups: dict[Hashable, list[str]] = {}
    for names in by_size.values():
        for name in names if len(names) >= _SEGMENTS else ():
            groups.setdefault(_shape(folded.segments[name], numbers=False), []).append(name)
    leaders: dict[str, str] = {}
    for names in groups.values():
        # what is equal in its numbers, too, would be one segment if that could be
        if len(names) >= _SEGMENTS and len({_shape(folded.segments[n]) for n in names}) == len(names):
            leaders.update(dict.fromkeys(names, names[0]))
    return leaders


def _shape(graph: Graph, *, numbers: bool = True) -> Hashable:
    """Equal for graphs that differ in names alone or, without ``numbers``, in fractions as well."""
    values = [*(v for v, _ in graph.inputs), *(out for node in graph.nodes for out in node.outs)]
    at = {value: k for k, value in enumerate(values)}

    def form(arg: Arg) -> Hashable:
        return form_of(arg, lambda name: ("ref", at[name]), None if numbers else lambda _: float)

    nodes = tuple((n.op, form(n.args), form(n.kwargs), n.types, n.backward) for n in graph.nodes)
    return tuple(t for _, t in graph.inputs), nodes, tuple(at[v] for v in graph.outputs)


def _steps(graph: Graph) -> tuple[dict[int, int], dict[str, str]]:
    """Ops of a loop -> the same op of its first step; and the same of what the segment takes."""
    inputs = [value for value, _ in graph.inputs]
    members: dict[int, list[int]] = {}
    for number, kind in enumerate(_kinds(graph)):
        members.setdefault(kind, []).append(number)
    first = {k: same[0] for same in members.values() if len(same) >= _MANY for k in same[1:]}
    return (
        {k - len(inputs): f - len(inputs) for k, f in first.items() if k >= len(inputs)},
        {inputs[k]: inputs[f] for k, f in first.items() if k < len(inputs)},
    )


def _kinds(graph: Graph) -> list[int]:
    """Per input and then per op a number: that of its op, its types, and those of the ops around it."""
    types, leaving = graph.types(), set(graph.outputs)
    inputs = [value for value, _ in graph.inputs]
    refs: list[tuple[str, ...]] = [*(() for _ in inputs), *(tuple(refs_of(n)) for n in graph.nodes)]
    outs = [*((value,) for value in inputs), *(n.outs for n in graph.nodes)]
    ops = [*("" for _ in inputs), *(n.op for n in graph.nodes)]
    makers = {out: (k, p) for k, results in enumerate(outs) for p, out in enumerate(results)}
    users: list[list[tuple[int, int]]] = [[] for _ in outs]
    uses: dict[str, int] = dict.fromkeys(leaving, 1)
    for number, taken in enumerate(refs):
        for position, ref in enumerate(taken):
            uses[ref] = uses.get(ref, 0) + 1
            users[makers[ref][0]].append((number, position))
    kinds = _numbered(
        [
            (
                op,
                tuple(types[r] for r in taken),
                tuple((types.get(o), min(uses.get(o, 0), 2), o in leaving) for o in results),
            )
            for op, taken, results in zip(ops, refs, outs, strict=True)
        ]
    )
    for _ in range(_AROUND):
        kinds = _numbered(
            [
                (
                    kinds[number],
                    tuple((kinds[makers[r][0]], makers[r][1]) for r in taken),
                    frozenset((kinds[user], position) for user, position in users[number]),
                )
                for number, taken in enumerate(refs)
            ]
        )
    return kinds


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    table: dict[Hashable, int] = {}
    return [table.setdefault(key, len(table)) for key in keys]
