"""A model looked at once: captured, simplified, with its rules; shared by planning and compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.ir import Folded, Joint
from autoshard.ir.flow import Flow, flow_of
from autoshard.ir.routing import parse_replicas
from autoshard.ir.similar_rows import RowGroups
from autoshard.passes.pipeline import Simplifying, simplify
from autoshard.passes.simplify.cast_products import ProductCasts
from autoshard.planner.fingerprint import fingerprint
from autoshard.program.dumps import Dumps, Shot
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.factor_splits import DigitTable, find_digits
from autoshard.rules.registry import RULES, rules_for
from autoshard.rules.user import Rules, rule_table
from autoshard.search.problem.problem import Model


@dataclass(frozen=True)
class Analysis:
    """What does not depend on the mesh.

    captured: what it was made of. fingerprint: of the simplified graph; a plan only fits the graph it was
    made for. dumps: texts of the passes before the search. replicated: ops without a rule that run on full
    tensors. table: the rule of every op that has one, those of the user among them. expert_chunks: see
    `PlanOptions`.
    """

    captured: Joint = field(repr=False)
    folded: Folded
    flow: Flow
    rules: dict[tuple[str, int], Factored]
    digits: DigitTable
    fingerprint: str
    replicated: tuple[str, ...]
    dumps: Dumps = field(default_factory=Dumps)
    table: Mapping[str, RuleFn] = field(default_factory=lambda: RULES, repr=False)
    expert_chunks: int = 1

    @cached_property
    def model(self) -> Model:
        """One for all searches, which keep in it what they find out."""
        return Model(self.folded, self.flow, self.rules, self.digits, self.expert_chunks)


def analyse(
    joint: Joint,
    *,
    replicate_unknown: bool = False,
    rules: Rules = None,
    progress: Callable[[str], None] | None = None,
    tile_rows: int = 0,
    products: str = "",
    expert_chunks: int = 1,
    replicate_experts: str = "",
    allow: str = "",
) -> Analysis:
    """Simplify a captured model and find its rules. Raises NoRuleError naming all ops without one.

    rules: the user's own, beside those that come with autoshard. tile_rows: tokens of a tile of what is wide
    (`passes.memory.tile_rows`), 0 for no tiles. products, expert_chunks, replicate_experts, and allow without
    what is for programs: as `PlanOptions` has them.
    """
    say = progress or (lambda _: None)
    table = rule_table(RULES, rules)
    say("folding")
    shots: dict[str, Shot] = {}
    rows = parse_replicas(replicate_experts)
    groups = RowGroups.parse(allow)
    how = Simplifying(tile_rows, table, ProductCasts.parse(products), expert_chunks, rows, groups)
    folded = simplify(joint, lambda name, graph: shots.__setitem__(name, Shot(graph, "any")), how)
    flow = flow_of(folded)
    say("finding rules")
    rules_found, replicated = rules_for(folded, replicate_unknown=replicate_unknown, table=table)
    digits = find_digits(folded, flow, rules_found)
    return Analysis(
        joint,
        folded,
        flow,
        rules_found,
        digits,
        fingerprint(folded, flow, rules_found, digits),
        replicated,
        Dumps(shots),
        table,
        expert_chunks,
    )
