"""The user's model, running a program: parameters are DTensors under their own names.

The module keeps its class (a subclass of it is made), its state_dict keys, and its outputs' structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.module_snapshot import ModuleSnapshot
from autoshard.capture.origins import hook_line
from autoshard.capture.python_state.captured_state import stored_state
from autoshard.errors import UsageError
from autoshard.program.holders import holders_of
from autoshard.program.program import Program
from autoshard.runtime.arguments import split_inputs
from autoshard.runtime.checks.agreement import WeightHashes, check_first_call, check_parts_differ, gives_parts
from autoshard.runtime.checks.call_guard import CallGuard, Captured
from autoshard.runtime.checks.recapture import same_graph_as_stored
from autoshard.runtime.groups import place_of
from autoshard.runtime.local_batch import gathered_batch
from autoshard.runtime.optim.dropout_clock import DropoutClock
from autoshard.runtime.optim.follow_parameters import follow_parameters
from autoshard.runtime.optim.optimizer_hooks import keep_blocks
from autoshard.runtime.runner import Given, Runner
from autoshard.runtime.shared_params import carry_marks, mark_shared
from autoshard.runtime.stepper import Stepper
from autoshard.torch_adapters.compiled import uncompiled
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.hooks import (
    BACKWARD_TABLES,
    FORWARD_TABLES,
    carry_tensor_hooks,
    module_hooks,
)


class _Run(torch.autograd.Function):
    """The program as one autograd node: parameters and inputs in, outputs out."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, module: nn.Module, buffers: Any, count: int, *tensors: Any) -> Any:
        # without gradients there is no backward that could want other outputs
        wanted = any(ctx.needs_input_grad)
        ctx.retry = Retry.of(runner, module, tensors, count, buffers) if wanted else None
        env = runner.forward(tensors[:count], tensors[count:], buffers)
        if runner.guard is not None:
            runner.guard.after_forward(env)
        runner.update_buffers(env, buffers)
        if module.training:
            runner.clock.calls += 1
        outs = runner.outputs(env)
        positions = runner.output_positions
        plain = [o for o, k in zip(outs, positions, strict=True) if k not in runner.with_gradient]
        ctx.mark_non_differentiable(*plain)
        ctx.set_materialize_grads(False)
        ctx.runner, ctx.env, ctx.watched = runner, env, runner.watched(env, tensors[:count])
        ctx.given = [Given.of(x) for x in tensors[count:]]
        ctx.positions = positions
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        runner: Runner = ctx.runner
        if ctx.env is None:
            raise UsageError(
                "backward runs a second time through one call of the model",
                why="what it needs from forward is freed the first time, also with retain_graph=True",
                hint="add the losses up and call backward once, or call the model again",
            )
        env, ctx.env = ctx.env, None
        runner.check_unchanged(ctx.watched)
        by_position = dict(zip(ctx.positions, grads, strict=True))
        missed = [k for k, g in by_position.items() if g is not None and k not in runner.tangent_positions]
        if missed:
            runner, env = ctx.retry.run(missed)
        for port in runner.tangents:
            env[port.name] = runner.tangent(by_position[int(port.target)], port)
        with runner.waiting():
            found = runner.backward(env)
        back: list[Any] = [None, None, None, None]
        back += [found.get(("grad", p.target)) for p in runner.params]
        for port, given in zip(runner.inputs, ctx.given, strict=True):
            back.append(runner.input_grad(found.get(("input_grad", port.target)), port, given))
        return tuple(back)


