"""The functions people call: plan, compile, load, parallelize."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.traced_function import Differentiate
from autoshard.cluster import (
    Cluster,
    Mesh,
    load_cluster,
    parse_target,
    usable_memory,
)
from autoshard.cost.recipe import recipe_named
from autoshard.errors import UsageError, VerificationError
from autoshard.ir.offload import Offload
from autoshard.passes.simplify.batch_terms import NO_TERMS
from autoshard.planner.analysis import Analysis
from autoshard.planner.candidates import PipeAsk
from autoshard.planner.lowering import emission, emit
from autoshard.planner.planning import Planned, Progress, Question, Source
from autoshard.planner.step_terms import step_terms, warn_of
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.rules.registry import RULES
from autoshard.rules.user import Rules
from autoshard.runtime.arguments import split_inputs
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.pins import Pin
from autoshard.search.problem.problem import batch_of
from autoshard.search.select.choose import Ask
from autoshard.search.select.tactics import Tactic, parse_tactics
from autoshard.torch_adapters.compiled import uncompiled


@dataclass(frozen=True)
class Compiled:
    """A program that can be saved, loaded, verified and run."""

    program: Program

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the program folder; nothing half-written stays behind on an error."""
        save_program(self.program, folder, overwrite=overwrite)


def plan(
    model: nn.Module,
    mesh: Any,
    *,
    example_inputs: Any,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    memory: int | None = None,
    devices: int | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    recompute: bool = True,
    pins: Sequence[str] = (),
    tactics: str = "",
    schedule: str = "",
    chunks: int | None = None,
    microbatches: int | None = None,
    slices: int | None = None,
    rivals: bool = False,
    replicate_unknown: bool = False,
    rules: Rules = None,
    offload: str = "",
    differentiate: Differentiate = "auto",
    target: str = "",
    progress: Progress | None = None,
) -> Planned:
    """Decide how a model runs on a mesh. Pure: needs no process group, no device, no memory for weights.

    mesh: a text (``"dp=2,tp=2"``), a torch DeviceMesh, or a cluster (name or TOML file), whose mesh
    shape is then searched over ``devices`` ranks (default: WORLD_SIZE or the cluster's own number).
    example_inputs: tensors of global shape: a mapping (keyword arguments), a tuple (positional ones), a
    pair of both, or a single tensor. cluster: whose prices to use (default: cpu-gloo for a model on
    the CPU, h100-dgx otherwise). memory: bytes per rank (default: 94 % of the
    device where a cluster is named; no limit, but a warning, where only a mesh is). global_batch:
    sequences per optimizer step, for which the number of microbatches is then chosen (default: the batch
    of the example inputs, in one piece). optimizer: what is kept per parameter, ``adamw`` or
    ``adamw-fp32`` (see `cost.recipe`). recompute: whether activations may be computed again in backward.
    pins: placements that are decided already, as ``"model.layers.*.q_proj.weight=tp:S(0)"``. tactics: what to
    decide axis by axis on a given mesh, as ``"dp on batch; auto on tp"``. schedule, chunks, microbatches: of
    a pipeline, chosen where not given (see `autoshard.schedules`); a mesh with a ``pp`` axis divides the
    model into stages, a cluster may be searched for one, too, and without ``global_batch`` the batch of the
    example inputs is then that of a whole step. slices: into how many parts of its sequence every microbatch
    is divided, with the schedule ``seq1f1b`` (default: 2). rivals: also price what a user
    would have picked by hand (see `Planned.settled`).
    replicate_unknown: whether an op without a rule runs on whole tensors, on every rank.
    rules: the user's own (see `autoshard.rule`). offload: what lives in host memory, as
    ``"activations,optimizer"`` (see `offload.Offload`). differentiate: ``"auto"`` for the gradients of the
    one loss that a model returns, ``"all"`` for those of all its outputs (see `capture.capture`).

    Raises CaptureError, NoRuleError, UsageError, and InfeasibleError if no plan fits the memory.
    """
    say = progress or (lambda _: None)
    away = Offload.parse(offload)
    _check_memory(memory)
    args, kwargs = split_inputs(example_inputs)
    where = parse_target(mesh)
    machine = _cluster_of(where, cluster, model)
    named = isinstance(where, Cluster) or cluster is not None
    ranks = where.world_size if isinstance(where, Mesh) else _devices(machine, devices)
    limit = usable_memory(machine.used_by(ranks).device) if memory is None and named else memory
    if global_batch is not None and global_batch < 1:
        raise UsageError(f"global_batch is {global_batch}", hint="give the sequences of one optimizer step")
    ask = Ask(
        batch=global_batch,
        recipe=recipe_named(optimizer),
        recompute=recompute,
        rivals=rivals,
        pins=tuple(map(Pin.parse, pins)),
        tactics=_tactics(tactics, where),
    )
    question = Question(
        where,
        machine,
        ranks,
        global_batch,
        PipeAsk(schedule, chunks, microbatches, slices),
        ask,
        memory=limit,
        target=target,
        offload=away,
        progress=say,
    )
    return question.planned(Source(model, args, kwargs, replicate_unknown, rules, differentiate))


