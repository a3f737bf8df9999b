"""Collectives between ranks that are threads: matched, computed, recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from autoshard.auditing.rank_threads import RankThreads, Waiting, current_rank
from autoshard.auditing.recording import Recorder, Sample, sample
from autoshard.capture.origins import CodeLine
from autoshard.errors import UsageError
from autoshard.torch_adapters.threaded_groups import ThreadedGroup

_SUMS = ("sum", "avg")


@dataclass(frozen=True)
class CollectiveCall:
    """What a rank asks of a collective. sent: copies of what it gives. received: where results go."""

    kind: str
    line: CodeLine
    sent: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]
    reduction: str
    root: int | None
    original: tuple[torch.Tensor, ...]
    given: tuple[Sample, ...]
    outer: CodeLine

    def text(self) -> str:
        """For people: ``all_reduce(sum) of f64[4, 8]``."""
        reduction = f"({self.reduction})" if self.reduction else ""
        shapes = ", ".join(f"{_dtype(x)}{list(x.shape)}" for x in (self.sent or self.received)[:3])
        return f"{self.kind}{reduction} of {shapes}" if shapes else self.kind


@dataclass
class Meeting:
    """A collective of a group: what its ranks ask, by position, until all have."""

    ranks: tuple[int, ...]
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    over: bool = False


class Mismatch(Exception):
    """Ranks of a group are in different collectives. calls: rank, what it asks, its line."""

    def __init__(self, why: str, calls: tuple[tuple[int, str, str], ...]) -> None:
        super().__init__(why)
        self.why, self.calls = why, calls


Reduction: TypeAlias = "Callable[[list[torch.Tensor], str], torch.Tensor]"


@dataclass
class Mailbox:
    """The messages from one rank to another. messages: not taken, by number, with the line of the sender."""

    messages: dict[int, tuple[torch.Tensor, CodeLine]] = field(default_factory=dict)
    _sent: int = 0
    _asked: int = 0

    def add(self, message: torch.Tensor, line: CodeLine) -> None:
        """One more."""
        self.messages[self._sent] = message, line
        self._sent += 1

    def turn(self) -> int:
        """The number of the message that the next receive gets."""
        self._asked += 1
        return self._asked - 1

    def has(self, number: int | None) -> bool:
        """Whether a message is there; None: one that no receive has asked for yet."""
        return self._sent > (self._asked if number is None else number)

    def take(self, number: int) -> tuple[torch.Tensor, CodeLine]:
        """A message that is there."""
        return self.messages.pop(number)


@dataclass
class Rendezvous:
    """Carries the messages of all ranks (a `torch_adapters.threaded_groups.Exchange`).

    reduction: makes one tensor of those that ranks give to a reduction of a name.
    """

    threads: RankThreads
    recorders: Sequence[Recorder]
    reduction: Reduction
    _meetings: dict[tuple[Any, int], Meeting] = field(default_factory=dict)
    _counts: dict[tuple[Any, int], int] = field(default_factory=lambda: defaultdict(int))
    _mail: dict[tuple[Any, int, int, int], Mailbox] = field(default_factory=lambda: defaultdict(Mailbox))

    def collective(
        self,
        group: ThreadedGroup,
        kind: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        **how: Any,
    ) -> Callable[[], None]:
        """Take part in a group's next collective. Returns what waits for its end.

        how: ``reduction``, of torch, and ``root``, a position in the group, if the kind has them.
        """
        with self.recorders[current_rank()].pause():
            return self._collective(group, kind, sent, received, **how)

    def _collective(
        self,
        group: ThreadedGroup,
        kind: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        reduction: Any = None,
        root: int | None = None,
    ) -> Callable[[], None]:
        rank, recorder = current_rank(), self.recorders[current_rank()]
        key = (group.ranks, group.pg_name)
        number = self._counts[(key, rank)]
        self._counts[(key, rank)] += 1
        meeting = self._meetings.setdefault((key, number), Meeting(group.ranks))
        call = CollectiveCall(
            kind,
            recorder.line(outer=True),
            tuple(x.detach().clone() for x in sent),
            tuple(received),
            _reduction_name(reduction),
            root,
            tuple(sent),
            tuple(sample(x) for x in sent if x.is_floating_point() and x.numel()),
            recorder.backward_line(),
        )
        meeting.calls[group.position] = call
        if len(meeting.calls) == len(group.ranks):
            del self._meetings[(key, number)]
            self._finish(meeting)

        def wait() -> None:
            if not meeting.over:
                what = f"{call.text()} over ranks {', '.join(map(str, meeting.ranks))}"
                self.threads.wait(Waiting(lambda: meeting.over, what, str(call.line)))

        return wait

    def send(self, group: ThreadedGroup, tensor: torch.Tensor, to: int, tag: int) -> Callable[[], None]:
        """Lay a message down for another rank. Never waits."""
        recorder = self.recorders[current_rank()]
        line = recorder.line(outer=True)
        with recorder.pause():
            self._mail[(group.ranks, group.position, to, tag)].add(tensor.detach().clone(), line)
        recorder.collective("send", line, [tensor], [], ranks=(group.ranks[to],))
        return lambda: None

    def receive(
        self, group: ThreadedGroup, tensor: torch.Tensor, source: int | None, tag: int
    ) -> Callable[[], None]:
        """Take the next message of a rank, or of any: the first receive the first message, in whatever order
        they are waited for."""
        recorder, sources = self.recorders[current_rank()], _sources(group, source)
        line = recorder.line(outer=True)
        done: list[bool] = []
        boxes = [self._mail[(group.ranks, k, group.position, tag)] for k in sources]
        turn = boxes[0].turn() if len(boxes) == 1 else None

        def wait() -> None:
            if done:
                return
            names = ", ".join(str(group.ranks[k]) for k in sources)
            what = f"a message from rank {names}" + (f" with tag {tag}" if tag else "")
            self.threads.wait(Waiting(lambda: any(box.has(turn) for box in boxes), what, str(line)))
            box = next(box for box in boxes if box.has(turn))
            message, sender_line = box.take(box.turn() if turn is None else turn)
            done.append(True)
            if message.numel() != tensor.numel() or message.dtype != tensor.dtype:
                me = current_rank()
                raise Mismatch(
                    f"a message has {_dtype(message)}{list(message.shape)}, its receiver takes "
                    f"{_dtype(tensor)}{list(tensor.shape)}",
                    ((group.ranks[sources[0]], "send", str(sender_line)), (me, "receive", str(line))),
                )
            with recorder.pause():
                _write(tensor, message)
            recorder.collective("receive", line, [], [tensor], sender=sender_line)

        return wait

    def unread(self) -> list[tuple[int, int, str]]:
        """Messages that no rank took: sender, receiver, line of the sender."""
        return [
            (ranks[source], ranks[to], str(line))
            for (ranks, source, to, _), box in self._mail.items()
            for _, line in box.messages.values()
        ]

    def unfinished(self) -> list[tuple[Meeting, list[int]]]:
        """Collectives that some ranks never came to, with these ranks."""
        return [
            (m, [rank for k, rank in enumerate(m.ranks) if k not in m.calls]) for m in self._meetings.values()
        ]

    def _finish(self, meeting: Meeting) -> None:
        calls = [meeting.calls[k] for k in range(len(meeting.ranks))]
        _check(meeting, calls)
        alike = len(calls) > 1 and _alike(calls)
        for position, (call, results) in enumerate(zip(calls, _results(calls, self.reduction), strict=True)):
            for target, value in zip(call.received, results, strict=False):
                _write(target, value)
            self.recorders[meeting.ranks[position]].collective(
                call.kind,
                call.line,
                call.original,
                call.received,
                given=call.given,
                ranks=meeting.ranks,
                reduction=call.reduction,
                alike=alike,
                outer=call.outer,
            )
        meeting.over = True


def _sources(group: ThreadedGroup, source: int | None) -> list[int]:
    return [source] if source is not None else [k for k in range(group.size()) if k != group.position]


def _reduction_name(reduction: Any) -> str:
    if reduction is None:
        return ""
    kinds = {name.lower(): getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")}
    for name, kind in kinds.items():
        if reduction == kind:
            return name
    return str(reduction)


def _check(meeting: Meeting, calls: list[CollectiveCall]) -> None:
    """Raise Mismatch where the ranks of a group do not ask the same."""
    told = tuple((meeting.ranks[k], call.text(), str(call.line)) for k, call in enumerate(calls))
    if len({call.kind for call in calls}) > 1:
        raise Mismatch("ranks of a group are in different collectives", told)
    if len({call.reduction for call in calls}) > 1:
        raise Mismatch("ranks of a group reduce in different ways", told)
    if len({call.root for call in calls}) > 1:
        raise Mismatch("ranks of a group name different source ranks", told)
    if calls[0].kind in ("all_reduce", "reduce", "all_gather", "reduce_scatter", "broadcast"):
        sizes = {tuple((x.numel(), x.dtype) for x in call.sent) for call in calls}
        uneven = calls[0].kind in ("all_gather", "reduce_scatter")
        if len({tuple(d for _, d in each) for each in sizes}) > 1:
            raise Mismatch("ranks of a group send different types", told)
        if len(sizes) > 1 and not uneven:
            raise Mismatch("ranks of a group send different sizes", told)
    if calls[0].kind == "all_gather":
        for call in calls:
            if len(call.received) == len(calls) * len(call.sent):
                wanted = [x.numel() for x in call.received[: len(calls)]]
                if wanted != [other.sent[0].numel() for other in calls]:
                    raise Mismatch("ranks of a group gather other sizes than are sent", told)
    if calls[0].kind == "all_to_all":
        for k, call in enumerate(calls):
            for j, other in enumerate(calls):
                if call.sent[j].numel() != other.received[k].numel():
                    raise Mismatch(
                        f"rank {meeting.ranks[k]} sends {call.sent[j].numel()} elements to rank "
                        f"{meeting.ranks[j]}, which takes {other.received[k].numel()}",
                        told,
                    )


def _alike(calls: list[CollectiveCall]) -> bool:
    """Whether all ranks give the same values, which are not zeros."""
    first = calls[0].given
    if not first or any(len(call.given) != len(first) for call in calls):
        return False
    for k, one in enumerate(first):
        if any(other.given[k].shape != one.shape for other in calls):
            return False
        if any(not np.allclose(call.given[k].values, one.values, rtol=1e-9, atol=0) for call in calls):
            return False
    return any(one.values.any() for one in first)


def _results(calls: list[CollectiveCall], reduction: Reduction) -> list[list[torch.Tensor]]:
    """What every rank receives."""
    kind, ways = calls[0].kind, len(calls)
    if kind == "barrier":
        return [[] for _ in calls]
    if kind in ("all_reduce", "reduce"):
        sums = [reduction([c.sent[i] for c in calls], calls[0].reduction) for i in range(len(calls[0].sent))]
        return [sums if kind == "all_reduce" or calls[0].root == k else [] for k in range(ways)]
    if kind == "broadcast":
        return [list(calls[calls[0].root or 0].sent)] * ways
    if kind == "all_gather":
        every = [c.sent[i] for i in range(len(calls[0].sent)) for c in calls]
        return [every] * ways
    if kind == "gather":
        return [[c.sent[0] for c in calls] if calls[0].root == k else [] for k in range(ways)]
    if kind == "scatter":
        root = calls[calls[0].root or 0]
        return [[root.sent[k]] for k in range(ways)]
    if kind == "reduce_scatter":
        return [
            [
                reduction([c.sent[i * ways + k] for c in calls], calls[0].reduction)
                for i in range(len(calls[k].received))
            ]
            for k in range(ways)
        ]
    assert kind == "all_to_all", kind
    return [[c.sent[k] for c in calls] for k in range(ways)]


def reduced(parts: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """The result of a reduction, of numbers."""
    stacked = torch.stack(parts)
    if reduction in _SUMS:
        total = stacked.sum(0) if stacked.dtype is not torch.bool else stacked.any(0)
        return total / len(parts) if reduction == "avg" else total
    if reduction == "max":
        return stacked.amax(0)
    if reduction == "min":
        return stacked.amin(0)
    if reduction == "product":
        return stacked.prod(0)
    raise UsageError(f"an audit cannot reduce by {reduction}", hint="SUM, AVG, MAX, MIN or PRODUCT")


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        target.detach().copy_(value.reshape(target.shape).to(target.dtype))


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
