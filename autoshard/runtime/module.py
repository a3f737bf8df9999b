"""The user's model, running a program: parameters are DTensors under their own names.

The module keeps its class (a subclass of it is made), its state_dict keys, and its outputs' structure.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Port
from autoshard.placement import local_shape
from autoshard.program.program import Program
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.parts import shard_tensor
from autoshard.torch_adapters.dtensor import as_dtensor


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
        self.in_spec = pytree.treespec_loads(program.signature.in_tree)

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
        name = self.program.signature.input_names[int(port.target)]
        if isinstance(x, DTensor):
            x = x.full_tensor()
        if not isinstance(x, torch.Tensor):
            raise UsageError(f"input {name} is {type(x).__name__}", why="a tensor was given when planning")
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

    def _static(self, leaf: Any, index: int) -> None:
        wanted = self.program.signature.in_leaves[index][1]
        if repr(leaf) != wanted:
            raise UsageError(
                f"argument {self.program.signature.input_names[index]} is {leaf!r}",
                why=f"it was {wanted} when the program was compiled, and is part of the program",
                hint="compile again with this value",
            )

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flattened arguments of a call, in the order of the program's inputs."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise UsageError(
                "the call's arguments differ from those the program was compiled for",
                why=f"compiled for: {', '.join(self.program.signature.input_names)}",
                hint="pass the same arguments, positional or by keyword, as example_inputs had",
            )
        for index, ((kind, _), leaf) in enumerate(zip(self.program.signature.in_leaves, leaves, strict=True)):
            if kind == "static":
                self._static(leaf, index)
        return leaves

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = self.leaves(args, kwargs)
        given = dict(module.named_parameters(remove_duplicate=False))
        params = [given[p.target] for p in self.params]
        inputs = [leaves[int(p.target)] for p in self.inputs]
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
                env[port.name] = buffers[port.target]
        if self.seed_port is not None:
            env[self.seed_port.name] = torch.tensor(self.seed * 1_000_003 + self.steps, device=self.device)
        self.rank_program.run(env, False)
        return env

    def outputs(self, env: dict[str, Any]) -> list[Any]:
        """Outputs as the user sees them: plain scalars, DTensors for everything else."""
        found = {}
        for result in self.program.signature.results:
            if result.kind == "output":
                placed = self.program.lowered.values[result.value]
                local = env[result.value]
                scalar = not placed.type.shape
                whole = (
                    local.clone()
                    if scalar
                    else as_dtensor(local, self.mesh, placed.layout, placed.type.shape)
                )
                found[int(result.target)] = whole
        return [found[k] for k in sorted(found)]

    def update_buffers(self, env: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
        for result in self.program.signature.results:
            if result.kind == "buffer":
                buffers[result.target].copy_(env[result.value])

    def tangent(self, grad: Any, port: Port) -> torch.Tensor:
        placed = self.program.lowered.values[port.name]
        if grad is None:
            shape = local_shape(placed.type.shape, placed.layout, self.shape.sizes, self.coords)
            from autoshard.runtime.resolve import torch_dtype

            return torch.zeros(shape, dtype=torch_dtype(placed.type.dtype), device=self.device)
        if isinstance(grad, DTensor):
            from autoshard.torch_adapters.dtensor import torch_placements

            return grad.redistribute(self.mesh, torch_placements(placed.layout)).to_local().contiguous()
        return shard_tensor(grad, placed.layout, self.shape.sizes, self.coords)


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
        ctx.runner, ctx.env, ctx.count, ctx.total = runner, env, count, len(tensors)
        ctx.positions = positions
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner: Runner = ctx.runner
        if ctx.env is None:
            raise RuntimeError("backward ran already for this call; its saved values were freed")
        env, ctx.env = ctx.env, None
        by_position = dict(zip(ctx.positions, grads, strict=True))
        for port in runner.tangents:
            env[port.name] = runner.tangent(by_position[int(port.target)], port)
        runner.rank_program.run(env, True)
        found: dict[tuple[str, str], Any] = {}
        for result in runner.program.signature.results:
            if result.kind in ("grad", "input_grad"):
                placed = runner.program.lowered.values[result.value]
                local = env[result.value]
                whole = as_dtensor(local, runner.mesh, placed.layout, placed.type.shape)
                found[result.kind, result.target] = whole
        back: list[Any] = [None, None, None, None]
        back += [found.get(("grad", p.target)) for p in runner.params]
        for port in runner.inputs:
            grad = found.get(("input_grad", port.target))
            back.append(None if grad is None else grad.full_tensor())
        return tuple(back)


class ParallelModule(nn.Module):
    """Mixed into the user's class: forward runs the program."""

    _autoshard: Runner

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


def bind(program: Program, module: nn.Module, mesh: DeviceMesh, *, seed: int = 0) -> nn.Module:
    """Make ``module`` run ``program``: its parameters become DTensors, its forward the program.

    The module is changed in place and returned. Raises UsageError if it is not the model the program
    was compiled from, or lies on another kind of device than the mesh.
    """
    _check_module(program, module, mesh)
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


def bound_arguments(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, whatever way they were passed."""
    return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
