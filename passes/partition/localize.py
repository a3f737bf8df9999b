"""Rewrite calls to what one rank runs on its shards: local shapes, offsets, part-of-a-table ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autoshard.ir import Graph, Node, TensorType, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.passes.simplify.segment_cache import SegmentCache
from autoshard.rules.core import Factored, RuleFn
from autoshard.rules.local import LocalCall, MeshShape


def localize(lowered: Lowered, rules: Mapping[str, RuleFn], mesh: MeshShape, known: SegmentCache) -> Lowered:
    """Every node as a rank runs it; types stay global, layouts say what a rank holds.

    known: of programs with the same rules.
    """
    segments = {
        name: known.of("localize", segment, mesh, partial(_segment, segment, rules, mesh))
        for name, segment in lowered.segments.items()
    }
    return replace(lowered, segments=segments)


def _segment(segment: LoweredSegment, rules: Mapping[str, RuleFn], mesh: MeshShape) -> LoweredSegment:
    types = segment.graph.types()
    nodes = tuple(_node(node, types, segment, rules, mesh) for node in segment.graph.nodes)
    graph = Graph(segment.graph.name, segment.graph.inputs, nodes, segment.graph.outputs)
    return replace(segment, graph=graph)


def _node(
    node: Node,
    types: Mapping[str, TensorType],
    segment: LoweredSegment,
    rules: Mapping[str, RuleFn],
    mesh: MeshShape,
) -> Node:
    fn = rules.get(node.op)
    if fn is None:
        return node
    names = list(refs_of(node))
    ins: Sequence[TensorType] = [types[n] for n in names]
    rule: Factored = fn(node, ins)
    if rule.local is None:
        return node
    call = LocalCall(
        node,
        tuple(ins),
        tuple(segment.layouts[n] for n in names),
        tuple(segment.layouts.get(out) for out in node.outs),
        mesh,
    )
    return rule.local(call)
