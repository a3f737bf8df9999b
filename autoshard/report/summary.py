"""A plan in figures: step time, optimality gap, bytes per rank, the decisions with the largest margins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autoshard.cluster.mesh import Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.recipe import ADAMW
from autoshard.ir import DTYPES
from autoshard.ir.flow import PortClass
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.placement import Layout, Shard, is_even
from autoshard.ir.routing import parse_replicas
from autoshard.ir.units import seconds_text
from autoshard.planner.analysis import Analysis
from autoshard.planner.memory_fit import Peak
from autoshard.planner.stage_partition import Staging
from autoshard.program.text import layout_text
from autoshard.search.plan.plan import Cut, Plan, Why, why_key
from autoshard.search.problem.problem import model_flop
from autoshard.search.reasons.explain import strategy_text, zero_stage
from autoshard.search.select.request import CandidateSolution
from autoshard.search.solve.step_config import RankBytes
from autoshard.simulate.device_memory import DeviceMemory


@dataclass(frozen=True)
class Decision:
    """One choice, for reading.

    count: how many ops or parameters it holds for. alternative: the next best choice, "" if there is none.
    margin: seconds that the full step would lose with it.
    """

    what: str
    count: int
    choice: str
    reason: str
    alternative: str
    margin: float


@dataclass(frozen=True)
class ZeroGroup:
    """Parameters with one strategy over the data axes. bytes: global, of all of them.

    strategy: ``ZeRO-1`` to ``ZeRO-3``, ``replicated`` (on every data rank), or ``sharded`` (used as it is
    stored, each rank its own shard, as with expert parallelism).
    """

    strategy: str
    parameters: int
    bytes: float


@dataclass(frozen=True)
class RecomputeRow:
    """calls of ``total_calls`` of a segment whose activations are recomputed."""

    segment: str
    policy: str
    calls: int
    total_calls: int


@dataclass(frozen=True)
class PredictedStep:
    """The predicted step in seconds. exposed, overlapped: communication.

    mfu: FLOP of the model (recomputation not counted) over what the devices could do at their peak.
    """

    seconds: float
    compute: float
    exposed: float
    overlapped: float
    optimizer: float
    mfu: float
    model_flop: float


@dataclass(frozen=True)
class PipeStage:
    """A stage of a pipeline. begins, ends: where in the model; forward, backward: seconds of a microbatch.

    saved_bytes: for the backward of one microbatch.
    """

    rank: int
    begins: str
    ends: str
    forward: float
    backward: float
    saved_bytes: float


@dataclass(frozen=True)
class PipelineRow:
    """A pipeline. bubble: share of the step in which a rank waits, on average. equal_stages_seconds: a step
    with equally many layers per stage. tried: schedule -> seconds of a step, None where it does not fit."""

    ranks: int
    schedule: str
    chunks: int
    bubble: float
    peak_bytes: float
    equal_stages_seconds: float | None
    tried: dict[str, float | None]
    stages: tuple[PipeStage, ...]
    slices: int = 1
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class BaselineRow:
    """A strategy that a user would have picked. ratio: its step over ours, None if it cannot be used."""

    name: str
    mesh: str
    microbatches: int
    seconds: float | None
    ratio: float | None
    why: str


@dataclass(frozen=True)
class TacticRow:
    """What a tactic reached: seconds of a step, bytes on the fullest rank."""

    tactic: str
    mesh: str
    seconds: float
    bytes: float


@dataclass(frozen=True)
class PeakRow:
    """Simulated bytes of the fullest rank at its peak. saved_for_backward: activations.

    host: of a rank in the memory of its node, by name, empty if nothing is offloaded; node_host_bytes: of all
    its ranks. host_wait_seconds: exposed host transfers of a step, beside those that the plan predicts.
    """

    bytes: float
    parameters: float
    gradients: float
    optimizer: float
    saved_for_backward: float
    temporaries: float
    host: dict[str, float] = field(default_factory=dict)
    node_host_bytes: float = 0.0
    host_wait_seconds: float = 0.0

    @classmethod
    def of(cls, peak: Peak) -> PeakRow:
        held = peak.held
        temporaries = peak.bytes - held.total
        states = (held.parameters, held.gradients, held.optimizer, held.activations)
        row = cls(peak.bytes, *states, temporaries)
        if peak.host is None:
            return row
        host = asdict(peak.host.held)
        return replace(row, host=host, node_host_bytes=peak.host.bytes, host_wait_seconds=peak.waits)


@dataclass(frozen=True)
class PlanSummary:
    """A plan in figures. Bytes are those of the fullest rank; totals are of the full model.

    budget_bytes: None without a limit. dual_bound, gap: over all configurations, the gap that of the
    seconds, with stages as they are cut; configuration_bound, configuration_gap: of the chosen mesh and
    microbatches, before stages are cut. expert_chunks: see `Plan`. replicated_experts: of a layer. allow: see
    `Plan`.
    """

    mesh: str
    ranks: int
    cluster: str
    budget_bytes: int | None
    seconds: float
    dual_bound: float
    gap: float
    method: str
    variables: int
    states: int
    parameter_count: int
    parameter_bytes: float
    parameter_bytes_total: float
    gradient_bytes: float
    optimizer_bytes: float
    uneven_parameters: int
    warnings: tuple[str, ...]
    parameters: tuple[Decision, ...]
    ops: tuple[Decision, ...]
    mesh_reason: str = ""
    rank_order: str = ""
    microbatches: int = 1
    microbatch_size: int = 0
    zero: tuple[ZeroGroup, ...] = ()
    recompute: tuple[RecomputeRow, ...] = ()
    step: PredictedStep | None = None
    memory: RankBytes | None = None
    baselines: tuple[BaselineRow, ...] = ()
    tactics: tuple[TacticRow, ...] = ()
    configuration_bound: float = 0.0
    configuration_gap: float = 0.0
    pipeline: PipelineRow | None = None
    peak: PeakRow | None = None
    offload: str = ""
    #: seconds of the step of the program, every collective simulated; None where none was made
    simulated_seconds: float | None = None
    #: what a process takes of its device; None where that was not simulated
    device: DeviceMemory | None = None
    expert_chunks: int = 1
    replicated_experts: int = 0
    allow: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    plan: Plan,
    analysis: Analysis,
    solution: CandidateSolution | None = None,
    staging: Staging | None = None,
    peak: Peak | None = None,
    device: DeviceMemory | None = None,
) -> PlanSummary:
    """The summary of a plan for the model it was made for; with costs and the optimizer's bytes if the search
    is given, too: of AdamW without."""
    ranks = plan.pipeline.ranks if plan.pipeline is not None else 1
    mesh = Mesh.parse(plan.mesh)
    classes = [c for c in analysis.flow.classes.values() if c.first.kind == "param"]
    parameter_bytes = sum(len(c.ports) * _local_bytes(c, plan.params[c.key].stored, mesh) for c in classes)
    recipe = ADAMW if solution is None else solution.formulated.prices.recipe
    gradients = optimizer = 0.0
    for c in classes:
        if c.grads:
            kept, width = recipe.of(c.first), DTYPES[c.first.type.dtype][1]
            elements = len(c.ports) * _local_bytes(c, plan.params[c.key].stored, mesh) / width
            gradients += elements * kept.gradient_bytes(width)
            optimizer += elements * kept.optimizer_bytes(width)
            optimizer += len(c.ports) * kept.owned_bytes(c.first) / mesh.world_size
    uneven = sum(len(c.ports) for c in classes if not _even(c, plan.params[c.key].stored, mesh))
    warnings = plan.warnings
    if uneven:
        warnings = (*warnings, f"{uneven} parameters do not divide evenly; some ranks hold less than others")
    optimality = plan.optimality
    seconds = optimality.seconds if solution is None else _seconds(solution, staging)
    # the cost of cuts is not in optimality.seconds: the gap is that of the reported step
    gap = optimality.gap if staging is None else max(optimality.gap, 1.0 - optimality.dual_bound / seconds)
    return PlanSummary(
        plan.mesh if ranks == 1 else f"pp={ranks},{plan.mesh}",
        ranks * mesh.world_size,
        plan.cluster,
        plan.budget,
        seconds,
        optimality.dual_bound,
        gap,
        optimality.method,
        optimality.variables,
        optimality.states,
        sum(len(c.ports) * c.first.type.numel for c in classes),
        parameter_bytes / ranks,
        float(sum(len(c.ports) * c.first.type.nbytes for c in classes)),
        gradients / ranks,
        optimizer / ranks,
        uneven,
        warnings,
        tuple(_parameters(plan, classes, mesh)),
        tuple(_ops(plan, analysis, mesh)),
        _mesh_reason(plan),
        str(RankOrder(plan.order)) if plan.order else "",
        plan.microbatches,
        plan.batch,
        _zero(plan, classes, mesh),
        _recompute(plan, analysis),
        None if solution is None else _step(solution, staging),
        None if solution is None else solution.placements.setting.held(solution.placements.usage),
        () if solution is None else _baselines(solution, staging),
        ()
        if solution is None
        else tuple(TacticRow(s.tactic, s.mesh, s.step.total, s.held.total) for s in solution.stages),
        optimality.configuration_bound,
        optimality.configuration_gap,
        None if staging is None else _pipeline(staging),
        None if peak is None else PeakRow.of(peak),
        plan.offload,
        None if peak is None else peak.step,
        device,
        plan.expert_chunks,
        len(parse_replicas(plan.replicate_experts)[0]) if plan.replicate_experts else 0,
        plan.allow,
    )


def _zero(plan: Plan, classes: Sequence[PortClass], mesh: Mesh) -> tuple[ZeroGroup, ...]:
    """The strategies of the trained parameters over the axes that shard the batch."""
    data = [k for k, axis in enumerate(mesh.axes) if axis.meaning.splits_batch]
    groups: dict[str, tuple[int, float]] = {}
    for group in classes:
        if group.grads:
            strategy = plan.params[group.key]
            gathered = any(strategy.stored[k] != strategy.use[k] for k in data)
            sharded = any(isinstance(strategy.use[k], Shard) for k in data)
            stage = zero_stage(strategy) if gathered else "sharded" if sharded else "replicated"
            count, size = groups.get(stage, (0, 0.0))
            members = len(group.ports)
            groups[stage] = (count + members, size + members * group.first.type.nbytes)
    return tuple(ZeroGroup(stage, n, size) for stage, (n, size) in sorted(groups.items()))


def _recompute(plan: Plan, analysis: Analysis) -> tuple[RecomputeRow, ...]:
    counts = analysis.folded.counts()
    return tuple(
        RecomputeRow(name, rows.policy, rows.calls, counts[name]) for name, rows in plan.recompute.items()
    )


def _seconds(solution: CandidateSolution, staging: Staging | None) -> float:
    """Of a step: for a pipeline the simulated one, with the collectives of parameters that nothing hides."""
    step = solution.placements.step
    return step.total if staging is None else staging.seconds + staging.bare


def _step(solution: CandidateSolution, staging: Staging | None) -> PredictedStep:
    step, m = solution.placements.step, solution.configuration.microbatches
    flop, dtype = model_flop(solution.formulated.model)
    total = _seconds(solution, staging)
    ranks = solution.configuration.mesh.world_size * solution.configuration.pipe.ranks
    possible = total * solution.cluster.peak(dtype, ranks)
    mfu = m * flop / possible if possible else 0.0
    return PredictedStep(total, step.compute, step.exposed, step.hidden, step.update, mfu, m * flop)


def _pipeline(staging: Staging) -> PipelineRow:
    pipeline, timeline = staging.pipeline, staging.timeline
    costs = staging.costs.per_microbatch(pipeline.slices)
    names = ["the input", *(_cut_name(c) for c in pipeline.cuts), "the output"]
    stages = tuple(
        PipeStage(rank, names[k], names[k + 1], costs.forward[k], costs.backward[k], costs.held[k])
        for k, rank in enumerate(timeline.owner)
    )
    peak = max(timeline.peak)
    return PipelineRow(
        pipeline.ranks,
        pipeline.schedule,
        pipeline.chunks,
        timeline.bubble,
        peak,
        staging.equal,
        staging.tried,
        stages,
        pipeline.slices,
        pipeline.parts,
    )


def _cut_name(cut: Cut) -> str:
    layer = cut.label or f"call {cut.call}"
    return f"{layer}, {cut.value}" if cut.value else f"the end of {layer}"


def _baselines(solution: CandidateSolution, staging: Staging | None) -> tuple[BaselineRow, ...]:
    seconds = _seconds(solution, staging)
    return tuple(
        BaselineRow(
            r.name,
            r.mesh,
            r.microbatches,
            r.seconds,
            None if r.seconds is None or not seconds else r.seconds / seconds,
            r.why,
        )
        for r in solution.baselines
    )


def _mesh_reason(plan: Plan) -> str:
    """Why this mesh shape, if it was searched."""
    why = plan.why.get("mesh")
    if why is None:
        return ""
    cost = f" +{seconds_text(why.margin)}" if why.margin else ""
    return f"{why.reason}; next best {why.alternative}{cost}"


def _local_bytes(group: PortClass, layout: Layout, mesh: Mesh) -> float:
    """Of one of these parameters on the fullest rank."""
    return float(held_bytes(group.first.type, layout, mesh.sizes))


def _even(group: PortClass, layout: Layout, mesh: Mesh) -> bool:
    shape = group.first.type.shape
    return all(
        not isinstance(p, Shard) or is_even(shape[p.dim], p, size)
        for p, size in zip(layout, mesh.sizes, strict=True)
    )


def _parameters(plan: Plan, classes: Sequence[PortClass], mesh: Mesh) -> list[Decision]:
    """One row per class of parameters, biggest first."""
    rows = []
    for group in sorted(classes, key=lambda c: -len(c.ports) * c.first.type.nbytes):
        state = plan.params[group.key]
        choice = strategy_text(state, mesh)
        why = plan.why.get(why_key("param", group.key[1]), Why(""))
        rows.append(_decision(_class_name(group), len(group.ports), choice, why))
    return rows


def _decision(what: str, count: int, choice: str, why: Why) -> Decision:
    return Decision(what, count, choice, why.reason, why.alternative, why.margin)


def _class_name(group: PortClass) -> str:
    """``model.layers.*.mlp.up_proj.weight``: what the names of a class have in common."""
    names = [p.target.split(".") for p in group.ports]
    if len({len(n) for n in names}) > 1:
        return group.first.target
    return ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*names, strict=True))


def _ops(plan: Plan, analysis: Analysis, mesh: Mesh, most: int = 6) -> list[Decision]:
    """The decisions about ops whose next best choice would cost most."""
    counts = analysis.folded.counts()
    ranked = sorted(plan.nodes, key=lambda key: -plan.why[why_key("node", *key)].margin)
    rows: list[Decision] = []
    for segment, number in ranked:
        why = plan.why[why_key("node", segment, number)]
        if len(rows) == most or not why.margin:
            break
        node = analysis.folded.segments[segment].nodes[number]
        state = plan.nodes[segment, number]
        layout = next((x for x in state.outputs if x is not None), None)
        name = f"{node.op.split('.')[1]} in {node.origin.fqn or segment}" + (
            " (backward)" if node.backward else ""
        )
        choice = layout_text(layout, mesh.names) if layout else ""
        rows.append(_decision(name, counts[segment], choice, why))
    return rows
