"""Bytes that come and go within the actions of a step: what a part makes, and when what was kept is freed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from autoshard.ir import Call, refs_of
from autoshard.ir.boundaries import ends_of
from autoshard.ir.collectives import exact_transfer
from autoshard.ir.lowered import Instruction, StagePart, uses_of
from autoshard.program.holders import accumulated
from autoshard.program.program import Program
from autoshard.schedules.schedule import Action
from autoshard.simulate.equivalent_parts import likeness
from autoshard.simulate.framework_saved import Keeping
from autoshard.simulate.in_flight import Messages, OnTheWay, turn_of
from autoshard.simulate.node_bytes import Taken, gone_after, rows_of, taken_by
from autoshard.simulate.saved_for_backward import Storage, kept_in_order, storages_of
from autoshard.simulate.segment_work import Sheets

_PHASES = {"F": ("forward",), "B": ("backward", "weight"), "I": ("backward",), "W": ("weight",)}


@dataclass(frozen=True)
class _Inside:
    """A call. peak: bytes, its results and messages on their way counted. turns: of the messages that have
    theirs in it, so that those before arrive. leaving: its own messages that nothing in it waits for."""

    peak: float
    turns: frozenset[str]
    leaving: tuple[OnTheWay, ...]


@dataclass(frozen=True)
class Course:
    """Bytes of a rank beyond those as an action begins. along: the most at each instruction, and as it ends.
    ahead: of what is gathered for the next one, all the time."""

    along: tuple[float, ...]
    ahead: float = 0.0

    @cached_property
    def peak(self) -> float:
        return max(self.along) + self.ahead


_NOTHING = Course((0.0,))


class Transients:
    """How far the bytes of a rank rise within the actions of its program, as the executor makes and frees.

    The results of a call live until it ends; values inside it, and arguments that nothing else holds, until
    they are last used.
    """

    def __init__(self, program: Program, sheets: Sheets) -> None:
        self.program, self.sheets = program, sheets
        self.owner = (0,) if program.stages is None else program.stages.schedule.owner
        self._known: dict[tuple[int, str, int], Course] = {}
        self._alike: dict[Hashable, Course] = {}
        self._inside: dict[Hashable, _Inside] = {}
        self._in_turn: dict[str, frozenset[str]] = {}
        self._storages: dict[int, Mapping[str, Storage]] = {}
        self.results = set(program.lowered.results)
        #: whether microbatches are divided into slices of the sequence
        self.sliced = any(p.slice for p in program.lowered.parts)
        buffers = sheets.behaviour.gradient_buffers
        stages = range(len(self.owner)) if buffers else ()
        self.summed = frozenset(v for stage in stages for v in accumulated(program, stage))

    def course(self, action: Action) -> Course:
        """Of an action; the same for all microbatches."""
        key = (action.stage, action.kind, action.slice)
        if key not in self._known:
            parts = self.parts_of(action)
            result = self._course(parts, action.kind) if parts else _NOTHING
            self._known[key] = replace(result, ahead=self.ahead(parts))
        return self._known[key]

    def labels(self, action: Action) -> tuple[str, ...]:
        """What calls the instructions of an action, in their order."""
        items = (i for p in self.parts_of(action) for i in self.program.lowered.of(p))
        return tuple(i.label if isinstance(i, Call) else i.op for i in items)

    def parts_of(self, action: Action) -> list[StagePart]:
        """What an action runs."""
        parts = self.program.lowered.of_stage.get(action.stage, ())
        return [p for p in parts if p.phase in _PHASES[action.kind] and p.slice == action.slice]

    def end(self, rank: int) -> float:
        """Bytes that a pipeline rank holds more while it reduces gradients, after all its microbatches."""
        return self.course_of_end(rank).peak

    def course_of_end(self, rank: int) -> Course:
        """Of the reduction of gradients."""
        parts = self.parts_of_end(rank)
        return self._course(parts, "end") if parts else _NOTHING

    def parts_of_end(self, rank: int) -> list[StagePart]:
        """What reduces gradients; nothing where they lie in buffers, which are reduced where they are."""
        parts = [p for p in self.program.lowered.parts if p.phase == "reduce" and self.owner[p.stage] == rank]
        return [] if self.sheets.behaviour.gradient_buffers else parts

    def ahead(self, parts: Sequence[StagePart]) -> float:
        """Bytes of the parameters that are gathered for the next call while one computes, at most."""
        if not self.sheets.behaviour.gathers_overlap:
            return 0.0
        calls = [i for part in parts for i in self.program.lowered.of(part) if isinstance(i, Call)]
        return max((self._gathered(name) for name in dict.fromkeys(c.segment for c in calls)), default=0.0)

    def _gathered(self, name: str) -> float:
        segment = self.program.lowered.segments[name]
        values, inputs = segment.placed(), {n for n, _ in segment.graph.inputs}
        result = 0.0
        for node in segment.graph.nodes:
            if exact_transfer(node) == "all_gather" and inputs.issuperset(refs_of(node)):
                result += sum(self.sheets.ops.nbytes(values[out]) for out in node.outs if out in values)
        return result

    # -- one action ------------------------------------------------------------------------------------

    def _course(self, parts: Sequence[StagePart], kind: str) -> Course:
        lowered = self.program.lowered
        items = [item for part in parts for item in lowered.of(part)]
        storage = self.storages_of(self.owner[parts[0].stage])
        if kind == "F" and self.sheets.keeping is not None:
            return self._forward(parts, storage, self.sheets.keeping)
        staying: Collection[Storage] = self.staying(parts, kind, storage)
        there, arriving = self.entering(parts, kind, storage)
        numbers: dict[Storage, int] = {}

        lying = {storage[v] for v in self.summed if v in storage}
        storage = {v: (s[0], 0.0) if s in lying else s for v, s in storage.items()} if lying else storage
        staying = {(s[0], 0.0) if s in lying else s for s in staying}

        def marks(value: str) -> Hashable:
            own = storage[value]
            return numbers.setdefault(own, len(numbers)), own[1], own in staying, own in arriving

        key = (kind == "F", likeness(items, lowered.values, marks))
        if key not in self._alike:
            self._alike[key] = self._walk(items, storage, staying, self.freeable(kind, there), arriving)
        return self._alike[key]

    def freeable(self, kind: str, there: frozenset[Storage]) -> frozenset[Storage]:
        """What an action may free of what is there as it begins: a forward, what slices before it left."""
        return there if kind != "F" or self.sliced else frozenset()

    def _forward(
        self, parts: Sequence[StagePart], storage: Mapping[str, Storage], keeping: Keeping
    ) -> Course:
        """The same of a forward whose kernels keep other values: those so far, and what a call makes."""
        lowered, stage = self.program.lowered, parts[0].stage
        stages = [s for s, owner in enumerate(self.owner) if owner == self.owner[stage]]
        per_logit, size_of = self.sheets.behaviour.loss_kept, self.sheets.ops.bytes_of
        kept = kept_in_order(self.program, stages, stage, size_of, keeping, per_logit)
        _, arriving = self.entering(parts, "F", storage)
        level = sum(size for _, size in arriving)
        along: list[float] = []
        way = Messages()
        for part in parts:
            for number in range(part.start, part.stop):
                along.append(level + max(0.0, self._inner(lowered.main[number], storage, (), way)))
                level += kept.get(number, 0.0)
        return Course((*along, level + max(0.0, way.arrive_all())))

    def _walk(
        self,
        items: Sequence[Instruction],
        storage: Mapping[str, Storage],
        staying: Collection[Storage],
        there: Collection[Storage],
        arriving: Collection[Storage],
    ) -> Course:
        """there: storages that the rank holds as the items begin, which are freed after their last use."""
        last = {storage[v]: k for k, item in enumerate(items) for v in (*uses_of(item), *item.outs)}
        dying: dict[int, list[Storage]] = {}
        for each, k in last.items():
            if each not in staying:
                dying.setdefault(k, []).append(each)
        live = {*there, *arriving}
        level = sum(size for _, size in arriving)
        along: list[float] = []
        way = Messages()
        for k, item in enumerate(items):
            leaving = frozenset(each for each in dying.get(k, ()) if each in live)
            along.append(level + max(0.0, self._inner(item, storage, live, way, leaving)))
            new = {storage[v] for v in item.outs} - live
            gone = [each for each in dying.get(k, ()) if each in live or each in new]
            live |= new
            level += sum(size for _, size in new) - sum(size for _, size in gone)
            live.difference_update(gone)
        return Course((*along, level + way.arrive_all()))

    def _inner(
        self,
        item: Instruction,
        storage: Mapping[str, Storage],
        live: Collection[Storage],
        way: Messages,
        leaving: Collection[Storage] = (),
    ) -> float:
        """Peak inside one instruction, its results and messages on their way counted. leaving: storages that
        nothing behind it needs."""
        before = way.arrive(uses_of(item))
        if isinstance(item, Call):
            moved = self.moved(item, storage, leaving)
            inner = self._call(item, way, frozenset((names, own[1]) for own, names in moved.items()))
            for turn in inner.turns:
                way.arrive((), turn)
            names = self.names_of(item)
            way.issue(
                replace(m, outs=frozenset(names[o] for o in m.outs if o in names)) for m in inner.leaving
            )
            return max(before, inner.peak)
        new = sum(size for _, size in {storage[v] for v in item.outs if storage[v] not in live})
        return max(before, new + self._taken(taken_by(item, self.program.lowered.values, self.sheets), way))

    def names_of(self, call: Call) -> dict[str, str]:
        """Output of the segment -> how main calls it."""
        return dict(zip(self.program.lowered.segments[call.segment].graph.outputs, call.outs, strict=True))

    def moved(
        self, call: Call, storage: Mapping[str, Storage], leaving: Collection[Storage]
    ) -> dict[Storage, frozenset[str]]:
        """What a call alone holds, with its names in the segment. leaving: what nothing behind it needs."""
        if self.sheets.keeping is not None:
            return {}
        inputs = [n for n, _ in self.program.lowered.segments[call.segment].graph.inputs]
        names: dict[Storage, set[str]] = {}
        for inner, arg in zip(inputs, call.args, strict=True):
            if storage[arg] in leaving:
                names.setdefault(storage[arg], set()).add(inner)
        return {own: frozenset(inner) for own, inner in names.items()}

    def _call(self, call: Call, way: Messages, moved: frozenset[tuple[frozenset[str], float]]) -> _Inside:
        """moved: names in the segment that share a storage which the call alone holds, and its bytes."""
        lying = frozenset(inner for inner, outer in self.names_of(call).items() if outer in self.summed)
        turns = self._turns(call.segment)
        entering = tuple((m.turn, m.held, m.finish) for m in way.of_turns(turns))
        key = (call.segment, lying, entering, moved)
        if key not in self._inside:
            segment = self.program.lowered.segments[call.segment]
            messages = [OnTheWay(frozenset(), *row) for row in entering]
            make = partial(self._segment, call.segment, lying, messages, moved)
            given = (lying, entering, self.sheets.dropped(call.segment), moved)
            self._inside[key] = self.sheets.known.of("inside", segment, given, make)
        result = self._inside[key]
        # what nothing in the call waits for lies there all the time
        idle = way.held - sum(held for _, held, _ in entering)
        return replace(result, peak=result.peak + idle) if idle else result

    def _turns(self, name: str) -> frozenset[str]:
        """Of the messages that are issued in a segment one at a time."""
        if name not in self._in_turn:
            segment = self.program.lowered.segments[name]
            self._in_turn[name] = self.sheets.known.of(
                "turns", segment, None, lambda: frozenset(filter(None, map(turn_of, segment.graph.nodes)))
            )
        return self._in_turn[name]

    def _segment(
        self,
        name: str,
        lying: Collection[str],
        entering: Sequence[OnTheWay],
        moved: Collection[tuple[frozenset[str], float]],
    ) -> _Inside:
        """lying: outputs that are summed where they lie. entering: messages on their way, without what they
        bring, whose names are those of main. moved: see `_call`."""
        way = Messages(entering)
        peak, level = 0.0, 0.0
        rows = rows_of(name, self.program.lowered.segments[name], lying, self.sheets)
        gone = gone_after(rows, {each: each[0] for each in moved})
        for k, row in enumerate(rows):
            peak = max(peak, level + way.arrive(row.needs, row.turn))
            level += sum(size for _, size in row.makes)
            peak = max(peak, level + self._taken(row.taken, way))
            if row.loss:
                peak = max(peak, level + way.held + row.loss)
            level -= sum(size for _, size in (*row.frees, *gone.get(k, ())))
        return _Inside(peak, self._turns(name), way.bringing())

    def _taken(self, taken: Taken, way: Messages) -> float:
        """Bytes that an op needs while it runs, with those on their way, to which it adds its own."""
        before = way.held
        if taken.message is None:
            return before + taken.brief
        way.issue((taken.message,))
        return before if taken.stored else way.held

    # -- what is there before and after ----------------------------------------------------------------

    def storages_of(self, rank: int) -> Mapping[str, Storage]:
        if rank not in self._storages:
            stages = [s for s, owner in enumerate(self.owner) if owner == rank]
            self._storages[rank] = storages_of(self.program, stages, self.sheets.ops.bytes_of)
        return self._storages[rank]

    @cached_property
    def _users(self) -> Mapping[str, Sequence[StagePart]]:
        """Value -> the parts that use it and do not make it."""
        return _by_value(self._uses)

    @cached_property
    def _makers(self) -> Mapping[str, Sequence[StagePart]]:
        """Value -> the parts that make it."""
        return _by_value(self._makes)

    @cached_property
    def _ports(self) -> frozenset[str]:
        return frozenset(p.name for p in self.program.signature.ports)

    @cached_property
    def _uses(self) -> Mapping[StagePart, tuple[str, ...]]:
        return {part: ends_of(self.program.lowered, part).uses for part in self.program.lowered.parts}

    @cached_property
    def _makes(self) -> Mapping[StagePart, tuple[str, ...]]:
        return {part: ends_of(self.program.lowered, part).makes for part in self.program.lowered.parts}

    def staying(
        self, parts: Sequence[StagePart], kind: str, storage: Mapping[str, Storage]
    ) -> frozenset[Storage]:
        """What is still needed when the action has ended: results, what is sent, what later parts read.

        Backward goes from the last stage to the first, and from the last slice to the first.
        """
        stage, number = parts[0].stage, parts[0].slice
        own = self.owner[stage]

        def still_reads(part: StagePart) -> bool:
            if part in parts:
                return False
            here = part.stage == stage
            if kind == "F":
                over = part.phase == "forward" and here and part.slice < number
            else:
                over = part.phase in ("forward", "gather", "count") or (
                    part.phase == "backward" and (part.stage > stage or (here and part.slice > number))
                )
            return self.owner[part.stage] != own or not over

        new = {v for part in parts for v in (*self._makes[part], *self._uses[part])}
        return frozenset(
            storage[v] for v in new if v in self.results or any(map(still_reads, self._users.get(v, ())))
        )

    def entering(
        self, parts: Sequence[StagePart], kind: str, storage: Mapping[str, Storage]
    ) -> tuple[frozenset[Storage], frozenset[Storage]]:
        """(what the rank holds as the action begins, what arrives from other ranks), of what it reads."""
        own, number = self.owner[parts[0].stage], parts[0].slice

        def mine(part: StagePart) -> bool:
            return self.owner[part.stage] == own and part not in parts

        def had(part: StagePart) -> bool:
            before = kind != "F" or (part.stage == parts[0].stage and part.slice < number)
            return part.phase == "forward" and before and mine(part)

        def is_held(value: str) -> bool:
            if value in self._ports or any(map(mine, self._makers.get(value, ()))):
                return True
            return any(map(had, self._users.get(value, ())))

        uses = {v for part in parts for v in self._uses[part]}
        held = set(filter(is_held, uses))
        new = {storage[v] for part in parts for v in self._makes[part]}
        there = frozenset(storage[v] for v in held)  # what the parts hand on of it is no second copy
        return there, frozenset(storage[v] for v in uses - held) - there - new


def _by_value(values: Mapping[StagePart, Sequence[str]]) -> dict[str, list[StagePart]]:
    """Value -> the parts that have it among theirs."""
    result: dict[str, list[StagePart]] = {}
    for part, own in values.items():
        for value in own:
            result.setdefault(value, []).append(part)
    return result
