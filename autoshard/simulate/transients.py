"""Bytes that live within a part of a program: made in it, and gone when it ends or before."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autoshard.ir import Call, Node, refs_of
from autoshard.ir.lowered import Instruction, LoweredSegment, Part
from autoshard.program.program import Program
from autoshard.simulate.alike import likeness
from autoshard.simulate.kept import view_roots
from autoshard.simulate.ops import VIEWS, placed_of
from autoshard.simulate.sheets import Sheets

_PHASES = {"F": ("forward",), "B": ("backward", "weight"), "I": ("backward",), "W": ("weight",)}


class Transients:
    """Peaks of what the parts of a program hold beside what is kept from one part to another."""

    def __init__(self, program: Program, sheets: Sheets) -> None:
        self.program, self.sheets = program, sheets
        self._known: dict[tuple[int, str], float] = {}
        self._alike: dict[Hashable, float] = {}
        self._peaks: dict[tuple[str, frozenset[str]], float] = {}
        results = zip(program.lowered.results, program.signature.results, strict=True)
        self.gradients = {value for value, result in results if result.kind == "grad"}
        #: value -> the parts that use it
        self.users: dict[str, set[Part]] = {}
        for part in program.lowered.parts:
            for item in program.lowered.of(part):
                for value in _uses(item):
                    self.users.setdefault(value, set()).add(part)

    def of(self, stage: int, kind: str) -> float:
        """Bytes at the peak of an action (F, B, I or W) of a stage."""
        key = (stage, kind)
        if key not in self._known:
            parts = [p for p in self.program.lowered.parts if p.stage == stage and p.phase in _PHASES[kind]]
            self._known[key] = max((self._part(p) for p in parts), default=0.0)
        return self._known[key]

    def _part(self, part: Part) -> float:
        items = self.program.lowered.of(part)
        outside = self._used_elsewhere(part)
        key = likeness(items, self.program.lowered.values, lambda v: (v in outside, v in self.gradients))
        if key not in self._alike:
            self._alike[key] = self._walk(items, outside)
        return self._alike[key]

    def _walk(self, items: Sequence[Instruction], outside: frozenset[str]) -> float:
        last = {v: k for k, item in enumerate(items) for v in _uses(item)}
        live: dict[str, float] = {}
        peak = 0.0
        for k, item in enumerate(items):
            staying = frozenset(v for v in item.outs if v in last or v in outside)
            inner = self._inner(item, frozenset(v for v in item.outs if v in outside))
            peak = max(peak, sum(live.values()) + inner)
            for value in item.outs:
                # what other parts read is counted as kept, gradients where they are summed
                if value in staying and value not in outside and value not in self.gradients:
                    live[value] = self._main_bytes(item, value)
            for value in [v for v in live if last.get(v, -1) <= k]:
                del live[value]
        return peak

    def _used_elsewhere(self, part: Part) -> frozenset[str]:
        made = (v for item in self.program.lowered.of(part) for v in item.outs)
        return frozenset(v for v in made if self.users.get(v, set()) - {part})

    def _main_bytes(self, item: Instruction, value: str) -> float:
        if isinstance(item, Call):
            segment = self.program.lowered.segments[item.segment]
            inner = segment.graph.outputs[item.outs.index(value)]
            if view_roots(segment).get(inner, inner) in {n for n, _ in segment.graph.inputs}:
                return 0.0
        elif item.op in VIEWS:
            return 0.0
        return self.sheets.ops.nbytes(self.program.lowered.values[value])

    def _inner(self, item: Instruction, counted: frozenset[str]) -> float:
        """Peak inside one instruction, of what it makes and is not counted elsewhere."""
        if isinstance(item, Node):
            return sum(self._main_bytes(item, v) for v in item.outs if v not in counted)
        segment = self.program.lowered.segments[item.segment]
        outer = dict(zip(segment.graph.outputs, item.outs, strict=True))
        inside = frozenset(v for v, name in outer.items() if name in counted or name in self.gradients)
        key = (item.segment, inside)
        if key not in self._peaks:
            self._peaks[key] = self._segment(segment, inside)
        return self._peaks[key]

    def _segment(self, segment: LoweredSegment, counted: frozenset[str]) -> float:
        nodes, values = segment.graph.nodes, placed_of(segment)
        roots = view_roots(segment)
        fused = self.sheets.inside(nodes, segment.graph.outputs)
        inputs = {n for n, _ in segment.graph.inputs}
        last: dict[str, int] = {}
        for k, node in enumerate(nodes):
            for name in refs_of(node):
                last[roots.get(name, name)] = k
        for name in segment.graph.outputs:
            last[roots.get(name, name)] = len(nodes)
        skip = {roots.get(n, n) for n in counted} | inputs
        live: dict[str, float] = {}
        peak = 0.0
        for k, node in enumerate(nodes):
            for name in node.outs:
                if name in values and name not in roots and name not in skip and name not in fused:
                    live[name] = self.sheets.ops.nbytes(values[name])
            peak = max(peak, sum(live.values()) + self.sheets.ops.workspace(node, values))
            for name in [n for n in live if last.get(n, k) <= k]:
                del live[name]
        return peak


def _uses(item: Instruction) -> Sequence[str]:
    return item.args if isinstance(item, Call) else tuple(refs_of(item))
