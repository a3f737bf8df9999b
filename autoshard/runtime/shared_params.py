"""Parameters that more than one pipeline stage holds: their gradients are sums over those stages."""

from __future__ import annotations

from itertools import product
from typing import TypeAlias

import torch.distributed as dist
from torch import nn

from autoshard.cluster.mesh import Mesh
from autoshard.runtime.membership import Membership, join, membership_of
from autoshard.runtime.optim.pipeline_scales import Scales
from autoshard.runtime.runner import Runner

Members: TypeAlias = list[tuple[nn.Parameter, Membership]]


def mark_shared(module: nn.Module, runner: Runner, scales: Scales) -> Members:
    """Tell every parameter of a pipeline's rank which ranks have the rest of the model; what each was told.

    scales: who looks how gradients are scaled.
    """
    if runner.program.stages is None:
        return []
    members: Members = []
    group = pipe_group(runner)
    names = {p.target: p for p in runner.params}
    for name, parameter in module.named_parameters():
        if name in names:
            first = rank_holders(runner, names[name].name)[0]
            members.append((parameter, Membership(group, first == runner.place.pipe_rank, scales)))
    remember(members)
    return members


def remember(members: Members) -> None:
    """Tell parameters once more that have forgotten it: a module's ``to`` puts others in their place."""
    for parameter, membership in members:
        if membership_of(parameter) is None:
            join(parameter, membership)


def carry_marks(source: nn.Module, target: nn.Module) -> None:
    """Parameters of a copy are members of what their originals are members of."""
    for old, new in zip(source.parameters(), target.parameters(), strict=True):
        result = membership_of(old)
        if result is not None:
            join(new, result)


def rank_holders(runner: Runner, port: str) -> tuple[int, ...]:
    """The pipeline ranks that hold a port."""
    assert runner.program.stages is not None
    owner = runner.program.stages.schedule.owner
    return tuple(sorted({owner[s] for s in runner.holders[port]}))


def pipe_group(runner: Runner) -> dist.ProcessGroup:
    """The ranks that differ from this one only along pp. Every rank must call it."""
    return _groups(runner, tuple(range(len(runner.place.peers))))


def shared_groups(runner: Runner) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every set of pipeline ranks that shares a parameter. Every rank must call it."""
    ports = [p for p in runner.program.signature.ports if p.kind == "param"]
    sets = sorted({rank_holders(runner, p.name) for p in ports})
    return {ranks: _groups(runner, ranks) for ranks in sets if len(ranks) > 1}


def _groups(runner: Runner, pipe_ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """For every place inside a stage, the group of these pipeline ranks; this rank's own (or any other)."""
    program = runner.program
    assert program.stages is not None
    full, at = Mesh.parse(program.full_mesh), program.stages.position
    inner = [range(size) for k, size in enumerate(full.sizes) if k != at]
    enumerated = []
    for place in product(*inner):
        coords = [[*place[:at], k, *place[at:]] for k in pipe_ranks]
        enumerated.append([runner.place.order[full.rank(c)] for c in coords])
    own, _ = dist.new_subgroups_by_enumeration(enumerated)
    return own
