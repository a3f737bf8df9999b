"""The same question to the search with one thing decided otherwise, and what that would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster import Mesh
from autoshard.cluster.cluster import Cluster
from autoshard.cost.recipe import recipe_named
from autoshard.errors import InfeasibleError, UsageError
from autoshard.ir.offload import Offload
from autoshard.options import PlanOptions
from autoshard.planner.analysis import Analysis
from autoshard.planner.candidates import given_mesh
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.report.summary import PlanSummary, summarise
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.pins import Pin
from autoshard.search.problem.problem import batch_of
from autoshard.search.select.request import SearchRequest
from autoshard.search.select.tactics import parse_tactics
from autoshard.search.solve.formulate import layer_calls

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Changed:
    """A decision that changes. count: how many it holds for; before, after: in words."""

    what: str
    count: int
    before: str
    after: str


@dataclass(frozen=True)
class WhatIf:
    """An answer. alternative: the forced pin or mesh. why_not: why it is infeasible, "" if it is not.

    base: the best plan without it, found anew. forced: the best plan with it, None if there is none.
    same_as_stored: whether ``base`` decides all that the stored plan does. changed: decisions that change,
    the forced one among them.
    """

    alternative: str
    base: PlanSummary
    forced: PlanSummary | None
    changed: tuple[Changed, ...] = ()
    why_not: str = ""
    same_as_stored: bool = True

    @property
    def seconds(self) -> float | None:
        """By which a step would be longer; None if it cannot be."""
        return None if self.forced is None else self.forced.seconds - self.base.seconds


class Solver:
    """Solves the question of a stored plan again. analysis: of the model it was made for."""

    def __init__(
        self, analysis: Analysis, plan: Plan, cluster: Cluster, options: PlanOptions, progress: Progress
    ) -> None:
        self.analysis, self.plan, self.cluster = analysis, plan, cluster
        self.options, self.progress = options, progress

    def pinned(self, pin: Pin) -> WhatIf:
        """With one more pin. Raises UsageError if the plan's own question cannot be solved any more."""
        base = self._solve(self._mesh(), ())
        try:
            forced = self._solve(self._mesh(), (pin,))
        except (UsageError, InfeasibleError) as error:
            return self._answer(str(pin), base, None, error)
        return self._answer(str(pin), base, forced)

    def on_mesh(self, mesh: Mesh) -> WhatIf:
        """On another mesh, with the same sequences per step; a pipeline is cut anew."""
        base = self._solve(self._mesh(), ())
        try:
            forced = self._solve(mesh, (), keep=False)
        except (UsageError, InfeasibleError) as error:
            return self._answer(f"mesh {mesh}", base, None, error)
        return self._answer(f"mesh {mesh}", base, forced)

    # -- solving ---------------------------------------------------------------------------------------

    def _mesh(self) -> Mesh:
        pipeline = self.plan.pipeline
        return Mesh.parse(self.plan.mesh if pipeline is None else f"pp={pipeline.ranks},{self.plan.mesh}")

    def _solve(self, mesh: Mesh, pins: Sequence[Pin], *, keep: bool = True) -> Planned:
        """keep: the microbatches and the schedule of the plan; else they are chosen."""
        plan, pipeline = self.plan, self.plan.pipeline
        captured = batch_of(self.analysis.folded)
        total = plan.microbatches * (plan.batch or captured)
        pipe = PlanOptions()
        if keep and pipeline is not None:
            pipe = PlanOptions(
                schedule=pipeline.schedule,
                chunks=pipeline.chunks,
                microbatches=plan.microbatches,
                slices=_slices(pipeline.slices),
            )
        elif keep and plan.microbatches > 1:
            pipe = PlanOptions(microbatches=plan.microbatches)
        layers = sum(layer_calls(self.analysis.folded).values())
        pins_of = tuple(map(Pin.parse, self.options.pins))
        tactics = parse_tactics(self.options.tactics, mesh) if self.options.tactics and keep else ()
        return plan_analysed(
            self.analysis,
            [given_mesh(mesh, self.cluster, layers, total, pipe)],
            self.cluster,
            memory=plan.budget,
            request=SearchRequest(
                batch=None if total == captured and plan.microbatches == 1 and keep else total,
                recipe=recipe_named(self.options.optimizer),
                recompute=self.options.recompute,
                pins=(*pins_of, *pins),
                tactics=tactics,
            ),
            offload=Offload.parse(plan.offload),
            target=plan.target,
            fixed=keep and pipeline is not None,
            progress=self.progress,
        )

    # -- comparing -------------------------------------------------------------------------------------

    def _answer(
        self,
        asked: str,
        base: Planned,
        forced: Planned | None,
        error: UsageError | InfeasibleError | None = None,
    ) -> WhatIf:
        why = "" if error is None else ": ".join(filter(None, (error.what, error.why)))
        return WhatIf(
            asked,
            _summary(base),
            None if forced is None else _summary(forced),
            () if forced is None else tuple(changes(base, forced)),
            why,
            decides_alike(base.plan, self.plan),
        )


