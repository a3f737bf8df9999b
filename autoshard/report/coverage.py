"""What of a model the rules cover, found from the graph alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.ir import Folded, Joint, Node, TensorType, refs_of
from autoshard.passes.pipeline import simplify
from autoshard.rules.core import RuleFn
from autoshard.rules.registry import RULES, OpCalls, calls_of, missing_rules
from autoshard.rules.user import Rules, rule_table


@dataclass(frozen=True, slots=True)
class Uneven:
    """A dim of a parameter or input of odd size: ``size`` of ``shape``."""

    name: str
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Coverage:
    """What of a model the rules cover.

    calls, kinds: op calls in a step, and different ops. segments: different pieces of the model. missing:
    ops without a rule. replicated: calls whose rule allows no shard. uneven: sizes
    that two ranks cannot share equally.
    """

    calls: int
    kinds: int
    segments: int
    missing: tuple[OpCalls, ...]
    replicated: tuple[OpCalls, ...]
    uneven: tuple[Uneven, ...]

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self.missing, **asdict(self)}


def coverage(joint: Joint, rules: Rules = None) -> Coverage:
    """Look through a captured model; no search, time linear in the graph. rules: the user's own."""
    rule_of = rule_table(RULES, rules)
    folded = simplify(joint)
    times = folded.counts()
    nodes = [(name, node) for name, graph in folded.segments.items() for node in graph.nodes]
    return Coverage(
        sum(times[name] for name, _ in nodes),
        len({node.op for _, node in nodes}),
        len(folded.segments),
        missing_rules(folded, rule_of),
        _replicated(folded, rule_of),
        _uneven(joint),
    )


def _replicated(folded: Folded, rule_of: Mapping[str, RuleFn]) -> tuple[OpCalls, ...]:
    types = {name: graph.types() for name, graph in folded.segments.items()}
    return calls_of(folded, lambda segment, node: _indivisible(node, types[segment], rule_of.get(node.op)))


def _indivisible(node: Node, types: Mapping[str, TensorType], rule: RuleFn | None) -> bool:
    """Whether a call of some size cannot be sharded in any way."""
    ins = [types[r] for r in refs_of(node)]
    largest = max((t.numel for t in (*ins, *node.types) if t is not None), default=0)
    return rule is not None and bool(ins) and largest > 1 and not rule(node, ins).shardable()


def _uneven(joint: Joint) -> tuple[Uneven, ...]:
    """Odd sizes of matrices and of the batch; vectors follow the matrices that they are added to."""
    rows: list[Uneven] = []
    for port in joint.ports:
        dims: tuple[int, ...] = ()
        name = port.target
        if port.kind == "param" and len(port.type.shape) == 2:
            dims = port.type.shape
        elif port.kind == "input" and port.target in joint.batch_inputs:
            dims, name = port.type.shape[:1], joint.input_names[int(port.target)]
        rows += [Uneven(name, n, port.type.shape) for n in dims if n > 2 and n % 2]
    return tuple(rows)
