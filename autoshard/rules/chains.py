"""Chains of elementwise ops and row sums that a compiler makes one kernel of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autoshard.ir import Node, refs_of
from autoshard.ir.scaled import CAST_SCALED
from autoshard.ir.views import VIEWS
from autoshard.rules import pointwise

#: ops that chains in one kernel are made of: elementwise, and sums over rows
CHAINED = frozenset(
    (*pointwise.RULES, "aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", CAST_SCALED)
)


def inside_chains(
    nodes: Sequence[Node], outputs: Collection[str], dropped: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Values that stay inside fused kernels: made elementwise, and read by elementwise ops or row sums alone.

    nodes, outputs: of a graph. dropped: outputs and inputs that no kernel keeps, though the program does.
    """
    users: dict[str, list[Node]] = {}
    alias: dict[str, str] = {}
    for node in nodes:
        names = [alias.get(n, n) for n in dict.fromkeys(refs_of(node))]
        if node.op in VIEWS:
            alias.update(dict.fromkeys(node.outs, names[0]) if names else {})
            continue
        for name in names:
            users.setdefault(name, []).append(node)
    out = {alias.get(n, n) for n in outputs} - dropped
    made = {o: n for n in nodes for o in n.outs}
    inside = {
        name
        for name, node in made.items()
        if node.op in CHAINED
        and name not in out
        and (users.get(name) or name in dropped)
        and all(u.op in CHAINED for u in users.get(name, ()))
    }
    inside |= {name for name in dropped if name not in made}
    return frozenset(inside | {a for a, root in alias.items() if root in inside})


def kernel_of(nodes: Sequence[Node], value: str) -> tuple[str, ...]:
    """The ops of the fused kernel that makes a value, in order, by their first results; () if it is alone.

    nodes: of a graph. What the kernel hands to others is written, but not read within it.
    """
    kernels: dict[str, set[str]] = {}  # of every value that a chained op makes, and of views of it
    for node in nodes:
        taken = [kernels[name] for name in dict.fromkeys(refs_of(node)) if name in kernels]
        if node.op in VIEWS:
            kernels.update(dict.fromkeys(node.outs, taken[0]) if taken else {})
        elif node.op in CHAINED:
            joined = {node.name}.union(*taken)
            kernels.update({name: joined for name, ops in kernels.items() if ops & joined})
            kernels.update(dict.fromkeys(node.outs, joined))
    kernel = kernels.get(value, set())
    return tuple(n.name for n in nodes if n.name in kernel) if len(kernel) > 1 else ()
