"""Values that wait in host memory: stored behind what makes them, loaded one call ahead of what reads them.

Activations: what a forward call of a repeated layer keeps for backward. The largest go first, for as many
bytes as the host link takes while the calls beside them compute; what would make the device wait stays on it,
unless memory asks for everything (Rajbhandari et al., ZeRO-Infinity, SC 2021, section 5; Fang et al.,
PatrickStar, TPDS 2023, choose by use, too). Parameters: the rank's shards are loaded in front of their
gathers, and their gradients stored once they are complete.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from autoshard.ir import Call
from autoshard.ir.collectives import COLLECTIVES
from autoshard.ir.lowered import Instruction, Lowered, PlacedValue, StagePart, uses_of
from autoshard.ir.offload import HOST_OPS, Offload
from autoshard.passes.memory.host_calls import HostCalls
from autoshard.passes.memory.host_storages import StorageGroup, groups_of
from autoshard.passes.overlap.schedule_ops import Seconds, node_seconds
from autoshard.rules.chains import ALONE

#: uses of a loaded value that are so many computing calls apart share one load
_NEAR = 1
_BACKWARD = ("backward", "weight")
#: (place of the call before which it is issued, place of the call that needs it)
Slot: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Hosting:
    """What the pass goes by.

    kinds: what is wanted in host memory. nbytes: of a value on the rank. transfer: seconds that some bytes
    take over the host link in one direction. seconds: prices of nodes. ahead: whether loads are issued one
    call ahead. share: of the activations that the device would have to wait for, how many are stored all the
    same, from 0 to 1.
    """

    kinds: Offload
    nbytes: Callable[[PlacedValue], float]
    transfer: Callable[[float], float]
    seconds: Seconds
    ahead: bool = True
    share: float = 0.0

    def storing(self, share: float, ahead: bool) -> Hosting:
        """The same with another share of them stored, and loads ahead only if that is wanted, too."""
        return replace(self, share=share, ahead=self.ahead and ahead)


def offload(
    lowered: Lowered, parameters: Collection[str], gradients: Collection[str], how: Hosting, *, summed: bool
) -> Lowered:
    """The program with stores and loads.

    parameters: ports that live in host memory if these are wanted there. gradients: results that then end
    there. summed: whether gradients are sums over microbatches or slices, complete at the end of a step only.
    """
    work = _Work(lowered, how)
    if how.kinds.parameters:
        work.load_parameters(parameters)
    if how.kinds.activations:
        work.store_activations(parameters)
    results = lowered.results
    if how.kinds.parameters:
        results = work.store_gradients(gradients, summed=summed)
    return work.calls.placed(results)


@dataclass
class _Work:
    """One program on its way."""

    lowered: Lowered
    how: Hosting
    #: seconds of the host link towards the device, by the place before which loads are issued
    busy: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls = HostCalls(self.lowered)
        self._seconds: dict[str, float] = {}

    # -- time --------------------------------------------------------------------------------------

    def _compute(self, item: Instruction) -> float:
        """Seconds of computing of an instruction."""
        if not isinstance(item, Call):
            return 0.0 if _moves(item.op) else self.how.seconds(item, self.lowered.values, ALONE)
        if item.segment not in self._seconds:
            segment = self.lowered.segments[item.segment]
            each = zip(segment.graph.nodes, node_seconds(segment, self.how.seconds), strict=True)
            self._seconds[item.segment] = sum(s for n, s in each if not _moves(n.op))
        return self._seconds[item.segment]

    @cached_property
    def _computing(self) -> dict[int, float]:
        """Place in main -> seconds of computing, of calls that compute anything."""
        result = {k: self._compute(item) for k, item in enumerate(self.lowered.main)}
        return {k: s for k, s in result.items() if s > 0.0}

    @cached_property
    def _places(self) -> list[int]:
        """Places in main of calls that compute anything."""
        return sorted(self._computing)

    @cached_property
    def _until(self) -> list[float]:
        """Seconds of computing in front of each of them, and in all."""
        return [0.0, *accumulate(self._computing[k] for k in self._places)]

    def _before(self, part: StagePart, item: int) -> int | None:
        """The computing call of a part in front of another one."""
        at = bisect_left(self._places, item) - 1
        return self._places[at] if at >= 0 and self._places[at] >= part.start else None

    def _behind(self, part: StagePart, item: int) -> int | None:
        at = bisect_right(self._places, item)
        return self._places[at] if at < len(self._places) and self._places[at] < part.stop else None

    def _slot(self, part: StagePart, user: int) -> Slot:
        """Where a load for an instruction is issued."""
        ahead = self._before(part, user) if self.how.ahead else None
        return (user if ahead is None else ahead, user)

    def _beside(self, slot: Slot) -> float:
        """Seconds of computing between issue and use."""
        begin, end = (self._until[bisect_left(self._places, place)] for place in slot)
        return end - begin

    # -- loads -------------------------------------------------------------------------------------

    def _users(self, part: StagePart) -> dict[str, list[int]]:
        result: dict[str, list[int]] = {}
        for k in range(part.start, part.stop):
            for value in dict.fromkeys(uses_of(self.lowered.main[k])):
                result.setdefault(value, []).append(k)
        return result

    def _near(self, users: Sequence[int]) -> Iterator[list[int]]:
        """Uses that share a load: what is needed again much later is fetched again."""
        group: list[int] = []
        places = self._places
        for user in users:
            if group and bisect_left(places, user) - bisect_right(places, group[-1]) >= _NEAR:
                yield group
                group = []
            group.append(user)
        if group:
            yield group

    def _load(self, part: StagePart, hosted: Mapping[str, str]) -> None:
        """Load values of a part in front of their uses. hosted: value -> its name in host memory."""
        wanted: dict[Slot, list[tuple[str, list[int]]]] = {}
        users = self._users(part)
        for value in hosted:
            for group in self._near(users.get(value, ())):
                wanted.setdefault(self._slot(part, group[0]), []).append((value, group))
        for slot in sorted(wanted):
            named: dict[str, str] = {}
            for value, group in wanted[slot]:
                loaded = named[hosted[value]] = self.calls.fresh(f"{value}_loaded")
                for user in group:
                    self.calls.renamed.setdefault(user, {})[value] = loaded
            seconds = self.how.transfer(sum(map(self._nbytes, named)))
            self.busy[slot[0]] = self.busy.get(slot[0], 0.0) + seconds
            why = f"from host memory: {_text(seconds)} beside {_text(self._beside(slot))} of computing"
            self.calls.before.setdefault(slot[0], []).append(self.calls.load(slot[1], named, why))

    def _nbytes(self, value: str) -> float:
        return self.how.nbytes(self.calls.values[value])

    def load_parameters(self, parameters: Collection[str]) -> None:
        """Every parameter in front of its uses in every part."""
        for part in self.lowered.parts:
            users = self._users(part)
            self._load(part, {value: value for value in users if value in parameters})

    # -- activations -------------------------------------------------------------------------------

    def store_activations(self, parameters: Collection[str]) -> None:
        """What layers keep: behind the calls that make it, and in front of those that read it in backward."""
        for stage in sorted({p.stage for p in self.lowered.parts}):
            own = [p for p in self.lowered.parts if p.stage == stage]
            groups = groups_of(self.lowered, own, parameters, self.how.nbytes)
            chosen = self._hidden(own, groups)
            hidden = set(chosen)
            # what is made first waits longest
            rest = sorted((g for g in groups if g not in hidden), key=lambda g: g.maker)
            self._stored(own, [*chosen, *_first(rest, self.how.share)])

    def _hidden(self, parts: Sequence[StagePart], groups: Sequence[StorageGroup]) -> list[StorageGroup]:
        """The groups, largest first, whose stores and loads are over before what runs beside them is."""
        of = {k: p for p in parts for k in range(p.start, p.stop)}
        users = {p: self._users(p) for p in parts if p.phase in _BACKWARD}
        down: dict[int, float] = {}
        up: dict[Slot, float] = {}
        chosen: list[StorageGroup] = []
        for group in sorted(groups, key=lambda g: (-g.nbytes, g.maker, g.values)):
            slots = {
                self._slot(part, near[0])
                for part, known in users.items()
                for value in group.values
                for near in self._near(known.get(value, ()))
            }
            behind = self._behind(of[group.maker], group.maker)
            room = self._computing.get(group.maker if behind is None else behind, 0.0)
            stored = down.get(group.maker, 0.0) + group.moved
            fits = self.how.transfer(stored) <= room and all(
                self.busy.get(s[0], 0.0) + self.how.transfer(up.get(s, 0.0) + group.moved) <= self._beside(s)
                for s in slots
            )
            if fits:
                chosen.append(group)
                down[group.maker] = stored
                up.update((s, up.get(s, 0.0) + group.moved) for s in slots)
        return chosen

    def _stored(self, parts: Sequence[StagePart], groups: Sequence[StorageGroup]) -> None:
        of = {k: p for p in parts for k in range(p.start, p.stop)}
        makers: dict[int, dict[str, str]] = {}
        for group in groups:
            for value in group.values:
                makers.setdefault(group.maker, {})[value] = self.calls.fresh(f"{value}_host")
        hosted: dict[str, str] = {}
        for maker, named in sorted(makers.items()):
            seconds = self.how.transfer(sum(map(self._nbytes, named)))
            behind = self._behind(of[maker], maker)
            beside = self._computing.get(behind, 0.0) if behind is not None else 0.0
            why = f"to host memory: {_text(seconds)} beside {_text(beside)} of computing"
            self.calls.after.setdefault(maker, []).append(self.calls.store(maker, named, why))
            hosted |= named
        for part in parts:
            if part.phase in _BACKWARD:
                self._load(part, hosted)

    # -- gradients ---------------------------------------------------------------------------------

    def store_gradients(self, gradients: Collection[str], *, summed: bool) -> tuple[str, ...]:
        """Gradients end in host memory; returns the results by their names then."""
        named: dict[str, str] = {}
        for part in self.lowered.parts:
            if part.phase not in (*_BACKWARD, "reduce"):
                continue
            late = summed and part.phase != "reduce"
            for k in range(part.start, part.stop):
                new = [out for out in self.lowered.main[k].outs if out in gradients]
                named |= {v: self.calls.fresh(f"{v}_host") for v in new if v not in named}
                if new:
                    call = self.calls.store(k, {v: named[v] for v in new}, "gradients to host memory")
                    if late:
                        # slices of a stage add to the same gradients
                        self.calls.last.setdefault(part.stage, {}).setdefault(call.outs, call)
                    else:
                        self.calls.after.setdefault(k, []).append(call)
        return tuple(named.get(r, r) for r in self.lowered.results)


def _first(groups: Sequence[StorageGroup], share: float) -> Iterator[StorageGroup]:
    """As many of the first as have a share of all bytes together."""
    room = share * sum(g.nbytes for g in groups)
    held = 0.0
    for group in groups:
        held += group.nbytes
        if held > room * (1 + 1e-9):
            return
        yield group


def _moves(op: str) -> bool:
    """Whether an op computes nothing: collectives, and what moves to host memory and back."""
    return op in COLLECTIVES or op in HOST_OPS


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
