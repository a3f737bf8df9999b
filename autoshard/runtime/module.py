"""The user's model, running a program: parameters are DTensors under their own names.

The module keeps its class (a subclass of it is made), its state_dict keys, and its outputs' structure.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import UsageError
from autoshard.program.program import Program
from autoshard.runtime.groups import place_of
from autoshard.runtime.runner import Given, Runner
from autoshard.runtime.shared import carry_marks, mark_shared
from autoshard.runtime.stepper import Stepper


class _Run(torch.autograd.Function):
    """The program as one autograd node: parameters and inputs in, outputs out."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, module: nn.Module, buffers: Any, count: int, *tensors: Any) -> Any:
        env = runner.forward(tensors[:count], tensors[count:], buffers)
        if runner.guard is not None:
            runner.guard.after_forward(env)
        runner.update_buffers(env, buffers)
        if module.training:
            runner.steps += 1
        outs = runner.outputs(env)
        tangents = {int(t.target) for t in runner.tangents}
        positions = sorted(int(r.target) for r in runner.program.signature.results if r.kind == "output")
        plain = [o for o, position in zip(outs, positions, strict=True) if position not in tangents]
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
        for port in runner.tangents:
            env[port.name] = runner.tangent(by_position[int(port.target)], port)
        found = runner.backward(env)
        back: list[Any] = [None, None, None, None]
        back += [found.get(("grad", p.target)) for p in runner.params]
        for port, given in zip(runner.inputs, ctx.given, strict=True):
            back.append(runner.input_grad(found.get(("input_grad", port.target)), port, given))
        return tuple(back)


def _called(runner: Runner, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    params, inputs = runner.arguments_of(module, runner.arguments.flattened(args, kwargs))
    if runner.guard is not None:
        runner.guard.step(module)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return runner.returned(_Run.apply(runner, module, buffers, len(params), *params, *inputs))


class ParallelModule(nn.Module):
    """Mixed into the user's class: forward runs the program."""

    _autoshard: Runner
    _stepper: Stepper

    @property
    def microbatches(self) -> int:
        """How many calls make a step of the plan; `autoshard.runtime.train` makes them."""
        return self._autoshard.program.microbatches

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is cut into stages, so that only `train_step` runs it."""
        return self._autoshard.program.stages is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner = self._autoshard
        if runner.program.stages is not None:
            raise UsageError(
                "the model is a pipeline and is called directly",
                why="each rank has some of its stages, and a step is many microbatches through all of them",
                hint="loss = model.train_step(batch) runs forward and backward; then optimizer.step()",
            )
        self._check_mode()
        return _called(runner, self, args, kwargs)

    def train_step(self, batch: Any = None, /, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a whole step; gradients are added to ``.grad`` of the parameters.

        batch: as example inputs: a dict of keyword arguments, a tuple of positional ones or one tensor; of
        the size of all microbatches together, global or this rank's part. Returns the loss of the
        whole batch, a scalar without gradient that is the same on every rank. Raises UsageError if the
        model returns no loss or the batch has another size.
        """
        from autoshard.api import split_inputs

        args, more = ((), {}) if batch is None else split_inputs(batch)
        self._check_mode()
        leaves = self._autoshard.arguments.flattened(args, {**more, **kwargs})
        return self._stepper.step(self, leaves)

    def _check_mode(self) -> None:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A second model with the same program: an average of the weights, for instance."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        runner, stepper = copy.copy(self._autoshard), copy.copy(self._stepper)
        stepper.runner = runner
        memo[id(self._autoshard)], memo[id(self._stepper)] = runner, stepper
        for key, value in self.__dict__.items():
            made.__dict__[key] = copy.deepcopy(value, memo)
        carry_marks(self, made)
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


def bind(program: Program, module: nn.Module, mesh: DeviceMesh, *, seed: int = 0) -> nn.Module:
    """Make ``module`` run ``program``: its parameters become DTensors, its forward the program.

    The module is changed in place and returned. Raises UsageError if it is not the model the program
    was compiled from, or lies on another kind of device than the mesh.
    """
    _check_module(program, module, mesh)
    # parameters made in inference mode could never be trained
    with torch.inference_mode(False):
        return _bound(program, module, mesh, seed)


def _bound(program: Program, module: nn.Module, mesh: DeviceMesh, seed: int) -> nn.Module:
    runner = Runner(program, module, place_of(program, mesh), seed)
    given = dict(module.named_parameters(remove_duplicate=False))
    made = {p.target: runner.parameter(given[p.target], p) for p in runner.params}
    known = {p.target for p in program.signature.ports if p.kind == "param"}
    aliases = dict(program.signature.tied)
    for name in list(given):
        owner = module.get_submodule(name.rpartition(".")[0])
        target = aliases.get(name, name)
        if target in made:
            setattr(owner, name.rpartition(".")[2], made[target])
        elif target in known:
            # of another stage: this rank neither holds nor trains nor saves it
            owner._parameters[name.rpartition(".")[2]] = None
    for name, buffer in list(module.named_buffers()):
        owner = module.get_submodule(name.rpartition(".")[0])
        kept = name not in runner.updated or runner.holds_buffer(name)
        owner._buffers[name.rpartition(".")[2]] = buffer.to(runner.device) if kept else None
    cls = type(module)
    module.__class__ = type(cls.__name__, (ParallelModule, cls), {"__module__": cls.__module__})
    module._autoshard = runner  # type: ignore[assignment]
    module._stepper = Stepper(runner)  # type: ignore[assignment]
    mark_shared(module, runner, module._stepper.scales)  # type: ignore[arg-type, union-attr]
    module.register_load_state_dict_pre_hook(_shard_loaded)
    return module


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
