"""One rank's program on torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Port
from autoshard.program.program import Program
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.resolve import RankView
from autoshard.runtime.steps import PreparedSegment, Step


class RankProgram:
    """A program bound to one rank; groups: axis name -> name of the rank's process group of that axis."""

    def __init__(self, program: Program, rank: int, groups: Mapping[str, str], device: torch.device) -> None:
        self.program = program
        self.mesh = Mesh.parse(program.mesh)
        self.view = RankView(self.mesh.names, self.mesh.sizes, self.mesh.coords(rank))
        self.device = device
        collectives = GroupCollectives(groups)
        self.segments = {
            name: PreparedSegment(s.graph, self.view, collectives, device)
            for name, s in program.lowered.segments.items()
        }
        self.halves = tuple(self._prepare(backward, collectives) for backward in (False, True))

    def _prepare(self, backward: bool, collectives: GroupCollectives) -> list[_Item]:
        """Main as prepared items, each with the values that are dead after it."""
        lowered = self.program.lowered
        items = [i for i in lowered.main if i.backward == backward]
        keep = set(lowered.results)
        if not backward:
            keep |= {a for i in lowered.main if i.backward for a in _uses(i)}
        prepared: list[_Item] = []
        for item in reversed(items):
            dead = tuple(sorted((set(_uses(item)) | set(item.outs)) - keep))
            keep |= set(_uses(item))
            if isinstance(item, Call):
                prepared.append(_Item(item.args, item.outs, self.segments[item.segment], item.site, dead))
            else:
                slots = {n: k for k, n in enumerate([*_uses(item), *item.outs])}
                step = Step(item, self.view, slots, collectives(item, self.view))
                prepared.append(_Item(_uses(item), item.outs, step, 0, dead))
        return prepared[::-1]

    def kept_ports(self) -> tuple[Port, ...]:
        """Parameters and inputs that the backward half reads as they were given."""
        used = {a for i in self.program.lowered.main if i.backward for a in _uses(i)}
        ports = self.program.signature.ports
        return tuple(p for p in ports if p.name in used and p.kind in ("param", "input"))

    def run(self, env: dict[str, Any], backward: bool) -> None:
        """Run one half on the rank's values, dropping what is dead and adding what is made."""
        for item in self.halves[backward]:
            args = [env[a] for a in item.args]
            if isinstance(item.body, PreparedSegment):
                results = item.body(args, item.site)
            else:
                slots = [*args, *([None] * len(item.outs))]
                item.body.run(slots, 0)
                results = tuple(slots[len(args) :])
            env.update(zip(item.outs, results, strict=True))
            del args, results
            for name in item.dead:
                env.pop(name, None)


class _Item:
    __slots__ = ("args", "body", "dead", "outs", "site")

    def __init__(
        self,
        args: tuple[str, ...],
        outs: tuple[str, ...],
        body: PreparedSegment | Step,
        site: int,
        dead: tuple[str, ...],
    ) -> None:
        self.args, self.outs, self.body, self.site, self.dead = args, outs, body, site, dead


def _uses(item: Any) -> tuple[str, ...]:
    if isinstance(item, Call):
        return item.args
    from autoshard.ir import refs_of

    return tuple(refs_of(item))
