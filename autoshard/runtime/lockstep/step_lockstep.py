"""A full step of all ranks in one process: every microbatch through every stage, in the schedule's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from autoshard.errors import VerificationError
from autoshard.ir.lowered import StagePart
from autoshard.program.holders import accumulated, counted, holders_of
from autoshard.program.messages import RankAction, StageSend, moves_of
from autoshard.program.program import Program
from autoshard.runtime.lockstep.op_lockstep import Lockstep

#: pipeline rank -> one tensor per rank of a stage
Held: TypeAlias = "dict[int, list[torch.Tensor]]"


@dataclass(frozen=True)
class StepValues:
    """What a step makes. outputs: value -> shards of every microbatch. grads: value -> what ranks hold.

    buffers: value -> shards after the last microbatch.
    """

    outputs: dict[str, list[list[torch.Tensor]]]
    grads: dict[str, Held]
    buffers: dict[str, list[torch.Tensor]]


class StepLockstep:
    """Runs steps of a program. calls: microbatches of a step, if not those of the program."""

    def __init__(self, program: Program, calls: int | None = None) -> None:
        if calls is not None and program.stages is None:
            program = replace(program, microbatches=calls)
        self.program = program
        self.lockstep = Lockstep(program)
        self.moves = moves_of(program)
        self.holders = holders_of(program)
        self.owner = program.stages.schedule.owner if program.stages is not None else (0,)
        self.slices = program.stages.schedule.slices if program.stages is not None else 1
        self.parts = {(p.stage, p.phase, p.slice): p for p in program.lowered.parts}

    def ranks_of(self, port: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a port."""
        return tuple(sorted({self.owner[s] for s in self.holders[port]}))

    def held(self, x: torch.Tensor, port: str) -> Held:
        """What every rank holds of a global tensor."""
        return {rank: self.lockstep.shards(x, port) for rank in self.ranks_of(port)}

    def step(self, held: Mapping[str, Held], fixed: Sequence[Mapping[str, list[torch.Tensor]]]) -> StepValues:
        """One step. held: parameters and buffers by port. fixed: all other ports, for every microbatch.

        Raises VerificationError if ranks wait for each other forever.
        """
        return _Run(self, held, fixed).run()