def _tactics(text: str, where: Mesh | Cluster) -> tuple[Tactic, ...]:
    if not text.strip():
        return ()
    if not isinstance(where, Mesh):
        raise UsageError("tactics need a mesh", hint="give the mesh whose axes they use, as dp=4,tp=2")
    return parse_tactics(text, where)


def _check_memory(memory: object) -> None:
    if memory is not None and (not isinstance(memory, int) or isinstance(memory, bool) or memory <= 0):
        raise UsageError(f"memory is {memory!r}", hint="bytes per rank, for instance 16 * 2**30")


def _cluster_of(where: Mesh | Cluster, cluster: Any, model: nn.Module) -> Cluster:
    if isinstance(where, Cluster):
        return where
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is not None:
        return load_cluster(cluster)
    first = next(model.parameters(), None)
    return load_cluster("cpu-gloo" if first is not None and first.device.type == "cpu" else "h100-dgx")


def _devices(cluster: Cluster, devices: int | None) -> int:
    if devices is None:
        devices = int(os.environ.get("WORLD_SIZE", cluster.devices or 0))
    if not devices:
        raise UsageError(
            f"cluster {cluster.name} does not say how many devices to use", hint="pass devices=N (--gpus N)"
        )
    return devices


def compile(
    model: nn.Module,
    plan: Planned | Plan,
    *,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    rules: Rules = None,
    progress: Progress | None = None,
    **passes: Any,
) -> Compiled:
    """The per-rank programs of a model under a plan.

    A `Planned` is compiled as it is; a bare `Plan` (one that was stored) needs the model's example
    inputs and the user's rules again, and raises VerificationError if the model is not the one it was
    made for. passes: which optional passes run, see `emitting.Emission`.
    """
    say = progress or (lambda _: None)
    if isinstance(plan, Plan):
        args, kwargs = split_inputs(example_inputs)
        source = Source(model, args, kwargs, bool(plan.replicated), rules)
        machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or plan.cluster)
        plan = Planned(plan, source.analysed(say), machine, None, source)
    return Compiled(compile_analysed(plan, say, **passes))


