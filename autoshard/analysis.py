"""A model looked at once: captured, simplified, with its rules; shared by planning and compiling."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoshard.ir import Folded, Joint
from autoshard.ir.flow import Flow, flow_of
from autoshard.passes.pipeline import simplify
from autoshard.report.dump import dump_text
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.digits import DigitTable, find_digits
from autoshard.rules.registry import RULES, rules_for
from autoshard.rules.user import Rules, rule_table
from autoshard.search.problem import Model


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
    dumps: dict[str, str] = field(default_factory=dict)
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
    dumps: dict[str, str] = {}
    folded = simplify(joint, lambda name, graph: dumps.__setitem__(name, dump_text(name, graph, "any")))
    flow = flow_of(folded)
    say("finding rules")
    found, replicated = rules_for(folded, replicate_unknown=replicate_unknown, table=table)
    digits = find_digits(folded, flow, found)
    return Analysis(folded, flow, found, digits, fingerprint(folded), replicated, dumps, table)


def fingerprint(folded: Folded) -> str:
    """A hash of the simplified graph, of what its ends are, and of how often each segment is called."""
    parts = [dump_text("", folded, "")]
    parts += [f"{c.segment}({','.join(c.args)})->{','.join(c.outs)}@{c.site}" for c in folded.calls]
    parts += [f"{p.kind}:{p.target}:{p.type}" for p in folded.joint.ports]
    parts += [f"{r.kind}:{r.target}" for r in folded.joint.results]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
