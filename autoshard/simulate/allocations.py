"""The allocations of a rank, one by one, over the steps of a program: what `peaks` counts, in its order.

What lives at once adds up to the peak that is simulated. Beside that, an allocator sees which blocks come
between which others (`caching_allocator`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf

from autoshard.ir import DTYPES
from autoshard.program.holders import accumulated
from autoshard.schedules.schedule import Action
from autoshard.simulate.action_script import Script, ScriptWriter
from autoshard.simulate.caching_allocator import CachingAllocator, Event, Reserved
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.saved_for_backward import Storage, kept_storages

#: cycles of a schedule that are run, of those that are alike, and the most actions that one has
_CYCLES, _LONGEST = 2, 256


def allocations(peaks: Peaks, rank: int, steps: int = 2) -> Iterator[Event]:
    """What a pipeline rank allocates and frees over some steps.

    The optimizer makes its state at the end of the first step, as torch's do. Of equal cycles of a schedule,
    as in the steady state of 1F1B, a few stand for all.
    """
    return _Rank(peaks, rank).events(steps)


def reserved(events: Iterable[Event], *, expandable: bool = False, limit: float = inf) -> Reserved:
    """What the allocator of CUDA takes for them. Of two steps, the second finds what the first has left.
    limit: bytes that there are."""
    return CachingAllocator(expandable=expandable, limit=limit).run(events)


def shortened(row: Sequence[Action]) -> list[Action]:
    """The actions of a rank without most of the cycles in which it does the same; microbatches renumbered."""
    kinds = [(a.kind, a.stage, a.slice) for a in row]
    batches = [a.microbatch for a in row]
    best, cut = 0, list(row)
    for length in range(2, min(_LONGEST, len(row) // (_CYCLES + 1)) + 1):
        start = 0
        while start + length < len(row):
            step, end = batches[start + length] - batches[start], start
            while (
                end + length < len(row)
                and batches[end + length] - batches[end] == step
                and kinds[end] == kinds[end + length]
            ):
                end += 1
            cycles = (end - start) // length + 1 - _CYCLES
            if cycles * length > best and step > 0 and _is_balanced(row[start : start + length]):
                best, at = cycles * length, start + _CYCLES * length
                rest = (replace(a, microbatch=a.microbatch - step * cycles) for a in row[at + best :])
                cut = [*row[:at], *rest]
            start = max(end, start + 1)
    return cut


def _is_balanced(cycle: Sequence[Action]) -> bool:
    """Whether every stage takes back as many microbatches as it takes forward."""
    often = Counter((a.stage, "B" if a.kind == "W" else a.kind) for a in cycle)
    return all(often[a.stage, "F"] == often[a.stage, "B"] for a in cycle)


class _Log:
    """Blocks by name, and the events that they come and go by."""

    def __init__(self) -> None:
        self.out: list[Event] = []
        self.blocks: dict[Hashable, tuple[int, float]] = {}
        self._next = 0

    def make(self, name: Hashable, size: float) -> None:
        if size > 0 and name not in self.blocks:
            self._next += 1
            self.blocks[name] = self._next, size
            self.out.append((self._next, size))

    def drop(self, name: Hashable) -> None:
        result = self.blocks.pop(name, None)
        if result is not None:
            self.out.append((result[0], None))

    def rename(self, name: Hashable, new: Hashable, size: float) -> None:
        """The same block by another name if it has that size, another block if not."""
        if new not in self.blocks and self.blocks.get(name, (0, 0.0))[1] == size > 0:
            self.blocks[new] = self.blocks.pop(name)
        else:
            self.make(new, size)
            self.drop(name)


class _Rank:
    def __init__(self, peaks: Peaks, rank: int) -> None:
        self.prices, self.transients, self.rank = peaks.prices, peaks.transients, rank
        prices, program = self.prices, self.prices.program
        self.program, self.stages = program, prices.stages_of[rank]
        per_logit, size_of = prices.behaviour.loss_kept, prices.pricer.bytes_of
        self.kept = kept_storages(program, self.stages, size_of, prices.sheets.keeping, per_logit)
        self.storage = self.transients.storages_of(rank)
        self.totals = {s: [v for v in accumulated(program, s) if v in self.storage] for s in self.stages}
        self.writer = ScriptWriter(self.transients, prices.sheets, self.storage)
        self.log = _Log()
        self._scripts: dict[tuple[int, str, int], Script] = {}

    def events(self, steps: int) -> Iterator[Event]:
        self._begin()
        row = shortened(self.prices.schedule.actions[self.rank])
        for number in range(steps):
            missing = set() if self.prices.behaviour.gradient_buffers else set(self.stages)
            for before, action, behind in zip((None, *row), row, (*row[1:], None), strict=False):
                if self._pairs(before, action):
                    continue
                self._action(action, missing, behind if self._pairs(action, behind) else None)
                yield from self._written()
            self._end(first=number == 0)
            yield from self._written()

    def _written(self) -> list[Event]:
        out, self.log.out = self.log.out, []
        return out

    def _begin(self) -> None:
        """Parameters, and gradients that lie in buffers."""
        prices, state = self.prices, self.prices.states[self.rank]
        sizes = {p.name: prices.size(p.name) for p in prices.held_by(self.rank)}
        if sum(sizes.values()) > state.parameters:
            sizes.clear()  # what is updated lies in what is gathered, or in host memory
        for name, size in sizes.items():
            self.log.make(("parameter", name), size)
        self.log.make("gathered copies", state.parameters - sum(sizes.values()))
        gradients = prices.gradients_of[self.rank]
        self.log.make("stand-ins", state.gradients - sum(gradients.values()))
        if prices.behaviour.gradient_buffers:
            for stage, size in gradients.items():
                self.log.make(("gradients", stage), size)

    def _end(self, *, first: bool) -> None:
        """Gradients are reduced, parameters updated, gradients freed."""
        prices, log = self.prices, self.log
        of = {self.storage[v][0]: v for values in self.totals.values() for v in values}
        left = self._play(self._last, {name: ("gradient", value) for name, value in of.items()}, "end")
        elements = prices.updated(self.rank)
        log.make("update", prices.behaviour.step_bytes * elements)
        log.drop("update")
        if first and elements:
            each = prices.states[self.rank].optimizer / elements / 2
            for port in prices.held_by(self.rank):
                if port.target in prices.trained:
                    size = each * prices.size(port.name) / DTYPES[port.type.dtype][1]
                    log.make(("moment", 1, port.name), size)
                    log.make(("moment", 2, port.name), size)
        for name in (*left, *(("gradient", value) for value in of.values())):
            log.drop(name)

    def _pairs(self, action: Action | None, behind: Action | None) -> bool:
        """Whether two actions of a rank run as one."""
        if action is None or behind is None or action.kind + behind.kind != "FB":
            return False
        pairs = self.prices.schedule.pairs
        return action.microbatch != behind.microbatch and (action.stage, behind.stage) in pairs

    def _action(self, action: Action, missing: set[int], meanwhile: Action | None = None) -> None:
        """meanwhile: what runs as one with it, as if all of it did where this one holds most."""
        stage, kind, batch, log = action.stage, action.kind, action.microbatch, self.log
        other = None if meanwhile is None else partial(self._action, meanwhile, missing)
        new = self._play(self._script(action), {}, batch, other)
        if kind in "BW" and stage in missing:
            missing.discard(stage)
            for value in self.totals[stage]:
                made_as = (batch, self.storage[value][0])
                log.rename(made_as, ("gradient", value), self.prices.sum_bytes(value))
        stays = {(batch, name): size for name, size in self._after(action)}
        held = () if kind == "F" else (*self._of_forward[stage], *self._of_input[stage])
        for name in (*new, *((batch, name) for name, _ in held)):
            if name not in stays:
                log.drop(name)
        for name, size in stays.items():
            log.make(name, size)
        self._beside(action)

    def _after(self, action: Action) -> Sequence[Storage]:
        """What the stage holds of the microbatch when an action has ended."""
        if self.transients.sliced:
            of = self.prices.kept_of_slices[action.stage]
            return sorted((of.forward if action.kind == "F" else of.backward)[action.slice], key=_name)
        return {"F": self._of_forward, "I": self._of_input}.get(action.kind, {}).get(action.stage, ())

    @cached_property
    def _of_forward(self) -> dict[int, list[Storage]]:
        """What a stage holds of a microbatch after its forward."""
        return {s: sorted(k.held, key=_name) for s, k in self.kept.items()}

    @cached_property
    def _of_input(self) -> dict[int, list[Storage]]:
        """The same after the gradients of its input."""
        return {s: sorted(k.weight | k.made, key=_name) for s, k in self.kept.items()}

    def _beside(self, action: Action) -> None:
        """What is kept beside values; of a slice, its share of all that is."""
        name = ("beside", action.stage, action.microbatch, action.slice)
        self.log.drop(name)
        if action.kind == "F":
            share = self.prices.slice_shares[action.slice]
            self.log.make(name, self.prices.parts.beside(action.stage) * share)

    def _script(self, action: Action) -> Script:
        key = (action.stage, action.kind, action.slice)
        if key not in self._scripts:
            kept = frozenset(self._after(action)) if self.transients.sliced else self.kept[action.stage].held
            self._scripts[key] = self.writer.script(self.transients.parts_of(action), action.kind, kept)
        return self._scripts[key]

    @cached_property
    def _last(self) -> Script:
        return self.writer.script(self.transients.parts_of_end(self.rank), "end", frozenset())

    def _play(
        self,
        script: Script,
        names: dict[Hashable, Hashable],
        batch: Hashable,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Hashable]:
        """Run a script; the blocks it leaves. names: in place of its own; others are of the microbatch.
        meanwhile: done where it holds most."""
        make, drop = self.log.make, self.log.drop
        at = script.fullest if meanwhile is not None else -1
        if meanwhile is not None and at < 0:
            meanwhile()
        for number, (name, size) in enumerate(script.events):
            known = names.get(name)
            if known is None:
                known = names[name] = (batch, name)
            if size is None:
                drop(known)
            else:
                make(known, size)
            if number == at and meanwhile is not None:
                meanwhile()
        return [names[name] for name in script.left]


def _name(own: Storage) -> str:
    return str(own[0])
