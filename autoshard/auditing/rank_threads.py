"""Ranks as threads of one process that run one at a time: what one runs is the same at every audit.

A rank runs until it waits for a message; then the next one that can go on does. If none can, the ranks wait
for each other forever, and every one is told so.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import torch

from autoshard.torch_adapters.dtensor import op_handlers


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for. ready: whether it can go on. what: a collective, for people. line: where."""

    ready: Callable[[], bool]
    what: str
    line: str


@dataclass(frozen=True)
class RankEnd:
    """How a rank's code ended. error: what it raised. waits: what it waited for when no rank could go on."""

    error: BaseException | None = None
    waits: Waiting | None = None


class Stopped(BaseException):
    """Another rank failed, or all wait: this one goes no further. Not an Exception, so that no user code
    takes it."""


#: classes of Accelerate whose objects share what they have
_ACCELERATE = ("PartialState", "AcceleratorState", "GradientState")
#: packages that keep process groups in variables of modules
_IN_MODULES = ("deepspeed",)


def _tables() -> Iterator[dict[Any, Any]]:
    """Tables that libraries keep once a process, and that differ between ranks while one of them runs."""
    yield op_handlers()
    yield from _accelerate_tables()
    packages = [name for name in _IN_MODULES if name in sys.modules]
    for name, module in list(sys.modules.items()) if packages else ():
        if name.partition(".")[0] in packages:
            variables = vars(module)
            yield variables
            yield from [v for k, v in variables.items() if type(v) is dict and k != "__builtins__"]


def _accelerate_tables() -> Iterator[dict[Any, Any]]:
    module = sys.modules.get("accelerate.state")
    for name in _ACCELERATE if module is not None else ():
        table = getattr(module, name)._shared_state
        if isinstance(table, dict):
            yield table


def _set(table: dict[Any, Any], kept: dict[Any, Any]) -> None:
    """Make a table what it was; entries that did not change are left alone."""
    for key in table.keys() - kept.keys():
        del table[key]
    for key, value in kept.items():
        if key not in table or table[key] is not value:
            table[key] = value


class _State:
    """What a process has once and every rank needs for itself: random numbers, the variables of torchrun,
    and tables of libraries."""

    def __init__(self, rank: int, size: int) -> None:
        self._variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
        }
        self.save()

    def save(self) -> None:
        self._torch, self._python, self._numpy = (
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
        )
        self._tables = {id(table): dict(table) for table in _tables()}

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        os.environ.update(self._variables)
        for table in _accelerate_tables():  # one that this rank has not seen is as it was imported
            self._tables.setdefault(id(table), {})
        for table in list(_tables()):
            if id(table) in self._tables:
                _set(table, self._tables[id(table)])


class RankThreads:
    """Runs a function on every rank. size: how many."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = [Event() for _ in range(size)]
        self._waiting: dict[int, Waiting] = {}
        self._done: set[int] = set()
        self._state = [_State(rank, size) for rank in range(size)]
        self._ends: list[RankEnd] = [RankEnd()] * size
        self._stopped = False

    def run(self, function: Callable[[int], None], **attributes: Any) -> list[RankEnd]:
        """Call ``function(rank)`` in a thread per rank, until all are done or none can go on.

        attributes: what every thread gets as attributes. Returns how each ended, by rank.
        """
        before, variables = _State(0, self.size), dict(os.environ)
        threads = [Thread(target=self._main, args=(rank, function), daemon=True) for rank in range(self.size)]
        for rank, thread in enumerate(threads):
            vars(thread).update(attributes, rank=rank)
            thread.start()
        self._turn[0].set()
        try:
            for thread in threads:
                thread.join()
        finally:
            before.restore()
            os.environ.clear()
            os.environ.update(variables)
        return self._ends

    def wait(self, waiting: Waiting) -> None:
        """Give the turn away until a rank's message has arrived.

        Raises Stopped if it never will.
        """
        rank = current_rank()
        self._waiting[rank] = waiting
        while not waiting.ready():
            if self._stopped:
                self._ends[rank] = RankEnd(waits=waiting)
                raise Stopped
            self._pass_on(rank)
            self._take_turn(rank)
        del self._waiting[rank]

    def _main(self, rank: int, function: Callable[[int], None]) -> None:
        self._take_turn(rank)
        try:
            if not self._stopped:
                function(rank)
        except Stopped:
            pass
        except BaseException as error:
            self._ends[rank] = RankEnd(error=error)
            self._stopped = True
        self._done.add(rank)
        self._waiting.pop(rank, None)
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; if there is none, stop all."""
        self._state[rank].save()
        later = [(rank + 1 + k) % self.size for k in range(self.size)]
        left = [k for k in later if k not in self._done]
        if not left:
            return
        able = [k for k in left if self._stopped or k not in self._waiting or self._waiting[k].ready()]
        if not able:
            self._stopped = True
            able = left
        self._turn[able[0]].set()

    def _take_turn(self, rank: int) -> None:
        self._turn[rank].wait()
        self._turn[rank].clear()
        self._state[rank].restore()


def current_rank() -> int:
    """The rank whose thread this is."""
    rank: int = current_thread().rank  # type: ignore[attr-defined]
    return rank
