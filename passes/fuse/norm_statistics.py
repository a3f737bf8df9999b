"""LayerNorms whose statistics only their own gradients use.

Captured on a CPU in half precision, a LayerNorm gives its mean and its reciprocal deviation in half
precision, too. Kernels give them in fp32 and take them so: where both halves become kernels, and nothing
else sees the statistics, their type may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.ir import Call, Node, Ref, refs_of
from autoshard.ir.lowered import Lowered
from autoshard.passes.fuse.norm_patterns import UseIndex
from autoshard.passes.partition.value_origins import Origins

NORM, NORM_BACKWARD = "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"


@dataclass(frozen=True)
class Private:
    """Norms and gradients by (segment, name of the node); statistics by (segment, value)."""

    nodes: frozenset[tuple[str, str]]
    statistics: frozenset[tuple[str, str]]


def usual(node: Node) -> bool:
    """Whether a LayerNorm or its gradient is of one dim, with a weight, and all gradients wanted."""
    if node.op == NORM:
        _, width, weight, _, _ = node.args
        return len(width) == 1 and isinstance(weight, Ref)
    if node.op != NORM_BACKWARD:
        return False
    _, _, width, _, _, weight, bias, mask = node.args
    return len(width) == 1 and isinstance(weight, Ref) and tuple(mask) == (True, True, bias is not None)


def private(lowered: Lowered, index: Mapping[str, UseIndex], origins: Origins) -> Private:
    """All such norms, with their gradients."""
    norms = {(name, n.name): n for name, one in index.items() for n in one.graph.nodes if n.op == NORM}
    grads = {
        (name, n.name): n for name, one in index.items() for n in one.graph.nodes if n.op == NORM_BACKWARD
    }
    norms = {key: n for key, n in norms.items() if usual(n)}
    grads = {key: n for key, n in grads.items() if usual(n)}
    while True:
        new = {(name, o): (name, node) for (name, node), n in norms.items() for o in n.outs[1:]}
        fit = {key: n for key, n in grads.items() if _sources(lowered, origins, key[0], n) <= set(new)}
        taken = {(name, s.name) for (name, _), n in fit.items() for s in n.args[3:5]}
        lone = {key for stat, key in new.items() if not _only(lowered, index, *stat, fit, taken)}
        if not lone and len(fit) == len(grads):
            return Private(frozenset((*norms, *grads)), frozenset((*new, *taken)))
        norms = {key: n for key, n in norms.items() if key not in lone}
        grads = fit


def _sources(lowered: Lowered, origins: Origins, name: str, node: Node) -> set[tuple[str, str]]:
    """Where the statistics that a gradient takes are made, over all calls of its segment."""
    result: set[tuple[str, str]] = set()
    for item, call in enumerate(lowered.main):
        if not isinstance(call, Call) or call.segment != name:
            continue
        for stat in node.args[3:5]:
            origin = origins.inside(item, stat.name)
            maker = lowered.main[origin[0]] if isinstance(origin, tuple) else None
            result.add((maker.segment, origin[1]) if isinstance(maker, Call) else ("", str(origin)))
    return result


def _only(
    lowered: Lowered,
    index: Mapping[str, UseIndex],
    name: str,
    stat: str,
    grads: Mapping[tuple[str, str], Node],
    taken: set[tuple[str, str]],
) -> bool:
    """Whether a statistic goes from its segment straight to those gradients, and nowhere else."""
    if index[name].users.get(stat):
        return False
    outputs = index[name].graph.outputs
    names = {
        out
        for call in lowered.main
        if isinstance(call, Call) and call.segment == name
        for inner, out in zip(outputs, call.outs, strict=True)
        if inner == stat
    }
    if not names.isdisjoint(lowered.results):
        return False
    for item in lowered.main:
        if not isinstance(item, Call):
            if not names.isdisjoint(refs_of(item)):
                return False
            continue
        one = index[item.segment]
        for (inner, _), arg in zip(one.graph.inputs, item.args, strict=True):
            if arg not in names:
                continue
            users = {(item.segment, n.name) for n in one.users.get(inner, ())}
            if (
                not users <= set(grads)
                or inner in one.outputs
                or (users and (item.segment, inner) not in taken)
            ):
                return False
    return True