def compile_analysed(planned: Planned, progress: Progress | None = None, **passes: Any) -> Program:
    """The program of a plan, from the analysis it was made with.

    The program is one microbatch; a model that was captured with another batch is captured again. passes: see
    `emitting.Emission`.
    """
    say = progress or (lambda _: None)
    analysis, plan = planned.analysis, planned.plan
    captured = batch_of(analysis.folded)
    if plan.batch and captured != plan.batch:
        if planned.source is None:
            raise VerificationError(
                f"the plan is for microbatches of {plan.batch} sequences, the capture has {captured}",
                hint="compile with example inputs of one microbatch",
            )
        analysis = planned.source.with_batch(analysis, plan.batch).analysed(say)
    if analysis.fingerprint != plan.fingerprint:
        raise VerificationError(
            "the plan was made for another model or other inputs",
            why=f"the graph's fingerprint is {analysis.fingerprint}, the plan's {plan.fingerprint}",
            hint="plan again",
        )
    terms = NO_TERMS
    if plan.microbatches > 1:
        terms = step_terms(planned.source, planned.analysis, analysis, say)
        warn_of(terms)
    say("emitting programs")
    program = emit(plan, analysis, planned.cluster, emission(**passes), say, terms)
    return replace(program, user_ops=_user_ops(analysis))


def _user_ops(analysis: Analysis) -> tuple[str, ...]:
    """The ops of a model that have a rule of the user's."""
    used = {node.op for graph in analysis.folded.segments.values() for node in graph.nodes}
    return tuple(sorted(op for op in used & set(analysis.table) if op not in RULES))


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    rules: Rules = None,
) -> nn.Module:
    """Make ``model`` run a stored program, on every rank: no capture, no search.

    The process group is made from the environment (torchrun) if there is none yet. A program only calls
    ops that are known: a program with ops of the user's own needs their ``rules`` again, and raises
    VerificationError without them.
    """
    from autoshard.runtime.groups import device_mesh_for
    from autoshard.runtime.module import bind

    program = load_program(folder, rules=rules)
    return bind(program, model, device_mesh_for(program.whole_mesh, mesh), seed=seed)


def parallelize(
    model: Any = None,
    mesh: Any = None,
    *,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    memory: int | None = None,
    schedule: str = "",
    chunks: int | None = None,
    microbatches: int | None = None,
    slices: int | None = None,
    differentiate: Differentiate = "auto",
    local_batch: bool = False,
    seed: int = 0,
    replicate_unknown: bool = False,
    rules: Rules = None,
    **passes: Any,
) -> Any:
    """A model that runs in parallel on a mesh; its parameters become DTensors under their own names.

    With example inputs the program is made at once, without them at the first call, whose arguments
    then serve (they must have global shapes). With a ``pp`` axis they are those of a whole step, the model is
    trained by ``train_step`` (see `runtime.module.ParallelModule`), and schedule, chunks and microbatches are
    chosen unless given; for slices and replicate_unknown see `plan`, for the optional passes `compile`. Every
    rank given the same arguments comes to the same plan. For a loss on other outputs than the one that the
    model returns, a program for the gradients of all outputs is compiled at the first such backward, or at
    once with ``differentiate="all"``. All ranks give the same global batch, or each its own part of it; with
    ``local_batch=True`` example inputs and calls have a batch of the rank's own, as under DDP, and the loss
    is that of all of them. As a decorator (``@parallelize(mesh="dp=2,tp=2")``) it wraps an nn.Module class or
    a factory.
    """
    if model is None:
        return functools.partial(
            _decorate,
            mesh=mesh,
            example_inputs=example_inputs,
            cluster=cluster,
            memory=memory,
            schedule=schedule,
            chunks=chunks,
            microbatches=microbatches,
            slices=slices,
            differentiate=differentiate,
            local_batch=local_batch,
            seed=seed,
            replicate_unknown=replicate_unknown,
            rules=rules,
            **passes,
        )
    if mesh is None:
        raise UsageError("parallelize needs a mesh", hint='for instance mesh="dp=2,tp=2"')
    _check_plain_module(model)
    model = uncompiled(model)
    emission(**passes)
    options: dict[str, Any] = {
        "cluster": cluster,
        "memory": memory,
        "schedule": schedule,
        "chunks": chunks,
        "microbatches": microbatches,
        "slices": slices,
        "differentiate": differentiate,
        "local_batch": local_batch,
        "seed": seed,
        "replicate_unknown": replicate_unknown,
        "rules": rules,
        "passes": passes,
    }
    if example_inputs is None:
        from autoshard.runtime.lazy import make_lazy

        return make_lazy(model, lambda inputs: _parallelize_now(model, mesh, inputs, **options))
    return _parallelize_now(model, mesh, example_inputs, **options)