class _Run:
    def __init__(
        self,
        of: StepLockstep,
        held: Mapping[str, Held],
        fixed: Sequence[Mapping[str, list[torch.Tensor]]],
    ) -> None:
        self.of, self.program, self.fixed = of, of.program, fixed
        self.state = {name: dict(ranks) for name, ranks in held.items()}
        results = self.program.signature.results
        names = {p.target: p.name for p in self.program.signature.ports if p.kind == "buffer"}
        self.updates = {r.value: names[r.target] for r in results if r.kind == "buffer"}
        self.outputs = {r.value for r in results if r.kind == "output"}
        self.envs: dict[tuple[int, int], dict[str, list[Any]]] = {}
        self.sent: dict[StageSend, list[Any]] = {}
        self.sums: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.found: dict[str, dict[int, list[torch.Tensor]]] = {v: {} for v in self.outputs}
        self.buffers: dict[str, list[torch.Tensor]] = {}
        self.wanted = {s: accumulated(self.program, s) for s in range(len(of.owner))}

    def _gather(self) -> dict[int, dict[str, list[Any]]]:
        """What lasts for the full step, of the parameters as they are now, on every pipeline rank."""
        result: dict[int, dict[str, list[Any]]] = {rank: {} for rank in range(len(self.of.moves))}
        for (stage, phase, _), part in self.of.parts.items():
            if phase == "gather":
                rank = self.of.owner[stage]
                env = {name: list(ranks[rank]) for name, ranks in self.state.items() if rank in ranks}
                given = set(env)
                self.of.lockstep.run_part(env, part)
                result[rank].update((v, x) for v, x in env.items() if v not in given)
            elif phase == "count":
                result[self.of.owner[stage]] |= self._counted(stage, part)
        return result

    def _counted(self, stage: int, part: StagePart) -> dict[str, list[Any]]:
        """What a stage counts in all microbatches, added up."""
        new, rank = counted(self.program, stage)[0], self.of.owner[stage]
        totals: dict[str, list[Any]] = {}
        for values in self.fixed if new else ():
            env = {name: list(ranks[rank]) for name, ranks in self.state.items() if rank in ranks}
            env |= values
            self.of.lockstep.run_part(env, part)
            for value in new:
                known = totals.get(value)
                totals[value] = (
                    env[value] if known is None else [a + b for a, b in zip(known, env[value], strict=True)]
                )
        return totals

    def run(self) -> StepValues:
        moves = self.of.moves
        self.gathered = self._gather()
        at = [0] * len(moves)
        while any(k < len(moves[r]) for r, k in enumerate(at)):
            ready = [
                r
                for r, k in enumerate(at)
                if k < len(moves[r]) and all(m in self.sent for m in moves[r][k].receives)
            ]
            if not ready:
                stuck = [f"rank {r} at {moves[r][k].action}" for r, k in enumerate(at) if k < len(moves[r])]
                raise VerificationError(
                    "the ranks of the pipeline wait for each other forever", where=", ".join(stuck)
                )
            for rank in ready:
                self._move(rank, moves[rank][at[rank]])
                at[rank] += 1
        return self._finished()

    def _move(self, rank: int, move: RankAction) -> None:
        action = move.action
        env = self.envs.get((rank, action.microbatch))
        if env is None:
            env = self.envs[rank, action.microbatch] = {
                **self.fixed[action.microbatch],
                **self.gathered[rank],
            }
        for message in move.receives:
            env[message.value] = [x.clone() for x in self.sent.pop(message)]
        for name, ranks in self.state.items():
            # what forward read, backward reads again: later microbatches may have changed a buffer since
            begins = action.kind == "F" and action.slice == 0
            if rank in ranks and (begins or name not in env) and self._enters(name, action.stage):
                env[name] = list(ranks[rank])
        for phase in move.phases:
            part = self.of.parts.get((action.stage, phase, action.slice))
            if part is not None:
                self.of.lockstep.run_part(env, part)
        if action.kind == "F" and action.slice == self.of.slices - 1:
            self._after_forward(env, action.stage, rank, action.microbatch)
        for value in self.wanted[action.stage]:
            if value in env:
                self._add((action.stage, value), env.pop(value))
        for message in move.sends:
            self.sent[message] = env[message.value]

    def _enters(self, name: str, stage: int) -> bool:
        return stage in self.of.holders[name]

    def _after_forward(self, env: dict[str, list[Any]], stage: int, rank: int, microbatch: int) -> None:
        for value in self.outputs:
            if value in env and microbatch not in self.found[value]:
                self.found[value][microbatch] = env[value]
        for value, name in self.updates.items():
            if value in env and stage in self.of.holders[name]:
                self.buffers[value] = env[value]
                full = self.of.lockstep.whole(env[value], value)
                self.state[name] = self.of.held(full, name)

    def _add(self, key: tuple[int, str], shards: list[torch.Tensor]) -> None:
        known = self.sums.get(key)
        self.sums[key] = shards if known is None else [a + b for a, b in zip(known, shards, strict=True)]

    def _finished(self) -> StepValues:
        """Reduce the gradients, and add up those that stages share."""
        new: dict[int, dict[str, list[Any]]] = {s: {} for s in range(len(self.of.owner))}
        for (stage, value), shards in self.sums.items():
            new[stage][value] = shards
        for stage, env in new.items():
            part = self.of.parts.get((stage, "reduce", 0))
            if part is not None:
                self.of.lockstep.run_part(env, part)
        params = {p.target: p.name for p in self.program.signature.ports if p.kind == "param"}
        grads: dict[str, Held] = {}
        for result in self.program.signature.results:
            if result.kind == "grad":
                terms = [env[result.value] for env in new.values() if result.value in env]
                total = [torch.stack(list(row)).sum(0) for row in zip(*terms, strict=True)]
                ranks = self.of.ranks_of(params[result.target])
                grads[result.value] = {r: [x.clone() for x in total] for r in ranks}
        count = len(self.fixed)
        outputs = {v: [results[m] for m in range(count)] for v, results in self.found.items()}
        return StepValues(outputs, grads, self.buffers)
