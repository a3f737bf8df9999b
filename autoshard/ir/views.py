"""Ops whose result is a look at the storage of their input."""

from __future__ import annotations

from autoshard.ir.graph import refs_of
from autoshard.ir.lowered import LoweredSegment

#: the elements in the same order under another shape
RESHAPES = frozenset(("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"))
#: dims in another order
TRANSPOSES = frozenset(("aten.t.default", "aten.transpose.int", "aten.permute.default"))
#: dims of size 1 that come, go or are repeated
UNIT_DIMS = frozenset(
    f"aten.{name}"
    for name in ("expand.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
)
#: the tensor itself
ALIASES = frozenset(("aten.alias.default", "aten.detach.default"))
#: the elements in another type: no views, as these have storage of their own
CASTS = frozenset(("aten._to_copy.default", "prims.convert_element_type.default"))
#: some of the elements
PARTS = frozenset(
    f"aten.{name}"
    for name in ("slice.Tensor", "select.int", "split.Tensor", "split_with_sizes.default", "unbind.int")
)
#: ops that only look at their input in another way
VIEWS = RESHAPES | TRANSPOSES | UNIT_DIMS | ALIASES | PARTS


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
            if not (expanded and node.op in RESHAPES):
                roots |= dict.fromkeys(node.outs, root)
    return roots
