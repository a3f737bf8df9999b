"""Which values of a program are in host memory."""

from __future__ import annotations

from autoshard.ir import Node
from autoshard.ir.lowered import Lowered
from autoshard.ir.offload import HOST_OPS


def moves_to_host(lowered: Lowered) -> bool:
    """Whether anything of a program goes to host memory or comes from there."""
    main = (i for i in lowered.main if isinstance(i, Node))
    inside = (n for s in lowered.segments.values() for n in s.graph.nodes)
    return any(n.op in HOST_OPS for nodes in (main, inside) for n in nodes)
