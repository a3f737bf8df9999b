"""When the ops of a part of a program run on a rank: computing, and messages, a stream per mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from autoshard.cluster.cluster import Device, host_of
from autoshard.cost.collective import HOPS, AxisLink, seconds
from autoshard.cost.kernel_time import attention_seconds, product_seconds, traffic_seconds
from autoshard.ir.collectives import spec_named
from autoshard.simulate.contention import Message, delays, demand
from autoshard.simulate.turns import Stop, Turns, one_after_the_other
from autoshard.simulate.work import (
    Attention,
    CollectiveWork,
    HostWork,
    MatmulWork,
    MemoryWork,
    OpTask,
    Sheet,
    TiledWork,
    Transfer,
    Work,
)

#: parameters are gathered at most so many calls ahead of the one that computes
AHEAD = 2
#: what prices a piece of work, in seconds
Price = Callable[[Work], float]
#: a step of a part, and a task of its sheet
Place: TypeAlias = tuple[int, int]
#: how often messages of several axes are delayed by each other before that is taken to have settled
_ROUNDS = 2


@dataclass(frozen=True)
class SegmentCall:
    """One call of a part: a sheet, the values it takes, and those it gives, by name.

    loose: messages of activations in it stand in the way of nothing but what needs them.
    """

    sheet: Sheet
    args: tuple[str, ...]
    outs: tuple[str, ...]
    loose: bool = False


@dataclass(frozen=True)
class TaskSpan:
    """A task of a part.

    step: of the part; task: of its sheet. stream: 0 for computing, 1 + axis for messages; behind these one
    for copies to host memory and one for copies from there.
    """

    step: int
    task: int
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A part in time.

    seconds: until all is done. compute: of them. exposed: per mesh axis, of messages that nothing hides and
    of what messages beside computing cost it; behind these of copies to host memory and from there, if a
    program has any. hidden: of messages behind computing. spans: empty unless they were asked for.
    """

    seconds: float
    compute: float
    exposed: tuple[float, ...]
    hidden: float
    spans: tuple[TaskSpan, ...] = ()

    def __add__(self, other: Played) -> Played:
        """One after the other."""
        axes = zip_longest(self.exposed, other.exposed, fillvalue=0.0)
        return Played(
            self.seconds + other.seconds,
            self.compute + other.compute,
            tuple(a + b for a, b in axes),
            self.hidden + other.hidden,
        )

    @property
    def talk(self) -> float:
        """Exposed on all axes."""
        return sum(self.exposed)


NOTHING = Played(0.0, 0.0, (), 0.0)


def pricer(device: Device, links: Sequence[AxisLink]) -> Price:
    """Seconds of work on a device, with the link of every mesh axis; each piece is priced once."""
    known: dict[Work, float] = {}

    def price(work: Work) -> float:
        result = known.get(work)
        if result is None:
            result = known[work] = _seconds(work, device, links)
        return result

    return price


def _seconds(work: Work, device: Device, links: Sequence[AxisLink]) -> float:
    match work:
        case MatmulWork():
            return product_seconds(
                work.batch,
                work.rows,
                work.columns,
                work.depth,
                work.dtype,
                work.nbytes,
                device,
                turned=work.turned,
            )
        case Attention():
            return attention_seconds(
                work.flop / work.reach, work.nbytes, work.dtype, work.backward, device, native=work.native
            )
        case CollectiveWork():
            return float(seconds(work.kind, work.nbytes, work.link(links)))
        case TiledWork():
            return work.count * sum(_seconds(each, device, links) for each in work.works)
        case Transfer():
            return host_of(device).seconds(work.nbytes)
        case HostWork():
            return 0.0
        case _:
            return traffic_seconds(work.nbytes, device, launch=not work.joined, starts=not work.joined)


@dataclass(frozen=True)
class Habits:
    """What may run beside computing.

    ahead: parameters are gathered before they are needed. behind: gradients are reduced while more are
    computed, else after all of a part. beside: messages of activations run in a part per rank, each beside
    the product of the part before (Wang et al., ASPLOS 2023), so that one part of them is exposed. overlap:
    part of the time of messages beside computing that costs the computing nothing (their kernels take
    multiprocessors and bandwidth from it). dispatch: seconds that the host takes to issue a task, ahead of
    the device, from the start of a part on. late: messages are issued where they stand, and waited for where
    what they bring is needed, or the next reduce-scatter of their axis is issued
    (`runtime.collectives`), and copied to where it lies only then; the first three are then of no meaning.
    view: seconds of an op that only looks at a tensor in another way, which the device itself issues.
    blocking: whether the host issues a task when the one before it is done. experts: whether another
    microbatch computes while tokens are on their way, so that nothing waits for them.
    """

    ahead: bool = True
    behind: bool = True
    beside: bool = False
    overlap: float = 1.0
    dispatch: float = 0.0
    late: bool = False
    view: float = 0.0
    blocking: bool = False
    experts: bool = False


