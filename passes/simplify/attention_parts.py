"""Attention of few queries to many keys, as parts that merge and what follows from them.

The parts of ranks that divide the keys are a partial value of the reduction ``attention``, as row statistics
of cross-entropy are one of ``lse`` (`decompose`). Where no axis divides the keys the one part is exact.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir import Dtype, Folded, Graph, Node, TensorType, refs_of
from autoshard.passes.rewrite import Steps, Types, first_type
from autoshard.passes.segment_parts import fresh
from autoshard.rules.attention import SDPA, merges


def attention_parts(folded: Folded) -> Folded:
    """The model in which attention whose queries are smaller than its keys is divided by keys, too."""
    return replace(folded, segments={name: _graph(g) for name, g in folded.segments.items()})


def _graph(graph: Graph) -> Graph:
    types = graph.types()
    if not any(_merges(node, types) for node in graph.nodes):
        return graph
    taken, nodes = set(types), list[Node]()
    for node in graph.nodes:
        nodes += _in_parts(node, fresh(node.name, taken, "parts")) if _merges(node, types) else [node]
    return replace(graph, nodes=tuple(nodes))


def _merges(node: Node, types: Types) -> bool:
    return node.op == SDPA and merges(node, [types[ref] for ref in refs_of(node)])


def _in_parts(node: Node, name: str) -> list[Node]:
    q, k, v, mask, _, scale, *rest = node.args
    out, lse = first_type(node), node.types[1]
    assert lse is not None
    steps = Steps(node, lambda: name)
    type_ = TensorType((*out.shape[:3], out.shape[3] + 1), lse.dtype)
    parts = steps.add("autoshard.sdpa_parts.default", (q, k, v, mask, scale, *rest[1:]), type_)
    return [
        *steps.made,
        replace(node, op="autoshard.sdpa_joined.default", args=(parts, Dtype(out.dtype)), kwargs=()),
    ]