def _called(runner: Runner, module: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = module._checked(runner.arguments.flattened(args, kwargs))
    params, inputs = runner.arguments_of(module, leaves)
    if runner.guard is not None:
        runner.guard.step(module)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return runner.returned(_Run.apply(runner, module, buffers, len(params), *params, *inputs))


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

    def run(self, missed: list[int]) -> tuple[Runner, Any]:
        """The runner of the other program, and what its forward leaves for backward."""
        module = self.module
        assert isinstance(module, ParallelModule)
        if module._autoshard is self.runner:
            module._take_all_outputs(missed)
        runner = module._autoshard
        clock, runner.clock = runner.clock, self.clock
        try:
            env = runner.forward(self.tensors[: self.count], self.tensors[self.count :], self.buffers)
        finally:
            runner.clock = clock
        return runner, env


class ParallelModule(nn.Module):
    """Mixed into the user's class: forward runs the program, which torch.compile leaves alone."""

    _autoshard: Runner
    _autoshard_stepper: Stepper
    _autoshard_guard: CallGuard
    _autoshard_captured: Captured | None
    _autoshard_built: WeightHashes | None
    #: whether the first call gave each rank's part of the batch
    _autoshard_parts: bool
    _autoshard_local_batch: bool

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
        SGD and Muon among them, save it with the checkpoint, and set it after loading.
        """
        return self._autoshard.clock.steps

    @dropout_step.setter
    def dropout_step(self, step: int) -> None:
        self._autoshard.clock.stepped(step)

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._autoshard
        if runner.program.stages is not None:
            raise UsageError(
                "the model is a pipeline and is called directly",
                why="each rank has some of its stages, and a step is many microbatches through all of them",
                hint="loss = model.train_step(batch) runs forward and backward; then optimizer.step()",
            )
        self._check_state()
        with runner.waiting():
            return _called(runner, self, args, kwargs)

    @torch.compiler.disable
    def train_step(self, batch: Any = None, /, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a whole step; gradients are added to ``.grad`` of the parameters.

        batch: as example inputs: a dict of keyword arguments, a tuple of positional ones or one tensor; of
        the size of all microbatches together, global or this rank's part. Returns the loss of the
        whole batch, a scalar without gradient that is the same on every rank. Raises UsageError if the
        model returns no loss or the batch has another size.
        """
        args, more = ((), {}) if batch is None else split_inputs(batch)
        self._check_state()
        for hook in module_hooks(self, FORWARD_TABLES + BACKWARD_TABLES):
            raise UsageError(
                "the model has hooks, and train_step calls no module",
                where=hook_line(hook),
                why="a step is many microbatches through stages on several ranks",
                hint="do what the hook does before or after train_step",
            )
        with self._autoshard.waiting():
            leaves = self._checked(self._autoshard.arguments.flattened(args, {**more, **kwargs}))
            return self._autoshard_stepper.step(self, leaves)

    def _checked(self, leaves: list[Any]) -> list[Any]:
        """The arguments of a call as the program takes them; at the first call the ranks are compared."""
        runner = self._autoshard
        if self._autoshard_local_batch:
            leaves = gathered_batch(runner, leaves)
        if self._autoshard_built is not None:
            check_first_call(runner, self, self._autoshard_built, leaves)
            self._autoshard_built, self._autoshard_parts = None, gives_parts(runner, leaves)
        elif not self._autoshard_parts and gives_parts(runner, leaves):
            check_parts_differ(runner, leaves)
        return leaves

    def _check_state(self) -> None:
        runner = self._autoshard
        signature = runner.program.signature
        mode_matters = runner.seed_port is not None or any(r.kind == "buffer" for r in signature.results)
        if mode_matters and self.training != signature.training:
            was, now = ("train", "eval") if signature.training else ("eval", "train")
            raise UsageError(
                f"the program was compiled in {was} mode and is called in {now} mode",
                why="the model has dropout or running statistics, which differ between the two",
                hint=f"compile a second program with the model in {now} mode",
            )
        self._autoshard_guard.check()

    def _take_all_outputs(self, missed: list[int]) -> None:
        """Go on with the program for the gradients of all outputs. missed: those without one so far."""
        runner, captured = self._autoshard, self._autoshard_captured
        if captured is None:
            raise UsageError(
                f"a loss depends on output {missed[0]} of the model, of which the program takes no gradient",
                why="it was compiled for the gradient of the loss that the model returns alone",
                hint='compile it with plan(..., differentiate="all")',
            )
        with as_built(self):
            program = captured.all_outputs(self)
        made = Runner(program, self, place_of(program, runner.place_mesh), runner.seed, runner.place_mesh)
        for old, new in zip(runner.params, made.params, strict=True):
            if runner.layout(old) != made.layout(new):
                raise UsageError(
                    f"no program for the gradients of all outputs keeps {old.target} where it is",
                    hint='parallelize(..., differentiate="all")',
                )
        made.clock = runner.clock
        self._autoshard, self._autoshard_stepper = made, Stepper(made)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A second model with the same program: an average of the weights, for instance."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        runner, stepper = copy.copy(self._autoshard), copy.copy(self._autoshard_stepper)
        stepper.runner = runner
        runner.clock = copy.deepcopy(runner.clock)
        memo[id(self._autoshard)], memo[id(self._autoshard_stepper)] = runner, stepper
        memo[id(self._autoshard_guard)] = None
        memo[id(self._autoshard_captured)] = self._autoshard_captured
        for key, value in self.__dict__.items():
            made.__dict__[key] = copy.deepcopy(value, memo)
        state = stored_state(made, runner.program.state.attributes)
        same_graph = partial(_as_built, same_graph_as_stored(runner.program))
        made._autoshard_guard = CallGuard(made, state, runner.device.type, same_graph)
        carry_marks(self, made)
        if runner.seed_port is not None:
            runner.clock.follow(made.parameters())
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a parallelized model cannot be pickled",
            why="it is bound to the processes that run it",
            hint="save its state_dict(), with torch.distributed.checkpoint or full tensors",
        )


