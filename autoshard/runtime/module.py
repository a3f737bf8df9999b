"""The user's model, running a program: parameters are DTensors under their own names.

The module keeps its class (a subclass of it is made), its state_dict keys, and its outputs' structure.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture.origins import hook_line, user_line_of
from autoshard.capture.python_state.captured_state import CapturedState, state_here
from autoshard.errors import UsageError
from autoshard.program.holders import holders_of
from autoshard.program.program import Program, Signature
from autoshard.runtime.arguments import split_inputs
from autoshard.runtime.checks.agreement import WeightHashes
from autoshard.runtime.checks.call_guard import CallGuard, Captured
from autoshard.runtime.checks.recapture import same_graph_as_stored
from autoshard.runtime.eager_calls import EagerCalls
from autoshard.runtime.executor import Values
from autoshard.runtime.family import BoundProgram, ProgramFamily
from autoshard.runtime.groups import place_of
from autoshard.runtime.optim.dropout_clock import DropoutClock
from autoshard.runtime.optim.follow_parameters import follow_parameters
from autoshard.runtime.optim.optimizer_hooks import keep_blocks, local
from autoshard.runtime.optim.plain_steps import run_plain_steps
from autoshard.runtime.outputs import Rows
from autoshard.runtime.parallel_class import FORWARD, as_built, parallel_class
from autoshard.runtime.runner import Given, Runner, Watched
from autoshard.runtime.saving import saves_full
from autoshard.runtime.shared_params import carry_marks, mark_shared
from autoshard.runtime.sized_programs import SizedPrograms
from autoshard.runtime.step_outputs import step_outputs
from autoshard.runtime.stepper import Stepper
from autoshard.runtime.weights import ports_of, to_empty
from autoshard.torch_adapters.assigned_data import watch_data
from autoshard.torch_adapters.compiled import uncompiled
from autoshard.torch_adapters.dtensor import allow_nan_checks, torch_placements
from autoshard.torch_adapters.hooks import (
    BACKWARD_TABLES,
    FORWARD_TABLES,
    carry_tensor_hooks,
    module_hooks,
)
from autoshard.torch_adapters.records import to_records


@dataclass(frozen=True)
class PlainPass:
    """A call whose forward ran op by op. env: what it leaves for backward. watched: see `Runner.watched`."""

    runner: Runner
    env: Values
    watched: Sequence[Watched]

    @classmethod
    def forward(
        cls,
        runner: Runner,
        params: Sequence[Any],
        inputs: Sequence[Any],
        buffers: dict[str, torch.Tensor],
        rows: Rows | None,
    ) -> tuple[PlainPass, list[Any]]:
        """(the call, its outputs)."""
        env = runner.forward(params, inputs, buffers)
        if runner.guard is not None:
            runner.guard.after_forward(env)
        runner.update_buffers(env, buffers)
        outs = runner.outputs(env, rows)
        for value in runner.rank_program.returned_only:
            env.pop(value, None)
        return cls(runner, env, runner.watched(env, params)), outs

    def backward(self, tangents: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], DTensor]:
        """Gradients by kind and target."""
        self.env.update(tangents)
        return self.runner.gradients(self.runner.backward(self.env))


class _Run(torch.autograd.Function):
    """The program as one autograd node: parameters and inputs in, outputs out."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        module: nn.Module,
        buffers: Any,
        rows: Rows | None,
        count: int,
        *tensors: Any,
    ) -> Any:
        # without gradients there is no backward that could want other outputs
        wanted = any(ctx.needs_input_grad)
        ctx.retry = Retry.of(runner, module, tensors, count, buffers) if wanted else None
        given = tensors[:count], tensors[count:], buffers, rows
        recorded = runner.graphs.forward(*given) if wanted and runner.graphs is not None else None
        ctx.ran, outs = recorded or PlainPass.forward(runner, *given)
        if module.training:
            runner.clock.calls += 1
        positions = runner.output_positions
        plain = [o for o, k in zip(outs, positions, strict=True) if k not in runner.with_gradient]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        ctx.runner = runner
        ctx.given = [Given.of(x) for x in tensors[count:]]
        ctx.positions = positions
        return tuple(outs)

    @staticmethod
    @torch.compiler.disable  # a compiled function may have called backward
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        runner: Runner = ctx.runner
        if ctx.ran is None:
            raise UsageError(
                "backward runs a second time through one call of the model",
                why="what it needs from forward is freed the first time, also with retain_graph=True",
                hint="add the losses up and call backward once, or call the model again",
            )
        ran, ctx.ran = ctx.ran, None
        runner.check_unchanged(ran.watched)
        by_position = dict(zip(ctx.positions, grads, strict=True))
        missed = [k for k, g in by_position.items() if g is not None and k not in runner.tangent_positions]
        if missed:
            ran = ctx.retry.run(missed)
            runner = ran.runner
        tangents = {p.name: runner.tangent(by_position[int(p.target)], p) for p in runner.tangents}
        with runner.waiting():
            result = ran.backward(tangents)
        back: list[Any] = [None] * 5
        back += [result.get(("grad", p.target)) for p in runner.params]
        for port, given in zip(runner.inputs, ctx.given, strict=True):
            back.append(runner.input_grad(result.get(("input_grad", port.target)), port, given))
        return tuple(back)


