"""A program before it is printed: calls and collectives over values that have layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from autoshard.ir.folded import Call
from autoshard.ir.graph import Graph, Node, refs_of
from autoshard.ir.offload import STORE
from autoshard.ir.placement import Layout
from autoshard.ir.transposed import turned_in
from autoshard.ir.types import TensorType

Instruction: TypeAlias = "Call | Node"
#: gather: once a step, of parameters that stay gathered; count: for every microbatch before the step, of
#: inputs, and added up (`passes/simplify/count_once.py`); forward; backward (all of it, or what other stages
#: wait for); weight: the rest of a backward that is split; reduce: once a step, on gradients summed over all
#: microbatches
Phase: TypeAlias = Literal["gather", "count", "forward", "backward", "weight", "reduce"]


@dataclass(frozen=True)
class PlacedValue:
    """A value's global type and its layout. turned: whether its rows lie in memory by another dim than the
    last, which costs are told by and nothing else."""

    type: TensorType
    layout: Layout
    turned: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class LoweredSegment:
    """A segment with collectives; its graph carries global types.

    layouts: of every value. why: node name -> reason shown in dumps.
    """

    graph: Graph
    layouts: dict[str, Layout]
    why: dict[str, str]

    def placed(self) -> dict[str, PlacedValue]:
        """Type and layout of every value that has both."""
        types, turned = self.graph.types(), turned_in(self.graph)
        return {
            name: PlacedValue(types[name], layout, name in turned)
            for name, layout in self.layouts.items()
            if name in types
        }


@dataclass(frozen=True)
class StagePart:
    """What runs at once: the instructions ``start`` to ``stop`` of main, one phase of a pipeline stage.

    slice: of the sequence that it works on, where a microbatch is divided
    (`passes/sequence/slice_sequence.py`).
    """

    stage: int
    phase: Phase
    start: int
    stop: int
    slice: int = 0


@dataclass(frozen=True)
class PartBoundary:
    """Of one part: values that it uses and does not make itself, and values that it makes, both in order."""

    uses: tuple[str, ...]
    makes: tuple[str, ...]


def uses_of(item: Instruction) -> tuple[str, ...]:
    """Values that an instruction of main takes."""
    return item.args if isinstance(item, Call) else tuple(refs_of(item))


@dataclass(frozen=True)
class Lowered:
    """The full program.

    main: instructions in order, forward before backward. values: main value -> type and layout, of the
    inputs of the program, too. results: main value of every result of the joint graph, in its order. parts:
    main cut into what runs at once, in order, once that is known; of several stages, a value has one name
    wherever it is, and what a stage uses and does not make comes from the stage that makes it.
    """

    segments: dict[str, LoweredSegment]
    main: tuple[Instruction, ...]
    values: dict[str, PlacedValue]
    results: tuple[str, ...]
    parts: tuple[StagePart, ...] = ()

    def of(self, part: StagePart) -> tuple[Instruction, ...]:
        """The instructions of a part."""
        return self.main[part.start : part.stop]

    @cached_property
    def of_stage(self) -> Mapping[int, Sequence[StagePart]]:
        """Stage -> its parts, in order."""
        result: dict[int, list[StagePart]] = {}
        for part in self.parts:
            result.setdefault(part.stage, []).append(part)
        return result

    @cached_property
    def hosted(self) -> frozenset[str]:
        """Values of main that stores make, in host memory; ports are not among them."""
        inside = {
            name: {out for node in s.graph.nodes if node.op == STORE for out in node.outs}
            for name, s in self.segments.items()
        }
        result: set[str] = set()
        for item in self.main:
            if isinstance(item, Call):
                new = inside[item.segment]
                outputs = self.segments[item.segment].graph.outputs if new else ()
                result.update(out for out, inner in zip(item.outs, outputs, strict=False) if inner in new)
            elif item.op == STORE:
                result.update(item.outs)
        return frozenset(result)

    @cached_property
    def ends(self) -> Mapping[StagePart, PartBoundary]:
        """What every part takes and makes; looked up far more often than programs are made."""
        return {part: self._ends(part) for part in self.parts}

    def _ends(self, part: StagePart) -> PartBoundary:
        uses: dict[str, None] = {}
        makes: dict[str, None] = {}
        for item in self.of(part):
            for value in uses_of(item):
                if value not in makes:
                    uses[value] = None
            for value in item.outs:
                makes[value] = None
        return PartBoundary(tuple(uses), tuple(makes))


def with_main(lowered: Lowered, made: Callable[[Instruction], Sequence[Instruction]]) -> Lowered:
    """The program with other instructions in the place of each of main, none to leave it out."""
    main: list[Instruction] = []
    starts = [0]
    for item in lowered.main:
        main += made(item)
        starts.append(len(main))
    parts = tuple(replace(p, start=starts[p.start], stop=starts[p.stop]) for p in lowered.parts)
    return replace(lowered, main=tuple(main), parts=parts)


def with_parts(lowered: Lowered, pieces: Iterable[tuple[StagePart, Sequence[Instruction]]]) -> Lowered:
    """The program with these parts, in order, and their instructions; where a part lay is forgotten."""
    main: list[Instruction] = []
    parts: list[StagePart] = []
    for part, items in pieces:
        parts.append(replace(part, start=len(main), stop=len(main) + len(items)))
        main += items
    return replace(lowered, main=tuple(main), parts=tuple(parts))
