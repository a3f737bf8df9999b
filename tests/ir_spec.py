"""What must hold of a graph after any pass: checked between passes, as tinygrad's and MLIR's verifiers do."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.ir import Folded, refs_of
from autoshard.ir.folded import Call
from autoshard.ir.graph import Graph
from autoshard.ir.lowered import Lowered, uses_of


def check(graph: Folded | Lowered) -> None:
    """AssertionError, naming what is wrong, unless a graph is well formed."""
    if isinstance(graph, Folded):
        for each in graph.segments.values():
            _check_graph(each)
        _check_calls(graph.calls, graph.segments)
        return
    for name, segment in graph.segments.items():
        _check_graph(segment.graph)
        missing = segment.graph.types().keys() - segment.layouts.keys()
        assert not missing, f"{name}: values without a layout: {missing}"
    _check_calls(
        (i for i in graph.main if isinstance(i, Call)), {n: s.graph for n, s in graph.segments.items()}
    )
    _check_main(graph)


def _check_graph(graph: Graph) -> None:
    known = {name for name, _ in graph.inputs}
    assert len(known) == len(graph.inputs), f"{graph.name}: an input stands twice"
    for node in graph.nodes:
        unknown = set(refs_of(node)) - known
        assert not unknown, f"{graph.name}: {node.op} uses {unknown} before they are made"
        assert len(node.types) == len(node.outs), f"{graph.name}: {node.op} has types for other outputs"
        assert known.isdisjoint(node.outs), f"{graph.name}: {node.outs} are made twice"
        known.update(node.outs)
    assert set(graph.outputs) <= known, f"{graph.name}: outputs that nothing makes"


def _check_calls(calls: Iterable[Call], segments: dict[str, Graph]) -> None:
    called = set()
    for call in calls:
        graph = segments[call.segment]
        called.add(call.segment)
        assert len(call.args) == len(graph.inputs), f"{call.segment}: {len(call.args)} arguments"
        assert len(call.outs) == len(graph.outputs), f"{call.segment}: {len(call.outs)} results"
    assert called == segments.keys(), f"segments that nothing calls: {segments.keys() - called}"


def _check_main(lowered: Lowered) -> None:
    made = {value for item in lowered.main for value in item.outs}
    known = lowered.values.keys() - made
    # what every stage, and every slice of its sequence, makes for itself
    rooms = {k: (p.stage, p.slice) for p in lowered.parts for k in range(p.start, p.stop)}
    makers: set[tuple[str, tuple[int, int]]] = set()
    done = set(known)
    for number, item in enumerate(lowered.main):
        assert done.issuperset(uses_of(item)), f"{item} uses a value before it is made"
        done.update(item.outs)
        for value in item.outs:
            place = value, rooms.get(number, (0, 0))
            assert place not in makers, f"{value} is made twice in a stage"
            makers.add(place)
            assert value in lowered.values, f"{value} has no type and layout"
        used = set(uses_of(item)) - made - known
        assert not used, f"{item} uses {used}, which nothing makes"
    assert set(lowered.results) <= lowered.values.keys(), "results without a value"
    at = 0
    for part in lowered.parts:
        assert part.start == at and part.stop >= at, f"{part} does not follow the one before"
        at = part.stop
    assert not lowered.parts or at == len(lowered.main), "instructions in no part"