def _called(runner: Runner, module: ParallelModule, leaves: list[Any], rows: Rows | None) -> Any:
    params, inputs = runner.arguments_of(module, leaves)
    if runner.guard is not None:
        runner.guard.step(module)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return runner.returned(_Run.apply(runner, module, buffers, rows, len(params), *params, *inputs))


@dataclass(frozen=True)
class Retry:
    """A call whose program takes gradients of fewer outputs than the user has a loss of.

    The first time that happens, a program for the gradients of all outputs is compiled, with parameters where
    they are; it runs the call's forward once more, and all later calls.
    """

    runner: Runner
    module: nn.Module
    tensors: tuple[Any, ...]
    count: int
    buffers: dict[str, torch.Tensor]
    clock: DropoutClock

    @classmethod
    def of(
        cls, runner: Runner, module: nn.Module, tensors: tuple[Any, ...], count: int, buffers: Any
    ) -> Retry | None:
        """None for a program that has the gradients of all outputs."""
        if runner.with_gradient <= runner.tangent_positions:
            return None
        before = {n: b.clone() if n in runner.updated else b for n, b in buffers.items()}
        return cls(runner, module, tensors, count, before, copy.copy(runner.clock))

    def run(self, missed: list[int]) -> PlainPass:
        """The call, by the other program."""
        module = self.module
        assert isinstance(module, ParallelModule)
        runner = module._autoshard_family.take_all_outputs(module, self.runner, missed).runner
        clock, runner.clock = runner.clock, self.clock
        try:
            env = runner.forward(self.tensors[: self.count], self.tensors[self.count :], self.buffers)
        finally:
            runner.clock = clock
        return PlainPass(runner, env, ())


class _NotForAccelerate:
    """What Accelerate asks of a model before it wraps it in DistributedDataParallel."""

    def __get__(self, module: nn.Module | None, owner: type) -> bool:
        if module is None:
            return False
        frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
        paths = (frame.f_code.co_filename.replace("\\", "/") for frame in frames)
        trainer = any(path.endswith("transformers/trainer.py") for path in paths)
        which = "the Trainer of transformers" if trainer else "the Accelerator of Accelerate"
        raise UsageError(
            f"{which} is given a model that is parallel already",
            where=user_line_of(frames[0], ("accelerate", "transformers")),
            why="it would wrap it in DistributedDataParallel, and give ranks other batches",
            hint="from autoshard.interop.trainer import Trainer, in place of that of transformers; for a "
            "subclass of it, class Yours(ParallelTrainer, TheSubclass)"
            if trainer
            else "from autoshard.interop.accelerator import ReplicatedAccelerator, in place of Accelerator",
        )


