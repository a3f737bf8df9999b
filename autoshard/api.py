"""The functions people call: plan, compile, load, parallelize."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.garbage import collected_rarely
from autoshard.cluster import Cluster, Mesh, load_cluster, parse_target
from autoshard.cluster.load import catalog_names
from autoshard.errors import UsageError
from autoshard.interop.hf_weights import fill_buffers
from autoshard.options import PassOptions, PlanOptions, check_codegen, options_from, split_options
from autoshard.planner import length_plans as planner_lengths
from autoshard.planner import length_range as planner_range
from autoshard.planner.compiling import compile_analysed, ranks_of, request_of
from autoshard.planner.length_plans import LengthPlans, LengthShare, most_frequent, resized_inputs
from autoshard.planner.length_range import LengthRange, RangePlan
from autoshard.planner.lowering import full_mesh
from autoshard.planner.planned import Planned
from autoshard.planner.source import Progress, Source, options_of
from autoshard.program.program import Program
from autoshard.program.store import folder_for, load_program, save_program
from autoshard.rules.user import Rules
from autoshard.runtime.arguments import split_inputs
from autoshard.runtime.said import say_once, stages_said
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.plan_json import plan_from_json
from autoshard.search.solve.memory_text import bytes_up
from autoshard.torch_adapters.compiled import uncompiled

__all__ = [
    "Compiled",
    "compile",
    "compile_analysed",
    "load",
    "parallelize",
    "plan",
    "plan_lengths",
    "with_options",
]


#: a model, which stays of its class
M = TypeVar("M", bound=nn.Module)
#: a class of models, or a factory of them
D = TypeVar("D", bound=Callable[..., Any])


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
    device: bool = False,
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
            with ``pp`` a full step.
        cluster: whose prices to use (default: cpu-gloo for a model on the CPU, or on the meta device in a
            process group of CPUs, h100-dgx otherwise). Where one is named, ``memory`` is 94 % of its
            device's unless given.
        options: how the plan is searched; overrides: fields of it by name, `autoshard.PlanOptions`.
        rules: the user's own sharding rules, see `autoshard.rule`.
        target: what the plan is called.
        device: whether the caching allocator is simulated, and the plan made again with less memory if its
            segments would not fit the device.
        progress: is told every stage (default: lines on stderr once planning takes more than two seconds).

    Raises CaptureError, NoRuleError, UsageError, and InfeasibleError if no plan fits the memory.
    """
    chosen = options_from(PlanOptions, overrides, options)
    with stages_said(progress) as say, collected_rarely():
        request = request_of(model, mesh, cluster, chosen, target, say)
        source = Source.of_options(model, *split_inputs(example_inputs), chosen, rules)
        return request.planned_for_device(source) if device else request.planned(source)


def plan_length_range(
    model: nn.Module,
    mesh: Any,
    *,
    example_inputs: Any,
    lengths: LengthRange,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    options: PlanOptions | None = None,
    rules: Rules = None,
    target: str = "",
    progress: Progress | None = None,
    **overrides: Any,
) -> RangePlan:
    """One plan for batches of any length in a range, priced at the longest; arguments as for `plan`.

    Raises what `plan` raises, InfeasibleError also where a length that the mesh does not divide does not fit.
    """
    chosen = options_from(PlanOptions, overrides, options)
    source = Source.of_options(model, *split_inputs(example_inputs), chosen, rules)
    with stages_said(progress) as say, collected_rarely():
        request = request_of(model, mesh, cluster, chosen, target, say)
        return planner_range.plan_range(request, source, lengths)


def plan_lengths(
    model: nn.Module,
    mesh: Any,
    *,
    example_inputs: Any,
    lengths: str,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    options: PlanOptions | None = None,
    rules: Rules = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> LengthPlans:
    """Plans for a distribution of sequence lengths, one for each, on one set of parameter placements.

    Args:
        example_inputs: as for `plan`; every dim as long as dim 1 of the first batched input has a length.
        lengths: ``"512:0.7,4096:0.2,32768:0.1"``, lengths in tokens and the shares of steps that have them.

    The others are those of `plan`. Raises what `plan` raises.
    """
    chosen = options_from(PlanOptions, overrides, options)
    source = Source.of_options(model, *split_inputs(example_inputs), chosen, rules)
    with stages_said(progress) as say, collected_rarely():
        request = request_of(model, mesh, cluster, chosen, "", say)
        return planner_lengths.plan_lengths(request, source, planner_lengths.parse_lengths(lengths))


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
    with stages_said(progress) as say, collected_rarely():
        if isinstance(plan, Plan):
            args, kwargs = split_inputs(example_inputs)
            source = Source.of_plan(model, args, kwargs, plan, rules)
            machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or plan.cluster)
            plan = Planned(plan, source.analysed(say), machine, None, source)
        return Compiled(compile_analysed(plan, say, options_from(PassOptions, passes)))


