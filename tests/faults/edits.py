"""Edits of programs, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir import Call, Node, Ref, TensorType, refs_of, substitute
from autoshard.ir.lowered import LoweredSegment, PlacedValue, StagePart
from autoshard.program.program import NodeNote, Program
from autoshard.schedules.schedule import Schedule

GRADUAL = ("comm.all_reduce.default", "comm.reduce_scatter.default")
GATHERS = ("comm.all_gather.default",)
#: collectives of one tensor
SINGLE = (*GRADUAL, *GATHERS, "comm.slice.default", "comm.all_to_all.default")


def sites(program: Program) -> Iterator[tuple[str, int, Node]]:
    """(segment, number, node) of every node inside a segment that is called."""
    called = {i.segment for i in program.lowered.main if isinstance(i, Call)}
    for name, segment in program.lowered.segments.items():
        if name in called:
            for number, node in enumerate(segment.graph.nodes):
                yield name, number, node


def with_nodes(
    program: Program, name: str, pairs: Sequence[tuple[Node, NodeNote]], **changes: Any
) -> Program:
    """The program with other nodes in a segment. changes: of its graph or its layouts."""
    segment = program.lowered.segments[name]
    layouts = changes.pop("layouts", segment.layouts)
    graph = replace(segment.graph, nodes=tuple(n for n, _ in pairs), **changes)
    segments = {**program.lowered.segments, name: LoweredSegment(graph, layouts, segment.why)}
    notes = {**program.notes, name: tuple(note for _, note in pairs)}
    return replace(program, lowered=replace(program.lowered, segments=segments), notes=notes)


def pairs_of(program: Program, name: str) -> list[tuple[Node, NodeNote]]:
    nodes = program.lowered.segments[name].graph.nodes
    return list(zip(nodes, program.notes[name], strict=True))


def replaced(program: Program, name: str, number: int, node: Node) -> Program:
    pairs = pairs_of(program, name)
    pairs[number] = (node, pairs[number][1])
    return with_nodes(program, name, pairs)


def dropped(program: Program, name: str, number: int, stand_in: str) -> Program:
    """Without a node of one output: ``stand_in`` is used in its place, also as an output."""
    pairs = pairs_of(program, name)
    out = pairs[number][0].outs[0]
    del pairs[number]

    def told(value: str) -> Ref:
        return Ref(stand_in if value == out else value)

    made = [(substitute(node, told), note) for node, note in pairs]
    outputs = tuple(stand_in if o == out else o for o in program.lowered.segments[name].graph.outputs)
    return with_nodes(program, name, made, outputs=outputs)


def with_main(
    program: Program,
    items: Sequence[Any],
    parts: Sequence[StagePart] | None = None,
    values: Mapping[str, PlacedValue] | None = None,
) -> Program:
    """The program with other instructions; parts, values: None for those that it has."""
    lowered = program.lowered
    changed = replace(
        lowered,
        main=tuple(items),
        parts=tuple(parts or lowered.parts),
        values=lowered.values if values is None else dict(values),
    )
    return replace(program, lowered=changed)


def without_item(program: Program, number: int) -> Program:
    """Main without one instruction."""
    main = list(program.lowered.main)
    del main[number]
    parts = [
        replace(p, start=p.start - (p.start > number), stop=p.stop - (p.stop > number))
        for p in program.lowered.parts
    ]
    return with_main(program, main, parts)


def with_schedule(program: Program, **changes: Any) -> Program:
    assert program.stages is not None
    schedule: Schedule = replace(program.stages.schedule, **changes)
    return replace(program, stages=replace(program.stages, schedule=schedule))


def floats(program: Program, name: str) -> dict[str, TensorType]:
    return {v: t for v, t in program.lowered.segments[name].graph.types().items() if t.is_float}


def used(program: Program, name: str, value: str) -> bool:
    graph = program.lowered.segments[name].graph
    return value in graph.outputs or any(value in refs_of(n) for n in graph.nodes)
