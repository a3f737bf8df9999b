"""The table of all rules: op name -> rule."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.errors import NoRuleError
from autoshard.ir import Folded, refs_of
from autoshard.rules import (
    attention,
    create,
    embedding,
    experts,
    index,
    loss,
    matmul,
    norm,
    pointwise,
    reduction,
    spatial,
    view,
)
from autoshard.rules.core import Factored, RuleFn, opaque

RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        op: fn
        for family in (
            pointwise,
            view,
            reduction,
            matmul,
            norm,
            spatial,
            embedding,
            loss,
            attention,
            index,
            create,
            experts,
        )
        for op, fn in family.RULES.items()
    }
)


def rules_for(
    folded: Folded, *, replicate_unknown: bool = False
) -> tuple[dict[tuple[str, int], Factored], tuple[str, ...]]:
    """The factors of every node, by (segment, node number), and the ops that fell back to replication.

    Raises NoRuleError naming every op without a rule and the user's line that calls it, unless
    ``replicate_unknown``: then such an op runs on whole tensors on every rank.
    """
    found: dict[tuple[str, int], Factored] = {}
    unknown: dict[str, str] = {}
    for name, graph in folded.segments.items():
        types = graph.types()
        for number, node in enumerate(graph.nodes):
            ins = [types[r] for r in refs_of(node)]
            rule = RULES.get(node.op)
            if rule is None:
                unknown.setdefault(node.op, node.origin.source or node.origin.fqn)
                found[name, number] = opaque(ins, node.types)
            else:
                found[name, number] = rule(node, ins)
    if unknown and not replicate_unknown:
        raise NoRuleError(
            "no sharding rule for: " + ", ".join(sorted(unknown)),
            where="; ".join(f"{op} at {place}" for op, place in sorted(unknown.items())),
            why="without a rule the op can only run on whole tensors",
            hint="add a rule (autoshard/rules/), or accept replication with replicate_unknown=True "
            "(--replicate-unknown)",
        )
    return found, tuple(sorted(unknown))
