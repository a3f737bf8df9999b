"""A hash of all that a plan depends on: a plan fits the graph that it was made for, and no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from autoshard.ir import Folded, Node, TensorType, refs_of
from autoshard.ir.flow import Flow, Place, flow_of
from autoshard.program.names import port_names
from autoshard.program.original import folded_of
from autoshard.program.program import Program
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.factor_splits import DigitTable, find_digits
from autoshard.rules.registry import rules_for
from autoshard.rules.states import Digit


def fingerprint(
    folded: Folded, flow: Flow, rules: Mapping[tuple[str, int], Factored], digits: DigitTable
) -> str:
    """A hash of all that a plan depends on: ops and their rules, shapes, how segments are called.

    The batch is left out, so a plan made for one batch and scaled to another fits both.
    """
    text = _Symbolic(digits)
    parts: list[object] = []
    for name, graph in folded.segments.items():
        parts.append([(v, text.type((name, v), t)) for v, t in graph.inputs])
        for number, node in enumerate(graph.nodes):
            place, rule = (name, number), rules[name, number]
            outs = [None if t is None else text.type((name, v), t) for v, t in text.outs(node)]
            factors = (text.factors(place, rule), rule.inputs, rule.outputs, sorted(rule.fixed))
            parts.append((node.op, tuple(refs_of(node)), node.outs, outs, factors, rule.reduce, rule.linear))
        parts.append(graph.outputs)
    # by what they are of, not by what a capture calls them: a stored graph knows only that
    names = port_names(folded.joint.ports)
    for c in folded.calls:
        args = ",".join(names.get(a, a) for a in c.args)
        parts.append(f"{c.segment}({args})->{','.join(c.outs)}@{c.site}")
    for key, group in flow.classes.items():
        shape = text.type(key, group.first.type)
        parts += [f"{p.kind}:{p.target}:{shape}" for p in group.ports]
    parts += [f"{r.kind}:{r.target}" for r in folded.joint.results]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def fingerprint_of(program: Program, table: Mapping[str, RuleFn]) -> str:
    """Of the model that is stored with a program, as `analysis.fingerprint` makes it of a captured one.

    table: the rule of every op that has one.
    """
    assert program.original is not None
    folded = folded_of(program.original, program.signature)
    flow = flow_of(folded)
    table_, _ = rules_for(folded, replicate_unknown=True, table=table)
    return fingerprint(folded, flow, table_, find_digits(folded, flow, table_))


class _Symbolic:
    """Sizes with the batch written as B."""

    def __init__(self, digits: DigitTable) -> None:
        self.digits = digits

    def outs(self, node: Node) -> Iterator[tuple[str, TensorType | None]]:
        return zip(node.outs, node.types, strict=True)

    def type(self, place: Place, type_: TensorType) -> str:
        dims = (self.size(n, self.digits.values.get((*place, k), ())) for k, n in enumerate(type_.shape))
        return f"{type_.dtype}[{', '.join(dims)}]"

    def factors(self, key: tuple[str, int], rule: Factored) -> list[str]:
        pairs = zip(rule.sizes, self.digits.factors[key], strict=True)
        return [self.size(n, digits) for n, digits in pairs]

    def size(self, n: int, digits: Sequence[Digit]) -> str:
        batch = next((size for _, size, cls in digits if cls in self.digits.batch), None)
        return str(n) if batch is None else f"{n // batch}B"
