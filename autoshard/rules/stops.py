"""Where a forward and a backward that run as one may take turns (`schedules.schedule`).

A part stops before an op that needs tokens of experts which are on their way, and before every product, so
that what the other one waits for can be sent on in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Node, refs_of
from autoshard.ir.collectives import is_message, spec_of
from autoshard.rules import attention, experts, matmul, packed, scaled, scaled_experts

#: ops that take long
PRODUCTS = frozenset(
    (
        *matmul.RULES,
        *attention.RULES,
        *experts.RULES,
        *scaled.PRODUCTS,
        *scaled_experts.PRODUCTS,
        *packed.PRODUCTS,
        "aten.addmm.default",
    )
)


def stops_of(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Places of the ops of a segment before which it stops."""
    result: list[int] = []
    coming = set[str]()
    for k, node in enumerate(nodes):
        needs = coming.intersection(refs_of(node))
        coming -= needs
        spec = spec_of(node)
        if needs or node.op in PRODUCTS:
            result.append(k)
        if spec is not None and spec.family == "experts" and is_message(node):
            coming.update(node.outs)
    return tuple(result)