class Player:
    """Plays parts on one rank.

    price: seconds of work. sizes: of the mesh axes. widen: bytes of a gradient as it is reduced over those
    that it has. hosted: whether anything is copied to host memory or from there.
    """

    def __init__(
        self,
        price: Price,
        sizes: Sequence[int],
        habits: Habits,
        widen: float = 1.0,
        hosted: bool = False,
        links: Sequence[AxisLink] = (),
    ) -> None:
        self.price, self.sizes, self.habits, self.widen = price, tuple(sizes), habits, widen
        self.hosted, self.links = hosted, links
        crossed = [share.name for link in links for share in link.crossed]
        self.shared = len(set(crossed)) < len(crossed)
        self._demands: dict[CollectiveWork, Mapping[str, float]] = {}
        self._timed: dict[int, tuple[Sheet, list[_Timed]]] = {}

    def play(
        self,
        steps: Sequence[SegmentCall],
        parameters: Collection[str],
        gradients: Collection[str],
        spans: bool = False,
    ) -> Played:
        """The steps of a part, one after the other; ops wait for what they take and for their stream.

        parameters: values that are there from the start of the step. gradients: values that nothing in the
        part waits for.
        """
        return self.play_together((steps,), parameters, gradients, one_after_the_other, spans)[0]

    def play_together(
        self,
        parts: Sequence[Sequence[SegmentCall]],
        parameters: Collection[str],
        gradients: Collection[str],
        turns: Turns,
        spans: bool = False,
    ) -> tuple[Played, tuple[int, ...]]:
        """Parts that take turns, from stop to stop; and which goes on in each turn.

        What parts make has another name in each.
        """
        delayed: dict[Place, float] = {}
        for _ in range(_ROUNDS if self.shared else 0):
            result, taken = self._played(parts, parameters, gradients, turns, True, delayed)
            new = self._delays([step for part in parts for step in part], result.spans, delayed)
            if not new:
                return (result if spans else replace(result, spans=())), taken
            delayed = new
        return self._played(parts, parameters, gradients, turns, spans, delayed)

    def _played(
        self,
        parts: Sequence[Sequence[SegmentCall]],
        parameters: Collection[str],
        gradients: Collection[str],
        turns: Turns,
        spans: bool,
        delayed: Mapping[Place, float],
    ) -> tuple[Played, tuple[int, ...]]:
        """delayed: (step, task) -> seconds by which a message takes longer than on its own."""
        links = 2 if self.hosted else 0
        run = _Run(self.habits, len(self.sizes), spans, links, delayed, together=len(parts) > 1)
        run.fetched.update(parameters)
        going, first = dict[int, Iterator[Stop]](), 0
        for k, part in enumerate(parts):
            going[k] = self._part(run, part, first, gradients)
            first += len(part)
        stops = dict.fromkeys(going, Stop(0.0, 0.0))
        taken: list[int] = []
        while stops:
            taken.append(turns(run.free[0], stops, taken))
            stop = next(going[taken[-1]], None)
            if stop is None:
                del stops[taken[-1]]
            else:
                stops[taken[-1]] = stop
        return run.end(), tuple(taken)

    def _part(
        self, run: _Run, steps: Sequence[SegmentCall], first: int, gradients: Collection[str]
    ) -> Iterator[Stop]:
        """Play a part from stop to stop. first: number of its first step."""
        for number, step in enumerate(steps):
            if self.habits.ahead and not self.habits.late:
                # gathers of the next call are issued before what this one reduces
                for other in range(number + (number > 0), min(number + AHEAD, len(steps))):
                    run.fetch(other, steps[other], self._of(steps[other].sheet))
            yield from run.step(first + number, step, self._of(step.sheet), gradients)

    def _delays(
        self,
        steps: Sequence[SegmentCall],
        spans: Iterable[TaskSpan],
        delayed: Mapping[Place, float],
    ) -> dict[Place, float]:
        """What messages of other axes delay each message by, where they were last under way."""
        places, messages = [], []
        for span in spans:
            work = steps[span.step].sheet.tasks[span.task].work
            if isinstance(work, CollectiveWork) and 0 < span.stream <= len(self.sizes):
                place = span.step, span.task
                length = span.end - span.start - delayed.get(place, 0.0)
                places.append(place)
                messages.append(Message(span.start, length, span.stream, self._demand(work)))
        return {p: s for p, s in zip(places, delays(messages), strict=True) if s > 0}

    def _demand(self, work: CollectiveWork) -> Mapping[str, float]:
        result = self._demands.get(work)
        if result is None:
            result = self._demands[work] = demand(work.kind, work.nbytes, work.link(self.links))
        return result

    def _of(self, sheet: Sheet) -> list[_Timed]:
        result = self._timed.get(id(sheet))
        if result is None:
            timed = [self._task(t)._replace(unpacks=_unpacks(t, sheet.tasks)) for t in sheet.tasks]
            timed = [t._replace(ahead=s) for t, s in zip(timed, _ahead(timed), strict=True)]
            result = self._timed[id(sheet)] = (sheet, timed)
        return result[1]

    def _task(self, task: OpTask) -> _Timed:
        work, cost = task.work, self.price(task.work) + task.views * self.habits.view
        if isinstance(work, Transfer):
            stream = 1 + len(self.sizes) + (not work.down)
            return _Timed(stream, cost, task.after, task.inputs, cost, cost, in_turn=work.down)
        if isinstance(work, HostWork):
            return _Timed(0, 0.0, task.after, task.inputs, 0.0, 0.0, issues=work.tasks, waits=work.waits)
        if not isinstance(work, CollectiveWork):
            return _Timed(0, cost, task.after, task.inputs, cost, cost, self._packs(task))
        wide = cost if self.widen == 1 else self.price(replace(work, nbytes=work.nbytes * self.widen))
        bare = cost / self.sizes[work.axis] if self.habits.beside else cost
        spec = spec_named(task.op)
        exchanges = spec is not None and spec.family == "experts"
        aside = self.habits.experts and exchanges
        ring = work.kind in HOPS
        return _Timed(
            *(1 + work.axis, cost, task.after, task.inputs, wide, bare),
            in_turn=task.turn,
            ring=ring,
            aside=aside,
            exchanges=exchanges,
        )

    @staticmethod
    def _packs(task: OpTask) -> bool:
        """Whether it makes a message of shards, which needs nothing that is computed if these are
        parameters."""
        spec = spec_named(task.op)
        gathers = spec is not None and spec.gathers
        return gathers and not task.after and isinstance(task.work, MemoryWork)


