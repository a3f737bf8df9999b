"""The functions people call: plan, compile, load, parallelize."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.cluster import (
    Cluster,
    Mesh,
    load_cluster,
    parse_target,
    usable_memory,
)
from autoshard.errors import UsageError, VerificationError
from autoshard.options import Differentiate, PassOptions, PlanOptions, options_from, split_options
from autoshard.passes.simplify.batch_terms import NO_TERMS
from autoshard.planner.analysis import Analysis
from autoshard.planner.lowering import DEFAULT, lower_plan
from autoshard.planner.planning import Planned, PlanningRequest, Progress, Source
from autoshard.planner.resized import NotResizableError, resized
from autoshard.planner.step_terms import step_terms, warn_of
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.rules.registry import RULES
from autoshard.rules.user import Rules
from autoshard.runtime.arguments import split_inputs
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.problem import batch_of
from autoshard.search.solve.memory_text import bytes_up
from autoshard.torch_adapters.compiled import uncompiled

if TYPE_CHECKING:
    from autoshard.runtime.checks.call_guard import Captured


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
    options: PlanOptions | None = None,
    rules: Rules = None,
    target: str = "",
    progress: Progress | None = None,
    **overrides: Any,
) -> Planned:
    """Decide how a model runs on a mesh. Pure: needs no process group, no device, no memory for weights.

    Args:
        mesh: a text (``"dp=2,tp=2"``), a torch DeviceMesh, or a cluster (name or TOML file), whose mesh shape
            is then searched over ``devices`` ranks (default: WORLD_SIZE or the cluster's own number). A mesh
            with a ``pp`` axis divides the model into stages; a cluster may be searched for one, too.
        example_inputs: tensors of global shape: a mapping (keyword arguments), a tuple (positional ones), a
            pair of both, or a single tensor. Without ``global_batch`` they are a step in one microbatch, or
            with ``pp`` a whole step.
        cluster: whose prices to use (default: cpu-gloo for a model on the CPU, h100-dgx otherwise). Where one
            is named, ``memory`` is 94 % of its device's unless given.
        options: how the plan is searched; overrides: fields of it by name, `autoshard.PlanOptions`.
        rules: the user's own sharding rules, see `autoshard.rule`.
        target: what the plan is called.

    Raises CaptureError, NoRuleError, UsageError, and InfeasibleError if no plan fits the memory.
    """
    chosen = options_from(PlanOptions, overrides, options)
    args, kwargs = split_inputs(example_inputs)
    where = parse_target(mesh)
    machine = _cluster_of(where, cluster, model)
    named = isinstance(where, Cluster) or cluster is not None
    ranks = where.world_size if isinstance(where, Mesh) else _devices(machine, chosen.devices)
    limit = usable_memory(machine.used_by(ranks).device) if chosen.memory is None and named else chosen.memory
    request = PlanningRequest(where, machine, ranks, chosen, limit, target, progress or (lambda _: None))
    source = Source(model, args, kwargs, chosen.replicate_unknown, rules, chosen.differentiate)
    return request.planned(source)


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
    made for. passes: fields of `autoshard.PassOptions` by name.
    """
    say = progress or (lambda _: None)
    if isinstance(plan, Plan):
        args, kwargs = split_inputs(example_inputs)
        source = Source(model, args, kwargs, bool(plan.replicated), rules)
        machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or plan.cluster)
        plan = Planned(plan, source.analysed(say), machine, None, source)
    return Compiled(compile_analysed(plan, say, options_from(PassOptions, passes)))


