"""Which values of a program are in host memory."""

from __future__ import annotations

from autoshard.ir import Call, Node
from autoshard.ir.lowered import Lowered
from autoshard.ir.offload import HOST_OPS, STORE


def moves_to_host(lowered: Lowered) -> bool:
    """Whether anything of a program goes to host memory or comes from there."""
    main = (i for i in lowered.main if isinstance(i, Node))
    inside = (n for s in lowered.segments.values() for n in s.graph.nodes)
    return any(n.op in HOST_OPS for nodes in (main, inside) for n in nodes)


def hosted_values(lowered: Lowered) -> frozenset[str]:
    """Values of main that stores make; ports are not among them."""
    inside = {
        name: {out for node in s.graph.nodes if node.op == STORE for out in node.outs}
        for name, s in lowered.segments.items()
    }
    result: set[str] = set()
    for item in lowered.main:
        if isinstance(item, Call):
            new = inside[item.segment]
            outputs = lowered.segments[item.segment].graph.outputs if new else ()
            result.update(out for out, inner in zip(item.outs, outputs, strict=False) if inner in new)
        elif item.op == STORE:
            result.update(item.outs)
    return frozenset(result)