class _Timed(NamedTuple):
    stream: int
    cost: float
    after: tuple[int, ...]
    inputs: tuple[int, ...]
    as_gradient: float
    as_activation: float
    packs: bool = False
    in_turn: bool = False
    ring: bool = False
    unpacks: bool = False
    issues: int = 0
    waits: bool = False
    aside: bool = False
    exchanges: bool = False
    ahead: float = 0.0


def _ahead(timed: Sequence[_Timed]) -> list[float]:
    """Per task, seconds of computing from it on up to the next exchange of tokens that takes some time."""
    least = max((task.cost for task in timed if task.exchanges), default=0.0) / 10
    result, until = [0.0] * len(timed), 0.0
    for k in range(len(timed) - 1, -1, -1):
        task = timed[k]
        if task.exchanges and task.cost >= least:
            until = 0.0
        until += 0.0 if task.stream else task.cost
        result[k] = until
    return result


def _unpacks(task: OpTask, tasks: Sequence[OpTask]) -> bool:
    """Whether it copies what a message brought to where its results lie."""
    if not (spec_named(task.op) is not None and isinstance(task.work, MemoryWork) and task.after):
        return False
    before = tasks[task.after[-1]]
    message = isinstance(before.work, CollectiveWork) and before.work.kind not in HOPS
    return message and before.name == task.name


class _Unpacking(NamedTuple):
    """What is copied when a message that has been issued is waited for. arrived: when that is there."""

    number: int
    task: int
    cost: float
    arrived: float
    names: tuple[str, ...]


