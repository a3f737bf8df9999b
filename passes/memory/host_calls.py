"""Calls that move values between a device and the memory of its host, and where they go in a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.ir import Call, Graph, Node, Ref, substitute
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.offload import LOAD, STORE


@dataclass
class HostCalls:
    """Puts calls of ``host.store`` and ``host.load`` around the instructions of a program.

    before, after: place in main -> calls. renamed: place in main -> values that it takes under another name.
    last: stage -> what it stores at the end of a step, by the names that this has.
    """

    lowered: Lowered
    before: dict[int, list[Call]] = field(default_factory=dict)
    after: dict[int, list[Call]] = field(default_factory=dict)
    renamed: dict[int, dict[str, str]] = field(default_factory=dict)
    last: dict[int, dict[tuple[str, ...], Call]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segments: dict[str, LoweredSegment] = {}
        self.values = dict(self.lowered.values)
        self._taken = {*self.values, *(o for item in self.lowered.main for o in item.outs)}
        self._known: dict[tuple[str, str, tuple[PlacedValue, ...]], str] = {}

    def fresh(self, base: str) -> str:
        """A name that no value has yet."""
        name, k = base, 1
        while name in self._taken:
            k += 1
            name = f"{base}_{k}"
        self._taken.add(name)
        return name

    def store(self, item: int, named: Mapping[str, str], why: str) -> Call:
        """A call that stores values: name on the device -> name in host memory. item: which it belongs to."""
        return self._call(STORE, item, named, why)

    def load(self, item: int, named: Mapping[str, str], why: str) -> Call:
        """A call that loads values: name in host memory -> name on the device."""
        return self._call(LOAD, item, named, why)

    def _call(self, op: str, item: int, named: Mapping[str, str], why: str) -> Call:
        like = self.lowered.main[item]
        for source, new in named.items():
            self.values[new] = self.values[source]
        segment, label = (like.segment, like.label) if isinstance(like, Call) else ("", "")
        placed = tuple(self.values[name] for name in named)
        name = self._segment(op, segment, placed, like.backward, why)
        return Call(name, tuple(named), tuple(named.values()), label, like.backward)

    def _segment(self, op: str, of: str, placed: tuple[PlacedValue, ...], backward: bool, why: str) -> str:
        key = (op, of, placed)
        if key not in self._known:
            kind = op.split(".")[1]
            base = f"{of}_{kind}" if of else kind
            name, k = base, 1
            while name in self.segments or name in self.lowered.segments:
                k += 1
                name = f"{base}_{k}"
            self._known[key] = name
            self.segments[name] = _moving(name, op, placed, backward, why)
        return self._known[key]

    def placed(self, results: Sequence[str]) -> Lowered:
        """The program with the calls in their places. results: its results by their names now."""
        main: list[Instruction] = []
        parts: list[StagePart] = []
        for part in self.lowered.parts:
            start = len(main)
            for k in range(part.start, part.stop):
                main += self.before.get(k, ())
                main.append(_renamed(self.lowered.main[k], self.renamed.get(k, {})))
                main += self.after.get(k, ())
            if part.phase == "reduce":
                main += self.last.get(part.stage, {}).values()
            parts.append(replace(part, start=start, stop=len(main)))
        if self.last and not any(p.phase == "reduce" for p in parts):
            for stage in sorted({p.stage for p in parts}):
                start = len(main)
                main += self.last.get(stage, {}).values()
                parts.append(StagePart(stage, "reduce", start, len(main)))
        return replace(
            self.lowered,
            segments={**self.lowered.segments, **self.segments},
            main=tuple(main),
            values=self.values,
            results=tuple(results),
            parts=tuple(parts),
        )


def _moving(name: str, op: str, placed: Sequence[PlacedValue], backward: bool, why: str) -> LoweredSegment:
    """The segment of a call: one op on all its values."""
    ends = ("", "_host") if op == STORE else ("_host", "")
    ins, outs = ([f"x{k}{end}" for k in range(len(placed))] for end in ends)
    types = tuple(p.type for p in placed)
    refs = tuple(Ref(n) for n in ins)
    node = Node(op, (refs,), (), tuple(outs), types, backward=backward)
    graph = Graph(name, tuple(zip(ins, types, strict=True)), (node,), tuple(outs))
    layouts = {n: p.layout for names in (ins, outs) for n, p in zip(names, placed, strict=True)}
    return LoweredSegment(graph, layouts, {node.name: why})


def _renamed(item: Instruction, names: Mapping[str, str]) -> Instruction:
    if not names:
        return item
    if isinstance(item, Call):
        return replace(item, args=tuple(names.get(a, a) for a in item.args))
    return substitute(item, lambda name: Ref(names.get(name, name)))
