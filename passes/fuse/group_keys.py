"""Attention takes keys and values of groups of heads as they are.

Models with fewer key-value heads repeat these for every head of the queries, and sum the gradients of each
group. Kernels read them in place (Ainslie et al., "GQA", EMNLP 2023): no copies are made, in forward or in
backward, and gradients come as sums. Where ranks have other heads of keys than of queries, as with more ranks
than key-value heads, copies stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoshard.ir import Arg, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.lowered import Lowered, LoweredSegment
from autoshard.ir.views import RESHAPES
from autoshard.passes.rewrite import replaced_in
from autoshard.rules.attention import KEYS, keys_of, with_keys

_EXPAND, _SUM = "aten.expand.default", "aten.sum.dim_IntList"


def group_keys(lowered: Lowered) -> Lowered:
    """The program without repeated keys and values, where nothing else uses them."""
    segments = {name: _grouped(s) for name, s in lowered.segments.items()}
    return replace(lowered, segments=segments)


@dataclass(frozen=True)
class _Repeated:
    """Keys or values [b, h, 1, t, d] that are repeated for groups of heads. shape: [b, h, group, t, d] of a
    rank."""

    source: Ref
    shape: tuple[Arg, ...]


class _Around:
    """What stands around the ops of a segment."""

    def __init__(self, graph: Graph) -> None:
        self.types: Mapping[str, TensorType] = graph.types()
        self.makers = {out: node for node in graph.nodes for out in node.outs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(refs_of(node)):
                self.users.setdefault(name, []).append(node)
        self.outputs = set(graph.outputs)

    def repeated(self, name: str) -> _Repeated | None:
        """What a value is, if it is repeated keys that attention alone takes."""
        flat = self.makers.get(name)
        expand = self.makers.get(next(refs_of(flat), "")) if flat is not None else None
        if flat is None or expand is None or flat.op not in RESHAPES or expand.op != _EXPAND:
            return None
        source, shape, merged = expand.args[0], expand.args[1], flat.args[1]
        if not isinstance(source, Ref) or not isinstance(shape, tuple) or not isinstance(merged, tuple):
            return None
        before, after = self.types[source.name].shape, self.types[expand.name].shape
        if len(before) != 5 or before != (*after[:2], 1, *after[3:]) or len(shape) != 5:
            return None
        b, h, group, t, d = shape
        if not (isinstance(h, int) and isinstance(group, int) and merged == (b, h * group, t, d)):
            return None
        if self._only_user(expand.name) != flat or name in self.outputs:
            return None
        if any(user.op not in KEYS for user in self.users[name]):
            return None
        return _Repeated(source, shape)

    def total(self, grad: str, shape: tuple[Arg, ...]) -> tuple[Node, Node] | None:
        """(view, sum) by which the gradients of repeated keys are added up, if nothing else uses them."""
        view = self._only_user(grad)
        if view is None or view.op not in RESHAPES or view.args[1] != shape:
            return None
        total = self._only_user(view.name)
        adds = total is not None and total.op == _SUM and total.args[1:] == ((2,), True) and not total.kwargs
        return (view, total) if total is not None and adds else None

    def _only_user(self, name: str) -> Node | None:
        """What alone uses a value within the segment."""
        users = self.users.get(name, ())
        return users[0] if len(users) == 1 and name not in self.outputs else None


def _grouped(segment: LoweredSegment) -> LoweredSegment:
    graph = segment.graph
    if not any(node.op in KEYS for node in graph.nodes):
        return segment
    around, built, gone = _Around(graph), dict[str, Node](), set[str]()
    for node in graph.nodes:
        if node.op not in KEYS:
            continue
        keys, values = (around.repeated(a.name) if isinstance(a, Ref) else None for a in keys_of(node))
        if keys is None or values is None or keys.shape[:4] != values.shape[:4]:
            continue
        new = with_keys(node, keys.source, values.source)
        if "backward" in node.op:
            totals = [around.total(o, r.shape) for o, r in zip(node.outs[1:], (keys, values), strict=True)]
            if None in totals:
                continue
            pairs = [pair for pair in totals if pair is not None]
            gone.update(name for pair in pairs for each in pair for name in each.outs)
            outs = (node.outs[0], *(total.name for _, total in pairs))
            new = replace(new, outs=outs, types=(node.types[0], *(total.types[0] for _, total in pairs)))
        built[node.name] = new
    segment = replaced_in(segment, {**built, **dict.fromkeys(gone)})
    for ops in (RESHAPES, {_EXPAND}):  # the view, then what it is a view of
        used = {*segment.graph.outputs, *(r for n in segment.graph.nodes for r in refs_of(n))}
        unused = (n.name for n in segment.graph.nodes if n.op in ops and n.name not in used)
        segment = replaced_in(segment, dict.fromkeys(unused))
    return segment
