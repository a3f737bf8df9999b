"""Measured runs rebuilt: model, fixed plan and cluster, compiled to a program by our own passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from autoshard.cluster import Cluster, Mesh
from autoshard.cluster.mesh import Axis
from autoshard.cost.collective import seconds
from autoshard.cost.on_mesh import CostModels
from autoshard.errors import AutoshardError, UsageError
from autoshard.ir import DTYPES
from autoshard.passes.pipeline import LoweringOptions
from autoshard.passes.simplify.batch_terms import averaged
from autoshard.passes.stages.scatter_sends import Saving
from autoshard.planner.stage_link import in_parts, pipe_link
from autoshard.planner.step_terms import trained_output
from autoshard.program.build import build_program
from autoshard.program.dumps import Dumps
from autoshard.program.program import Program
from autoshard.rules.local import MeshShape
from autoshard.search.plan.plan import Plan, Recompute
from autoshard.search.reasons.explain import explain
from autoshard.search.select.request import CandidateSolution
from autoshard.search.solve.configuration import Configuration
from autoshard.search.solve.formulate import ShardingProblem, formulate, layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.solve_placements import place
from autoshard.search.solve.step_config import StepConfig
from autoshard.simulate.behaviour import Behaviour
from autoshard.solver.network import NoFiniteAssignment
from autoshard.validate.architecture import KnownSizes, architecture_of
from autoshard.validate.captured import Captures, Scaled
from autoshard.validate.frameworks import Framework, behaviour_of, framework_of
from autoshard.validate.machine import RunMachine, machine_of
from autoshard.validate.models import Architecture, on_meta
from autoshard.validate.placements import RunPlacement, masks_of
from autoshard.validate.rows import Run, Unsupported
from autoshard.validate.stages import RebuiltStages, stages_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Rebuilt:
    """A run as a program that can be priced. notes: what was assumed, or is not as the row has it."""

    run: Run
    program: Program
    cluster: Cluster
    behaviour: Behaviour
    notes: tuple[str, ...] = field(default=())


def rebuilt(
    runs: Iterable[Run], progress: Progress = lambda _: None, cluster: Cluster | None = None
) -> Iterator[Rebuilt | Unsupported]:
    """Every run rebuilt, in groups of the same model; cluster: for all of them, in place of the rows' own.

    A run that cannot be represented comes back with the reason.
    """
    groups: dict[tuple[Architecture, int, torch.dtype], list[_Told]] = {}
    for run in runs:
        try:
            told = _told(run, cluster)
        except AutoshardError as error:
            yield _refused(run, error)
            continue
        dtype = getattr(torch, DTYPES[run.dtype][0])
        groups.setdefault((told.known.shape, run.seq, dtype), []).append(told)
    for (shape, seq, dtype), alike in groups.items():
        progress(
            f"{shape.kind}, {shape.layers} layers, hidden {shape.hidden}, {seq} tokens: {len(alike)} runs"
        )
        captures = Captures(partial(on_meta, shape, seq=seq, dtype=dtype))
        # those that are alike but for their pipeline or batch follow each other
        for told in sorted(alike, key=lambda t: (t.run.micro * t.run.data, str(mesh_of(t.run)), t.run.id)):
            try:
                yield rebuilt_run(told.run, told.machine.cluster, told.framework, captures, _notes(told))
            except AutoshardError as error:
                yield _refused(told.run, error)


@dataclass(frozen=True)
class _Told:
    """What a row says, before its model is captured."""

    run: Run
    known: KnownSizes
    machine: RunMachine
    framework: Framework


def _told(run: Run, cluster: Cluster | None) -> _Told:
    framework = framework_of(run)
    vocab = padded_vocab(run.vocab, run.tensor, framework.vocab_multiple)
    machine = machine_of(run) if cluster is None else RunMachine(cluster)
    machine.cluster.check_world_size(run.gpus)
    return _Told(run, architecture_of(run, vocab), machine, framework)


def _refused(run: Run, error: AutoshardError) -> Unsupported:
    return Unsupported(run.id, run.study, f"{error.what}{f': {error.why}' if error.why else ''}")


def padded_vocab(vocab: int, tensor: int, multiple: int) -> int:
    """Rows of an embedding that is divided over tensor ranks: a multiple of ``multiple`` on each of them."""
    full = multiple * tensor
    return vocab if tensor == 1 or not multiple else -(-vocab // full) * full


def mesh_of(run: Run) -> Mesh:
    """Data ranks outside, what ZeRO divides inside them, those of experts and tensor ranks inside; of one
    pipeline rank."""
    owners = run.expert_ranks if run.experts else 1
    shard = storable(run.hidden, run.sharded) if run.zero else 1
    # ranks that share a sequence hold parts of parameters as those of other sequences do
    shard = max(1, shard // owners // run.context)
    data = (("dp", run.data // shard // owners), ("fsdp", shard), ("ep", owners))
    axes = (*data, ("cp", run.context), ("tp", run.tensor))
    return Mesh(tuple(Axis(name, size) for name, size in axes if size > 1) or (Axis("dp", 1),))


def storable(hidden: int, ranks: int) -> int:
    """The most ranks, in full groups, that a dim of this size can be divided over without empty parts.

    ZeRO divides flat buffers or pads what it stores; programs here divide tensors.
    """
    for ways in range(ranks, 1, -1):
        if ranks % ways == 0 and (ways - 1) * -(-hidden // ways) < hidden:
            return ways
    return 1


def rebuilt_run(
    run: Run, cluster: Cluster, framework: Framework, captures: Captures, notes: tuple[str, ...] = ()
) -> Rebuilt:
    """A run of a model as a program with the placements of a framework.

    Raises UsageError where no program has them, or its stages cannot be made.
    """
    scaled = captures.at(run.micro * run.data)
    behaviour = behaviour_of(run, framework, cluster.device.peak_flops)
    # op by op: every product's partial sums are reduced by themselves, as frameworks do
    plain = replace(cluster, device=replace(cluster.device, compiled=False))
    mesh, prices = mesh_of(run), CostModels(plain)
    stages = stages_of(run, scaled.model.folded)
    setting = _setting(run, scaled, cluster, stages)
    formulated = formulate(scaled.model, mesh, prices, setting, recipe=behaviour.recipe)
    masks = masks_of(formulated, _wanted(run, mesh))
    try:
        placements = place(formulated.problem, setting, None, allowed=masks.allowed)
    except NoFiniteAssignment:
        raise UsageError(
            f"no program has the placements of {framework.name} on {mesh}",
            where=run.id,
            why="some op of the model cannot run with them",
        ) from None
    config = Configuration(mesh, run.micro * run.data, run.microbatches, setting.pipe)
    solution = CandidateSolution(formulated, placements, config, cluster, placements.lower_bound)
    plan = explain(solution, cluster, scaled.analysis.fingerprint, reasons=False)
    saving = _saving(run, behaviour, cluster, mesh, prices)
    by_node = behaviour.exchange == "rank"  # as DeepEP and HybridEP send tokens
    program = _program(scaled, formulated, plan, prices, stages, saving, by_node=by_node)
    told = (*notes, *(stages.notes if stages else ()), *masks.notes)
    return Rebuilt(run, program, cluster, behaviour, told)


def _setting(run: Run, scaled: Scaled, cluster: Cluster, stages: RebuiltStages | None) -> StepConfig:
    calls = layer_calls(scaled.model.folded)
    pipe = Pipe() if stages is None else Pipe(run.pipeline, stages.pipeline.schedule, stages.pipeline.chunks)
    bare = StepConfig(run.microbatches, calls, overlap=cluster.device.overlap, pipe=pipe)
    if run.recompute not in ("full", "selective", "ops"):
        # attention is one op here, and what it keeps is the simulation's to say
        return bare
    policy: Literal["selective", "full"] = "full" if run.recompute == "full" else "selective"
    return replace(bare, recompute={name: Recompute(policy, n) for name, n in calls.items()})


def _wanted(run: Run, mesh: Mesh) -> RunPlacement:
    names = mesh.names
    tensor = names.index("tp") if "tp" in names else None
    shards = tuple(k for k, name in enumerate(names) if name in ("fsdp", "ep", "cp"))
    owners = names.index("ep") if "ep" in names else None
    return RunPlacement(tensor, shards, run.zero, run.sequence_parallel, owners)


def _program(
    scaled: Scaled,
    formulated: ShardingProblem,
    plan: Plan,
    prices: CostModels,
    stages: RebuiltStages | None,
    saving: Saving | None,
    *,
    by_node: bool,
) -> Program:
    model, mesh = scaled.model, formulated.mesh
    if stages is not None:
        plan = replace(plan, pipeline=stages.pipeline)
    options = LoweringOptions(
        model.flow,
        plan,
        MeshShape(mesh.names, mesh.sizes),
        prices.of(mesh, None).reshard,
        scaled.analysis.table,
        saving=saving,
        join_recompute=False,
        by_node=by_node,
    )
    if plan.microbatches > 1:
        # what it computes is equal for equal microbatches; a second capture would only cost time
        options = replace(options, terms=averaged(model.folded, trained_output(model.folded)))
    return build_program(model.folded, options, plan, Dumps(), None if stages is None else stages.schedule)


def _saving(
    run: Run, behaviour: Behaviour, cluster: Cluster, mesh: Mesh, prices: CostModels
) -> Saving | None:
    """What sending between stages in parts saves, None where the run's code sends everything whole."""
    if run.pipeline == 1 or not behaviour.scattered_sends:
        return None
    link, links = pipe_link(cluster, mesh, run.pipeline), prices.of(mesh, None).reshard.links

    def saving(nbytes: float, axis: int) -> float:
        return float(seconds("send", nbytes, link)) - in_parts(nbytes, link, links[axis])

    return saving


def _notes(told: _Told) -> tuple[str, ...]:
    run, framework = told.run, told.framework
    ways = storable(run.hidden, run.sharded)
    divided = (f"what ZeRO divides over {run.sharded} ranks is divided over {ways} here",)
    device = told.machine.cluster.device
    kind = "f8" if run.fp8 else run.dtype
    slow = (
        f"{device.name} has no rate for {kind}: its products are priced as {'bf16' if run.fp8 else 'f32'}",
    )
    assumed = (f"{run.framework or 'its framework'} is not known: {framework.name} behaviour",)
    hosted = (f"in host memory there ({', '.join(run.offload or ())}), on the device here",)
    uneven = ("tokens are taken to choose all experts as often, where routing is natural",)
    return (
        *(hosted if run.offload else ()),
        *(uneven if run.experts and run.routing == "natural" else ()),
        *((told.known.note,) if told.known.note else ()),
        *told.machine.notes,
        *(slow if kind not in device.peak_flops else ()),
        *(divided if run.zero and ways < run.sharded else ()),
        *(assumed if framework.assumed else ()),
    )