def _shard_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before load_state_dict: whole tensors are cut into what the ranks hold, those of other ranks left."""
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
    _check_every_rank_holds(program)
    _check_module(program, module, mesh)
    # parameters made in inference mode could never be trained
    with torch.inference_mode(False):
        _bind(program, module, mesh, seed, captured)
    module._autoshard_local_batch = local_batch  # type: ignore[assignment]
    return module


def _bind(
    program: Program, module: nn.Module, mesh: DeviceMesh, seed: int, captured: Captured | None
) -> None:
    stored = program.state.attributes
    state = captured.state if captured is not None else stored_state(module, stored)
    for change in state.left:
        change.read.table[change.read.key] = change.after  # type: ignore[index]  # attributes, in a dict
    same_graph = captured.same_graph if captured is not None else same_graph_as_stored(program)
    guard = CallGuard(
        module, state, mesh.device_type, partial(_as_built, same_graph), stored if captured is None else None
    )
    runner = Runner(program, module, place_of(program, mesh), seed, mesh)
    given = dict(module.named_parameters(remove_duplicate=False))
    built = WeightHashes.of(dict(module.named_parameters()))
    made = {p.target: runner.parameter(given[p.target], p) for p in runner.params}
    known = {p.target for p in program.signature.ports if p.kind == "param"}
    aliases = dict(program.signature.tied)
    for name in list(given):
        owner = module.get_submodule(name.rpartition(".")[0])
        target = aliases.get(name, name)
        if target in made:
            carry_tensor_hooks(given[name], made[target])
            setattr(owner, name.rpartition(".")[2], made[target])
        elif target in known:
            # of another stage: this rank neither holds nor trains nor saves it
            _leave_shape(owner, owner._parameters, name.rpartition(".")[2])
    for name, buffer in list(module.named_buffers()):
        owner = module.get_submodule(name.rpartition(".")[0])
        kept = name not in runner.updated or runner.holds_buffer(name)
        if kept:
            owner._buffers[name.rpartition(".")[2]] = buffer.to(runner.device)
        else:
            _leave_shape(owner, owner._buffers, name.rpartition(".")[2])
    module.__dict__.pop("forward", None)  # a replaced one is part of the program, and would run in its place
    module.__class__ = _parallel_class(type(module))
    module._autoshard = runner  # type: ignore[assignment]
    module._autoshard_stepper = Stepper(runner)  # type: ignore[assignment]
    module._autoshard_guard, module._autoshard_captured = guard, captured  # type: ignore[assignment]
    module._autoshard_built, module._autoshard_parts = built.cut(module), False  # type: ignore[assignment]
    aliases = dict(program.signature.tied)
    follow_parameters(module, {p: made.get(aliases.get(n, n)) for n, p in given.items()})
    mark_shared(module, runner, module._autoshard_stepper.scales)  # type: ignore[arg-type, union-attr]
    keep_blocks(module)
    if runner.seed_port is not None:
        runner.clock.follow(module.parameters())
    module.register_load_state_dict_pre_hook(_shard_loaded)


#: attributes of a parallel model that the user's has not
_OURS = frozenset(ParallelModule.__annotations__)
#: in the class of a parallel model: the user's own
_USERS = "_autoshard_class"


class _SetsOnUsers(type):
    """Of the classes of parallel models: what is set on one is set on the class that the user wrote.

    ``type(model).gain = 2.0`` means that class, and captures are of models of that class.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if _USERS in vars(cls):
            setattr(vars(cls)[_USERS], name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(cls, name: str) -> None:
        if _USERS in vars(cls):
            delattr(vars(cls)[_USERS], name)
        else:
            super().__delattr__(name)


def _parallel_class(users: type) -> type:
    """The class of parallel models of a class."""
    own = type(users)
    kind = _SetsOnUsers if own is type else type(own.__name__, (_SetsOnUsers, own), {})
    made: type = kind(users.__name__, (ParallelModule, users), {"__module__": users.__module__})
    type.__setattr__(made, _USERS, users)  # not before: the user's code may set something while it is made
    return made


@contextmanager
def as_built(module: nn.Module) -> Iterator[nn.Module]:
    """A parallel module as the user built it, for a capture: of its own class, tensors without data."""
    assert isinstance(module, ParallelModule)
    kind, signature = type(module), module._autoshard.program.signature
    with ModuleSnapshot.of(module):
        module.__class__ = vars(kind)[_USERS]
        for name in _OURS & module.__dict__.keys():
            del module.__dict__[name]
        made: dict[str, torch.Tensor] = {}
        for port in signature.ports:
            if port.kind in ("param", "buffer"):
                x = torch.empty(port.type.shape, dtype=torch_dtype(port.type.dtype), device="meta")
                trained = port.target not in signature.frozen and x.is_floating_point()
                made[port.target] = nn.Parameter(x, requires_grad=trained) if port.kind == "param" else x
        for name, target in [*((n, n) for n in made), *signature.tied]:
            path, _, key = name.rpartition(".")
            owner, x = module.get_submodule(path), made[target]
            owner.__dict__.pop(key, None)  # the shape of what another stage holds
            table: dict[str, Any] = owner._parameters if isinstance(x, nn.Parameter) else owner._buffers
            table[key] = x
        try:
            yield module
        finally:
            module.__class__ = kind


def _as_built(asked: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """What is asked of a parallel module, asked of it as the user built it."""
    with as_built(module):
        return asked(module)


def _leave_shape(owner: nn.Module, held: dict[str, Any], name: str) -> None:
    """A tensor without values in place of a parameter or a buffer: it is none any more, but code that asks
    for its shape, as a module that is printed, finds it."""
    taken = held.pop(name)
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
        if x.device.type == "meta":
            raise UsageError(
                f"parameter {port.target} is on the meta device and holds no values",
                hint="initialise the model (on the CPU is fine) before it is sharded",
            )
        if x.device.type not in ("cpu", mesh.device_type):
            raise UsageError(
                f"parameter {port.target} is on {x.device}, the mesh is of {mesh.device_type} devices",
                hint=f"move the model to {mesh.device_type} or leave it on the CPU",
            )
