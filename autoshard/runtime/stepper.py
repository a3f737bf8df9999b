"""A full training step of a program: all its microbatches, through all stages of this rank.

Losses and gradients are added up over the microbatches, whose parts make those of the full batch
(`passes/simplify/batch_terms.py`); gradients before they are reduced over ranks: in float32 if they are of
half precision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.ir.placement import local_shape
from autoshard.program.holders import accumulated, counted, makers_of
from autoshard.program.loss import loss_position
from autoshard.program.messages import RankAction, StageSend, moves_of
from autoshard.runtime.checks.check_mode import collective
from autoshard.runtime.executor import Values
from autoshard.runtime.microbatch import cut
from autoshard.runtime.optim.pipeline_scales import Scales
from autoshard.runtime.shared_params import Members, pipe_group, rank_holders, remember, shared_groups
from autoshard.runtime.transport.p2p import Channels
from autoshard.runtime.transport.shared_memory.p2p import MemoryChannels
from autoshard.runtime.transport.shared_memory.peers import Neighbours
from autoshard.runtime.transport.transport_choice import neighbours_of
from autoshard.schedules.schedule import Action, in_turns
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.hooks import run_gradient_hooks, run_post_accumulate_hooks

if TYPE_CHECKING:
    from autoshard.runtime.runner import Parts, Runner

_HALF = (torch.bfloat16, torch.float16)


class Stepper:
    """Runs steps of one rank. Every rank of the program must make one at the same time."""

    def __init__(self, runner: Runner, like: Stepper | None = None) -> None:
        """like: of another program of the same stages, whose groups are shared."""
        self.runner, self.program = runner, runner.program
        self.moves = runner.moves
        self.turns = in_turns(self.moves, attrgetter("paired"))
        self.watch = runner.guard.watch if runner.guard is not None else None
        self.accumulated = {s: accumulated(self.program, s) for s in runner.place.stages}
        #: what a stage counts, and what it takes for that
        self.counted = {s: counted(self.program, s) for s in runner.place.stages}
        self.made = makers_of(self.program)
        self.channels: Channels | MemoryChannels | None = None
        self.shared: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.pipe: dist.ProcessGroup | None = None
        self.up: dist.ProcessGroup | None = None
        self.near: Neighbours | None = None
        self.scales = Scales()
        self.members: Members = [] if like is None else like.members
        if self.program.stages is not None:
            self._meet(like)
        self.slices = self.program.stages.schedule.slices if self.program.stages is not None else 1
        #: how many terms a gradient has in a step
        self.terms = self.program.microbatches * self.slices

    def _meet(self, like: Stepper | None) -> None:
        """The groups and channels of a pipeline; collective."""
        runner, place = self.runner, self.runner.place
        if like is not None:
            self.scales, self.pipe, self.up, self.shared = like.scales, like.pipe, like.up, like.shared
            self.near = like.near
        else:
            self.scales.watch()
            self.pipe = pipe_group(runner)
            # messages up and messages down must not wait for each other on one communicator
            self.up = pipe_group(runner) if dist.get_backend() == "nccl" else None
            self.shared = shared_groups(runner)
            self.near = neighbours_of(self.pipe, place.device)
        assert self.pipe is not None
        self.channels = (
            Channels(self.moves, place.peers, self._describe, place.device, self.up, None, self.watch)
            if self.near is None
            else MemoryChannels(self.near, self._describe, self.watch)
        )

    def _describe(self, value: str) -> tuple[tuple[int, ...], torch.dtype]:
        placed = self.program.lowered.values[value]
        runner = self.runner
        shape = local_shape(placed.type.shape, placed.layout, runner.shape.sizes, runner.coords)
        return tuple(shape), torch_dtype(placed.type.dtype)

    def step(self, module: nn.Module, leaves: Sequence[Any]) -> torch.Tensor:
        """Forward and backward of all microbatches of a batch, given as its flattened arguments."""
        remember(self.members)
        run = _StepRun(self, module, leaves, self.loss_output, self.turns)
        runner = self.runner
        if runner.guard is not None:
            runner.guard.step(module)
        with torch.no_grad():
            graphs = runner.graphs
            recorded = (
                None
                if graphs is None
                else graphs.step([*run.parameters.values()], run.calls, run.buffers, run.recorded)
            )
            if recorded is None:
                run.moves()
                run.give(run.gradients())
            else:
                run.give(recorded[1])
        if module.training:
            runner.clock.calls += self.program.microbatches
        return run.loss() if recorded is None else recorded[0]

    @torch.no_grad()
    def evaluate(
        self, module: nn.Module, leaves: Sequence[Any], wanted: Collection[str] = ()
    ) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        """The loss of a batch, by the forward of all microbatches alone, and outputs that this rank makes.

        wanted: values of outputs; each is whole within its stage, one for each microbatch.
        """
        run = _StepRun(self, module, leaves, self.loss_output, self._forward_turns, wanted)
        run.moves()
        return run.loss(trained=False), run.outputs

    @cached_property
    def _forward_turns(self) -> tuple[tuple[RankAction, ...], ...]:
        moves = moves_of(self.program, forward_only=True)[self.runner.place.pipe_rank]
        return in_turns(moves, attrgetter("paired"))

    @cached_property
    def loss_output(self) -> tuple[str, str]:
        """(value of the loss, position of that output); found at the first step, as a model may have none."""
        position = loss_position(self.program.signature, self.program.lowered.values)
        results = self.program.signature.results
        value = next(r.value for r in results if r.kind == "output" and r.target == str(position))
        return value, str(position)

    def source_of(self, output: str) -> int:
        """The rank along pp that makes an output."""
        assert self.program.stages is not None
        stage = self.made[output][0]
        return self.runner.place.peers[self.program.stages.schedule.owner[stage]]


class _StepRun:
    """One step."""

    def __init__(
        self,
        stepper: Stepper,
        module: nn.Module,
        leaves: Sequence[Any],
        loss: tuple[str, str],
        order: tuple[tuple[RankAction, ...], ...],
        wanted: Collection[str] = (),
    ) -> None:
        self.stepper, self.runner, self.program = stepper, stepper.runner, stepper.program
        self.loss_value, self.loss_position = loss
        self.order = order
        #: the last action of every microbatch
        self.last = {m.action.microbatch: m.action for turn in order for m in turn}
        self.module = module
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        calls = [pytree.tree_leaves(batch) for batch in cut(self.program, leaves)]
        # every call takes pieces of the same tensors, so that looking at those of one is enough
        params, inputs = self.runner.arguments_of(module, calls[0])
        self.parameters = {p.target: x for p, x in zip(self.runner.params, params, strict=True)}
        places = [int(p.target) for p in self.runner.inputs]
        #: the inputs of every microbatch
        self.calls: Sequence[Sequence[Any]] = [inputs, *([call[k] for k in places] for call in calls[1:])]
        #: of dropout, by microbatch; None: those of the clock
        self.seeds: Sequence[torch.Tensor | None] = [None] * len(self.calls)
        self.taken: list[torch.Tensor] = []
        self.envs: dict[int, Values] = {}
        self.gathered: dict[str, Any] = {}
        self.sums: dict[tuple[int, str], torch.Tensor] = {}
        #: sums that nothing else refers to, which may be added to in place
        self.owned: set[tuple[int, str]] = set()
        self.losses: list[torch.Tensor] = []
        self.wanted = wanted
        self.outputs: dict[str, list[torch.Tensor]] = {}

    def _gather(self) -> None:
        """Make what lasts for the full step, of the parameters as they are now."""
        runner = self.runner
        for stage in sorted(runner.place.stages):
            new = runner.rank_program.made_by((stage, "gather", 0))
            if new:
                env = runner.entry(self.taken, self.calls[0], seed=self.seeds[0])
                runner.run(env, (stage, "gather", 0))
                self.gathered.update((value, env[value]) for value in new)
            self._count(stage)

    def _count(self, stage: int) -> None:
        """Add up what a stage counts in all microbatches."""
        new, uses = self.stepper.counted[stage]
        result: list[list[torch.Tensor]] = []
        for inputs, seed in zip(self.calls, self.seeds, strict=True) if new else ():
            env = self.runner.entry((), inputs, only=uses, seed=seed)
            self.runner.enter_buffers(env, self.buffers, stage)
            self.runner.run(env, (stage, "count", 0))
            result.append([env[value] for value in new])
        totals = [sum(row[1:], row[0]) for row in zip(*result, strict=True)]
        self.gathered.update(zip(new, totals, strict=bool(result)))

    def recorded(
        self, calls: Sequence[Sequence[torch.Tensor]], seeds: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Parts]:
        """Loss and gradients for inputs of microbatches that lie elsewhere."""
        self.calls, self.seeds = calls, seeds
        self.moves()
        return self.loss(), self.gradients()

    def moves(self) -> None:
        self.taken, self.losses = self.runner.taken([*self.parameters.values()]), []
        self._gather()
        channels, turns = self.stepper.channels, self.order
        if channels is not None:
            channels.begin()
        for number, turn in enumerate(turns):
            if channels is not None:
                # what the next turn needs may arrive while this one computes
                ahead = chain.from_iterable(turns[number : number + 2])
                channels.ask([m for move in ahead for m in move.receives])
            envs = [self._entered(move) for move in turn]
            if len(turn) == 1:
                for phase in turn[0].phases:
                    self.runner.run(envs[0], (turn[0].action.stage, phase, turn[0].action.slice))
            else:
                self._run_together(turn, envs)
            for move, env in zip(turn, envs, strict=True):
                self._finish(move, env)
        if channels is not None:
            channels.end()

    def _run_together(self, turn: Sequence[RankAction], envs: Sequence[Values]) -> None:
        stages = self.program.stages
        assert stages is not None
        forward, backward = (move.action for move in turn)
        parts = [
            (env, [(move.action.stage, phase, move.action.slice) for phase in move.phases])
            for move, env in zip(turn, envs, strict=True)
        ]
        self.runner.run_together(parts, stages.turns[forward.stage, backward.stage])

    def _entered(self, move: RankAction) -> Values:
        """The values of a microbatch, with what has arrived for an action."""
        action, channels = move.action, self.stepper.channels
        env = self.envs.get(action.microbatch)
        if env is None:
            call = action.microbatch
            env = self.runner.entry(self.taken, self.calls[call], call, seed=self.seeds[call])
            self.envs[call] = env
            env.update(self.gathered)
            for _, uses in self.stepper.counted.values():
                for value in uses:
                    env.used(value)
        for message in move.receives:
            assert channels is not None
            env[message.value] = channels.take(message)
        if action.kind != "F":
            self._enter_tangents(env)
        elif action.slice == 0:
            self.runner.enter_buffers(env, self.buffers, action.stage)
        return env

    def _finish(self, move: RankAction, env: Values) -> None:
        """Hand on what an action has made."""
        action = move.action
        if action.kind == "F" and action.slice == self.stepper.slices - 1:
            self._after_forward(env, action)
        self._accumulate(env, action.stage)
        if move.sends:
            self._send(env, move.sends)
        if self.last[action.microbatch] == action:
            del self.envs[action.microbatch]

    def _enter_tangents(self, env: Values) -> None:
        for port in self.runner.tangents:
            if port.name not in env:
                one = port.target == self.loss_position
                shape, dtype = self.stepper._describe(port.name)
                fill = 1.0 if one else 0.0
                tangent = torch.full(shape, fill, dtype=dtype, device=self.runner.device)
                scale = self.runner.loss_scale
                env[port.name] = tangent if scale is None else (tangent * scale).to(dtype)

    def _after_forward(self, env: Values, action: Action) -> None:
        if action.stage in self.stepper.made.get(self.loss_value, (0,)):
            self.losses.append(env[self.loss_value].detach().to(self._loss_type))
        for value in self.wanted:
            if action.stage == self.stepper.made.get(value, (0,))[0]:
                full = self.runner.placed(env[value], value).full_tensor()
                self.outputs.setdefault(value, []).append(full)
        self.runner.update_buffers(env, self.buffers)

    def _accumulate(self, env: Values, stage: int) -> None:
        """Add this microbatch's gradients of a stage to those of the others."""
        totals: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        for value in self.stepper.accumulated[stage]:
            result = env.pop(value, None)
            if result is None:
                continue
            key = (stage, value)
            known = self.sums.get(key)
            if known is None:
                half = result.dtype in _HALF and self.stepper.terms > 1
                self.sums[key] = result.float() if half else result
            elif key in self.owned:
                totals.append(known)
                terms.append(result)
            else:
                # the first may lie in the memory of another value: a sum of its own costs no more
                self.sums[key] = known + result
                self.owned.add(key)
        if totals:
            torch._foreach_add_(totals, terms)

    def _send(self, env: Values, messages: Sequence[StageSend]) -> None:
        assert self.stepper.channels is not None
        self.stepper.channels.send([(m, env[m.value]) for m in messages])
        for value in dict.fromkeys(m.value for m in messages):
            env.used(value)

    # -- the end of a step -------------------------------------------------------------------------

    def gradients(self) -> Parts:
        """Reduce the gradients; those of parameters of this rank that are trained."""
        env: dict[int, Values] = {}
        for stage in sorted(self.runner.place.stages):
            env[stage] = self.runner.rank_program.start()
            for (owner, value), total in self.sums.items():
                if owner == stage:
                    dtype = torch_dtype(self.program.lowered.values[value].type.dtype)
                    env[stage][value] = total.to(dtype)
        self.sums.clear()
        self.owned.clear()
        for stage, values in env.items():
            self.runner.run(values, (stage, "reduce", 0))
        owned = {p.target: p for p in self.runner.params}
        given: set[int] = set()
        results: Parts = {}
        for result in self.program.signature.results:
            if result.kind != "grad" or result.target not in owned:
                continue
            parts = [values[result.value] for values in env.values() if result.value in values]
            grad = self._over_stages(parts, result.value, owned[result.target].name)
            if grad is not None and self.parameters[result.target].requires_grad:  # it may be frozen by now
                # two parameters may have the same gradient, and each must own its memory
                grad = grad.clone() if id(grad) in given else grad
                given.add(id(grad))
                results["grad", result.target] = grad, result.value
        return results

    def _over_stages(self, parts: Sequence[torch.Tensor], value: str, port: str) -> torch.Tensor | None:
        """The sum over all stages that hold a parameter."""
        own = sum(parts[1:], parts[0]) if parts else None
        ranks = rank_holders(self.runner, port) if self.program.stages is not None else ()
        if len(ranks) < 2:
            return own
        if own is None:
            shape, dtype = self.stepper._describe(value)
            own = torch.zeros(shape, dtype=dtype, device=self.runner.device)
        own = own.contiguous().to(self.runner.device)  # gradients may be in host memory
        with collective(f"the sum over stages of the gradient of {port}", self.stepper.watch):
            dist.all_reduce(own, group=self.stepper.shared[ranks])
        return own

    def give(self, parts: Parts) -> None:
        """Hand gradients to the parameters."""
        for (_, target), part in parts.items():
            parameter = self.parameters[target]
            new = run_gradient_hooks(parameter, self.runner.gradient(*part))
            parameter.grad = new if parameter.grad is None else parameter.grad + new
            run_post_accumulate_hooks(parameter)

    @property
    def _loss_type(self) -> torch.dtype:
        """The type in which losses are added up: of single precision, or that of the loss."""
        placed = self.program.lowered.values.get(self.loss_value)
        return torch.promote_types(torch.float32, torch_dtype(placed.type.dtype) if placed else torch.float32)

    def loss(self, trained: bool = True) -> torch.Tensor:
        """The sum over the microbatches, from the stage that makes it. trained: whether there are gradients,
        which ranks have to scale alike."""
        stepper, place = self.stepper, self.runner.place
        nothing = torch.zeros((), dtype=self._loss_type, device=self.runner.device)
        total = torch.stack(self.losses).sum() if self.losses else nothing
        if self.program.stages is None:
            return total
        assert stepper.pipe is not None
        source = stepper.source_of(self.loss_value)
        own = torch.cat([total.reshape(1), stepper.scales.row(total.device).to(total.dtype)])
        rows = [torch.empty_like(own) for _ in place.peers]
        with collective(f"the loss from rank {source}", stepper.watch):
            dist.all_gather(rows, own, group=stepper.pipe)
        if trained:
            stepper.scales.check(torch.stack(rows)[:, 1:])
            stepper.scales.note(self.module.parameters())
        return rows[dist.get_group_rank(stepper.pipe, source)][0].clone()
