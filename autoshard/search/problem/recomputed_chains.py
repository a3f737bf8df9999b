"""What of a recomputed layer stays inside fused kernels, in forward and in backward.

Forward then hands on little: chains of elementwise ops write their last values alone. In backward what is
recomputed is read by ops of the same segment (`passes/memory/join_recompute.py`), so that its values need not
be written either, nor read as if they had been saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir import Folded, Graph, Node, refs_of
from autoshard.ir.flow import Flow, Place
from autoshard.ir.graph import renamed
from autoshard.rules.chains import ALONE, FusedKernels, InKernel
from autoshard.search.problem.saved_for_backward import NodeKey, SavedTerms


@dataclass(frozen=True)
class RecomputedOp:
    """The kernels that an op is a part of. forward: in forward of a layer that is recomputed. backward: as it
    is recomputed. reads: how often backward of a layer that is not recomputed reads its result."""

    forward: InKernel = ALONE
    backward: InKernel = ALONE
    reads: int = 0


def recomputed_chains(folded: Folded, flow: Flow, kept: SavedTerms) -> dict[NodeKey, RecomputedOp]:
    """Those of all layers, for selective recomputation; full recomputation adds ops that end chains."""
    phase = folded.is_backward()
    read: dict[str, dict[str, dict[str, str]]] = {}  # layer -> segment of backward -> its input -> value
    handed: set[Place] = {place for place, _, _ in flow.results}
    for (source, value), (target, taken) in flow.edges:
        if not source or phase[source]:
            continue
        if phase[target]:
            read.setdefault(source, {}).setdefault(target, {})[taken] = value
        else:
            handed.add((source, value))
    result: dict[NodeKey, RecomputedOp] = {}
    for name, staying in kept.staying.items():
        graph = folded.segments[name]
        nodes = {k: node for k, node in enumerate(graph.nodes) if (name, k) in kept.full}
        cheap = {k: node for k, node in nodes.items() if (name, k) in kept.selective}
        outputs = staying | {value for value in graph.outputs if (name, value) in handed}
        lean = FusedKernels.of(graph.nodes, outputs)
        joined = [_Joined.of(cheap, folded.segments[t], inputs) for t, inputs in read.get(name, {}).items()]
        for k, node in nodes.items():
            unmoved = frozenset[str]().union(*(j.inside | j.paid.get(node.outs, frozenset()) for j in joined))
            begun = any(node.outs in j.begun for j in joined)
            reads = sum(j.reads[node.name] for j in joined)
            result[name, k] = RecomputedOp(lean.of_node(node), InKernel(unmoved, begun), reads)
    return result


@dataclass(frozen=True)
class _Joined:
    """Ops of a layer as they are recomputed in a segment of backward.

    inside: of their values, those that stay in kernels. paid: by the results of an op, values that an op of
    backward reads in the same kernel anyway. begun: results of those in kernels of backward. reads: of their
    values, how often backward reads it where it was saved.
    """

    inside: frozenset[str]
    paid: Mapping[tuple[str, ...], frozenset[str]]
    begun: frozenset[tuple[str, ...]]
    reads: Counter[str]

    @staticmethod
    def of(nodes: Mapping[int, Node], later: Graph, inputs: Mapping[str, str]) -> _Joined:
        """nodes: that are recomputed. inputs: of the segment of backward -> values of forward."""
        new = {out for node in nodes.values() for out in node.outs}
        # forward and backward may use a name for two values
        names = {value: f"saved.{value}" for node in nodes.values() for value in (*refs_of(node), *node.outs)}
        taken = {inner: names[value] for inner, value in inputs.items() if value in names}
        values = {name: value for value, name in names.items()}
        first = dict(zip(nodes, renamed(tuple(nodes.values()), names), strict=True))
        rest = renamed(later.nodes, taken)
        alone = FusedKernels.of(rest, later.outputs)
        both = FusedKernels.of((*first.values(), *rest), later.outputs)
        reads = Counter[str]()
        paid: dict[tuple[str, ...], set[str]] = {}
        for node in rest:
            more = both.of_node(node).unmoved - alone.of_node(node).unmoved
            for name in more.intersection(refs_of(node)):
                value = values.get(name, "")
                if value in new:
                    reads[value] += 1
                    continue
                for k, op in first.items():
                    if name in refs_of(op) and both.kernels.get(op.name) == both.kernels[node.name]:
                        paid.setdefault(nodes[k].outs, set()).add(value)
        inside = frozenset(value for value in new if names[value] in both.inside)
        kernels = {both.kernels[node.name] for node in rest if node.name in both.kernels}
        begun = frozenset(nodes[k].outs for k, op in first.items() if both.kernels.get(op.name) in kernels)
        return _Joined(inside, {outs: frozenset(each) for outs, each in paid.items()}, begun, reads)
