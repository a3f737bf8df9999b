"""Ops whose result is a look at the storage of their input."""

from __future__ import annotations

from autoshard.ir.graph import refs_of
from autoshard.ir.lowered import LoweredSegment

#: ops that only look at their input in another way
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "permute.default",
        "transpose.int",
        "t.default",
        "expand.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "slice.Tensor",
        "select.int",
        "split.Tensor",
        "split_with_sizes.default",
        "unbind.int",
        "alias.default",
        "detach.default",
    )
)
_RESHAPES = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


def view_roots(segment: LoweredSegment) -> dict[str, str]:
    """For every view the value whose storage it shares; see `kept_by`."""
    roots: dict[str, str] = {}
    types = segment.graph.types()
    for node in segment.graph.nodes:
        if node.op in VIEWS:
            source = next(refs_of(node), None)
            if source is None:
                continue
            root = roots.get(source, source)
            expanded = types[source].numel > types[root].numel
            if not (expanded and node.op in _RESHAPES):
                roots |= dict.fromkeys(node.outs, root)
    return roots
