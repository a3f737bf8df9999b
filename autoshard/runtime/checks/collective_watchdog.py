"""Where every rank is: which collective it waits in, told through the store of the process group.

Used only where ``AUTOSHARD_CHECK`` is set (see `autoshard.runtime.checks.check_mode`). A thread of every rank
writes what its rank does; a rank whose collective fails, or takes long, reads what the others wrote.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from autoshard.torch_adapters.groups import default_store

#: seconds between two notes of a rank
PERIOD = 0.5
#: seconds after which a collective that is still under way is reported to stderr
SLOW = 120.0


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


@dataclass
class RankPosition:
    """What a rank does. step: calls of the program so far. count: collectives begun in this step.

    name: of the collective that it waits in or, if not ``inside``, that it was in last. layer: the call of a
    segment it is in. since: of the monotonic clock, in seconds.
    """

    step: int = 0
    count: int = 0
    name: str = ""
    layer: str = ""
    inside: bool = False
    since: float = field(default_factory=time.monotonic)


class Watch:
    """Notes of one rank, and those of the others. rank: in the world. ranks: of the program."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], slow: float = SLOW) -> None:
        self.store, self.rank, self.ranks, self.slow = store, rank, tuple(ranks), slow
        #: every rank binds the same programs in the same order: so many came before
        self.number = store.add(f"autoshard/watches/{rank}", 1)
        self.at = RankPosition()
        self._told: str = ""
        self._warned = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._note, name="autoshard-watch", daemon=True)
        self._thread.start()

    # -- what this rank does -----------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        at = self.at
        at.step, at.count, at.since, at.inside, at.name, at.layer = step, 0, time.monotonic(), False, "", ""

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """While a collective runs; on an error the rank stays inside."""
        at = self.at
        at.name, at.count, at.since, at.inside = name, at.count + 1, time.monotonic(), True
        yield
        at.inside, at.since = False, time.monotonic()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    # -- what all of them do -----------------------------------------------------------------------

    def report(self, patience: float = 2 * PERIOD) -> list[str]:
        """One line for all ranks that do the same. patience: seconds that others get to write theirs."""
        self._write()
        time.sleep(patience)
        return lines_of(self.rank, self.notes())

    def notes(self) -> dict[int, dict[str, Any] | None]:
        """The last note of every rank; None of one that has written none, or whose store is gone."""
        result: dict[int, dict[str, Any] | None] = {}
        for rank in self.ranks:
            try:
                key = self._key(rank)
                result[rank] = json.loads(self.store.get(key)) if self.store.check([key]) else None
            except (RuntimeError, ValueError):
                result[rank] = None
        return result

    def _key(self, rank: int) -> str:
        return f"autoshard/watch/{self.number}/{rank}"

    def _note(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self._write()
                self._warn()
            except RuntimeError:
                return  # the store is gone: the program ends

    def _write(self) -> None:
        at = self.at
        note = {"step": at.step, "count": at.count, "name": at.name, "layer": at.layer, "inside": at.inside}
        note["seconds"] = round(time.monotonic() - at.since, 1)
        text = json.dumps(note)
        if text != self._told:
            self.store.set(self._key(self.rank), text)
            self._told = text

    def _warn(self) -> None:
        """Say once that a collective takes long; only the first of the ranks that wait does."""
        at = self.at
        if not at.inside or self._warned == at.count or time.monotonic() - at.since < self.slow:
            return
        notes = self.notes()
        waiting = [
            r for r, n in notes.items() if n is not None and n["inside"] and n["seconds"] > self.slow / 2
        ]
        if min([*waiting, self.rank]) == self.rank:
            self._warned = at.count
            lines = "\n".join(f"  {line}" for line in lines_of(self.rank, notes))
            print(
                f"autoshard: {at.name} takes more than {self.slow:.0f} s\n{lines}",
                file=sys.stderr,
                flush=True,
            )


def lines_of(own: int, notes: dict[int, dict[str, Any] | None]) -> list[str]:
    """Ranks that do the same together, those that wait first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    longest: dict[tuple[Any, ...], float] = {}
    for rank, note in notes.items():
        key: tuple[Any, ...] = ()
        if note is not None:
            key = (note["inside"], note["step"], note["count"], note["name"], note["layer"])
            longest[key] = max(longest.get(key, 0.0), float(note["seconds"]))
        groups.setdefault(key, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (not (item[0] and item[0][0]), item[1]))
    return [f"{ranks_text(ranks)} {_doing(key, longest.get(key, 0.0), len(ranks))}" for key, ranks in ordered]


def _doing(key: tuple[Any, ...], seconds: float, count: int) -> str:
    many = count > 1
    if not key:
        return f"{'have' if many else 'has'} written nothing"
    inside, step, number, name, layer = key
    within = f", in {layer}" if layer else ""
    where = f"{name}{within}, step {step}, collective {number} of it"
    if inside:
        return f"wait{'' if many else 's'} in {where}, for {seconds:.1f} s"
    last = f"the last was {where}" if name else f"step {step} has begun"
    return f"{'are' if many else 'is'} in no collective for {seconds:.1f} s; {last}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 to 6, 9``"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def watch_here(ranks: Sequence[int]) -> Watch:
    """A watch on the store of the process group. slow: ``AUTOSHARD_CHECK_SLOW`` in seconds."""
    return Watch(default_store(), dist.get_rank(), ranks, float(os.environ.get("AUTOSHARD_CHECK_SLOW", SLOW)))