def compile_analysed(
    planned: Planned,
    progress: Progress | None = None,
    passes: PassOptions = DEFAULT,
    **overrides: Any,
) -> Program:
    """The program of a plan, from the analysis it was made with.

    The program is one microbatch; a model that was captured with another batch is captured again. overrides:
    fields of ``passes`` by name.
    """
    passes = options_from(PassOptions, overrides, passes)
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
    program = lower_plan(plan, analysis, planned.cluster, passes, say, terms)
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
    local_batch: bool = False,
    seed: int = 0,
    rules: Rules = None,
    **options: Any,
) -> Any:
    """A model that runs in parallel on a mesh; its parameters become DTensors under their own names.

    With example inputs the program is made at once, without them at the first call, whose arguments
    then serve (they must have global shapes). With a ``pp`` axis they are those of a whole step, and the
    model is trained by ``train_step`` (see `runtime.module.ParallelModule`). Every rank given the same
    arguments comes to the same plan. For a loss on other outputs than the one that the model returns, a
    program for the gradients of all outputs is compiled at the first such backward, or at once with
    ``differentiate="all"``. As a decorator (``@parallelize(mesh="dp=2,tp=2")``) it wraps an nn.Module class
    or a factory.

    The mesh, example inputs, cluster and rules are those of `plan`.

    Args:
        local_batch: False: all ranks give the same global batch, or each its own part of it. True: example
            inputs and calls have a batch of the rank's own, as under DDP, and the loss is that of all.
        seed: of dropout.
        options: fields of `autoshard.PlanOptions` and `autoshard.PassOptions` by name.
    """
    about = {"cluster": cluster, "local_batch": local_batch, "seed": seed, "rules": rules, **options}
    if model is None:
        return functools.partial(_decorate, mesh=mesh, example_inputs=example_inputs, **about)
    if mesh is None:
        raise UsageError("parallelize needs a mesh", hint='for instance mesh="dp=2,tp=2"')
    _check_plain_module(model)
    model = uncompiled(model)
    planned, passed = split_options(options)

    def make(inputs: Any) -> nn.Module:
        return _parallelize_now(
            model,
            mesh,
            inputs,
            planned,
            passed,
            cluster=cluster,
            local_batch=local_batch,
            seed=seed,
            rules=rules,
        )

    if example_inputs is None:
        from autoshard.runtime.lazy import make_lazy

        return make_lazy(model, make)
    return make(example_inputs)


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
    options: PlanOptions,
    passes: PassOptions,
    *,
    cluster: str | os.PathLike[str] | Cluster | None,
    local_batch: bool,
    seed: int,
    rules: Rules,
) -> nn.Module:
    from autoshard.runtime.groups import device_mesh_for
    from autoshard.runtime.local_batch import global_example
    from autoshard.runtime.module import bind
    from autoshard.runtime.said import say_once

    if local_batch:
        where = parse_target(mesh)
        ranks = where.world_size if isinstance(where, Mesh) else _devices(where, options.devices)
        example_inputs = global_example(example_inputs, ranks)
    planned = plan(model, mesh, example_inputs=example_inputs, cluster=cluster, options=options, rules=rules)
    program = compile_analysed(planned, passes=passes)
    given = mesh if isinstance(mesh, DeviceMesh) else None

    source = planned.source
    assert source is not None
    prices = planned.cluster if isinstance(parse_target(mesh), Cluster) else cluster
    again = _Recompiler(planned.plan.mesh, prices, options, passes, rules)
    bound = bind(
        program,
        model,
        device_mesh_for(program.whole_mesh, given),
        seed=seed,
        captured=again.captured(planned, (source.args, source.kwargs)),
        local_batch=local_batch,
    )
    say_once(_decided(planned, program))
    return bound


@dataclass(frozen=True)
class _Recompiler:
    """Compiles further programs of a parallel model, with its options. mesh, cluster: as for `plan`."""

    mesh: str
    cluster: str | os.PathLike[str] | Cluster | None
    options: PlanOptions
    passes: PassOptions
    rules: Rules

    def captured(self, planned: Planned, inputs: Any) -> Captured:
        """What the capture of a plan leaves. inputs: that it was captured with."""
        from autoshard.runtime.checks.recapture import captured_of

        assert planned.source is not None
        state, differentiate = planned.analysis.folded.joint.captured_state, planned.source.differentiate
        return captured_of(
            state, inputs, differentiate, self.compiled, functools.partial(self.resized, planned)
        )

    def compiled(
        self,
        module: nn.Module,
        inputs: Any,
        differentiate: Differentiate,
        stored: Sequence[Program],
        pins: Sequence[str],
    ) -> tuple[Program, Captured]:
        """A program for other inputs: see `runtime.checks.call_guard.Compiling`."""
        options = replace(
            self.options,
            differentiate="all" if self.options.differentiate == "all" else differentiate,
            pins=tuple(pins),
            stored=stored_layouts(stored),
            tactics="",
            global_batch=None,
            replicate_small_batch=True,
        )
        planned = plan(
            module,
            self.mesh,
            example_inputs=inputs,
            cluster=self.cluster,
            options=options,
            rules=self.rules,
        )
        return compile_analysed(planned, passes=self.passes), self.captured(planned, inputs)

    def resized(self, planned: Planned, module: nn.Module, inputs: Any) -> Program | None:
        """The program of a plan for inputs of other sizes, None where it does not suit them."""
        assert planned.source is not None
        source = replace(planned.source, model=module, args=inputs[0], kwargs=inputs[1])
        analysis = source.analysed(lambda _: None)
        try:
            same = resized(planned.plan, planned.analysis, analysis)
        except NotResizableError:
            return None
        return compile_analysed(Planned(same, analysis, planned.cluster, None, source), passes=self.passes)


def _decided(planned: Planned, program: Program) -> str:
    """What `parallelize` decided, in a line."""
    solution = planned.solution
    assert solution is not None
    seconds, held = solution.placements.seconds, solution.placements.bytes
    return (
        f"{program.whole_mesh}, step {1e3 * seconds:.3g} ms on {planned.cluster.name} (predicted), "
        f"{bytes_up(held)} per rank; model.plan has the placements"
    )


def stored_layouts(programs: Iterable[Program]) -> tuple[tuple[str, str], ...]:
    """The layouts that parameters of programs have, by name."""
    found: dict[str, str] = {}
    for program in programs:
        for port in program.signature.ports:
            if port.kind == "param":
                layout = program.lowered.values[port.name].layout
                found[port.target] = " ".join(map(str, layout))
    return tuple(found.items())


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