def _slices(count: int) -> int | None:
    return count if count > 1 else None


def _summary(planned: Planned) -> PlanSummary:
    return summarise(planned.plan, planned.analysis, planned.solution, planned.staging, planned.peak)


def decides_alike(one: Plan, other: Plan) -> bool:
    """Whether two plans of a model decide the same, whatever they say about why."""

    def decisions(plan: Plan) -> Plan:
        return replace(plan, why={}, warnings=(), optimality=one.optimality, target="", cluster="")

    return decisions(one) == decisions(other)


def changes(base: Planned, forced: Planned) -> Iterator[Changed]:
    """Decisions of two plans of a model that differ, in an order for reading; repeated layers once."""
    a, b = _summary(base), _summary(forced)
    yield from _plain(a, b)
    rows_before = {row.what: row for row in a.parameters}
    for row in b.parameters:
        before = rows_before.get(row.what)
        if before is not None and before.choice != row.choice:
            yield Changed(row.what, row.count, before.choice, row.choice)
    if base.plan.mesh != forced.plan.mesh:
        return
    yield from _ops(base, forced)


def _plain(a: PlanSummary, b: PlanSummary) -> Iterator[Changed]:
    """What is decided for the full model."""

    def recompute(summary: PlanSummary) -> str:
        rows = [f"{r.policy} for {r.calls} of {r.total_calls} {r.segment}" for r in summary.recompute]
        return ", ".join(rows) or "nothing"

    def pipe(summary: PlanSummary) -> str:
        row = summary.pipeline
        return (
            "none"
            if row is None
            else f"{row.schedule} x {row.chunks}, stages end after "
            + ", ".join(stage.ends for stage in row.stages[:-1])
        )

    pairs = {
        "mesh": (a.mesh, b.mesh),
        "microbatches": (str(a.microbatches), str(b.microbatches)),
        "recompute": (recompute(a), recompute(b)),
        "chunks of experts' tokens": (str(a.expert_chunks), str(b.expert_chunks)),
        "approximations": (a.allow or "none", b.allow or "none"),
        "replicated experts": (str(a.replicated_experts), str(b.replicated_experts)),
        "pipeline": (pipe(a), pipe(b)),
    }
    for what, (before, after) in pairs.items():
        if before != after:
            yield Changed(what, 1, before, after)


def _ops(base: Planned, forced: Planned) -> Iterator[Changed]:
    """Ops that give other results, by module; the mesh is the same."""
    from autoshard.program.text import layout_text, op_text

    names = Mesh.parse(base.plan.mesh).names
    folded = base.analysis.folded
    counts = folded.counts()
    for (segment, number), state in base.plan.nodes.items():
        other = forced.plan.nodes.get((segment, number))
        if other is None or other.outputs == state.outputs:
            continue
        node = folded.segments[segment].nodes[number]
        before, after = (
            layout_text(next((x for x in s.outputs if x is not None), ()), names[: len(names)])
            if any(x is not None for x in s.outputs)
            else ""
            for s in (state, other)
        )
        half = " (backward)" if node.backward else ""
        yield Changed(
            f"{segment}/{node.name} = {op_text(node.op)} in {node.origin.fqn or segment}{half}",
            counts[segment],
            before,
            after,
        )
