"""A graph cut into segments, each written once however often it is called.

Main is a list of calls. Names of values in main are unique over the full model; names inside a
segment are unique there.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.graph import Graph
from autoshard.ir.joint import Joint


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a segment.

    args, outs: main values bound to the segment's inputs and outputs, in order.
    label: the layer it stands for (``model.layers.3``), "" outside layers.
    site: number added to the dropout sites of the segment.
    """

    segment: str
    args: tuple[str, ...]
    outs: tuple[str, ...]
    label: str
    backward: bool
    site: int = 0


@dataclass(frozen=True)
class Folded:
    """A captured model as calls of unique segments."""

    segments: dict[str, Graph]
    calls: tuple[Call, ...]
    joint: Joint

    def counts(self) -> dict[str, int]:
        """How often each segment is called."""
        table = dict.fromkeys(self.segments, 0)
        for call in self.calls:
            table[call.segment] += 1
        return table

    def is_backward(self) -> dict[str, bool]:
        return {call.segment: call.backward for call in self.calls}
