"""What the ranks of a process group have between them, measured: collectives by level, and every pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from types import MappingProxyType

import torch
import torch.distributed as dist

from autoshard.cluster.cluster import Level
from autoshard.cluster.measured import CollectiveTimings
from autoshard.cost.fit import FITTED, FittedLink, Timing, fit_link
from autoshard.errors import UsageError
from autoshard.runtime.pending import Finish
from autoshard.runtime.profile.device import Say, synchronize
from autoshard.runtime.transport.transport import Arrival, Transport
from autoshard.runtime.transport.transport_choice import transport_of

#: a timing covers as many calls as take this long, in seconds; on the CPU behind computing so much longer
_WINDOW = MappingProxyType({"cpu": 4e-2, "cuda": 2e-3})
_LONGER = 3
#: products of this side come before each collective on the CPU, for so many seconds: programs compute a few
#: milliseconds between messages
_SIDE, _BETWEEN = 256, 6e-3
_SMALLEST = 1024
#: sizes grow by this factor
_GROWTH = 8
_ELEMENT = 4  # bytes of float32
#: messages of a byte are sent as many times more often: they are cheap, and any disturbance is all they show
_SHORT_REPEATS = 10
#: times that pairs with impossible times are timed again: something else had the machine
_AGAIN = 4


@dataclass(frozen=True)
class MeasuredLevel:
    """A level, where its figures come from, and the largest error of the fit as a share."""

    level: Level
    sources: dict[str, str]
    worst: float


def node_size(hosts: Sequence[str]) -> int:
    """Ranks per node, from the host of every rank.

    Raises UsageError unless each node has the same number of ranks, side by side.
    """
    if not hosts:
        raise UsageError("there are no ranks", where="nodes")
    size = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    nodes = [tuple(hosts[at : at + size]) for at in range(0, len(hosts), size)]
    alike = all(len(node) == size and len(set(node)) == 1 for node in nodes)
    if not alike or len({node[0] for node in nodes}) < len(nodes):
        raise UsageError(
            "nodes are not of the same size",
            where=f"hosts by rank: {', '.join(hosts)}",
            why="a level of wiring holds groups of equal size, of neighbouring ranks",
            hint="start as many processes on each node, ranks of a node side by side, as torchrun does",
        )
    return size


def sizes_to(largest: int) -> list[int]:
    """Bytes of the messages to time: from 1 KiB, eight times more each, and the largest."""
    if largest < _SMALLEST * _GROWTH:
        why = "latency and bandwidth need short and long messages"
        raise UsageError(
            f"the largest message is {largest} bytes", why=why, hint=f"at least {_SMALLEST * _GROWTH}"
        )
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH < largest:
        sizes.append(sizes[-1] * _GROWTH)
    return [*sizes, largest]


def measure_levels(
    device: torch.device, per_node: int, sizes: Sequence[int], repeats: int, say: Say, share: float = 1.0
) -> list[MeasuredLevel]:
    """The levels, innermost first, the same on every rank.

    Inside nodes, all nodes work at once, in groups of all sizes that divide them: each has its times in
    tables, the largest gives the link. Between nodes, first one rank of each node on its own, which gives the
    link, then all ranks at once, each with its likes of the other nodes, which tells how many share it.
    Collective: all ranks call it with the same arguments. share: seconds that pass over those that a core
    computes for a process (`profile_sharing`).
    """
    world = dist.get_world_size()
    nodes = [list(range(at, at + per_node)) for at in range(0, world, per_node)]
    result: list[MeasuredLevel] = []
    computing = _Computing(device, repeats, share)

    def timed(members: Sequence[Sequence[int]]) -> list[Timing]:
        return _timings(members, device, sizes, repeats, computing)

    if per_node > 1:
        size = per_node if len(nodes) > 1 else None
        active = {"shared_by": "measured: all ranks of a node were active"}
        tables: list[CollectiveTimings] = []
        for ranks in (n for n in range(2, per_node + 1) if per_node % n == 0):
            say(f"collectives of {ranks} ranks inside nodes of {per_node}")
            groups = [list(range(at, at + ranks)) for at in range(0, world, ranks)]
            timings = timed(groups)
            tables += tables_of(timings)
        result.append(_level("node", size, timings, repeats, active, tables=tables))
    if len(nodes) > 1:
        say(f"collectives between {len(nodes)} nodes")
        across = [[node[local] for node in nodes] for local in range(per_node)]
        alone = timed(across[:1])
        together = timed(across) if per_node > 1 else alone
        slower = _fit(alone, "network").bandwidth / _fit(together, "network").bandwidth
        shared = min(per_node, max(1, round(slower)))
        source = f"measured: {slower:.3g} times slower with all {per_node} ranks of a node active"
        tables = tables_of(together)
        result.append(_level("network", None, alone, repeats, {"shared_by": source}, shared, tables))
    for each in result:
        level = each.level
        fit = f"{level.latency * 1e6:.4g} us, {level.bandwidth / 1e9:.4g} GB/s"
        say(f"{level.name}: {fit}, shared by {level.shared_by}; off by at most {each.worst:.0%}")
    return result


def measure_pairs(
    device: torch.device, nbytes: int, repeats: int, say: Say
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes/s in one direction and seconds of latency from every rank to every other, one pair at a time.

    Both are [world, world] in float64, 0 on the diagonal, the same on every rank. A message and an answer of
    a byte each take twice the latency; how much longer a message of ``nbytes`` takes gives the bandwidth.
    Pairs whose long message seems to take no longer than a short one are timed again, a few times.
    Raises UsageError if it still does. Collective.
    """
    world = dist.get_world_size()
    wrong = ~torch.eye(world, dtype=torch.bool)
    short, long = torch.zeros(2, world, world, dtype=torch.float64)
    for _ in range(1 + _AGAIN):
        result = _round_trips(wrong, device, nbytes, repeats, say)
        # each round on its own: in a quieter one both are shorter
        short, long = torch.where(wrong, result, torch.stack((short, long)))
        wrong &= long <= short
        if not wrong.any():
            break
    else:
        hint = "measure on an idle machine, with more --repeats or a larger --largest"
        raise UsageError(f"a message of {nbytes} bytes took no longer than one of a byte", hint=hint)
    apart = ~torch.eye(world, dtype=torch.bool)
    bandwidth = torch.zeros_like(short)
    bandwidth[apart] = (nbytes - 1) / (long - short)[apart]
    return bandwidth, short / 2


