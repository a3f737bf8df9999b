"""A product followed only by the sum with its bias becomes one call again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autoshard.ir import Graph, Node, Ref, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment


def fuse_bias(lowered: Lowered) -> Lowered:
    """``add(mm(a, b), bias)`` with a one-dim bias as ``addmm``, where nothing else uses the product."""
    segments = {name: fused(s) for name, s in lowered.segments.items()}
    return replace(lowered, segments=segments)


def fused(segment: LoweredSegment) -> LoweredSegment:
    """A segment with its products and biases as one call each."""
    graph = segment.graph
    types = graph.types()
    uses = Counter(r for node in graph.nodes for r in refs_of(node)) + Counter(graph.outputs)
    products = {n.name: n for n in graph.nodes if n.op == "aten.mm.default" and uses[n.name] == 1}
    new: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op != "aten.add.Tensor" or node.kwargs or len(node.args) != 2:
            continue
        left, right = node.args
        if not isinstance(left, Ref) or not isinstance(right, Ref) or left.name not in products:
            continue
        product = products[left.name]
        same = types[left.name] == node.types[0] and types[right.name].dtype == types[left.name].dtype
        if same and len(types[right.name].shape) == 1:
            new[node.name] = replace(node, op="aten.addmm.default", args=(right, *product.args))
            del products[left.name]
    return replace(segment, graph=_without(graph, new))


def _without(graph: Graph, fused: dict[str, Node]) -> Graph:
    nodes = [fused.get(n.name, n) for n in graph.nodes]
    used = set(graph.outputs) | {r for n in nodes for r in refs_of(n)}
    absorbed = [n for n in nodes if n.op != "aten.mm.default" or n.name in used]
    return replace(graph, nodes=tuple(absorbed))
