"""The user's model, running a program: parameters are DTensors under their own names.

The module keeps its class (a subclass of it is made), its state_dict keys, and its outputs' structure.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Port
from autoshard.placement import local_shape
from autoshard.program.program import Program
from autoshard.runtime.arguments import Arguments
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.parts import shard_tensor
from autoshard.runtime.resolve import torch_dtype
from autoshard.torch_adapters.dtensor import as_dtensor, torch_placements

#: an end of a program, the tensor given for it, and its version then
_Watched = tuple[Port, torch.Tensor, int]


class Runner:
    """Binds a program to a module on this rank."""

    def __init__(self, program: Program, module: nn.Module, mesh: DeviceMesh, seed: int) -> None:
        self.program, self.mesh, self.seed = program, mesh, seed
        self.steps = 0
        self.shape = Mesh.parse(program.mesh)
        if self.shape.world_size != mesh.size():
            raise UsageError(
                f"the program is for {self.shape.world_size} ranks, the world has {mesh.size()}",
                where=f"mesh {program.mesh}",
                hint=f"start {self.shape.world_size} processes, or compile for another mesh",
            )
        rank = dist.get_rank()
        self.coords = self.shape.coords(rank)
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        groups = {n: mesh.get_group(n).group_name for n in self.shape.names}
        self.rank_program = RankProgram(program, rank, groups, device)
        self.device = device
        self.constants = {
            p.name: self._shard(program.constants[p.target], p)  # type: ignore[arg-type]
            for p in program.signature.ports
            if p.kind == "const"
        }
        self.params = [p for p in program.signature.ports if p.kind == "param"]
        self.inputs = [p for p in program.signature.ports if p.kind == "input" and p.target != "seed"]
        self.seed_port = next((p for p in program.signature.ports if p.target == "seed"), None)
        self.tangents = [p for p in program.signature.ports if p.kind == "tangent"]
        self.out_spec = pytree.treespec_loads(program.signature.out_tree)
        self.updated = {r.target for r in program.signature.results if r.kind == "buffer"}
        self.kept = self.rank_program.kept_ports()
        self.arguments = Arguments(type(module).forward, program.signature)
        self.differentiable = {r.target for r in program.signature.results if r.kind == "input_grad"}

    # -- values ------------------------------------------------------------------------------------

    def _shard(self, x: torch.Tensor, port: Port) -> torch.Tensor:
        layout = self.program.lowered.values[port.name].layout
        part = shard_tensor(x.detach(), layout, self.shape.sizes, self.coords)
        return part.to(self.device).contiguous()

    def parameter(self, x: torch.Tensor, port: Port) -> nn.Parameter:
        """The rank's shard of a full parameter, as a DTensor parameter."""
        layout = self.program.lowered.values[port.name].layout
        local = self._shard(x, port).clone()
        trained = port.target not in self.program.signature.frozen
        return nn.Parameter(as_dtensor(local, self.mesh, layout, port.type.shape), requires_grad=trained)

    def input_shard(self, x: Any, port: Port) -> torch.Tensor:
        """A rank's shard of an argument: of the global shape, of the local one, or a DTensor."""
        placed = self.program.lowered.values[port.name]
        name = self._name(port)
        if isinstance(x, DTensor):
            x = x.full_tensor()
        dtype = torch_dtype(placed.type.dtype)
        if x.dtype != dtype:
            raise UsageError(
                f"input {name} is of type {x.dtype}",
                why=f"the program was compiled for {dtype}",
                hint=f"convert it, {name}.to({dtype}), or compile again for this type",
            )
        local = local_shape(placed.type.shape, placed.layout, self.shape.sizes, self.coords)
        if tuple(x.shape) == placed.type.shape:
            return self._shard(x, port)
        if tuple(x.shape) == local:
            return x.detach().to(self.device)
        raise UsageError(
            f"input {name} has shape {list(x.shape)}",
            why=f"the program takes the global shape {list(placed.type.shape)} or this rank's part "
            f"{list(local)}",
            hint="drop the last incomplete batch, or plan again for this shape",
        )

    def _name(self, port: Port) -> str:
        return self.program.signature.input_names[int(port.target)]

    def _check_input(self, x: Any, port: Port) -> None:
        """What can only be seen before autograd hands the arguments over."""
        if not isinstance(x, torch.Tensor):
            raise UsageError(
                f"input {self._name(port)} is {type(x).__name__}", why="a tensor was given when planning"
            )
        if x.requires_grad and port.target not in self.differentiable and torch.is_grad_enabled():
            raise UsageError(
                f"input {self._name(port)} requires a gradient, and the program computes none for it",
                why="the example input it was compiled for did not require one",
                hint="detach() it, or compile with an example input that requires a gradient",
            )

    def _check_parameter(self, x: Any, port: Port) -> None:
        dtype = torch_dtype(port.type.dtype)
        if isinstance(x, DTensor) and x.dtype == dtype and x.device.type == self.device.type:
            return
        what = f"{x.dtype} on {x.device}" if isinstance(x, DTensor) else "not a DTensor any more"
        raise UsageError(
            f"parameter {port.target} is {what}",
            why=f"the program holds it as a DTensor of {dtype} on {self.device.type}",
            hint="convert or move the model before it is parallelized",
        )

    def shard_state(self, state: dict[str, Any], prefix: str) -> None:
        """Replace whole parameters in a state dict by DTensors, in place."""
        ports = {p.target: p for p in self.params}
        owners = dict(self.program.signature.tied)
        for name in [*ports, *owners]:
            port, found = ports.get(owners.get(name, name)), state.get(prefix + name)
            if port is None or not isinstance(found, torch.Tensor) or isinstance(found, DTensor):
                continue
            if tuple(found.shape) == port.type.shape:
                state[prefix + name] = self._placed(self._shard(found, port), port.name)

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = self.arguments.flattened(args, kwargs)
        given = dict(module.named_parameters(remove_duplicate=False))
        params = [given[p.target] for p in self.params]
        inputs = [leaves[int(p.target)] for p in self.inputs]
        for port, value in zip(self.params, params, strict=True):
            self._check_parameter(value, port)
        for port, value in zip(self.inputs, inputs, strict=True):
            self._check_input(value, port)
        buffers = dict(module.named_buffers(remove_duplicate=False))
        outs = _Run.apply(self, module, buffers, len(params), *params, *inputs)
        flat: list[Any] = []
        feed = iter(outs)
        for kind, text in self.program.signature.out_leaves:
            flat.append(next(feed) if kind == "tensor" else _literal(text))
        return pytree.tree_unflatten(flat, self.out_spec)

    def forward(
        self, params: Sequence[Any], inputs: Sequence[Any], buffers: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        """Run the forward half; the values that backward needs."""
        env: dict[str, Any] = dict(self.constants)
        for port, value in zip(self.params, params, strict=True):
            env[port.name] = value.to_local()
        for port, value in zip(self.inputs, inputs, strict=True):
            env[port.name] = self.input_shard(value, port)
        for port in self.program.signature.ports:
            if port.kind == "buffer":
                part = self._shard(buffers[port.target], port)
                # backward wants the value of before the update
                env[port.name] = part.clone() if port.target in self.updated else part
        if self.seed_port is not None:
            env[self.seed_port.name] = torch.tensor(self.seed * 1_000_003 + self.steps, device=self.device)
        self._run(env, False)
        return env

    def _run(self, env: dict[str, Any], backward: bool) -> None:
        """One half, in the types that the program was compiled for."""
        with torch.autocast(self.device.type, enabled=False):
            self.rank_program.run(env, backward)

    def watched(self, env: dict[str, Any], params: Sequence[torch.Tensor]) -> list[_Watched]:
        """Parameters and inputs that backward reads, with how often they were changed in place so far."""
        given = {p.name: x for p, x in zip(self.params, params, strict=True)}
        values = [(p, given.get(p.name, env[p.name])) for p in self.kept]
        return [(p, x, x._version) for p, x in values if not x.is_inference()]

    def check_unchanged(self, watched: Sequence[_Watched]) -> None:
        for port, value, version in watched:
            if value._version != version:
                name = self._name(port) if port.kind == "input" else port.target
                raise UsageError(
                    f"{port.kind} {name} was changed in place between forward and backward",
                    why="its gradient needs the value that forward saw",
                    hint="call backward before optimizer.step(), and do not reuse input tensors",
                )

    def outputs(self, env: dict[str, Any]) -> list[Any]:
        """Outputs as the user sees them: plain scalars, DTensors for everything else."""
        found = {}
        for result in self.program.signature.results:
            if result.kind == "output":
                placed = self.program.lowered.values[result.value]
                local = env[result.value]
                scalar = not placed.type.shape
                found[int(result.target)] = local.clone() if scalar else self._placed(local, result.value)
        return [found[k] for k in sorted(found)]

    def _placed(self, local: torch.Tensor, name: str) -> DTensor:
        """The rank's part of a value as a DTensor."""
        placed = self.program.lowered.values[name]
        return as_dtensor(local, self.mesh, placed.layout, placed.type.shape)

    def update_buffers(self, env: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        """Buffers are whole on every rank, however the program holds them."""
        for result in self.program.signature.results:
            if result.kind == "buffer":
                buffers[result.target].copy_(self._placed(env[result.value], result.value).full_tensor())

    def tangent(self, grad: Any, port: Port) -> torch.Tensor:
        placed = self.program.lowered.values[port.name]
        if grad is None:
            shape = local_shape(placed.type.shape, placed.layout, self.shape.sizes, self.coords)
            return torch.zeros(shape, dtype=torch_dtype(placed.type.dtype), device=self.device)
        if isinstance(grad, DTensor):
            return grad.redistribute(self.mesh, torch_placements(placed.layout)).to_local().contiguous()
        return shard_tensor(grad, placed.layout, self.shape.sizes, self.coords)

    def backward(self, env: dict[str, Any]) -> dict[tuple[str, str], DTensor]:
        """Run the backward half; gradients by kind and target."""
        self._run(env, True)
        found: dict[tuple[str, str], DTensor] = {}
        for result in self.program.signature.results:
            if result.kind in ("grad", "input_grad"):
                found[result.kind, result.target] = self._placed(env[result.value], result.value)
        return found

    def input_grad(self, grad: DTensor | None, port: Port, given: _Given) -> torch.Tensor | None:
        """The gradient of an input, in the form in which the input was given."""
        if grad is None:
            return None
        if given.placements is not None:
            return grad.redistribute(given.mesh, given.placements)
        if given.shape == tuple(port.type.shape):
            return grad.full_tensor()
        layout = self.program.lowered.values[port.name].layout
        return grad.redistribute(self.mesh, torch_placements(layout)).to_local()


@dataclass(frozen=True)
class _Given:
    """The form of an argument: a DTensor's placements, or the shape of a plain tensor."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> _Given:
        if isinstance(x, DTensor):
            return cls(tuple(x.shape), x.device_mesh, tuple(x.placements))
        return cls(tuple(x.shape))


class _Run(torch.autograd.Function):
    """The program as one autograd node: parameters and inputs in, outputs out."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, module: nn.Module, buffers: Any, count: int, *tensors: Any) -> Any:
        env = runner.forward(tensors[:count], tensors[count:], buffers)
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
        ctx.given = [_Given.of(x) for x in tensors[count:]]
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


class ParallelModule(nn.Module):
    """Mixed into the user's class: forward runs the program."""

    _autoshard: Runner

    @property
    def microbatches(self) -> int:
        """How many calls make a step of the plan; `autoshard.runtime.train` makes them."""
        return self._autoshard.program.microbatches

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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
        return runner(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A second model with the same program: an average of the weights, for instance."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self._autoshard)] = copy.copy(self._autoshard)
        for key, value in self.__dict__.items():
            made.__dict__[key] = copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a parallelized model cannot be pickled",
            why="it is bound to the processes that run it",
            hint="save its state_dict(), with torch.distributed.checkpoint or full tensors",
        )


def _shard_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before load_state_dict: whole tensors are cut into what the ranks hold."""
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
    runner = Runner(program, module, mesh, seed)
    given = dict(module.named_parameters(remove_duplicate=False))
    made = {p.target: runner.parameter(given[p.target], p) for p in runner.params}
    aliases = dict(program.signature.tied)
    for name in list(given):
        owner = module.get_submodule(name.rpartition(".")[0])
        target = aliases.get(name, name)
        if target in made:
            setattr(owner, name.rpartition(".")[2], made[target])
    for name, buffer in list(module.named_buffers()):
        owner = module.get_submodule(name.rpartition(".")[0])
        owner._buffers[name.rpartition(".")[2]] = buffer.to(runner.device)
    cls = type(module)
    module.__class__ = type(cls.__name__, (ParallelModule, cls), {"__module__": cls.__module__})
    module._autoshard = runner  # type: ignore[assignment]
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


def _literal(text: str) -> Any:
    import ast

    return ast.literal_eval(text)
