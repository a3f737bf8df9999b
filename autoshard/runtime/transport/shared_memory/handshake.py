"""How the processes of a group come to share memory: each opens what the others have, through ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.transport.shared_memory.arena import Arena, Mapped
from autoshard.runtime.transport.shared_memory.peers import Neighbours, close
from autoshard.torch_adapters.groups import timeout_of


@dataclass(frozen=True)
class _Hello:
    """What others need to know to read this rank's memory and to write to it. doors: rank -> its pipe."""

    pid: int
    memory: int
    name: bytes
    doors: Mapping[int, int]


@dataclass(frozen=True)
class _Own:
    """What this rank brings. inlets, doors: the ends of a pipe from every other rank."""

    arena: Arena
    inlets: dict[int, int] = field(default_factory=dict)
    doors: dict[int, int] = field(default_factory=dict)

    @classmethod
    def made(cls, others: list[int]) -> _Own | None:
        """None where the system gives no such memory or no more files."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            own = cls(Arena())
        except OSError:
            return None
        try:
            for k in others:
                own.inlets[k], own.doors[k] = os.pipe()
        except OSError:
            close((own.inlets, own.doors), [own.arena.mapped])
            return None
        return own

    def hello(self) -> _Hello:
        return _Hello(os.getpid(), self.arena.mapped.fd, self.arena.name, self.doors)


def meet(group: dist.ProcessGroup, willing: bool = True) -> Neighbours | None:
    """The ranks of a group; None, on each of them, if one is not willing or cannot read another's memory,
    because it is on another machine, in another container or of another user. Collective."""
    rank, ways = dist.get_rank(group), dist.get_world_size(group)
    others = [k for k in range(ways) if k != rank]
    own = _Own.made(others) if willing else None
    hellos: list[Any] = [None] * ways
    dist.all_gather_object(hellos, None if own is None else own.hello(), group=group)
    memories: dict[int, Mapped] = {}
    outlets: dict[int, int] = {}
    met = own is not None
    for k in others:
        met = met and hellos[k] is not None and _opened(k, hellos[k], rank, memories, outlets)
    agreed = torch.tensor(int(met))
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)  # also: everybody has opened what it needs
    if own is not None:
        close([own.doors], ())  # only the other rank has it now, and its end is seen
    if own is None or not int(agreed):
        inlets = {} if own is None else own.inlets
        close((inlets, outlets), [*memories.values(), *(() if own is None else (own.arena.mapped,))])
        return None
    names = {k: dist.get_global_rank(group, k) for k in range(ways)}
    return Neighbours(rank, names, own.arena, memories, own.inlets, outlets, timeout_of(group))


def _opened(rank: int, hello: _Hello, own: int, memories: dict[int, Mapped], outlets: dict[int, int]) -> bool:
    """Whether another process could be reached. What was opened is put into the last two."""
    try:
        memories[rank] = Mapped(os.open(f"/proc/{hello.pid}/fd/{hello.memory}", os.O_RDWR | os.O_CLOEXEC))
        if memories[rank].name() != hello.name:
            return False  # a process of the same number, in another place
        outlets[rank] = os.open(
            f"/proc/{hello.pid}/fd/{hello.doors[own]}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except OSError:
        return False
    return True
