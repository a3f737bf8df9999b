"""A program bound to a module on this rank: the module's values as the program's, and back."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir import Port
from autoshard.ir.joint import NOT_MADE
from autoshard.ir.placement import Layout, Shard, local_shape
from autoshard.program.holders import holders_of
from autoshard.program.messages import moves_of
from autoshard.program.program import Program
from autoshard.program.signature_check import literal
from autoshard.runtime.arguments import Arguments
from autoshard.runtime.checks.assigned_data import check_data
from autoshard.runtime.checks.check_mode import guard_of
from autoshard.runtime.checks.heartbeat import Heartbeat, patience
from autoshard.runtime.debugging.dump import dump
from autoshard.runtime.debugging.nan_trace import NanTrace
from autoshard.runtime.executor import PartKey, RankProgram, Values
from autoshard.runtime.graphs import graphs_of
from autoshard.runtime.groups import RankPlace
from autoshard.runtime.host import in_host_memory
from autoshard.runtime.optim.dropout_clock import DropoutClock
from autoshard.runtime.optim.grad_scaler import agreement_of
from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.runtime.outputs import NotMade, Rows, ShardedOutput
from autoshard.runtime.parallel_class import users_class
from autoshard.runtime.shard_utils import shard_tensor
from autoshard.runtime.stage_buffers import StageBuffers
from autoshard.runtime.transport.transport import Transport
from autoshard.runtime.transport.transport_choice import transport_of
from autoshard.torch_adapters import records
from autoshard.torch_adapters.blocks import agreeing
from autoshard.torch_adapters.dtensor import (
    Spec,
    as_dtensor,
    dtensor_of,
    host_dtensor,
    spec_of,
    torch_placements,
)
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.groups import default_store
from autoshard.torch_adapters.modes import below_autograd

#: an end of a program, the tensor given for it, and its version then
Watched: TypeAlias = "tuple[Port, torch.Tensor, int]"
#: (kind, target) of a gradient -> the rank's part of it and its value in the program
Parts: TypeAlias = "dict[tuple[str, str], tuple[torch.Tensor, str]]"


@dataclass(frozen=True)
class Given:
    """The form of an argument: a DTensor's placements, or the shape of a plain tensor."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> Given:
        if isinstance(x, DTensor):
            return cls(tuple(x.shape), x.device_mesh, tuple(x.placements))
        return cls(tuple(x.shape))


