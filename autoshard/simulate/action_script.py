"""What an action of a rank makes and frees, block by block: `transients` has the same as a level of bytes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile

from autoshard.ir import Call
from autoshard.ir.lowered import Instruction, StagePart, uses_of
from autoshard.simulate.caching_allocator import Event
from autoshard.simulate.in_flight import OnTheWay
from autoshard.simulate.node_bytes import NodeBytes, Taken, gone_after, rows_of, taken_by
from autoshard.simulate.saved_for_backward import Storage
from autoshard.simulate.segment_work import Sheets
from autoshard.simulate.transients import Transients


@dataclass(frozen=True)
class Script:
    """events: of names that mean one microbatch each. left: what is still there as the action ends."""

    events: tuple[Event, ...] = ()
    left: tuple[Hashable, ...] = ()

    @cached_property
    def fullest(self) -> int:
        """Place of the event after which most bytes are there."""
        sizes, now, levels = dict[Hashable, float](), 0.0, list[float]()
        for name, size in self.events:
            now -= sizes.pop(name, 0.0)
            if size is not None:
                sizes[name] = size
                now += size
            levels.append(now)
        return levels.index(max(levels)) if levels else -1


class _InFlight:
    """Messages on their way, by the number of the block that each takes, in the order in which they left."""

    def __init__(self) -> None:
        self.messages: dict[int, OnTheWay] = {}
        self._turns: dict[str, list[int]] = {}
        #: value -> messages that bring it, some of which may have arrived
        self._bringing: dict[str, list[int]] = {}

    def send(self, block: int, message: OnTheWay) -> None:
        self.messages[block] = message
        self._turns.setdefault(message.turn, []).append(block)
        self._bring(block, message.outs)

    def due(self, needed: Collection[str], turn: str) -> list[int]:
        """Those that bring what is needed, or whose turn it is."""
        if not self.messages:
            return []
        blocks = {n for value in needed for n in self._bringing.get(value, ())}
        blocks.update(self._turns.get(turn, ()) if turn else ())
        return sorted(blocks & self.messages.keys())

    def enter(self) -> tuple[dict[str, list[int]], int]:
        """Go into a call, whose values have names of their own: what is on its way brings nothing that they
        need. The result is for `leave`."""
        before, self._bringing = self._bringing, {}
        return before, next(reversed(self.messages), -1)

    def leave(self, before: tuple[dict[str, list[int]], int], names: Mapping[str, str]) -> None:
        """names: of values of the call, by which they are known outside."""
        self._bringing, last = before
        for block in takewhile(lambda n: n > last, reversed(self.messages)):
            self._bring(block, (names[o] for o in self.messages[block].outs if o in names))

    def _bring(self, block: int, values: Iterable[str]) -> None:
        for value in values:
            self._bringing.setdefault(value, []).append(block)


class ScriptWriter:
    """Writes the scripts of a rank's actions. storage: of the values of main, on that rank."""

    def __init__(self, transients: Transients, sheets: Sheets, storage: Mapping[str, Storage]) -> None:
        self.transients, self.sheets, self.storage = transients, sheets, storage
        self.lowered = transients.program.lowered
        self.lying = frozenset(storage[v] for v in transients.summed if v in storage)
        self._rows: dict[tuple[str, frozenset[str]], tuple[NodeBytes, ...]] = {}

    def script(self, parts: Sequence[StagePart], kind: str, kept: Collection[Storage]) -> Script:
        """kept: by kernels, or by what is read later: of a forward what stays, of others what they find."""
        return _Writing(self, parts, kind, kept).script() if parts else Script()

    def rows(self, segment: str, lying: frozenset[str]) -> tuple[NodeBytes, ...]:
        """The ops of a segment."""
        key = (segment, lying)
        if key not in self._rows:
            self._rows[key] = rows_of(segment, self.lowered.segments[segment], lying, self.sheets)
        return self._rows[key]