class ParallelModule(nn.Module):
    """Mixed into the user's class: forward runs the program, which torch.compile leaves alone."""

    _is_accelerate_prepared = _NotForAccelerate()

    _autoshard_family: ProgramFamily
    _autoshard_eager: EagerCalls

    @property
    def _autoshard(self) -> Runner:
        """The program that ran last."""
        return self._autoshard_family.current.runner

    @property
    def microbatches(self) -> int:
        """How many calls make a step of the plan; `autoshard.runtime.train` makes them."""
        return self._autoshard.program.microbatches

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is cut into stages, so that only `train_step` runs it."""
        return self._autoshard.program.stages is not None

    @property
    def dropout_step(self) -> int:
        """The number that dropout masks of the next call follow from, besides the seed.

        It counts the steps of the optimizer, and is loaded with the state of one that counts them, as Adam
        and its kind do: with model and optimizer loaded, training goes on with the same masks. For others,
        SGD, Muon and LayerWiseOptimizer among them, save it with the checkpoint, and set it after loading.
        """
        return self._autoshard.clock.steps

    @dropout_step.setter
    def dropout_step(self, step: int) -> None:
        self._autoshard.clock.stepped(step)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_pipeline:
            raise UsageError(
                "the model is a pipeline and is called directly",
                why="each rank has some of its stages, and a step is many microbatches through all of them",
                hint="loss = model.train_step(batch) runs forward and backward; then optimizer.step(); "
                "model.eval_outputs(batch) returns what the model would",
            )
        given = args, kwargs
        args, kwargs = to_records(given)
        asks = self._autoshard_family.current.guard.grad_mode
        if self._autoshard_eager.running or self._autoshard_eager.has_to(self, args, kwargs, asks):
            with self._autoshard_eager.gathered(self):
                users = self.__dict__.get(FORWARD, super().forward)
                args, kwargs = self._autoshard_eager.precision.of_call(given)
                return users(*args, **kwargs)
        with self._autoshard.waiting():
            leaves, rows = self._autoshard_family.of_call(self, args, kwargs)
            self._autoshard_eager.enters_program(rows)
            return _called(self._autoshard, self, leaves, rows)

    @torch.compiler.disable
    def train_step(self, batch: Any = None, /, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a full step; gradients are added to ``.grad`` of the parameters.

        batch: as example inputs: a dict of keyword arguments, a tuple of positional ones or one tensor; of
        the size of all microbatches together, global or this rank's part. Returns the loss of the
        full batch, a scalar without gradient that is the same on every rank. Raises UsageError if the
        model returns no loss or the batch has another size.
        """
        with self._autoshard.waiting():
            leaves = _leaves_of_step(self, batch, kwargs)
            return self._autoshard_family.current.stepper.step(self, leaves)

    def release_graphs(self) -> None:
        """Drop the CUDA graphs of all programs, to be called before ``destroy_process_group()``: NCCL waits
        for graphs that have its messages. The next step records anew."""
        for bound in self._autoshard_family.programs:
            if bound.runner.graphs is not None:
                bound.runner.graphs.release()

    @torch.compiler.disable
    def eval_step(self, batch: Any = None, /, **kwargs: Any) -> torch.Tensor:
        """Forward of a full step, without gradients: the loss of a batch in the mode that the model is in.

        Takes and returns what `train_step` does; dropout steps are not counted.
        """
        with self._autoshard.waiting():
            leaves = _leaves_of_step(self, batch, kwargs)
            return self._autoshard_family.current.stepper.evaluate(self, leaves)[0]

    @torch.compiler.disable
    def eval_outputs(self, batch: Any = None, ignore: Collection[str] = (), /, **kwargs: Any) -> Any:
        """What the model returns for the batch of a full step, without gradients: of a pipeline, too.

        Takes what `eval_step` does. ignore: names of outputs that are left empty, such as caches. Returns
        plain tensors of the full batch, on every rank. Raises UsageError for an output without the batch if
        a step is several microbatches.
        """
        with self._autoshard.waiting():
            leaves = _leaves_of_step(self, batch, kwargs)
            return step_outputs(self._autoshard_family.current.stepper, self, leaves, ignore)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Of ``to``, ``float`` and their like. Parameters that it does not change stay as they are: torch
        would put others in their place, without their hooks."""
        kept = [
            (table, name, p)
            for module in (self.modules() if recurse else (self,))
            for table in (module._parameters,)
            for name, p in table.items()
            if p is not None and _is_unchanged(fn, p)
        ]
        for table, name, _ in kept:
            table[name] = None
        try:
            return super()._apply(fn, recurse)
        finally:
            for table, name, p in kept:
                table[name] = p

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Memory for what has none; other values stay. A call is refused until all of it is written.

        Raises UsageError for a device that the program does not run on, or with ``recurse=False``.
        """
        here = self._autoshard.device
        if not recurse or device is None or torch.device(device).type != here.type:
            raise UsageError(
                f"to_empty(device={device!r}, recurse={recurse})",
                why=f"the program runs on {here.type}, and its parameters are those of all modules",
                hint=f'model.to_empty(device="{here.type}")',
            )
        to_empty(self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A second model with the same programs: an average of the weights, for instance."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        family = self._autoshard_family
        memo[id(family)] = None
        # torch cannot copy a DTensor whose shard begins somewhere in a bucket
        memo.update({id(p.grad): p.grad.clone() for p in self.parameters() if p.grad is not None})
        for key, value in self.__dict__.items():
            new.__dict__[key] = copy.deepcopy(value, memo)
        clock = copy.deepcopy(self._autoshard.clock)
        copies = {bound: _copied(bound, new, clock) for bound in family.programs}
        new._autoshard_family = family.copied(copies, partial(_bound, new))
        carry_marks(self, new)
        watch_data(new.parameters())
        clock.follow(new.parameters())
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a parallelized model cannot be pickled",
            why="it is bound to the processes that run it",
            hint="save its state_dict(), with torch.distributed.checkpoint or full tensors",
        )