class Runner:
    """Binds a program to a module on this rank."""

    def __init__(
        self,
        program: Program,
        module: nn.Module,
        place: RankPlace,
        seed: int,
        full_mesh: DeviceMesh | None = None,
        like: Runner | None = None,
    ) -> None:
        """like: another program of the same parameters on the same mesh, whose transports, heartbeat and
        clock are shared."""
        self.program, self.place, self.mesh, self.seed = program, place, place.mesh, seed
        #: of all ranks, with the pp axis
        self.place_mesh = full_mesh or place.mesh
        self.clock: DropoutClock = DropoutClock() if like is None else like.clock
        self.stage_buffers: StageBuffers = StageBuffers() if like is None else like.stage_buffers
        self.stage_buffers.admit(program)
        #: what the loss of a step is multiplied by before backward
        self.loss_scale: torch.Tensor | None = None
        #: the stage whose forward ran last
        self.forward_of = 0
        self.shape = Mesh.parse(program.mesh)
        self.coords = self.shape.coords(place.inner_rank)
        self.device = place.device
        groups = {n: self.mesh.get_group(n).group_name for n in self.shape.names}
        #: by axis of the mesh
        self.transports: Mapping[str, Transport] = (
            {axis: transport_of(name, self.device) for axis, name in groups.items()}
            if like is None
            else like.transports
        )
        self.moves = moves_of(program)[place.pipe_rank]
        sent = {m.value for move in self.moves for m in move.sends}
        self.guard = guard_of(self)
        self.heartbeat: Heartbeat | None = heartbeat_here(place.order) if like is None else like.heartbeat
        if self.heartbeat is not None and like is None:
            weakref.finalize(self, self.heartbeat.close)
        watch = self.guard.watch if self.guard is not None else None
        self.rank_program = RankProgram(
            program, place.inner_rank, self.transports, self.device, place.stages, sent, watch
        )
        self.constants = {
            p.name: self._shard(program.constants[p.target], p)  # type: ignore[arg-type]
            for p in program.signature.ports
            if p.kind == "const"
        }
        known = {} if like is None else like.holders_of_state
        self.holders = holders_of(program, known)
        # its gradients are added up over the ranks that have a parameter, also where only some use it
        self.holders |= {
            p.name: known[p.target] for p in self._ports if p.kind == "param" and p.target in known
        }
        self.params = [p for p in program.signature.ports if p.kind == "param" and self.holds(p)]
        self.inputs = [p for p in program.signature.ports if p.kind == "input" and p.target != "seed"]
        self.seed_port = next((p for p in program.signature.ports if p.target == "seed"), None)
        self.tangents = [p for p in program.signature.ports if p.kind == "tangent"]
        self.tangent_positions = frozenset(int(t.target) for t in self.tangents)
        results = program.signature.results
        self.output_positions = sorted(int(r.target) for r in results if r.kind == "output")
        marked = {k for k, leaf in enumerate(program.signature.out_leaves) if leaf == ("tensor", "grad")}
        #: outputs that have a gradient as those of the model itself have
        self.with_gradient = marked | self.tangent_positions
        self.out_spec = pytree.treespec_loads(program.signature.out_tree)
        self.returns_records = records.NAME in program.signature.out_tree
        self.updated = {r.target for r in program.signature.results if r.kind == "buffer"}
        self.kept = self.rank_program.kept_ports()
        self.arguments = Arguments(users_class(module).forward, program.signature)
        self.agree = agreement_of(self)
        self.graphs = graphs_of(self)
        #: value -> how it lies, once it was made a DTensor
        self._specs: dict[str, Spec] = {}
        self._alike: dict[Spec, Spec] = {} if like is None else like._alike
        self.frozen = frozenset(program.signature.frozen)
        self.differentiable = {r.target for r in program.signature.results if r.kind == "input_grad"}
        if self.is_first:
            dump(program, users_class(module).__name__)

    def holds(self, port: Port) -> bool:
        """Whether a stage of this rank uses a parameter, buffer or constant."""
        return not self.place.stages.isdisjoint(self.holders[port.name])

    @property
    def holders_of_state(self) -> dict[str, tuple[int, ...]]:
        """Target of a parameter or a buffer -> its stages."""
        return {p.target: self.holders[p.name] for p in self._ports if p.kind in ("param", "buffer")}

    def holds_buffer(self, target: str) -> bool:
        return any(p.kind == "buffer" and p.target == target and self.holds(p) for p in self._ports)

    @property
    def is_first(self) -> bool:
        """Whether this rank stands first along every axis of the mesh, pp among them."""
        return not any(self.place_mesh.get_coordinate() or ())

    @property
    def _ports(self) -> tuple[Port, ...]:
        return self.program.signature.ports

    def waiting(self) -> AbstractContextManager[None]:
        """Inside, this rank may wait for others; who is waited for is said after a while."""
        return nullcontext() if self.heartbeat is None else self.heartbeat.call()

    @property
    def axis_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of this rank along every axis of the mesh, pp among them."""
        return [self.place_mesh.get_group(k) for k in range(self.place_mesh.ndim)]

    def step_shape(self, port: Port) -> tuple[int, ...]:
        """The global shape of an input of a step: of all microbatches where the program has several."""
        shape = port.type.shape
        batched = shape and port.target in self.program.signature.batch_inputs
        return (shape[0] * self.program.microbatches, *shape[1:]) if batched else shape

    def form_of(self, leaves: Sequence[Any], calls: int = 1) -> Literal["global", "part"] | None:
        """How the arguments of a call are given: of global shape, or some of them as this rank's rows.

        calls: so many microbatches together. None where the program does not take them.
        """
        form: Literal["global", "part"] = "global"
        for port in self.inputs:
            x = leaves[int(port.target)]
            if not self._takes_type(x, port):
                return None
            shape = tuple(x.shape)
            if calls > 1 and port.target in self.program.signature.batch_inputs:
                shape = (shape[0] // calls, *shape[1:]) if shape and shape[0] % calls == 0 else ()
            if shape != port.type.shape:
                if isinstance(x, DTensor) or shape != self._part_shape(port):
                    return None
                form = "part"
        return form

    def takes_sizes_like(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments of a call differ from the program's in sizes alone."""
        given = [(leaves[int(p.target)], p) for p in self.inputs]
        return all(self._takes_type(x, p) and x.dim() == len(p.type.shape) for x, p in given)

    def _takes_type(self, x: object, port: Port) -> TypeGuard[torch.Tensor]:
        """Whether an argument is a tensor of an input's type, and wants no gradient that there is not."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch_dtype(port.type.dtype):
            return False
        return not x.requires_grad or port.target in self.differentiable or not torch.is_grad_enabled()

    def _part_shape(self, port: Port) -> tuple[int, ...] | None:
        """Of each rank's rows; None where not all have the same number."""
        placed = self.program.lowered.values[port.name]
        first, last = ([0] * len(self.coords), [n - 1 for n in self.shape.sizes])
        ends = {
            tuple(local_shape(placed.type.shape, placed.layout, self.shape.sizes, c)) for c in (first, last)
        }
        return ends.pop() if len(ends) == 1 else None

    @cached_property
    def batch_rows(self) -> Rows | None:
        """The rows of the batch that this rank's part of the inputs has; None where it has all."""
        for port in self.inputs:
            if port.target in self.program.signature.batch_inputs:
                axes = tuple(
                    k for k, p in enumerate(self.layout(port)) if isinstance(p, Shard) and p.dim == 0
                )
                shape, part = self._part_shape(port), 0
                if shape is None:
                    return None
                count = shape[0]
                for axis in axes:
                    part = part * self.shape.sizes[axis] + self.coords[axis]
                ways = math.prod(self.shape.sizes[axis] for axis in axes)
                return Rows(part * count, count, axes, ways) if ways > 1 else None
        return None

    def input_name(self, port: Port) -> str:
        """How a user writes an input."""
        return self.program.signature.input_names[int(port.target)]

    def layout(self, port: Port) -> Layout:
        """How a value that the program is given lies."""
        return self.program.lowered.values[port.name].layout

    # -- values ------------------------------------------------------------------------------------

    def _part(self, x: torch.Tensor, port: Port) -> torch.Tensor:
        """The rank's part of a full tensor, where that is."""
        layout = self.program.lowered.values[port.name].layout
        return shard_tensor(x.detach(), layout, self.shape.sizes, self.coords).contiguous()

    def _shard(self, x: torch.Tensor, port: Port) -> torch.Tensor:
        return self._part(x, port).to(self.device)

    def parameter(self, x: torch.Tensor, port: Port) -> nn.Parameter:
        """The rank's shard of a full parameter, as a DTensor parameter."""
        layout = self.program.lowered.values[port.name].layout
        trained = port.target not in self.program.signature.frozen
        new = self.parameter_as(self._part(x, port), layout, port.type.shape)
        return nn.Parameter(new, requires_grad=trained)

    def part_of(self, x: torch.Tensor, port: Port) -> torch.Tensor:
        """The rank's part of a full parameter, of any type, in the type that the model has."""
        return self._part(x, port).to(torch_dtype(port.stored_dtype))

    def taken(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the program takes of the rank's parts of parameters: the same, or their casts."""
        held = map(local, params)
        return [
            x.to(torch_dtype(p.type.dtype)) if p.stored else x for p, x in zip(self.params, held, strict=True)
        ]

    def parameter_as(self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> DTensor:
        """The rank's part of a parameter, copied to where parameters live."""
        if part.is_meta:
            return self._alike_dtensor(as_dtensor(part, self.mesh, layout, shape))
        if self.program.offload.parameters:
            held = in_host_memory(part, self.device)
            return self._alike_dtensor(host_dtensor(held, self.mesh, layout, shape))
        return self._alike_dtensor(as_dtensor(part.to(self.device, copy=True), self.mesh, layout, shape))

    def _alike_dtensor(self, x: DTensor) -> DTensor:
        return dtensor_of(x.to_local(), self._one(spec_of(x)))

    def _one(self, spec: Spec) -> Spec:
        """The same object for all that lie alike: optimizers compare them at every op."""
        return self._alike.setdefault(spec, spec)

    def input_shard(self, x: Any, port: Port) -> torch.Tensor:
        """A rank's shard of an argument: of the global shape, of the local one, or a DTensor."""
        if isinstance(x, DTensor):
            x = x.full_tensor()
        self._check_form(x, port)
        if tuple(x.shape) == port.type.shape:
            return self._shard(x, port)
        return x.detach().to(self.device)

    def _check_form(self, x: torch.Tensor, port: Port) -> None:
        """UsageError unless a tensor has the type and one of the shapes that the program takes."""
        placed = self.program.lowered.values[port.name]
        name = self.input_name(port)
        dtype = torch_dtype(placed.type.dtype)
        if x.dtype != dtype:
            raise UsageError(
                f"input {name} is of type {x.dtype}",
                why=f"the program was compiled for {dtype}",
                hint=f"convert it, {name}.to({dtype}), or compile again for this type",
            )
        local = local_shape(placed.type.shape, placed.layout, self.shape.sizes, self.coords)
        if tuple(x.shape) in (placed.type.shape, local):
            return
        raise UsageError(
            f"input {name} has shape {list(x.shape)}",
            why=f"the program takes the global shape {list(placed.type.shape)} or this rank's part "
            f"{list(local)}",
            hint="drop the last incomplete batch, or plan again for this shape",
        )

    def _check_input(self, x: Any, port: Port) -> None:
        """What can only be seen before autograd hands the arguments over."""
        if not isinstance(x, torch.Tensor):
            raise UsageError(
                f"input {self.input_name(port)} is {type(x).__name__}", why="a tensor was given when planning"
            )
        if x.requires_grad and port.target not in self.differentiable and torch.is_grad_enabled():
            raise UsageError(
                f"input {self.input_name(port)} requires a gradient, and the program computes none for it",
                why="the example input it was compiled for did not require one",
                hint="detach() it, or compile with an example input that requires a gradient",
            )
        # now, not when it is used: the ranks of a pipeline have begun to wait for each other by then
        self._check_form(x, port)

    def _check_parameter(self, x: Any, port: Port) -> None:
        dtype = torch_dtype(port.stored_dtype)
        where = "cpu" if self.program.offload.parameters else self.device.type
        if isinstance(x, DTensor) and x.dtype == dtype and x.device.type == where:
            if x.requires_grad and port.target in self.frozen and torch.is_grad_enabled():
                raise UsageError(
                    f"parameter {port.target} is trained, and was frozen at capture",
                    why="the program computes no gradient for it",
                    hint="call requires_grad_(True) before the model is parallelized",
                )
            check_data(port.target, x)
            return
        if x is None:
            raise UsageError(
                f"the model has no parameter {port.target} any more",
                why="the program computes with it, and with nothing that stands in its place",
                hint="parametrize, prune or replace modules before the model is parallelized",
            )
        if x.is_meta:
            raise UsageError(
                f"parameter {port.target} has no values",
                why="the model was built on the meta device, and nothing was loaded into it",
                hint='autoshard.load_weights(model, "FOLDER")',
            )
        what = f"{x.dtype} on {x.device}" if isinstance(x, DTensor) else "not a DTensor any more"
        raise UsageError(
            f"parameter {port.target} is {what}",
            why=f"the program holds it as a DTensor of {dtype} on {where}",
            hint="convert or move the model before it is parallelized",
        )

    def shard_state(self, state: dict[str, Any], prefix: str) -> None:
        """Replace full parameters in a state dict by DTensors, in place, and drop what other ranks hold."""
        ports = {p.target: p for p in self.params}
        owners = dict(self.program.signature.tied)
        for other in self._ports:
            if not self.holds(other) and (other.kind == "param" or other.target in self.updated):
                for name in (
                    other.target,
                    *(alias for alias, owner in owners.items() if owner == other.target),
                ):
                    state.pop(prefix + name, None)
        for name in [*ports, *owners]:
            port, result = ports.get(owners.get(name, name)), state.get(prefix + name)
            if port is None or not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
                continue
            if tuple(result.shape) == port.type.shape:
                layout = self.program.lowered.values[port.name].layout
                state[prefix + name] = self.parameter_as(self._part(result, port), layout, port.type.shape)

    # -- running -----------------------------------------------------------------------------------

    def arguments_of(self, module: nn.Module, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(parameters, inputs) of a call, checked; leaves: its flattened arguments."""
        given = dict(module.named_parameters(remove_duplicate=False))
        params = [given.get(p.target) for p in self.params]
        inputs = [leaves[int(p.target)] for p in self.inputs]
        for port, value in zip(self.params, params, strict=True):
            self._check_parameter(value, port)
        for port, value in zip(self.inputs, inputs, strict=True):
            self._check_input(value, port)
        return params, inputs

    def returned(self, outs: Sequence[Any]) -> Any:
        """What the model returns, from its tensors."""
        flat: list[Any] = []
        feed = iter(outs)
        for leaf in self.program.signature.out_leaves:
            kind, text = leaf
            flat.append(next(feed) if kind == "tensor" else NotMade() if leaf == NOT_MADE else literal(text))
        output = pytree.tree_unflatten(flat, self.out_spec)
        return records.from_records(output) if self.returns_records else output

    def forward(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        buffers: Mapping[str, torch.Tensor],
        seed: torch.Tensor | None = None,
    ) -> Values:
        """Run the forward part of a single stage; the values that backward needs."""
        env = self.entry(self.taken(params), inputs, seed=seed)
        env.nans = NanTrace.if_asked(self.rank_program.places, forward=True)
        self.enter_buffers(env, buffers, 0)
        self.run(env, (0, "gather", 0))
        self.run(env, (0, "count", 0))
        self.run(env, (0, "forward", 0))
        return env

    def entry(
        self,
        params: Sequence[torch.Tensor],
        inputs: Sequence[Any],
        call: int = 0,
        only: Collection[str] | None = None,
        seed: torch.Tensor | None = None,
    ) -> Values:
        """What a microbatch begins with.

        params: what the rank holds of the parameters, () for none. call: which of the step's calls of the
        program it is. only: the inputs that are needed, None for all. seed: of dropout, None for that of the
        clock.
        """
        env = self.rank_program.start()
        env.update(self.constants)
        for port, value in zip(self.params if params else (), params, strict=True):
            env[port.name] = value
        for port, value in zip(self.inputs, inputs, strict=True):
            if only is None or port.name in only:
                env[port.name] = self.input_shard(value, port)
        if self.seed_port is not None:
            number = self.clock.seed(self.seed, call)
            # not torch.tensor, which waits for the device
            env[self.seed_port.name] = torch.full((), number, device=self.device) if seed is None else seed
        return env

    def enter_buffers(self, env: Values, buffers: Mapping[str, torch.Tensor], stage: int) -> None:
        """The buffers of a stage, whose forward comes next, as they are now."""
        self.forward_of = stage
        for port in self.program.signature.ports:
            if port.kind == "buffer" and stage in self.holders[port.name]:
                part = self._shard(buffers[port.target], port)
                # backward wants the value of before the update
                env[port.name] = part.clone() if port.target in self.updated else part

    def run(self, env: Values, key: PartKey) -> None:
        """One part, in the types that the program was compiled for."""
        with torch.autocast(self.device.type, enabled=False), below_autograd():
            self.rank_program.run(env, key)

    def run_together(self, parts: Sequence[tuple[Values, Sequence[PartKey]]], turns: Sequence[int]) -> None:
        """Parts of several microbatches in turns."""
        with torch.autocast(self.device.type, enabled=False), below_autograd():
            self.rank_program.run_together(parts, turns)

    def watched(self, env: dict[str, Any], params: Sequence[torch.Tensor]) -> list[Watched]:
        """Parameters and inputs that backward reads, with how often they were changed in place so far. env:
        what is in neither is not looked at."""
        given = {p.name: x for p, x in zip(self.params, params, strict=True)}
        values = [(p, given.get(p.name, env.get(p.name))) for p in self.kept]
        return [(p, x, x._version) for p, x in values if x is not None and not x.is_inference()]

    def check_unchanged(self, watched: Sequence[Watched]) -> None:
        for port, value, version in watched:
            if value._version != version:
                name = self.input_name(port) if port.kind == "input" else port.target
                raise UsageError(
                    f"{port.kind} {name} was changed in place between forward and backward",
                    why="its gradient needs the value that forward saw",
                    hint="call backward before optimizer.step(), and do not reuse input tensors",
                )

    def outputs(self, env: dict[str, Any], rows: Rows | None = None) -> list[Any]:
        """Outputs as the user sees them: plain scalars, sharded tensors for everything else.

        rows: of the batch that ranks get back where they call with their own.
        """
        batch = {p.type.shape[0] for p in self.inputs if p.target in self.program.signature.batch_inputs}
        results = {}
        for result in self.program.signature.results:
            if result.kind == "output":
                placed = self.program.lowered.values[result.value]
                local = env[result.value]
                shape = placed.type.shape
                batched = bool(shape) and shape[0] in batch
                results[int(result.target)] = (
                    ShardedOutput.of(self.placed(local, result.value), rows if batched else None)
                    if shape
                    else local.clone()
                )
        return [results[k] for k in sorted(results)]

    def placed(self, local: torch.Tensor, name: str) -> DTensor:
        """The rank's part of a value as a DTensor."""
        return dtensor_of(local, self._spec(local, name))

    def _spec(self, local: torch.Tensor, name: str) -> Spec:
        """How a value lies whose part on this rank is ``local``."""
        if name not in self._specs:
            placed = self.program.lowered.values[name]
            new = as_dtensor(local, self.mesh, placed.layout, placed.type.shape)
            self._specs[name] = self._one(spec_of(new))
        return self._specs[name]

    def gradient(self, local: torch.Tensor, name: str) -> DTensor:
        """The rank's part of the gradient of a parameter, where parameters live."""
        if not self.program.offload.parameters:
            new = self.placed(local, name)
        else:
            placed = self.program.lowered.values[name]
            host = host_dtensor(local.cpu(), self.mesh, placed.layout, placed.type.shape)
            new = self._alike_dtensor(host)
        return new if self.agree is None else agreeing(new, self.agree)

    def update_buffers(self, env: dict[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
        """Keep what the stage just run has made of its buffers: they are whole on each of its ranks.

        A microbatch still has the values of stages before on the same rank, which later ones have replaced.
        """
        stages = {p.target: self.holders[p.name] for p in self._ports if p.kind == "buffer"}
        for result in self.program.signature.results:
            if result.kind == "buffer" and self.forward_of in stages[result.target] and result.value in env:
                buffers[result.target].copy_(self.placed(env[result.value], result.value).full_tensor())

    def tangent(self, grad: Any, port: Port) -> torch.Tensor:
        placed = self.program.lowered.values[port.name]
        if grad is None:
            shape = local_shape(placed.type.shape, placed.layout, self.shape.sizes, self.coords)
            return torch.zeros(shape, dtype=torch_dtype(placed.type.dtype), device=self.device)
        if isinstance(grad, DTensor):
            return grad.redistribute(self.mesh, torch_placements(placed.layout)).to_local().contiguous()
        return shard_tensor(grad, placed.layout, self.shape.sizes, self.coords)

    def backward(self, env: Values) -> Parts:
        """Run everything behind forward on a single stage; the rank's parts of gradients."""
        env.nans = env.nans or NanTrace.if_asked(self.rank_program.places, forward=False)
        for phase in ("backward", "weight", "reduce"):
            self.run(env, (0, phase, 0))
        if env.nans is not None:
            env.nans.check(self)
        results: Parts = {}
        given: set[str] = set()
        for result in self.program.signature.results:
            if result.kind in ("grad", "input_grad"):
                # two parameters may have the same gradient, which each may change in place
                part = env[result.value].clone() if result.value in given else env[result.value]
                given.add(result.value)
                results[result.kind, result.target] = part, result.value
        return results

    def gradients(self, parts: Parts) -> dict[tuple[str, str], DTensor]:
        """Gradients by kind and target."""
        return {
            key: self.gradient(*part) if key[0] == "grad" else self.placed(*part)
            for key, part in parts.items()
        }

    def input_grad(self, grad: DTensor | None, port: Port, given: Given) -> torch.Tensor | None:
        """The gradient of an input, in the form in which the input was given."""
        if grad is None:
            return None
        if given.placements is not None:
            return grad.redistribute(given.mesh, given.placements)
        if given.shape == tuple(port.type.shape):
            return grad.full_tensor()
        layout = self.program.lowered.values[port.name].layout
        return grad.redistribute(self.mesh, torch_placements(layout)).to_local()


def heartbeat_here(ranks: Sequence[int]) -> Heartbeat | None:
    """The heartbeat of this rank; None where it is switched off, or there is nobody to wait for."""
    seconds, limit = patience()
    # torch's fake backend has no store, and nobody to wait for
    if not seconds or len(ranks) < 2 or dist.get_backend() == "fake":
        return None
    return Heartbeat(default_store(), dist.get_rank(), ranks, seconds, limit)
