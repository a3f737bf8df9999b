"""From a plan to a program: which of the optional passes run, and at which prices they decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autoshard.cluster.cluster import Cluster, host_of
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.cluster.order import RankOrder
from autoshard.cost.collective import AxisLink, link_of, seconds
from autoshard.cost.kernel_time import traffic_seconds
from autoshard.cost.model import CostModel
from autoshard.cost.on_mesh import model_of
from autoshard.cost.stage_machines import bounding_machine
from autoshard.ir.collectives import BUCKET_BYTES
from autoshard.ir.flow import Flow
from autoshard.ir.offload import Offload
from autoshard.options import PassOptions
from autoshard.passes.memory.offload import Hosting
from autoshard.passes.overlap.schedule_ops import Seconds
from autoshard.passes.partition.hierarchy import ByLevel
from autoshard.passes.partition.quantize_collectives import Precision, Quantising
from autoshard.passes.pipeline import REFINES, LoweringOptions
from autoshard.passes.simplify.batch_terms import NO_TERMS, BatchTerms
from autoshard.passes.simplify.scale_terms import totals_in
from autoshard.passes.stages.scatter_sends import Saving
from autoshard.planner.analysis import Analysis
from autoshard.planner.fingerprint import fingerprint_of
from autoshard.planner.hierarchy_choice import HierarchyOption, best_hierarchy, comparison, hierarchy_options
from autoshard.planner.host_memory import least_offload
from autoshard.planner.node_costs import NodePrices
from autoshard.planner.stage_link import in_parts, pipe_link
from autoshard.program.build import build_program
from autoshard.program.dumps import Dumps
from autoshard.program.program import Program
from autoshard.rules.local import MeshShape
from autoshard.schedules.registry import make
from autoshard.schedules.schedule import Schedule
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_to_json
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops
from autoshard.simulate.stage_costs import StagePrices

#: share of the memory that a message of several layers may fill, one over this
_JOINED = 32
#: passes that can be left out
OPTIONAL = ("bucket", "overlap", "kernels", "ring")
#: every pass that makes a step shorter without anything being allowed
DEFAULT = PassOptions()


def lower_plan(
    plan: Plan,
    analysis: Analysis,
    cluster: Cluster,
    passes: PassOptions = DEFAULT,
    say: Callable[[str], None] = lambda _: None,
    terms: BatchTerms = NO_TERMS,
) -> Program:
    """The program of a plan for the analysed model. terms: what adds up over its microbatches.

    Raises UsageError for what cannot be as wanted, InfeasibleError if the host has too little memory.
    """
    passes = replace(passes, offload=passes.offload or plan.offload)
    cluster = laid_for(plan, cluster)
    lowering = replace(lowering_of(plan, analysis.flow, analysis, cluster, passes), terms=terms)

    def build(way: HierarchyOption) -> Program:
        laid = _laid_out(lowering, way, cluster, passes)

        def stored(share: float, ahead: bool) -> Program:
            own = replace(laid, hosting=laid.hosting and laid.hosting.storing(share, ahead))
            return build_program(analysis.folded, own, plan, analysis.dumps, schedule_of(plan))

        if laid.hosting is None:
            return stored(0.0, True)
        peaks = least_offload(stored, lambda program: StagePrices(program, cluster), plan.budget)
        return peaks.prices.program

    mesh = Mesh.parse(plan.mesh)
    options = hierarchy_options(passes.hierarchy, cluster, full_mesh(mesh, plan), mesh)
    program, tried = best_hierarchy(options, build, cluster, plan.budget, say)
    if REFINES in program.dumps:
        assert isinstance(program.dumps, Dumps)  # it was made just now
        program = replace(program, dumps=program.dumps.headed(REFINES, comparison(tried)))
    program = _with_turns(program, cluster)
    if program.original is None or not totals_in(program.original.segments):
        return program
    # its losses add up to those of the full batch, by a graph that is not quite the captured one
    stored = replace(plan, step_fingerprint=fingerprint_of(program, analysis.table))
    return replace(program, plan=plan_to_json(stored))


def _with_turns(program: Program, cluster: Cluster) -> Program:
    """The program with the turns of what runs as one, by price."""
    stages = program.stages
    if stages is None or not stages.schedule.paired:
        return program
    prices = StagePrices(program, cluster)
    turns = {(f, b): prices.parts_of(f).turns(f, b) for f, b in prices.costs.paired}
    return replace(program, stages=replace(stages, turns=turns))


def lay_out(
    plan: Plan, analysis: Analysis, cluster: Cluster, way: HierarchyOption, passes: PassOptions = DEFAULT
) -> Program:
    """The program of a plan with collectives laid on levels in one way, of the batch that was captured.

    Raises CannotRefineError if it has no such form.
    """
    cluster = laid_for(plan, cluster)
    options = _laid_out(lowering_of(plan, analysis.flow, analysis, cluster, passes), way, cluster, passes)
    return build_program(analysis.folded, options, plan, analysis.dumps, schedule_of(plan))


def lowering_of(
    plan: Plan, flow: Flow, analysis: Analysis, cluster: Cluster, passes: PassOptions = DEFAULT
) -> LoweringOptions:
    """What the passes after the search need to know of a plan."""
    mesh, cluster = Mesh.parse(plan.mesh), laid_for(plan, cluster)
    prices = NodePrices(cluster, mesh, full_mesh(mesh, plan), passes.codegen)
    return LoweringOptions(
        flow,
        plan,
        MeshShape(mesh.names, mesh.sizes),
        _model(cluster, mesh, plan).reshard,
        analysis.table,
        saving=saving_of(cluster, mesh, plan),
        seconds=prices if passes.overlap else None,
        kernels=passes.kernels,
        bucket=passes.bucket,
        join=_joined(cluster, plan) if passes.bucket and passes.overlap else 0,
        beside=passes.overlap and cluster.device.overlap > 0,
        # of chunks that go round while nothing else runs, there are only more messages
        ring=prices if passes.ring and cluster.device.overlap > 0 else None,
        hosting=_hosting(cluster, mesh, prices, passes),
    )


def laid_for(plan: Plan, cluster: Cluster) -> Cluster:
    """The cluster with the ranks of a plan on the devices that it says."""
    return cluster.laid(RankOrder(plan.order)) if plan.order else cluster


def _model(cluster: Cluster, mesh: Mesh, plan: Plan) -> CostModel:
    """Prices on what bounds all pipeline ranks."""
    ranks = 1 if plan.pipeline is None else plan.pipeline.ranks
    return model_of(bounding_machine(cluster, mesh, ranks), mesh)


def _joined(cluster: Cluster, plan: Plan) -> int:
    """Bytes up to which the messages of several layers are one: only where nothing would run beside them."""
    if cluster.device.overlap > 0:
        return 0
    return BUCKET_BYTES if plan.budget is None else min(BUCKET_BYTES, plan.budget // _JOINED)


def _hosting(cluster: Cluster, mesh: Mesh, prices: Seconds, passes: PassOptions) -> Hosting | None:
    """What waits in host memory, and at which prices. Raises UsageError if the cluster does not know them."""
    kinds = Offload.parse(passes.offload)
    if not kinds:
        return None
    ops = Ops(mesh, mesh.coords(0), Behaviour())
    return Hosting(kinds, ops.nbytes, host_of(cluster.device).seconds, prices, passes.overlap)


def saving_of(cluster: Cluster, mesh: Mesh, plan: Plan) -> Saving | None:
    """What sending between stages in parts saves, None without a pipeline."""
    if plan.pipeline is None:
        return None
    link, links = pipe_link(cluster, mesh, plan.pipeline.ranks), _model(cluster, mesh, plan).reshard.links

    def saving(nbytes: float, axis: int) -> float:
        return float(seconds("send", nbytes, link)) - in_parts(nbytes, link, links[axis])

    return saving


def schedule_of(plan: Plan) -> Schedule | None:
    """The order in which the stages of a plan run, None without a pipeline."""
    pipeline = plan.pipeline
    if pipeline is None:
        return None
    return make(pipeline.schedule, pipeline.ranks, plan.microbatches, pipeline.chunks, pipeline.slices)


def full_mesh(mesh: Mesh, plan: Plan) -> Mesh:
    """The mesh of all ranks that a plan is for, with its pp axis. mesh: of one stage."""
    if plan.pipeline is None:
        return mesh
    at = plan.pipeline.position
    return Mesh((*mesh.axes[:at], Axis("pp", plan.pipeline.ranks), *mesh.axes[at:]))


def _laid_out(
    options: LoweringOptions, way: HierarchyOption, cluster: Cluster, passes: PassOptions
) -> LoweringOptions:
    """The passes for a way to lay collectives on levels, at the prices of the mesh that it gives."""
    taken = replace(
        options,
        hierarchy=tuple(ByLevel(levels, lambda kind, nbytes, axis: 0.0) for levels in way.levels),
        secondary=way.secondary,
    )
    precision = Precision.parse(passes.allow)
    mesh, last = Mesh.parse(str(options.mesh)), Mesh.parse(str(taken.last_mesh))
    links: dict[str, AxisLink] = {}
    for each in (mesh, last):
        full = full_mesh(each, options.plan)
        links |= {
            a.name: link_of(cluster.used_by(full.world_size), full, full.index(a.name)) for a in each.axes
        }

    def of(kind: str, nbytes: float, axis: str) -> float:
        return float(seconds(kind, nbytes, links[axis]))

    hierarchy = tuple(ByLevel(levels, of) for levels in way.levels)
    quantise = None
    if str(precision):
        copy = partial(traffic_seconds, device=cluster.device)
        quantise = Quantising(precision, lambda kind, n, axis: of(kind, n, last.names[axis]), copy)
    taken = replace(taken, hierarchy=hierarchy, quantise=quantise)
    if last == mesh:
        return taken  # priced already
    prices = NodePrices(cluster, last, full_mesh(last, options.plan), passes.codegen)
    hosting = _hosting(cluster, last, prices, passes)
    return replace(taken, seconds=prices if passes.overlap else None, hosting=hosting)
