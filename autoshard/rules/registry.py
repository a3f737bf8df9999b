"""The table of all rules: op name -> rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.errors import AutoshardError, NoRuleError
from autoshard.ir import Folded, Node, TensorType, refs_of
from autoshard.ir.row_tiles import TILES
from autoshard.ir.scans import SCAN
from autoshard.rules import (
    attention,
    causal_conv,
    create,
    embedding,
    experts,
    index,
    linalg,
    loss,
    matmul,
    norm,
    packed,
    pointwise,
    recurrent,
    reduction,
    row_tiles,
    scaled,
    scaled_experts,
    scans,
    similar_rows,
    spatial,
    view,
)
from autoshard.rules.core import Factored, RuleFn, opaque
from autoshard.torch_adapters.random_ops import is_random

_FAMILIES = {
    op: fn
    for family in (
        pointwise,
        view,
        reduction,
        matmul,
        scaled,
        scaled_experts,
        packed,
        norm,
        spatial,
        linalg,
        embedding,
        loss,
        attention,
        recurrent,
        causal_conv,
        index,
        create,
        experts,
        similar_rows,
    )
    for op, fn in family.RULES.items()
}
_SINGLE: Mapping[str, RuleFn] = MappingProxyType({**_FAMILIES, **attention.JOINED})
RULES: Mapping[str, RuleFn] = MappingProxyType(
    {**_SINGLE, TILES: row_tiles.rule_with(_SINGLE), SCAN: scans.rule_with(_SINGLE)}
)


@dataclass(frozen=True, slots=True)
class OpCalls:
    """One op. count: its calls in a step. sources, modules: the user's lines and modules that call it."""

    op: str
    count: int
    sources: tuple[str, ...]
    modules: tuple[str, ...]


def missing_rules(folded: Folded, table: Mapping[str, RuleFn] = RULES) -> tuple[OpCalls, ...]:
    """All ops of a model without a rule, by name."""
    return calls_of(folded, lambda segment, node: node.op not in table)


def calls_of(folded: Folded, chosen: Callable[[str, Node], bool]) -> tuple[OpCalls, ...]:
    """The ops of those nodes that ``chosen(segment, node)`` says, by name."""
    times = folded.counts()
    result: dict[str, OpCalls] = {}
    for name, graph in folded.segments.items():
        for node in graph.nodes:
            if not chosen(name, node):
                continue
            old = result.get(node.op, OpCalls(node.op, 0, (), ()))
            result[node.op] = OpCalls(
                node.op,
                old.count + times[name],
                _with(old.sources, node.origin.source),
                _with(old.modules, node.origin.fqn),
            )
    return tuple(result[op] for op in sorted(result))


def _with(known: tuple[str, ...], more: str) -> tuple[str, ...]:
    return known if not more or more in known else (*known, more)


def rules_for(
    folded: Folded, *, replicate_unknown: bool = False, table: Mapping[str, RuleFn] = RULES
) -> tuple[dict[tuple[str, int], Factored], tuple[str, ...]]:
    """The factors of every node, by (segment, node number), and the ops that fell back to replication.

    Raises NoRuleError naming every op without a rule and the user's line that calls it, unless
    ``replicate_unknown``: then such an op runs on full tensors on every rank (random numbers never do).
    """
    unknown = missing_rules(folded, table)
    _refuse_random(unknown)
    if unknown and not replicate_unknown:
        places = [(m.op, next(iter((*m.sources, *m.modules)), "")) for m in unknown]
        raise NoRuleError(
            "no sharding rule for: " + ", ".join(m.op for m in unknown),
            where="; ".join(f"{op} at {place}" for op, place in places),
            why="without a rule the op can only run on whole tensors",
            hint="hand over a rule of your own (autoshard.rule, --rules), or accept replication with "
            "replicate_unknown=True (--replicate-unknown)",
        )
    result: dict[tuple[str, int], Factored] = {}
    for name, graph in folded.segments.items():
        types = graph.types()
        for number, node in enumerate(graph.nodes):
            ins = [types[r] for r in refs_of(node)]
            rule = table.get(node.op)
            result[name, number] = opaque(ins, node.types) if rule is None else _laid_out(rule, node, ins)
    return result, tuple(m.op for m in unknown)


def _refuse_random(unknown: Sequence[OpCalls]) -> None:
    """NoRuleError for ops that draw random numbers: on full tensors, every rank would draw its own."""
    drawn = [m for m in unknown if is_random(m.op)]
    if drawn:
        raise NoRuleError(
            "no sharding rule for random numbers: " + ", ".join(m.op for m in drawn),
            where="; ".join(f"{m.op} at {next(iter((*m.sources, *m.modules)), '')}" for m in drawn),
            why="ranks draw from generators of their own, so their copies of one tensor would differ",
            hint="torch.rand, randn, bernoulli or dropout, which give the same numbers on all ranks; or "
            "numbers drawn outside and passed as an argument",
        )


def _laid_out(rule: RuleFn, node: Node, ins: list[TensorType]) -> Factored:
    """What a rule says; a rule of a user's may fail or say something impossible."""
    try:
        factored = rule(node, ins)
        if not isinstance(factored, Factored):
            raise TypeError(f"it gives a {type(factored).__name__}, not a Factored")
        factored.check(ins, node.types)
    except AutoshardError:
        raise
    except Exception as error:
        raise NoRuleError(
            f"the rule of {node.op} cannot be used",
            where=node.origin.source or node.origin.fqn,
            why=f"{type(error).__name__}: {error}",
            hint="see autoshard.rules for how rules are written, and autoshard.check_rule for testing one",
        ) from error
    return factored