def _check_plain_module(model: Any) -> None:
    from autoshard.runtime.lazy import LazyModule
    from autoshard.runtime.module import ParallelModule

    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}", hint="give an nn.Module, not its class")
    if isinstance(model, LazyModule | ParallelModule):
        raise UsageError(
            f"this {type(model).__name__} is parallelized already",
            why="a model runs one program",
            hint="build the model again and parallelize that one",
        )


def _parallelize_now(
    model: nn.Module,
    mesh: Any,
    example_inputs: Any,
    *,
    seed: int,
    local_batch: bool,
    passes: Mapping[str, Any],
    **options: Any,
) -> nn.Module:
    from autoshard.runtime.checks.recapture import captured_of
    from autoshard.runtime.groups import device_mesh_for
    from autoshard.runtime.local_batch import global_example
    from autoshard.runtime.module import bind

    away = passes.get("offload", "")
    if local_batch:
        where = parse_target(mesh)
        ranks = where.world_size if isinstance(where, Mesh) else _devices(where, None)
        example_inputs = global_example(example_inputs, ranks)
    planned = plan(model, mesh, example_inputs=example_inputs, offload=away, **options)
    program = compile_analysed(planned, **passes)
    given = mesh if isinstance(mesh, DeviceMesh) else None

    planned_mesh, source = planned.plan.mesh, planned.source
    assert source is not None

    def with_all_outputs(built: nn.Module, inputs: Any) -> Program:
        more = {**options, "offload": away, "differentiate": "all", "pins": storage_pins(program)}
        return compile_analysed(plan(built, planned_mesh, example_inputs=inputs, **more), **passes)

    inputs = source.args, source.kwargs
    captured = captured_of(
        planned.analysis.folded.joint.captured_state, inputs, source.differentiate, with_all_outputs
    )
    return bind(
        program,
        model,
        device_mesh_for(program.whole_mesh, given),
        seed=seed,
        captured=captured,
        local_batch=local_batch,
    )


def storage_pins(program: Program) -> tuple[str, ...]:
    """Pins that keep parameters of a program where they are; layers that lie alike are pinned together."""
    axes = Mesh.parse(program.mesh).names
    pins: dict[str, dict[str, str]] = {}
    for port in program.signature.ports:
        if port.kind == "param":
            glob = re.sub(r"(?<=\.)\d+(?=\.)", "*", port.target)
            layout = program.lowered.values[port.name].layout
            placed = ",".join(f"{axis}:{p}" for axis, p in zip(axes, layout, strict=True))
            pins.setdefault(glob, {})[port.target] = placed
    found: list[str] = []
    for glob, named in pins.items():
        one = len(set(named.values())) == 1
        found += [f"{glob}={next(iter(named.values()))}"] if one else [f"{n}={p}" for n, p in named.items()]
    return tuple(found)


def _decorate(target: Any, **options: Any) -> Any:
    """The decorator form: a class whose instances are parallelized, or a factory whose result is."""
    if isinstance(target, type) and issubclass(target, nn.Module):
        original = target.__init__

        @functools.wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if type(self) is target:
                parallelize(self, **options)

        target.__init__ = init  # type: ignore[method-assign]
        return target

    @functools.wraps(target)
    def factory(*args: Any, **kwargs: Any) -> Any:
        return parallelize(target(*args, **kwargs), **options)

    return factory


def with_options(program: Program, **options: str) -> Program:
    """The program with notes on how it was asked for (batch, sequence), used by the command line."""
    return replace(program, options=tuple(sorted((k, str(v)) for k, v in options.items())))
