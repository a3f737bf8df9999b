"""One microbatch of a pipeline, all ranks in one process, with the bytes that are alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.ir.boundaries import ends_of
from autoshard.program.messages import moves_of
from autoshard.program.program import Program
from autoshard.runtime.executor import RankProgram, Values
from autoshard.simulate.stage_costs import StagePrices


class StageRun:
    """One microbatch of a program whose stages have one rank each.

    forward, split: bytes alive on a rank after its last forward, and after its (last) input gradient.
    """

    def __init__(
        self, program: Program, prices: StagePrices, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> None:
        self.program, self.prices, self.moves = program, prices, moves_of(program)
        lowered = program.lowered
        self.ranks: list[RankProgram] = []
        self.envs: list[Values] = []
        self.given = ports_of(program, model, batch)
        for stages, moves in zip(prices.stages_of, self.moves, strict=True):
            sent = [v for move in moves for v in dict.fromkeys(m.value for m in move.sends)]
            made = RankProgram(program, 0, {}, torch.device("cpu"), stages, sent)
            env = made.start()
            uses = {v for p in lowered.parts if p.stage in stages for v in ends_of(lowered, p).uses}
            env.update({n: x for n, x in self.given.items() if n in uses})
            self.ranks.append(made)
            self.envs.append(env)
        self.results = {r.value for r in program.signature.results}
        self.forward: dict[int, float] = {}
        self.split: dict[int, float] = {}

    def all(self) -> None:
        sent: dict[Any, torch.Tensor] = {}
        at = [0] * len(self.moves)
        while any(k < len(moves) for k, moves in zip(at, self.moves, strict=True)):
            before = list(at)
            for rank, moves in enumerate(self.moves):
                if at[rank] == len(moves) or any(m not in sent for m in moves[at[rank]].receives):
                    continue
                move, env = moves[at[rank]], self.envs[rank]
                env.update({m.value: sent[m].clone() for m in move.receives})
                for phase in move.phases:
                    self.ranks[rank].run(env, (move.action.stage, phase, move.action.slice))
                sent.update({m: env[m.value] for m in move.sends})
                for value in dict.fromkeys(m.value for m in move.sends):
                    env.used(value)
                if move.action.kind == "F":
                    self.forward[rank] = self._alive(rank, ("backward", "weight"))
                elif move.action.kind == "I":
                    self.split[rank] = self._alive(rank, ("weight",))
                at[rank] += 1
            assert at != before

    def _alive(self, rank: int, phases: tuple[str, ...]) -> float:
        """Bytes of all that a rank has but ports, and results that are only handed over."""
        lowered, stages = self.program.lowered, self.prices.stages_of[rank]
        parts = [p for p in lowered.parts if p.stage in stages and p.phase in phases]
        uses = {v for p in parts for v in ends_of(lowered, p).uses}
        ports = {x.untyped_storage().data_ptr() for x in self.given.values()}
        found = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for value, x in self.envs[rank].items()
            if value in uses or (value not in self.results and not value.endswith("_partial"))
        }
        return float(sum(n for at, n in found.items() if at not in ports))


def ports_of(program: Program, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = list(batch.values())
    found: dict[str, torch.Tensor] = {}
    for p in program.signature.ports:
        match p.kind:
            case "const":
                value = program.constants[p.target]
                assert isinstance(value, torch.Tensor)
                found[p.name] = value
            case "input":
                found[p.name] = leaves[int(p.target)]
            case "tangent":
                found[p.name] = torch.ones(p.type.shape)
            case _:
                found[p.name] = state[p.target].detach()
    return found
