"""What of a recomputed layer stays inside fused kernels, in forward and in backward.

Forward then hands on little: chains of elementwise ops write their last values alone. In backward what is
recomputed is read by ops of the same segment (`passes/memory/join_recompute.py`), so that its values need not
be written either.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Folded
from autoshard.ir.flow import Flow, Place
from autoshard.ir.graph import renamed
from autoshard.rules.chains import inside_chains
from autoshard.search.problem.saved_for_backward import SavedTerms


@dataclass(frozen=True)
class RecomputedChains:
    """Values inside kernels. forward: of calls that are recomputed. backward: as these are recomputed."""

    forward: frozenset[Place]
    backward: frozenset[Place]

    @staticmethod
    def of(folded: Folded, flow: Flow, kept: SavedTerms) -> RecomputedChains:
        """Of selective recomputation; full recomputation adds ops that end chains."""
        backward = folded.is_backward()
        read: dict[str, dict[str, dict[str, str]]] = {}  # layer -> segment of backward -> its input -> value
        handed: set[Place] = {place for place, _, _ in flow.results}
        for (source, value), (target, taken) in flow.edges:
            if not source or backward[source]:
                continue
            if backward[target]:
                read.setdefault(source, {}).setdefault(target, {})[taken] = value
            else:
                handed.add((source, value))
        lean: set[Place] = set()
        joined: set[Place] = set()
        for name, staying in kept.staying.items():
            graph = folded.segments[name]
            outputs = staying | {value for value in graph.outputs if (name, value) in handed}
            lean.update((name, value) for value in inside_chains(graph.nodes, outputs))
            nodes = [node for k, node in enumerate(graph.nodes) if (name, k) in kept.selective]
            made = {out: f"{name}.{out}" for node in nodes for out in node.outs}
            for target, inputs in read.get(name, {}).items():
                later = folded.segments[target]
                names = {taken: made[value] for taken, value in inputs.items() if value in made}
                inside = inside_chains((*renamed(nodes, made), *renamed(later.nodes, names)), later.outputs)
                joined.update((name, value) for value, at in made.items() if at in inside)
        return RecomputedChains(frozenset(lean), frozenset(joined))
