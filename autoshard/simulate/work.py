"""What an op asks of a device: one of a few kinds of work, on the shapes that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from autoshard.cost.link import AxisLink


@dataclass(frozen=True, slots=True)
class MatmulWork:
    """``batch`` products [rows, depth] @ [depth, columns]. nbytes: read and written. turned: whether
    each of the factors lies in memory by its other dim."""

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    nbytes: float
    turned: tuple[bool, bool] = (False, False)

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of ``heads`` heads of all sequences together.

    flop: of the fused kernel, half of the square if causal. nbytes: that it reads and writes. native: whether
    the kernel is written for the device. reach: what it reaches of the rate of the best.
    """

    heads: int
    queries: int
    keys: int
    width: int
    backward: bool
    dtype: str
    flop: float
    nbytes: float
    native: bool = True
    reach: float = 1.0


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """A kernel that is bound by memory. nbytes: read and written. flop: on the vector units. joined: whether
    it is a part of one that other work has begun."""

    nbytes: float
    flop: float = 0.0
    joined: bool = False


Level: TypeAlias = Literal["all", "across", "inside"]


@dataclass(frozen=True, slots=True)
class CollectiveWork:
    """A collective over a mesh axis. nbytes: as `cost.collective.seconds` counts them. level: among which of
    its ranks, all or those of one of its two levels."""

    kind: str
    axis: int
    nbytes: float
    level: Level = "all"

    def link(self, links: Sequence[AxisLink]) -> AxisLink:
        """What it goes over. links: of the axes."""
        link = links[self.axis]
        return link if self.level == "all" else link.across if self.level == "across" else link.inside_nodes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between a device and the memory of its host. nbytes: of all values in it. down: to the host."""

    nbytes: float
    down: bool


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host issues so many further tasks. waits: first until the device has done what they depend on."""

    tasks: int
    waits: bool


@dataclass(frozen=True, slots=True)
class TiledWork:
    """The same works, one after the other, so many times."""

    works: tuple[MatmulWork | Attention | MemoryWork, ...]
    count: int

    @property
    def flop(self) -> float:
        return self.count * sum(work.flop for work in self.works)

    @property
    def nbytes(self) -> float:
        return self.count * sum(work.nbytes for work in self.works)


Work: TypeAlias = "MatmulWork | Attention | MemoryWork | CollectiveWork | Transfer | HostWork | TiledWork"


@dataclass(frozen=True, slots=True)
class Beat:
    """One piece of work of a ring. after: places of those before it that it waits for."""

    work: Work
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpTask:
    """One op of a sheet.

    name: of the first value that the op makes; op: without its overload. after: tasks of the sheet that it
    waits for. inputs: arguments of the sheet that it takes. views: ops that only look at tensors in another
    way, issued with it. turn: whether the one before it over the same axis is waited for (`ir.collectives`).
    """

    name: str
    op: str
    work: Work
    after: tuple[int, ...]
    inputs: tuple[int, ...]
    views: int = 0
    turn: bool = False


@dataclass(frozen=True, slots=True)
class Sheet:
    """A segment as tasks, in the order in which they are issued.

    outs: per output the task that makes it, or ~k for argument k that it is a view of. stops: per task, and
    behind them all, how often the segment stops before it (`rules.stops`); () for nowhere.
    """

    tasks: tuple[OpTask, ...]
    outs: tuple[int, ...]
    stops: tuple[int, ...] = ()