def load(
    folder: str | os.PathLike[str],
    model: M,
    *,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    rules: Rules = None,
    codegen: str = "",
    cuda_graphs: bool | None = None,
    code_cache: str | os.PathLike[str] = "",
) -> M:
    """Make ``model`` run a stored program, on every rank: no capture, no search. Calls of another kind are
    planned as of a model that `parallelize` gave.

    A folder may have programs for several numbers of ranks (``autoshard compile --also 24``): that of this
    world is taken. The process group is made from the environment (torchrun) if there is none yet. A program
    only calls ops that are known: one with ops of the user's own needs their ``rules`` again, and raises
    VerificationError without them. codegen, cuda_graphs: instead of the program's (`autoshard.PassOptions`).
    code_cache: a folder that compiled code is taken from and put into, for instance one beside the program's;
    it holds pickles, so that it must be one that you trust.
    """
    from autoshard.planner.model_compiler import ModelCompiler
    from autoshard.runtime.compile_once import CompilingRanks
    from autoshard.runtime.groups import device_mesh_for, world_size
    from autoshard.runtime.module import bind

    fill_buffers(model)
    program = load_program(folder_for(folder, mesh.size() if mesh else world_size()), rules=rules)
    graphs = program.cuda_graphs if cuda_graphs is None else cuda_graphs
    program = replace(
        program,
        codegen=check_codegen(codegen) or program.codegen,
        cuda_graphs=graphs,
        code_cache=os.fspath(code_cache),
    )
    devices = device_mesh_for(program.full_mesh, mesh)
    plan = plan_from_json(program.plan)
    known = plan.cluster if plan.cluster in catalog_names() else None
    ranks = CompilingRanks.of(devices)
    where = full_mesh(Mesh.parse(plan.mesh), plan)
    passes = PassOptions(codegen=program.codegen, cuda_graphs=graphs)
    compiler = ModelCompiler(where, known, options_of(plan), passes, rules, ranks)
    captured = compiler.of_stored(program, uncompiled(model))
    return cast(M, bind(program, model, devices, seed=seed, captured=captured))


@overload
def parallelize(
    model: M,
    mesh: Any,
    *,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    lengths: str = "",
    local_batch: bool = False,
    seed: int = 0,
    rules: Rules = None,
    progress: Progress | None = None,
    **options: Any,
) -> M: ...
@overload
def parallelize(*, mesh: Any, **options: Any) -> Callable[[D], D]: ...
def parallelize(
    model: Any = None,
    mesh: Any = None,
    *,
    example_inputs: Any = None,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    lengths: str = "",
    local_batch: bool = False,
    seed: int = 0,
    rules: Rules = None,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """A model that runs in parallel on a mesh; its parameters become DTensors under their own names.

    With example inputs the program is made at once, without them at the first call, whose arguments
    then serve (they must have global shapes). With a ``pp`` axis they are those of a full step, and the
    model is trained by ``train_step`` (see `runtime.module.ParallelModule`). The first rank compiles, the
    others receive its program; ``AUTOSHARD_CACHE`` names a folder that keeps it. For a loss on other outputs
    than the one that the model returns, a program for the gradients of all outputs is compiled at the first
    such backward, or at once with ``differentiate="all"``. As a decorator
    (``@parallelize(mesh="dp=2,tp=2")``) it wraps an nn.Module class or a factory.

    The mesh, example inputs, cluster, rules and progress (of the rank that plans) are those of `plan`.

    Args:
        lengths: ``"512:0.7,4096:0.3"``: lengths of sequences and the shares of steps that have them; their
            programs are planned together (`plan_lengths`) and compiled at once.
        local_batch: False: all ranks give the same global batch, or each its own part of it. True: example
            inputs and calls have a batch of the rank's own, as under DDP, and the loss is that of all.
        seed: of dropout.
        options: fields of `autoshard.PlanOptions` and `autoshard.PassOptions` by name.
    """
    about = {
        "cluster": cluster,
        "lengths": lengths,
        "local_batch": local_batch,
        "seed": seed,
        "rules": rules,
        "progress": progress,
        **options,
    }
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
            shares=planner_lengths.parse_lengths(lengths) if lengths else (),
            local_batch=local_batch,
            seed=seed,
            rules=rules,
            progress=progress,
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
    shares: Sequence[LengthShare],
    local_batch: bool,
    seed: int,
    rules: Rules,
    progress: Progress | None,
) -> nn.Module:
    from autoshard.planner.model_compiler import ModelCompiler
    from autoshard.runtime.compile_once import CompilingRanks
    from autoshard.runtime.groups import device_mesh_for, init_world
    from autoshard.runtime.local_batch import global_example
    from autoshard.runtime.module import bind

    fill_buffers(model)
    where = parse_target(mesh)
    if local_batch:
        example_inputs = global_example(example_inputs, ranks_of(where, options))
    given = mesh if isinstance(mesh, DeviceMesh) else None
    init_world(where if isinstance(where, Mesh) and given is None else None)
    compiler = ModelCompiler(where, cluster, options, passes, rules, CompilingRanks.of(given), progress)
    inputs = split_inputs(example_inputs)
    program, captured, planned = compiler.first(model, inputs, shares)
    bound = bind(
        program,
        model,
        device_mesh_for(program.full_mesh, given),
        seed=seed,
        captured=captured,
        local_batch=local_batch,
    )
    say_once(_decided(program, planned))
    for share in shares:
        if share != most_frequent(shares):
            sized = resized_inputs(inputs, share.length)
            bound._autoshard_family.compile_ahead(bound, sized)  # type: ignore[operator, union-attr]
    return bound


def _decided(program: Program, planned: Planned | None) -> str:
    """What `parallelize` decided, in a line. planned: None for a program from the cache."""
    plan = plan_from_json(program.plan)
    seconds = plan.optimality.seconds
    if planned is None or planned.solution is None:
        about = "read from the cache"
    else:
        about = f"{bytes_up(planned.solution.placements.bytes)} per rank"
    return (
        f"{program.full_mesh}, step {1e3 * seconds:.3g} ms on {plan.cluster} (predicted), {about}; "
        "model.plan has the placements"
    )


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
