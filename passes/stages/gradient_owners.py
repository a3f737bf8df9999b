"""Gradients of parameters in a pipeline: which stages want each of them, and which ops make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autoshard.ir import Joint, Node, Origin, Ref
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.statements import Statement
from autoshard.passes.stages.unpartitioned import Unpartitioned


@dataclass(frozen=True)
class Owned:
    """Which stages want which gradients.

    uncut: the program, with copies of gradients that serve something else as well. owners: gradient of a
    parameter -> the stages that have the parameter.
    """

    uncut: Unpartitioned
    owners: Mapping[str, frozenset[int]]


def owners_of(uncut: Unpartitioned, joint: Joint, stages_of: Mapping[str, Collection[int]]) -> Owned:
    """Which stages want each gradient; one that serves something else as well is copied for its owner.

    stages_of: parameter -> the stages that use it; one that nothing uses is in the first stage.
    """
    full = uncut.whole
    gradients = _gradients(uncut, joint, stages_of)
    wanted: dict[str, set[frozenset[int]]] = {}
    for _, value, stages in gradients:
        wanted.setdefault(value, set()).add(stages)
    main, results, values = list(full.lowered.main), list(full.results), full.values
    owners: dict[str, frozenset[int]] = {}
    added: list[Statement] = []
    copied: dict[str, PlacedValue] = {}
    taken: set[str] = set()
    for k, value, stages in gradients:
        repeated = value in taken
        taken.add(value)
        if value in uncut.users or len(wanted[value]) > 1 or repeated:
            name, type_ = f"{value}_own{k}", values[value].type
            origin = _origin(uncut, value)
            node = Node("aten.clone.default", (Ref(value),), (), (name,), (type_,), origin, True)
            added.append(Statement(len(main), -1, node, (value,), (name,), True))
            main.append(node)
            copied[name] = values[value]
            results[k] = value = name
        owners[value] = stages
    if added:
        full = replace(
            full,
            lowered=replace(full.lowered, main=tuple(main), values={**full.lowered.values, **copied}),
            all=(*full.all, *added),
            results=tuple(results),
            values={**values, **copied},
        )
        uncut = uncut.with_whole(full)
    return Owned(uncut, owners)


def _gradients(
    uncut: Unpartitioned, joint: Joint, stages_of: Mapping[str, Collection[int]]
) -> list[tuple[int, str, frozenset[int]]]:
    """(place among the results, value, stages of the parameter) of every gradient of a parameter."""
    names = {p.target: p.name for p in joint.ports if p.kind == "param"}
    return [
        (k, value, frozenset(stages_of.get(names[result.target], ())) or frozenset((0,)))
        for k, (result, value) in enumerate(zip(joint.results, uncut.whole.results, strict=True))
        if result.kind == "grad"
    ]


def _origin(uncut: Unpartitioned, value: str) -> Origin:
    return uncut.whole.all[uncut.maker[value]].node.origin if value in uncut.maker else Origin()


def floors_of(owned: Owned) -> list[int]:
    """Per place, the lowest stage an op of backward may be in: below it, a gradient would miss its
    parameter."""
    statements, users, owners = owned.uncut.whole.all, owned.uncut.users, owned.owners
    floors = [0] * len(statements)
    for place in range(len(statements) - 1, -1, -1):
        statement = statements[place]
        if not statement.backward:
            continue
        lowest = 0
        for value in statement.makes:
            if value in owners:
                lowest = max(lowest, min(owners[value]))
            for user in users.get(value, ()):
                if floors[user] > lowest:
                    lowest = floors[user]
        floors[place] = lowest
    return floors


def makers_of(owned: Owned) -> dict[int, frozenset[int]]:
    """Place of every op that makes the gradient of a parameter, or a term of it -> the stages to be in.

    What merely reshapes, reduces or adds up gradients hands this on to the ops before.
    """
    uncut, statements = owned.uncut, owned.uncut.whole.all
    result: dict[int, frozenset[int]] = {}
    for value, stages in owned.owners.items():
        left = [value]
        while left:
            place = uncut.maker.get(left.pop(), -1)
            if place < 0 or not statements[place].backward:
                continue
            result[place] = stages
            uses = statements[place].uses
            if len(uses) != 1 and statements[place].node.op != "aten.add.Tensor":
                continue
            if all(len(uncut.users[u]) == 1 for u in uses):
                left += uses
    return result
