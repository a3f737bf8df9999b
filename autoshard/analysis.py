"""A model looked at once: captured, simplified, with its rules; shared by planning and compiling."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.ir import Folded, Joint, Node, TensorType, refs_of
from autoshard.ir.flow import Flow, Place, flow_of
from autoshard.passes.pipeline import simplify
from autoshard.program.names import port_names
from autoshard.report.dumps import Dumps, Shot
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.digits import DigitTable, find_digits
from autoshard.rules.registry import RULES, rules_for
from autoshard.rules.states import Digit
from autoshard.rules.user import Rules, rule_table
from autoshard.search.problem.problem import Model


@dataclass(frozen=True)
class Analysis:
    """What does not depend on the mesh.

    fingerprint: of the simplified graph; a plan only fits the graph it was made for. dumps: texts of
    the passes before the search. replicated: ops without a rule that run on whole tensors. table: the
    rule of every op that has one, those of the user among them.
    """

    folded: Folded
    flow: Flow
    rules: dict[tuple[str, int], Factored]
    digits: DigitTable
    fingerprint: str
    replicated: tuple[str, ...]
    dumps: Dumps = field(default_factory=Dumps)
    table: Mapping[str, RuleFn] = field(default_factory=lambda: RULES, repr=False)

    @property
    def model(self) -> Model:
        return Model(self.folded, self.flow, self.rules, self.digits)


def analyse(
    joint: Joint,
    *,
    replicate_unknown: bool = False,
    rules: Rules = None,
    progress: Callable[[str], None] | None = None,
) -> Analysis:
    """Simplify a captured model and find its rules. Raises NoRuleError naming all ops without one.

    rules: the user's own, beside those that come with autoshard.
    """
    say = progress or (lambda _: None)
    table = rule_table(RULES, rules)
    say("folding")
    shots: dict[str, Shot] = {}
    folded = simplify(joint, lambda name, graph: shots.__setitem__(name, Shot(graph, "any")))
    flow = flow_of(folded)
    say("finding rules")
    found, replicated = rules_for(folded, replicate_unknown=replicate_unknown, table=table)
    digits = find_digits(folded, flow, found)
    return Analysis(
        folded,
        flow,
        found,
        digits,
        fingerprint(folded, flow, found, digits),
        replicated,
        Dumps(shots),
        table,
    )


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
        found = zip(rule.sizes, self.digits.factors[key], strict=True)
        return [self.size(n, digits) for n, digits in found]

    def size(self, n: int, digits: Sequence[Digit]) -> str:
        batch = next((size for _, size, cls in digits if cls in self.digits.batch), None)
        return str(n) if batch is None else f"{n // batch}B"