class _Writing:
    def __init__(
        self, writer: ScriptWriter, parts: Sequence[StagePart], kind: str, kept: Collection[Storage]
    ) -> None:
        self.writer, self.parts, self.kind = writer, parts, kind
        self.storage, self.transients = writer.storage, writer.transients
        main = writer.lowered.main
        self.items = [(n, main[n]) for part in parts for n in range(part.start, part.stop)]
        framework, forward = writer.sheets.keeping is not None, kind == "F"
        stays = kept if framework and forward else self.transients.staying(parts, kind, self.storage)
        self.dying = self._dying(frozenset(stays))
        if framework and not forward:
            self._with_kernels(kept)
        self.kept = {own[0] for own in kept} if forward else set[object]()
        self.events: list[Event] = []
        self.live: dict[Hashable, None] = {}
        self.way = _InFlight()
        #: what a call let go of before it ended
        self.gone: set[Storage] = set()
        self.blocks = count()

    def script(self) -> Script:
        there, arriving = self.transients.entering(self.parts, self.kind, self.storage)
        for own in _ordered(arriving):
            self.make_storage(own)
        ahead = 0.0 if self.kind == "end" else self.transients.ahead(self.parts)
        self.make("ahead", ahead)
        for k, (number, item) in enumerate(self.items):
            self.arrive(self.way.due(uses_of(item), ""))
            new = [self.storage[v] for v in item.outs]
            if isinstance(item, Call):
                held = self.transients.freeable(self.kind, there)
                here = [own for own in self.dying.get(k, ()) if own[0] in self.live or own in held]
                moved = self.transients.moved(item, self.storage, here)
                self.call(number, item, {own[0] for own in new} | self.kept, moved)
            for own in new:
                if own not in there:
                    self.make_storage(own)
            if not isinstance(item, Call):
                self.issue(taken_by(item, self.writer.lowered.values, self.writer.sheets))
            for own in self.dying.get(k, ()):
                if own not in self.gone:
                    self.drop(own[0])
        self.arrive(list(self.way.messages))
        self.drop("ahead")
        return Script(tuple(self.events), tuple(self.live))

    def _dying(self, stays: Collection[Storage]) -> dict[int, list[Storage]]:
        """Place of an instruction -> what it is the last to use."""
        last = {self.storage[v]: k for k, (_, item) in enumerate(self.items) for v in _names(item)}
        dying: dict[int, list[Storage]] = {}
        for each, k in last.items():
            if each not in stays:
                dying.setdefault(k, []).append(each)
        return dying

    def _with_kernels(self, kept: Collection[Storage]) -> None:
        """What kernels keep of a forward call goes when the last of what the program keeps of it does."""
        ends: dict[object, int] = {}
        for k, gone in self.dying.items():
            for what, _ in gone:
                if isinstance(what, tuple):
                    ends[what[0]] = max(k, ends.get(what[0], k))
        for own in _ordered(kept):
            if isinstance(own[0], tuple) and own[0][0] in ends:
                self.dying[ends[own[0][0]]].append(own)

    # -- blocks ----------------------------------------------------------------------------------------

    def make(self, name: Hashable, size: float) -> None:
        if size > 0 and name not in self.live:
            self.live[name] = None
            self.events.append((name, size))

    def make_storage(self, own: Storage) -> None:
        if own not in self.writer.lying:
            self.make(own[0], own[1])

    def drop(self, name: Hashable) -> None:
        self.live.pop(name, None)
        self.events.append((name, None))

    def brief(self, size: float) -> None:
        if size > 0:
            name = ("brief", next(self.blocks))
            self.make(name, size)
            self.drop(name)

    def issue(self, taken: Taken) -> None:
        if taken.message is None:
            self.brief(taken.brief)
            return
        block = next(self.blocks)
        self.make(("message", block), taken.message.held)
        self.way.send(block, taken.message)

    def arrive(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.brief(self.way.messages.pop(block).finish)
            self.drop(("message", block))

    # -- a call ----------------------------------------------------------------------------------------

    def call(
        self,
        number: int,
        call: Call,
        stays: Collection[object],
        moved: Mapping[Storage, frozenset[str]],
    ) -> None:
        """stays: names of storages that are there when it has ended. moved: see `Transients.moved`."""
        names = self.transients.names_of(call)
        lying = frozenset(inner for inner, outer in names.items() if outer in self.transients.summed)
        outside = self.way.enter()
        new: list[Hashable] = []
        rows = self.writer.rows(call.segment, lying)
        gone = gone_after(rows, moved)
        for k, row in enumerate(rows):
            self.arrive(self.way.due(row.needs, row.turn))
            for value, size in row.makes:
                self.make((number, value), size)
                new.append((number, value))
            if not row.taken.stored:
                self.issue(row.taken)
            self.brief(row.loss)
            for value, _ in row.frees:
                if (number, value) not in stays:
                    self.drop((number, value))
            for own in gone.get(k, ()):
                self.drop(own[0])
                self.gone.add(own)
            if row.taken.stored:  # counts once the op has ended
                self.issue(row.taken)
        for name in new:
            if name in self.live and name not in stays:
                self.drop(name)
        self.way.leave(outside, names)


def _names(item: Instruction) -> tuple[str, ...]:
    return (*uses_of(item), *item.outs)


def _ordered(storages: Collection[Storage]) -> list[Storage]:
    """In an order that does not change from run to run."""
    return sorted(storages, key=lambda own: str(own[0]))
