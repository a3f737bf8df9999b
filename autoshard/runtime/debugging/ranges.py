"""What a profiler of torch sees of a program: the user's modules while their ops run, and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from autoshard.ir import Call
from autoshard.runtime.debugging.op_places import OpPlaces
from autoshard.runtime.pending import Issue, Pending
from autoshard.runtime.prepared_steps import PreparedItem, PreparedSegment
from autoshard.runtime.straight_line import Stopping
from autoshard.torch_adapters.profiler import record_range


class Ranges:
    """One run of a part. A collective is issued in a range of its name, and waited for in one more.

    compiled: whether segments are: they run as they are, each in one range.
    """

    def __init__(self, places: OpPlaces, compiled: bool = False) -> None:
        self.places, self.compiled = places, compiled
        #: values of main that may be on their way -> the range of what makes them
        self._coming: dict[str, str] = {}

    def arrived(self, values: dict[str, Any], names: Sequence[str]) -> list[Any]:
        """Values, waited for."""
        return [_waited(values[name], self._coming.get(name, "")) for name in names]

    def run(self, item: PreparedItem, args: list[Any]) -> Stopping:
        """The results of an instruction, from stop to stop; neighbours of one module share a range."""
        if self.compiled and isinstance(item.instruction, Call) and isinstance(item.body, PreparedSegment):
            if item.body.stops:  # ranges of two microbatches would lie across each other
                return (yield from item.run(args))
            with record_range(f"{item.label} {item.instruction.segment}".strip()):
                return item.body(args, item.site)
        steps, slots, ends = item.opened(args)
        coming: dict[int, str] = {}
        now = ""
        with ExitStack() as inside:
            for step, place in zip(steps, self.places.of(item.instruction), strict=True):
                if step.stops:
                    inside.close()
                    now = ""
                    yield
                late = [slot for slot in step.uses if type(slots[slot]) is Pending]
                if late or place.range != now:
                    inside.close()
                    for slot in late:
                        slots[slot] = _waited(slots[slot], coming[slot])
                    now = place.range
                    inside.enter_context(record_range(now))
                step.run(slots, item.site)
                if isinstance(step.fn, Issue):
                    coming |= dict.fromkeys(step.outs, now)
        self._coming |= {o: coming[slot] for o, slot in zip(item.outs, ends, strict=True) if slot in coming}
        return [slots[slot] for slot in ends]


def _waited(value: Any, name: str) -> Any:
    if type(value) is not Pending:
        return value
    with record_range(f"wait {name}"):
        return value.get()