@torch.no_grad()
def _is_unchanged(fn: Callable[[torch.Tensor], torch.Tensor], parameter: nn.Parameter) -> bool:
    new = fn(parameter)
    same = new.dtype == parameter.dtype and new.device == parameter.device
    return same and local(new).data_ptr() == local(parameter).data_ptr()


def _leaves_of_step(module: ParallelModule, batch: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Make the program of a step the current one. Returns the leaves of its arguments."""
    args, more = ((), {}) if batch is None else split_inputs(batch)
    for hook in module_hooks(module, FORWARD_TABLES + BACKWARD_TABLES):
        raise UsageError(
            "the model has hooks, and a step calls no module",
            where=hook_line(hook),
            why="a step is many microbatches through stages on several ranks",
            hint="do what the hook does before or after the step",
        )
    leaves, _ = module._autoshard_family.of_call(module, args, {**more, **kwargs}, step=True)
    return leaves


def _shard_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before load_state_dict: full tensors are cut into what the ranks hold, those of other ranks left."""
    if isinstance(module, ParallelModule):
        module._autoshard.shard_state(state, prefix)


def bind(
    program: Program,
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    seed: int = 0,
    captured: Captured | None = None,
    local_batch: bool = False,
) -> nn.Module:
    """Make ``module`` run ``program``: its parameters become DTensors, its forward the program.

    The module is changed in place and returned; of one that ``torch.compile`` gave, that is the module which
    was compiled. captured: what the capture of the program took for granted; without it (a program that was
    stored) the attributes that were read must be what they were then. local_batch: whether every rank calls
    with a batch of its own, of which the global one is made.

    Raises UsageError if it is not the model the program was compiled from, or lies on another kind of device
    than the mesh.
    """
    module = uncompiled(module)
    allow_nan_checks()
    _check_every_rank_holds(program)
    _check_module(program, module, mesh)
    # parameters made in inference mode could never be trained
    with torch.inference_mode(False):
        _bind(program, module, mesh, seed, captured, local_batch)
    return module


def _bind(
    program: Program,
    module: nn.Module,
    mesh: DeviceMesh,
    seed: int,
    captured: Captured | None,
    local_batch: bool,
) -> None:
    stored = program.state.attributes
    state = captured.state if captured is not None else state_here(module, stored)
    runner = Runner(program, module, place_of(program, mesh), seed, mesh)
    eager = EagerCalls(_no_eager_calls(program), lambda: runner.clock.seed(seed, 0), program.precision)
    eager.watch(module)
    if local_batch:
        eager.batch_axes = tuple(range(mesh.ndim))
    guard = _guard(module, program, mesh.device_type, captured, state)
    built = WeightHashes.of(dict(module.named_parameters()))
    given = dict(module.named_parameters(remove_duplicate=False))
    new = _place_parameters(module, runner)
    for name, buffer in list(module.named_buffers()):
        owner = module.get_submodule(name.rpartition(".")[0])
        kept = name not in runner.updated or runner.holds_buffer(name)
        if kept:
            # values of what is on meta are loaded later
            placed = buffer if buffer.is_meta else buffer.to(runner.device)
            owner._buffers[name.rpartition(".")[2]] = placed
        else:
            _leave_shape(owner, owner._buffers, name.rpartition(".")[2])
    if "forward" in module.__dict__:  # it is part of the program, and would run in its place
        module.__dict__[FORWARD] = module.__dict__.pop("forward")
    module.__class__ = parallel_class(type(module), ParallelModule, {"save_pretrained": saves_full})
    sized = None if captured is None else SizedPrograms(program, captured)
    first = BoundProgram(runner, Stepper(runner), guard, captured, sized)
    family = ProgramFamily(first, built.cut(module), local_batch, partial(_bound, module))
    module._autoshard_family, module._autoshard_eager = family, eager  # type: ignore[assignment]
    follow_parameters(module, {p: new.get(n) for n, p in given.items()})
    first.stepper.members = mark_shared(module, runner, first.stepper.scales)
    keep_blocks(module)
    watch_data(module.parameters())
    runner.clock.follow(module.parameters())
    run_plain_steps(module, ports_of)
    module.register_load_state_dict_pre_hook(_shard_loaded)


def _bound(module: nn.Module, like: BoundProgram, program: Program, captured: Captured) -> BoundProgram:
    """Another program of a parallel module, whose parameters are where they are."""
    old = like.runner
    runner = Runner(program, module, place_of(program, old.place_mesh), old.seed, old.place_mesh, old)
    given = dict(module.named_parameters(remove_duplicate=False))
    _check_stages(old, runner)
    for port in runner.params:
        parameter = given[port.target]
        if isinstance(parameter, DTensor) and tuple(parameter.placements) != tuple(
            torch_placements(runner.layout(port))
        ):
            raise UsageError(
                f"no program for this call keeps {port.target} where it is",
                why=f"it lies as {tuple(parameter.placements)} on {runner.shape}",
                hint="parallelize a second model for such calls, or pin the parameter in both",
            )
    new = _place_parameters(module, runner)
    if new:
        follow_parameters(module, {given[n]: p for n, p in new.items()})
        keep_blocks(module)
        runner.clock.follow(new.values())
    guard = _guard(module, program, runner.device.type, captured, captured.state)
    return BoundProgram(runner, Stepper(runner, like.stepper), guard, captured)


def _check_stages(old: Runner, new: Runner) -> None:
    """UsageError, on all ranks, unless the ranks that use a parameter have it in another program."""
    if old.program.stages is None:
        return
    before, owner = old.holders_of_state, old.program.stages.schedule.owner
    used = holders_of(new.program, before)
    for port in (p for p in new.program.signature.ports if p.kind == "param"):
        now, then = ({owner[s] for s in each} for each in (used[port.name], before.get(port.target, ())))
        if not now <= then:
            raise UsageError(
                f"no program for this call keeps {port.target} on the pipeline ranks that have it",
                why=f"ranks {sorted(then)} have it, and the call would use it on {sorted(now)}",
                hint="parallelize a second model for such calls",
            )


def _guard(
    module: nn.Module, program: Program, device: str, captured: Captured | None, state: CapturedState
) -> CallGuard:
    """Of a program's calls. It changes the attributes that forward leaves changed."""
    for change in state.left:
        change.read.table[change.read.key] = change.after  # type: ignore[index]  # attributes, in a dict
    same_graph = captured.same_graph if captured is not None else same_graph_as_stored(program)
    stored = program.state.attributes if captured is None else captured.stored
    return CallGuard(module, state, device, partial(_as_built, program.signature, same_graph), stored)


def _as_built(signature: Signature, asked: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """What is asked of a parallel module, asked of it as the user built it."""
    with as_built(module, signature):
        return asked(module)


def _copied(bound: BoundProgram, module: nn.Module, clock: DropoutClock) -> BoundProgram:
    """A program, of a copy of its module."""
    runner, stepper = copy.copy(bound.runner), copy.copy(bound.stepper)
    stepper.runner, runner.clock = runner, clock
    runner.graphs = None if runner.graphs is None else runner.graphs.copied(runner)
    program, captured = runner.program, bound.captured
    state = state_here(module, program.state.attributes)
    same_graph = partial(_as_built, program.signature, same_graph_as_stored(program))
    # what was changed since the last call is in no program yet
    stored = {**program.state.variables, **program.state.attributes}
    guard = CallGuard(module, state, runner.device.type, same_graph, stored)
    guard.know_hooks_of(bound.guard)
    return BoundProgram(runner, stepper, guard, captured)


def _no_eager_calls(program: Program) -> str:
    """Why modules of a model cannot be called by themselves, "" where they can."""
    if program.stages is not None:
        return "each rank of a pipeline has the parameters of its own stages"
    if program.offload.parameters:
        return "the parameters are in host memory"
    return ""


def _place_parameters(module: nn.Module, runner: Runner) -> dict[str, nn.Parameter]:
    """Put this rank's shards in place of a program's global parameters; all their names -> parameter."""
    given = dict(module.named_parameters(remove_duplicate=False))
    new = {
        p.target: runner.parameter(given[p.target], p)
        for p in runner.params
        if not isinstance(given[p.target], DTensor)
    }
    known = {p.target for p in runner.program.signature.ports if p.kind == "param"}
    aliases = dict(runner.program.signature.tied)
    placed: dict[str, nn.Parameter] = {}
    for name in list(given):
        owner, key = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        target = aliases.get(name, name)
        if target in new:
            carry_tensor_hooks(given[name], new[target])
            setattr(owner, key, new[target])
            placed[name] = new[target]
        elif target in known and not isinstance(given[name], DTensor):
            # of another stage: this rank neither holds nor trains nor saves it
            _leave_shape(owner, owner._parameters, key)
    return placed


def _leave_shape(owner: nn.Module, held: dict[str, Any], name: str) -> None:
    """A tensor without values in place of a parameter or a buffer: it is none any more, but code that asks
    for its shape, as a module that is printed, finds it."""
    # its place in the table stays, as a capture meets them in their order
    taken, held[name] = held[name], None
    if taken is None:
        return  # of a module with several names
    owner.__dict__[name] = torch.empty_like(taken, device="meta", requires_grad=False)


def _check_every_rank_holds(program: Program) -> None:
    """UsageError, the same on all ranks, if the stages of a pipeline's rank have no parameters."""
    if program.stages is None:
        return
    holders, owner = holders_of(program), program.stages.schedule.owner
    params = [p for p in program.signature.ports if p.kind == "param"]
    having = {owner[stage] for p in params for stage in holders[p.name]}
    idle = sorted(set(owner) - having)
    if params and idle:
        ranks = f"rank{'s' if len(idle) > 1 else ''} {', '.join(map(str, idle))} of pp"
        raise UsageError(
            f"{ranks} would hold no parameters",
            why=f"of the {len(owner)} stages, those there have none: an optimizer would "
            "get an empty list there, while the other ranks wait",
            hint="use a mesh with a smaller pp axis, or fewer chunks",
        )


def _check_module(program: Program, module: nn.Module, mesh: DeviceMesh) -> None:
    given = dict(module.named_parameters(remove_duplicate=False))
    for port in program.signature.ports:
        if port.kind != "param":
            continue
        if port.target not in given:
            raise UsageError(
                f"the model has no parameter {port.target}",
                why="the program was compiled from another model",
                hint="compile a program for this model",
            )
        x = given[port.target]
        if tuple(x.shape) != port.type.shape:
            raise UsageError(
                f"parameter {port.target} has shape {list(x.shape)}",
                why=f"the program expects {list(port.type.shape)}: it was compiled from another model",
                hint="compile a program for this model",
            )
        if x.device.type not in ("cpu", "meta", mesh.device_type):
            raise UsageError(
                f"parameter {port.target} is on {x.device}, the mesh is of {mesh.device_type} devices",
                hint=f"move the model to {mesh.device_type} or leave it on the CPU",
            )
