"""When a pipeline schedule computes and sends, and what its ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from autoshard.errors import UsageError, VerificationError
from autoshard.schedules.schedule import Action, Kind, Schedule
from autoshard.schedules.sends import Send, SendState
from autoshard.schedules.sharing import Sharing, share
from autoshard.schedules.steps import KINDS, turns_of


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of the stages of a pipeline, for one microbatch each.

    Of a schedule with slices, for one slice each: slice c of stage s stands at s * slices + c, as does what
    is sent from and to stage s for it.

    forward, backward, backward_input, backward_weight: seconds per stage.
    send_forward: seconds from stage s to s+1; send_backward: from s+1 to s; one less than stages each.
    Between stages of one rank nothing is sent, whatever stands here.
    held: bytes a stage keeps from the start of a forward to the end of its backward.
    held_weight: the part of it still kept between the end of the input gradient and that of the weight one.
    base: bytes per rank of everything else. update: seconds at the end of the step, per rank.
    made_weight: bytes that the input gradient makes and the weight one needs, kept from the end of the one to
    that of the other, per stage; () for none.
    sharing: which ranks share processors, of which those that compute have more while others wait; seconds
    are then those of all ranks computing. None: no rank does.
    paired: (stage of a forward, stage of a backward) -> seconds in which both run as one; their sum where
    nothing stands.
    freed: with slices, bytes that the end of a backward frees, which may be more or less than its forward
    added; () for as many.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]
    held: tuple[float, ...]
    held_weight: tuple[float, ...]
    base: tuple[float, ...]
    update: tuple[float, ...]
    made_weight: tuple[float, ...] = ()
    sharing: Sharing | None = None
    paired: Mapping[tuple[int, int], float] = field(default_factory=dict)
    freed: tuple[float, ...] = ()

    @cached_property
    def seconds(self) -> dict[Kind, tuple[float, ...]]:
        """Of every kind of action, per stage or slice of one."""
        return {
            "F": self.forward,
            "B": self.backward,
            "I": self.backward_input,
            "W": self.backward_weight,
        }

    @cached_property
    def changes(self) -> dict[Kind, list[float]]:
        """Bytes that every kind of action adds to what is in flight, per stage or slice of one."""
        new = self.made_weight or (0.0,) * len(self.held)
        kept = [a + b for a, b in zip(self.held_weight, new, strict=True)]
        return {
            "F": list(self.held),
            "B": [-h for h in self.freed or self.held],
            "I": [-(h - k) for h, k in zip(self.held, kept, strict=True)],
            "W": [-k for k in kept],
        }

    @classmethod
    def uniform(
        cls,
        ranks: int,
        chunks: int = 1,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        send: float = 0.0,
        held: float = 1.0,
        slices: int = 1,
    ) -> StageCosts:
        """Equal stages. Seconds and bytes are those of a full rank: its chunks and slices have equal shares.

        A full backward takes as long as its two parts; a send takes `send` seconds whatever the chunks.
        All of `held` is kept until the weight gradient. No base, no update.
        """
        n, parts = ranks * chunks * slices, chunks * slices
        full = backward_input + backward_weight
        f, b, i, w, h = ((x / parts,) * n for x in (forward, full, backward_input, backward_weight, held))
        sends, nothing = (send,) * (n - slices), (0.0,) * ranks
        return cls(f, b, i, w, sends, sends, held=h, held_weight=h, base=nothing, update=nothing)

    def per_microbatch(self, slices: int) -> StageCosts:
        """The same per stage, all slices of a microbatch together; messages one after the other."""

        def summed(x: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(x[k : k + slices]) for k in range(0, len(x), slices))

        return StageCosts(
            summed(self.forward),
            summed(self.backward),
            summed(self.backward_input),
            summed(self.backward_weight),
            summed(self.send_forward),
            summed(self.send_backward),
            summed(self.held),
            summed(self.held_weight),
            self.base,
            self.update,
            summed(self.made_weight),
            self.sharing,
            self.paired,
        )


class ActionSpan(NamedTuple):
    """One action of a rank, seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    spans: what each rank computes, in order. sends: all transfers, each pair of ranks in order.
    makespan: seconds until the last rank has updated. busy: seconds per rank of computing and updating, where
    ranks share processors at the speed of all computing.
    update: seconds at the end of the step, per rank. peak: bytes per rank.
    curve: per rank, (seconds, bytes held from then on).
    """

    name: str
    owner: tuple[int, ...]
    spans: tuple[tuple[ActionSpan, ...], ...]
    sends: tuple[Send, ...]
    makespan: float
    busy: tuple[float, ...]
    update: tuple[float, ...]
    peak: tuple[float, ...]
    curve: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.spans)

    @property
    def bubble(self) -> float:
        """Share of the makespan that a rank is idle, averaged over ranks; 0 for a step of no time."""
        if not self.makespan:
            return 0.0
        return 1.0 - sum(self.busy) / self.ranks / self.makespan

    @property
    def gaps(self) -> tuple[float, ...]:
        """Idle seconds per rank between its first action and its last.

        This is the bubble of Qi et al. (2023, section 4): their ranks need not end a step together, so that
        the late start of a rank is made good by its late end. The makespan counts both, and it alone
        matters where all ranks wait for each other before they update, as for clipping by the global norm.
        """
        return tuple(
            row[-1].end - row[0].start - sum(s.end - s.start for s in row) if row else 0.0
            for row in self.spans
        )


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """The timeline of a schedule.

    Ranks compute one action at a time, in their order, as soon as what it needs is there. Sends overlap
    with computing; those from one rank to another take turns, in the order in which they were made. A rank
    updates when its own list is done, without waiting for others. Of two actions that run as one, the spans
    are drawn one after the other.

    Raises UsageError if the costs do not suit the schedule or are below zero, VerificationError if ranks wait
    for each other.
    """
    starts: list[list[float]] = [[] for _ in schedule.actions]
    through: list[list[float]] = [[] for _ in schedule.actions]
    sends: list[Send] = []
    ends = _play(schedule, costs, starts, through, sends)
    spans = tuple(
        tuple(ActionSpan(a, t, u) for a, t, u in zip(row, at, until, strict=True))
        for row, at, until in zip(schedule.actions, starts, through, strict=True)
    )
    curves = tuple(_curve(schedule, row, costs, base) for row, base in zip(spans, costs.base, strict=True))
    return Timeline(
        name=schedule.name,
        owner=schedule.owner,
        spans=spans,
        sends=tuple(sends),
        makespan=max(ends),
        busy=tuple(
            sum(turn_seconds(schedule, costs, turn) for turn in row) + update
            for row, update in zip(schedule.turns, costs.update, strict=True)
        ),
        update=costs.update,
        peak=peak_bytes(schedule, costs),
        curve=curves,
    )


def makespan(schedule: Schedule, costs: StageCosts) -> float:
    """Seconds of `simulate`, without its lists. Raises what `simulate` raises."""
    return max(_play(schedule, costs, None, None, None))


def step_seconds(schedule: Schedule, costs: StageCosts, apart: bool = False) -> float:
    """Seconds of one of many steps: the makespan, or what the slowest rank takes from its first action to its
    last, where ranks begin the next step without waiting for each other (apart; Qi et al., Zero Bubble
    Pipeline Parallelism, 2023, section 4)."""
    if not apart:
        return makespan(schedule, costs)
    starts: list[list[float]] = [[] for _ in schedule.actions]
    ends = _play(schedule, costs, starts, None, None)
    return max(end - (row[0] if row else 0.0) for end, row in zip(ends, starts, strict=True))


def least_makespan(schedule: Schedule, costs: StageCosts) -> float:
    """Seconds that `makespan` does not go below, but for rounding, without playing anything.

    A rank computes all microbatches of its stages, which it cannot begin before the first one has come down
    to its first stage; from its last action on, unless that is a weight gradient, a gradient has to go up.
    Of slices of a sequence nothing is known (0); ranks that share processors may be as fast as one alone.
    Raises UsageError if the costs do not suit the schedule.
    """
    _check_costs(schedule, costs)
    if schedule.slices > 1:
        return 0.0
    owner = schedule.owner
    full = back = costs.backward
    if schedule.splits_backward:  # some stages may split it, others not
        parts = [a + b for a, b in zip(costs.backward_input, costs.backward_weight, strict=True)]
        full = tuple(min(pair) for pair in zip(costs.backward, parts, strict=True))
        back = tuple(min(pair) for pair in zip(costs.backward, costs.backward_input, strict=True))
    each = [f + b for f, b in zip(costs.forward, full, strict=True)]
    if schedule.paired:  # the most that pairs can save
        for (f, b), both in costs.paired.items():
            each[f] = min(each[f], costs.forward[f] + full[f] - max(0.0, costs.forward[f] + full[b] - both))
    sent = [float(a != b) for a, b in pairwise(owner)]  # between stages of one rank nothing is sent
    result = [0.0]
    for rank, row in enumerate(schedule.actions):
        if not row:
            continue
        first, last = row[0], row[-1]
        work = schedule.microbatches * sum(x for x, own in zip(each, owner, strict=True) if own == rank)
        above = range(first.stage if first.kind == "F" else 0)
        down = sum(costs.forward[s] + sent[s] * costs.send_forward[s] for s in above)
        above = range(last.stage if last.kind in "BI" else 0)
        up = sum(back[s] + sent[s] * costs.send_backward[s] for s in above)
        result.append(down + work + up + costs.update[owner[0] if above else rank])
    return max(result) / (costs.sharing.alone if costs.sharing is not None else 1.0)


def peak_bytes(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """Per rank, the most bytes it holds at once. A rank computes one thing at a time, so this depends on
    the order alone, not on when. Raises UsageError if the costs do not suit the schedule."""
    _check_costs(schedule, costs)
    return tuple(
        max(base, base + max(in_flight_bytes(schedule, row, costs), default=0.0))
        for row, base in zip(schedule.actions, costs.base, strict=True)
    )


def _at(schedule: Schedule, action: Action) -> int:
    """Where the costs of an action stand."""
    return action.stage * schedule.slices + action.slice


def in_flight_bytes(schedule: Schedule, row: Sequence[Action], costs: StageCosts) -> Iterator[float]:
    """Bytes in flight after each change, in order: at the start of a forward, at the end of the others."""
    changes, slices = costs.changes, schedule.slices
    steps = [changes[a.kind][a.stage * slices + a.slice] for a in row]
    return islice(accumulate(steps, initial=0.0), 1, None)


def _curve(
    schedule: Schedule, row: Sequence[ActionSpan], costs: StageCosts, base: float
) -> tuple[tuple[float, float], ...]:
    steps = in_flight_bytes(schedule, [span.action for span in row], costs)
    changes = (
        (s.start if s.action.kind == "F" else s.end, base + b) for s, b in zip(row, steps, strict=True)
    )
    return ((0.0, base), *changes)


def turn_seconds(schedule: Schedule, costs: StageCosts, turn: Sequence[Action]) -> float:
    """Of one action, or of two that run as one."""
    both = costs.paired.get((turn[0].stage, turn[-1].stage)) if len(turn) > 1 else None
    if both is not None:
        return both
    return sum(costs.seconds[action.kind][_at(schedule, action)] for action in turn)


def _check_costs(schedule: Schedule, costs: StageCosts) -> None:
    stages, ranks = schedule.stages, schedule.ranks
    units, hops = stages * schedule.slices, (stages - 1) * schedule.slices
    expected = dict.fromkeys(
        ("forward", "backward", "backward_input", "backward_weight", "held", "held_weight"), units
    )
    expected |= {"send_forward": hops, "send_backward": hops, "base": ranks, "update": ranks}
    expected |= {name: units for name in ("made_weight", "freed") if getattr(costs, name)}
    for name, length in expected.items():
        if len(getattr(costs, name)) != length:
            raise UsageError(
                f"costs.{name} has {len(getattr(costs, name))} numbers, not {length}",
                where=f"schedule {schedule.name}: {stages} stages on {ranks} ranks",
            )
        signed = costs.freed and name in ("held", "freed")  # of what other slices left
        if not signed and not all(x >= 0 for x in getattr(costs, name)):
            raise UsageError(f"costs.{name} has a number below zero", where=f"schedule {schedule.name}")
    split = not costs.freed
    if split and any(kept > held for kept, held in zip(costs.held_weight, costs.held, strict=True)):
        raise UsageError(
            "a stage keeps more for its weight gradient than it holds at all",
            where=f"schedule {schedule.name}",
            why="costs.held_weight is a part of costs.held",
        )


def _play(
    schedule: Schedule,
    costs: StageCosts,
    starts: list[list[float]] | None,
    through: list[list[float]] | None,
    sends: list[Send] | None,
) -> list[float]:
    """Seconds at which each rank is done; when actions start and end, and sends, are written to the lists
    given.

    Every rank goes on until it needs something that has no time yet; whoever gives it wakes the rank.
    """
    _check_costs(schedule, costs)
    steps, seconds = schedule.steps, costs.seconds
    row_of_all = [x for kind in KINDS for x in seconds[kind]]
    wires = SendState(schedule, row_of_all, (*costs.send_forward, *costs.send_backward), sends)
    if costs.sharing is not None:
        shared = share(steps, costs.sharing, costs.update, wires)
        _check_done(schedule, [len(row) for row in shared.ends])
        for given, new in ((starts, shared.starts), (through, shared.ends)):
            if given is not None:
                given[:] = map(list, new)
        return list(shared.done)
    if schedule.paired:
        clock = _play_turns(schedule, costs, wires, starts, through)
        return [end + update for end, update in zip(clock, costs.update, strict=True)]
    clock, at = [0.0] * schedule.ranks, [0] * schedule.ranks
    blocked = bytearray(schedule.ranks)
    queue = list(range(schedule.ranks))
    # what `SendState` does one by one, since schedules have up to a million actions
    there, over, free, spent, messages = wires.there, wires.over, wires.free, wires.spent, wires.messages
    while queue:
        rank = queue.pop()
        blocked[rank] = 0
        row, k, now = steps[rank], at[rank], clock[rank]
        mine = starts[rank] if starts is not None else None
        until = through[rank] if through is not None else None
        count = len(row)
        while k < count:
            costs_at, needs, behind, done, gives, receiver, pair, link, action = row[k]
            start = there[needs]
            if start < 0.0 or not over[behind]:
                break
            if start < now:
                start = now
            now = start + spent[costs_at]
            if mine is not None:
                mine.append(start)
            if until is not None:
                until.append(now)
            k += 1
            over[done] = 1
            if receiver < 0:
                if gives >= 0:
                    there[gives] = now
                continue
            leaves = free[pair]
            if leaves < now:
                leaves = now
            there[gives] = free[pair] = arrives = leaves + messages[link]
            if sends is not None:
                sends.append(Send(action, rank, receiver, leaves, arrives))
            if blocked[receiver]:
                blocked[receiver] = 0
                queue.append(receiver)
        at[rank], clock[rank] = k, now
        blocked[rank] = k < count
    _check_done(schedule, at)
    return [end + update for end, update in zip(clock, costs.update, strict=True)]


def _play_turns(
    schedule: Schedule,
    costs: StageCosts,
    wires: SendState,
    starts: list[list[float]] | None,
    through: list[list[float]] | None,
) -> list[float]:
    """The same of a schedule with pairs, which begin when both actions can and are done at once."""
    turns, clock, at = turns_of(schedule), [0.0] * schedule.ranks, [0] * schedule.ranks
    queue, blocked = list(range(schedule.ranks)), bytearray(schedule.ranks)
    while queue:
        rank = queue.pop()
        blocked[rank] = 0
        for turn in turns[rank][at[rank] :]:
            ready = [wires.ready(step) for step in turn]
            if min(ready) < 0.0:
                blocked[rank] = 1
                break
            begin = max(clock[rank], *ready)
            both = turn_seconds(schedule, costs, [step.action for step in turn])
            at[rank], clock[rank] = at[rank] + 1, begin + both
            alone = [wires.seconds(step) for step in turn]
            for step, own in zip(turn, alone, strict=True):
                end = clock[rank] if step is turn[-1] else begin + both * (own / sum(alone) if own else 0.0)
                if starts is not None:
                    starts[rank].append(begin)
                if through is not None:
                    through[rank].append(end)
                begin = end
                receiver = wires.made(step, clock[rank])
                if receiver >= 0 and blocked[receiver]:
                    blocked[receiver] = 0
                    queue.append(receiver)
    _check_done(schedule, [sum(map(len, row[:k])) for row, k in zip(turns, at, strict=True)])
    return clock


def _check_done(schedule: Schedule, at: Sequence[int]) -> None:
    """VerificationError unless every rank has come to the end of its list. at: where each stands."""
    for rank, row in enumerate(schedule.actions):
        if at[rank] < len(row):
            raise VerificationError(
                f"{row[at[rank]]} waits forever",
                where=f"schedule {schedule.name}, rank {rank}, {row[at[rank]]}",
                why="what it needs comes later, or nowhere, in the lists of the schedule",
            )