def _round_trips(
    pairs: torch.Tensor, device: torch.device, nbytes: int, repeats: int, say: Say
) -> torch.Tensor:
    """[2, world, world]: seconds of a byte, and of ``nbytes`` with a byte back, of these pairs. Collective.

    pairs: [world, world], the same on every rank.
    """
    times = torch.zeros(2, *pairs.shape, dtype=torch.float64)
    for source, row in enumerate(pairs.tolist()):
        targets = [target for target, asked in enumerate(row) if asked]
        if targets:
            say(f"links of rank {source} to {len(targets)} others")
        for target in targets:
            times[0, source, target] = _one_way(device, source, target, 1, _SHORT_REPEATS * repeats)
            times[1, source, target] = _one_way(device, source, target, nbytes, repeats)
    times = times.to(device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.cpu()


def _one_way(device: torch.device, source: int, target: int, length: int, repeats: int) -> float:
    """Least seconds on the sender until the receiver has answered with a byte; 0 on other ranks.

    The least, as anything else that the machine does only adds to what a link needs of its own.
    """
    rank = dist.get_rank()
    message = torch.zeros(length, dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    times: list[float] = []
    dist.barrier()
    for _ in range(repeats + 1):
        if rank == source:
            synchronize(device)
            start = time.perf_counter()
            dist.send(message, target)
            dist.recv(answer, target)
            synchronize(device)
            times.append(time.perf_counter() - start)
        elif rank == target:
            dist.recv(message, source)
            dist.send(answer, source)
            synchronize(device)
    return min(times[1:]) if times else 0.0  # the first one connects


def _level(
    name: str,
    size: int | None,
    timings: Sequence[Timing],
    repeats: int,
    sources: dict[str, str],
    shared_by: int = 1,
    tables: Sequence[CollectiveTimings] = (),
) -> MeasuredLevel:
    fit = _fit(timings, f"level {name}")
    lengths = sorted({t.nbytes for t in timings})
    how = (
        f"measured: least squares of a + n/b over {', '.join(FITTED)}, {lengths[0]} to {lengths[-1]} bytes, "
        f"{timings[0].ranks} ranks, {dist.get_backend()}, medians of {repeats}, on the CPU "
        f"of what they add to computing; off by up to {fit.worst:.0%}"
    )
    by_size = {} if size is None else {"size": "ranks with the same host name"}
    level = Level(name, size, fit.latency, fit.bandwidth, shared_by, measured=tuple(tables))
    sources = {**by_size, "latency": how, "bandwidth": how, **sources}
    if tables:
        sources["measured"] = "measured: the same, of groups of each size at once"
    return MeasuredLevel(level, sources, fit.worst)


def _fit(timings: Sequence[Timing], where: str) -> FittedLink:
    return fit_link([t for t in timings if t.kind in FITTED], where=where)


def tables_of(timings: Sequence[Timing]) -> list[CollectiveTimings]:
    """Times of collectives of as many ranks, a table for each kind."""
    result = []
    for kind in dict.fromkeys(each.kind for each in timings):
        own = {each.nbytes: each for each in timings if each.kind == kind}
        times = tuple(own[n].seconds for n in sorted(own))
        result.append(CollectiveTimings(kind, timings[0].ranks, tuple(sorted(own)), times))
    return result


def _timings(
    members: Sequence[Sequence[int]],
    device: torch.device,
    sizes: Sequence[int],
    repeats: int,
    computing: _Computing,
) -> list[Timing]:
    """Collectives of groups of equal size that run at once: what they add to a program (`_Computing.added`).

    Ranks of no group wait, or compute. Every rank returns the same.
    """
    rank = dist.get_rank()
    groups = [dist.new_group(list(ranks)) for ranks in members]  # every rank makes every group
    mine = next((group for group, ranks in zip(groups, members, strict=True) if rank in ranks), None)
    over = None if mine is None else transport_of(mine.group_name, device)
    ranks = len(members[0])
    # between two, messages in both directions at once, as stages of a pipeline send them
    kinds = (*FITTED, *(("send",) if ranks == 2 else ()))
    # elements of one rank's part of the tensor
    parts = [-(-asked // (ranks * _ELEMENT)) for asked in sizes]
    calls = [
        None if over is None else _collective(kind, part, ranks, device, over)
        for kind in kinds
        for part in parts
    ]
    added = iter(computing.added(calls))
    result: list[Timing] = []
    for kind in kinds:
        own = [next(added) for _ in parts]
        late = rising([each.late for each in own])  # a longer message makes nobody less late
        for part, each, wait in zip(parts, own, late, strict=True):
            result.append(Timing(kind, part * ranks * _ELEMENT, ranks, each.own + max(0.0, wait)))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return result


def _collective(
    kind: str, part: int, ranks: int, device: torch.device, over: Transport
) -> Callable[[], object]:
    """A call of the collective as programs make it; the full tensor has ``part * ranks`` elements of f32."""
    full = torch.zeros(part * ranks, device=device)
    piece = torch.zeros(part, device=device)
    if kind == "send":
        peers = (over.rank + 1) % over.ways, (over.rank - 1) % over.ways
        return lambda: over.pass_on(full, torch.empty_like(full), *peers)()
    if kind == "all_reduce":
        return lambda: _arrived(*over.all_reduce(full, "sum", own=True))
    if kind == "all_gather":
        return lambda: over.gather(piece)()
    return lambda: _arrived(*over.scatter(full))


def _arrived(arriving: Arrival, finish: Finish) -> object:
    return finish(arriving())


@dataclass(frozen=True)
class AddedSeconds:
    """What a message adds to a program, in seconds.

    own: of the cores, for the message itself. late: in which cores have nothing to do, as ranks wait for each
    other or for the wire.
    """

    own: float
    late: float


class _Computing:
    """What comes before a collective on the CPU. Every rank makes one at the same time.

    share: seconds that pass over those that a core computes for a process, while all compute.
    """

    def __init__(self, device: torch.device, repeats: int, share: float) -> None:
        self.device, self.repeats, self.share = device, repeats, share
        self.square = torch.ones(_SIDE, _SIDE)
        self.products = 1
        if device.type == "cpu":
            once = share * self._window(None, round(_WINDOW["cpu"] / 1e-3)).computed
            self.products = max(1, round(_BETWEEN / once))

    def added(self, calls: Sequence[Callable[[], object] | None]) -> list[AddedSeconds]:
        """What each call adds, the mean over the ranks that make it.

        On the CPU it comes after computing, as in programs: caches are cold, and ranks that share cores are
        late for each other. Those that wait leave their core to others: the cores' seconds are what all ranks
        have used, and what passes beside these was waited for by all. All calls take turns, so that what
        disturbs the machine for a while is in few timings of many calls, of which the median is taken.
        """
        if self.device.type != "cpu":
            return [
                AddedSeconds(median(_world_times(call, self.device, self.repeats)), 0.0) for call in calls
            ]
        for call in calls:
            self._window(call, 1)
        once = [self._window(call, 1).passed for call in calls]
        counts = [max(1, ceil(_LONGER * _WINDOW["cpu"] / passed)) for passed in once]
        rounds = [
            [self._window(call, count) for call, count in zip(calls, counts, strict=True)]
            for _ in range(self.repeats)
        ]
        return [self._added(each) for each in zip(*rounds, strict=True)]

    def _added(self, windows: Sequence[_Window]) -> AddedSeconds:
        own = self.share * median(each.called for each in windows)
        return AddedSeconds(own, median(each.passed - self.share * each.computed for each in windows))

    def _window(self, call: Callable[[], object] | None, count: int) -> _Window:
        """So many rounds of computing, each with a call after it; of ranks without one, computing alone."""
        dist.barrier()
        start, computed, called = time.perf_counter(), time.process_time(), 0.0
        for _ in range(count):
            for _ in range(self.products):
                torch.mm(self.square, self.square)
            if call is not None:
                before = time.thread_time()
                call()
                called += time.thread_time() - before
        computed, passed = time.process_time() - computed, time.perf_counter() - start
        sums = torch.tensor([computed, called, call is not None], dtype=torch.float64)
        dist.all_reduce(sums)
        ranks, callers = dist.get_world_size(), max(1.0, float(sums[2]))
        longest = slowest(self.device, [passed])[0]
        return _Window(longest / count, float(sums[0]) / ranks / count, float(sums[1]) / callers / count)


@dataclass(frozen=True)
class _Window:
    """Seconds of a round. passed: until all ranks were done. computed: of a core, by all threads of a rank,
    the mean. called: the same, of the call alone, and of the ranks that make it."""

    passed: float
    computed: float
    called: float


def rising(values: Sequence[float]) -> list[float]:
    """The numbers nearest to these, by squares, of which none is below the one before (R. Barlow et al.,
    Statistical Inference under Order Restrictions, 1972, section 1.2: pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [value for value, count in pools for _ in range(count)]


def _world_times(call: Callable[[], object] | None, device: torch.device, repeats: int) -> list[float]:
    """Seconds per call on the slowest rank, by repeat."""

    def run(times: int) -> float:
        dist.barrier()
        if call is None:
            return 0.0
        synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / times

    run(1)
    first = slowest(device, [run(1)])[0]
    times = max(1, ceil(_WINDOW[device.type] / first))
    return slowest(device, [run(times) for _ in range(repeats)])


def mean_of(device: torch.device, seconds: Sequence[float]) -> list[float]:
    """The mean over the ranks of each of these. Collective."""
    held = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(held)
    return [float(value) / dist.get_world_size() for value in held.cpu()]


def slowest(device: torch.device, seconds: Sequence[float]) -> list[float]:
    """Each of these on the rank where it is largest. Collective."""
    held = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return [float(value) for value in held.cpu()]
