"""The ranks of a group in one process: what `runtime.lockstep.op_lockstep` runs the collectives of a program
over.

The collectives are those that really run (`runtime.collectives`); only the way of their data is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from threading import Condition
from typing import Any

import torch

from autoshard.ir import Node
from autoshard.ir.collectives import COLLECTIVES, axes_of, in_one_message, is_message
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.pending import Finish, all_arrived, arrived, as_it_is
from autoshard.runtime.resolve import RankView
from autoshard.runtime.transport.transport import Arrival, Join, Transport, reduced


class Table:
    """Where the ranks of a group lay their messages down for each other."""

    def __init__(self, ways: int) -> None:
        self.ways = ways
        self._changed = Condition()
        self._laid: dict[int, dict[int, Any]] = {}
        self._read: dict[int, int] = {}
        self._failed = False

    def put(self, number: int, rank: int, message: Any) -> None:
        """A rank's message of this number."""
        with self._changed:
            self._laid.setdefault(number, {})[rank] = message
            self._changed.notify_all()

    def fail(self) -> None:
        """A rank lays nothing down any more: who waits for it fails, too."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def take(self, number: int) -> list[Any]:
        """The messages of all ranks, in their order; each rank asks once.

        Raises RuntimeError if a rank has failed instead.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._laid[number]) == self.ways or self._failed)
            laid = self._laid[number]
            if len(laid) < self.ways:
                raise RuntimeError("another rank of the group has failed")
            self._read[number] = self._read.get(number, 0) + 1
            if self._read[number] == self.ways:
                del self._laid[number], self._read[number]
        return [laid[k] for k in range(self.ways)]


class InProcess:
    """A `runtime.transport.transport.Transport` over a table."""

    name = ""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.ways = table, rank, table.ways
        self._count = 0

    def _lay(self, message: Any) -> Callable[[], list[Any]]:
        number, self._count = self._count, self._count + 1
        self.table.put(number, self.rank, message)
        return lambda: self.table.take(number)

    def room(self, count: int, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def gather(self, x: torch.Tensor) -> Arrival:
        take = self._lay(x)
        return lambda: torch.cat(take())

    def gather_rows(self, x: torch.Tensor, join: Join) -> Callable[[], Any]:
        take = self._lay(x.view(-1))
        return lambda: join(take())

    def scatter(self, x: torch.Tensor) -> tuple[Arrival, Finish]:
        take = self._lay(x.view(self.ways, x.shape[0] // self.ways, *x.shape[1:]))
        return lambda: reduced([row[self.rank] for row in take()], "sum"), as_it_is

    def all_reduce(self, x: torch.Tensor, op: str, own: bool = False) -> tuple[Arrival, Finish]:
        take = self._lay(x)
        return lambda: reduced(take(), op), as_it_is

    def all_to_all(self, x: torch.Tensor) -> Arrival:
        counts = [x.numel() // self.ways] * self.ways
        return self.exchange(x, counts, counts)

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        starts = accumulate(sent, initial=0)
        take = self._lay([x.narrow(0, start, count) for start, count in zip(starts, sent, strict=False)])

        def join() -> torch.Tensor:
            rows = [parts[self.rank] for parts in take()]
            if [len(row) for row in rows] != list(received):
                raise RuntimeError(f"rows {[len(row) for row in rows]} came, {list(received)} were expected")
            return torch.cat(rows)

        return join

    def pass_on(self, x: torch.Tensor, out: torch.Tensor, after: int, before: int) -> Callable[[], None]:
        take = self._lay(x.clone())

        def finish() -> None:
            out.copy_(take()[before].view(out.shape))

        return finish


class Together:
    """The collectives of all ranks of a mesh. views: of the ranks, in their order."""

    def __init__(self, views: Sequence[RankView]) -> None:
        self.tables: dict[str, list[Table]] = {axis: [] for axis in views[0].names}
        transports: list[dict[str, Transport]] = [{} for _ in views]
        for axis, tables in self.tables.items():
            for group in groups_of(views, (axis,)):
                tables.append(Table(len(group)))
                for k, rank in enumerate(group):
                    transports[rank][axis] = InProcess(tables[-1], k)
        self.ranks = [GroupCollectives(over) for over in transports]

    def run(self, node: Node, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """What a ``comm`` node gives on every rank. calls: of its function of each rank."""
        if not is_message(node):
            return [call() for call in calls]
        axes = axes_of(node)
        spec = COLLECTIVES[node.op]
        if spec.pending and spec.moves and in_one_message(node):
            # all are issued before the first is waited for
            return [_there(issued) for issued in [call() for call in calls]]

        def run(call: Callable[[], Any]) -> Any:
            try:
                with torch.no_grad():
                    return _there(call())
            except BaseException:
                for table in chain.from_iterable(self.tables[axis] for axis in axes):
                    table.fail()
                raise

        with ThreadPoolExecutor(len(calls)) as ranks:
            return [done.result() for done in [ranks.submit(run, call) for call in calls]]


def groups_of(views: Sequence[RankView], axes: Sequence[str]) -> list[list[int]]:
    """Ranks that differ only along some axes, in the order of their coordinates along these."""
    numbers = [views[0].names.index(axis) for axis in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, view in enumerate(views):
        rest = tuple(c for k, c in enumerate(view.coords) if k not in numbers)
        groups.setdefault(rest, []).append(rank)
    along = {rank: tuple(view.coords[k] for k in numbers) for rank, view in enumerate(views)}
    return [sorted(group, key=along.__getitem__) for group in groups.values()]


def _there(issued: Any) -> Any:
    return all_arrived(issued) if isinstance(issued, list) else arrived(issued)