class _Run:
    """One part as it is played."""

    def __init__(
        self,
        habits: Habits,
        axes: int,
        spans: bool,
        links: int = 0,
        delayed: Mapping[Place, float] = MappingProxyType({}),
        *,
        together: bool = False,
    ) -> None:
        """links: streams of copies to host memory and from there. delayed: (step, task) -> seconds more.
        together: whether several parts take turns, so that they stop."""
        self.habits, self.axes, self.links, self.delayed = habits, axes, links, delayed
        self.together = together
        self.free = [0.0] * (1 + axes + links)
        self.busy = [0.0] * (1 + axes + links)
        #: per stream, the end of the last reduction, or store, of which one at a time is on its way
        self.last = [0.0] * (1 + axes + links)
        self.ready: dict[str, float] = {}
        self.fetched: set[str] = set()
        self.began: dict[int, float] = {}
        self.late: list[tuple[int, int, int, float]] = []
        self.cover, self.copies = _Cover(), _Cover()
        self.spans: list[TaskSpan] | None = [] if spans else None
        self.host = 0.0
        #: step -> when those of its tasks end that only gather parameters, if they were issued ahead of it
        self.ahead: dict[int, dict[int, float]] = {}
        #: value -> what makes it of a message that nothing has waited for yet
        self.pending: dict[str, _Unpacking] = {}

    def fetch(self, number: int, step: SegmentCall, timed: Sequence[_Timed]) -> None:
        """Issue what gathers the parameters of a step, when the step that is `AHEAD` before it has begun."""
        gate = self.began[number - AHEAD] if number >= AHEAD else 0.0
        taken = [self.ready.get(name, 0.0) for name in step.args]
        bare = [name in self.fetched for name in step.args]
        result = self.ahead[number] = {}
        for k, task in enumerate(timed):
            if not (task.stream or task.packs) or task.ring or task.stream > self.axes:
                continue
            if not (all(bare[i] for i in task.inputs) and all(d in result for d in task.after)):
                continue
            if task.cost:
                self.host += self.habits.dispatch
            start = max(gate, self.host, *(result[d] for d in task.after), *(taken[i] for i in task.inputs))
            if task.packs:  # of a shard: too short to be in the way of computing
                result[k] = start + task.cost
                self.busy[0] += task.cost
                if self.habits.blocking:
                    self.host = result[k]
            else:
                start = max(start, self.free[task.stream])
                result[k] = self._runs(number, k, task.stream, task.cost, start)

    def step(
        self, number: int, step: SegmentCall, timed: Sequence[_Timed], gradients: Collection[str]
    ) -> Iterator[Stop]:
        """Play it from stop to stop, of which one is before it begins; without any where it plays alone."""
        habits, free, ready = self.habits, self.free, self.ready
        stops = step.sheet.stops if self.together else ()
        if stops:
            arriving = [self.pending[name].arrived for name in step.args if name in self.pending]
            yield Stop(max(arriving, default=0.0), timed[0].ahead if timed else 0.0)
        issued = self.ahead.pop(number, {})
        if self.pending:
            self._wait(step.args)
        taken = [ready.get(name, 0.0) for name in step.args]
        bare = [name in self.fetched for name in step.args]
        last = {s for name, s in zip(step.outs, step.sheet.outs, strict=True) if name in gradients}
        end, pure = [0.0] * len(timed), [False] * len(timed)
        first = -1.0
        # copies that wait until something takes what they make
        unpacking: dict[int, float] = {}
        for k, task in enumerate(timed):
            stream, after, inputs = task.stream, task.after, task.inputs
            cost = task.cost
            for _ in range(stops[k] if stops else 0):
                wanted = [unpacking.get(d, end[d]) for d in after] + [taken[i] for i in inputs]
                yield Stop(max(wanted, default=0.0), task.ahead)
            if habits.late:
                if task.unpacks:
                    unpacking[k] = end[after[-1]]
                    continue
                if unpacking:
                    for d in after:
                        if d in unpacking:
                            end[d] = self._copy(number, d, timed[d].cost, unpacking.pop(d))
            if k in issued:
                pure[k], end[k] = True, issued[k]
                continue
            if cost:  # else it is done on the way by another kernel
                self.host += habits.dispatch
            start = max(free[stream], self.host)
            for d in after:
                if end[d] > start:
                    start = end[d]
            for i in inputs:
                if taken[i] > start:
                    start = taken[i]
            if task.waits:
                self.host = max(self.host, start)
            self.host += task.issues * habits.dispatch
            if not stream:
                pure[k] = task.packs and all(bare[i] for i in inputs)
                if first < 0:
                    first = start
            elif habits.late or task.ring:
                # what it sends has to be there when it is issued
                free[0] = max(free[0], *(end[d] for d in after), *(taken[i] for i in inputs), 0.0)
                if task.in_turn:
                    free[0] = max(free[0], self.last[stream])
                start = max(start, free[0])
                cost = task.as_gradient if k in last else cost
            else:
                pure[k] = all(bare[i] for i in inputs) and all(pure[d] for d in after)
                if pure[k]:
                    start = max(start, free[0])
                elif k in last:
                    cost = task.as_gradient
                    if not habits.behind:
                        self.late.append((number, k, stream, cost))
                        continue
                elif not step.loose:
                    cost, start = task.as_activation, max(start, free[0])
            if task.aside:
                end[k] = start = max(
                    self.host, free[0], *(end[d] for d in after), *(taken[i] for i in inputs)
                )
                self._runs(number, k, stream, cost, max(start, free[stream]))
                continue
            end[k] = self._runs(number, k, stream, cost, start)
            if task.in_turn:
                self.last[stream] = end[k]
            if stream and not (habits.late or task.ring) and (pure[k] or not (k in last or step.loose)):
                free[0] = max(free[0], end[k])
        for _ in range(stops[-1] if stops else 0):
            yield Stop(0.0, 0.0)
        self.began[number] = max(first, 0.0) if timed else free[0]
        for name, source in zip(step.outs, step.sheet.outs, strict=True):
            ready[name] = end[source] if source >= 0 else taken[~source]
        for d, arrived in unpacking.items():
            names = tuple(n for n, s in zip(step.outs, step.sheet.outs, strict=True) if s == d)
            self.pending |= dict.fromkeys(names, _Unpacking(number, d, timed[d].cost, arrived, names))

    def _wait(self, names: Iterable[str]) -> None:
        """Wait for the messages that bring these values."""
        for name in names:
            result = self.pending.get(name)
            if result is not None:
                end = self._copy(result.number, result.task, result.cost, result.arrived)
                for new in result.names:
                    del self.pending[new]
                    self.ready[new] = end

    def _copy(self, number: int, k: int, cost: float, arrived: float) -> float:
        """Copy what a message brought to where its results lie; when that is done."""
        if cost:
            self.host += self.habits.dispatch
        return self._runs(number, k, 0, cost, max(self.free[0], self.host, arrived))

    def _runs(self, number: int, k: int, stream: int, cost: float, start: float) -> float:
        if stream and self.delayed:
            cost += self.delayed.get((number, k), 0.0)
        end = start + cost
        if cost and self.habits.blocking:
            self.host = end
        self.free[stream] = end
        self.busy[stream] += cost
        if stream > self.axes:
            self.copies.message(start, end, stream - 1 - self.axes)
        elif stream:
            self.cover.message(start, end, stream - 1)
        else:
            self.cover.compute(start, end)
            if self.links:
                self.copies.compute(start, end)
        if self.spans is not None:
            self.spans.append(TaskSpan(number, k, stream, start, end))
        return end

    def end(self) -> Played:
        self._wait(list(self.pending))
        at = max(self.free)
        for number, k, stream, cost in self.late:
            at = self._runs(number, k, stream, cost, at)
        compute, axes = self.busy[0], self.busy[1:]
        behind = self.cover.both(self.axes)
        hidden = sum(behind)
        total = max(self.free) + (1.0 - self.habits.overlap) * hidden
        # what is bare of every axis, and what it costs the computing beside it
        bare = [a - self.habits.overlap * b for a, b in zip(axes, behind, strict=False)]
        # copies to host memory and back run on engines of their own
        copied = self.copies.both(self.links)
        bare += [max(0.0, a - b) for a, b in zip(axes[self.axes :], copied, strict=True)]
        talk = min(max(0.0, total - compute), sum(bare))
        share = talk / sum(bare) if sum(bare) > 0 else 0.0
        # a device that waits for its host is computing as well as it can
        exposed = tuple(b * share for b in bare)
        return Played(total, total - talk, exposed, hidden, tuple(self.spans or ()))


class _Cover:
    """Seconds in which messages run beside computing."""

    def __init__(self) -> None:
        self.computed: list[tuple[float, float]] = []
        self.sent: list[tuple[float, float, int]] = []

    def compute(self, start: float, end: float) -> None:
        if self.computed and self.computed[-1][1] == start:
            self.computed[-1] = (self.computed[-1][0], end)
        elif end > start:
            self.computed.append((start, end))

    def message(self, start: float, end: float, axis: int) -> None:
        if end > start:
            self.sent.append((start, end, axis))

    def both(self, axes: int) -> list[float]:
        """Per axis."""
        result, k = [0.0] * axes, 0
        at = 0.0
        for start, end, axis in sorted(self.sent):
            start = max(start, at)  # messages of two axes at once count once
            if end <= start:
                continue
            at = end
            while k and self.computed[k - 1][1] > start:
                k -= 1
            while k < len(self.computed) and self.computed[k][1] <= start:
                k += 1
            j = k
            while j < len(self.computed) and self.computed[j][0] < end:
                result[axis] += min(end, self.computed[j][1]) - max(start, self.computed[j][0])
                j += 1
        return result
