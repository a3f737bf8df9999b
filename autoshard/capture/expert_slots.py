"""Says of a traced graph which values are of slots of experts, and frees its ops from how many there are.

A trace counts a slot for every expert and token (`autoshard.ops.experts`), so that sizes in the arguments of
ops would be too large for the rows that exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.errors import CaptureError
from autoshard.ir import Arg, Graph, Node, TensorType, refs_of
from autoshard.ir.row_tiles import SHAPED
from autoshard.rules import experts
from autoshard.rules.registry import RULES

_CHOICES = "autoshard.choices.default"
_ROUTES = frozenset(("autoshard.route.default", "autoshard.route_one.default"))
#: what is given slots and makes no value of slots
_ENDS = frozenset(
    (
        "autoshard.combine.default",
        "autoshard.combine_weights.default",
        "autoshard.expert_outer.default",
        "autoshard.expert_sum.default",
    )
)
_SLICE_BACKWARD = "aten.slice_backward.default"


class SlotsError(CaptureError):
    """An op on values of slots is not known to treat rows alike."""


def with_slots(graph: Graph) -> Graph:
    """The graph with `TensorType.filled` where values are of slots.

    Raises SlotsError for an op on them that is not known to treat rows alike.
    """
    if all(node.op != _CHOICES for node in graph.nodes):
        return graph
    types = dict(graph.types())
    nodes: list[Node] = []
    for node in graph.nodes:
        new = _filled(node, [types[r] for r in refs_of(node)])
        types.update((o, t) for o, t in zip(new.outs, new.types, strict=True) if t is not None)
        nodes.append(new)
    return replace(graph, nodes=tuple(nodes))


def _filled(node: Node, ins: Sequence[TensorType]) -> Node:
    if node.op == _CHOICES:
        return _with(node, (1, 1))
    if node.op in _ROUTES:
        experts = node.args[1]
        return _with(node, (min(ins[0].shape[1], experts), experts))
    slots = next((t for t in ins if t.has_slots), None)
    if slots is None or node.op in _ENDS:
        return node
    hold = _holds_slots(node, ins)
    if not any(hold):
        return node  # a sum over all slots
    new = _without_count(node, slots.shape[0])
    types = zip(new.types, hold, strict=True)
    return replace(new, types=tuple(t and replace(t, filled=slots.filled) if h else t for t, h in types))


def _holds_slots(node: Node, ins: Sequence[TensorType]) -> list[bool]:
    """Per result whether its dim 0 is of slots, by the rule of the op. Raises SlotsError if slots lie along
    another dim, are neither kept apart nor added up, or meet a tensor of a fixed number of rows."""
    known = RULES.get(node.op)
    if known is None:
        raise _refusal(node)
    rule = known(node, [replace(t, filled=None) for t in ins])
    given = list(zip(rule.inputs, ins, strict=True))
    slots = {f for dims, t in given if t.has_slots for f in dims[0]}
    meets = any(t.filled is None and dims and slots & set(dims[0]) for dims, t in given)
    if slots & rule.fixed or (meets and node.op not in experts.RULES):
        raise _refusal(node)
    hold = []
    for dims in rule.outputs:
        along = [d for d, dim in enumerate(dims or ()) if slots & set(dim)]
        if along not in ([], [0]) or (not along and not slots <= {f for f, _ in rule.reduce}):
            raise _refusal(node)
        hold.append(bool(along))
    return hold


def _with(node: Node, filled: tuple[int, int]) -> Node:
    return replace(node, types=tuple(t and replace(t, filled=filled) for t in node.types))


def _without_count(node: Node, count: int) -> Node:
    """The op, told no number of slots."""
    out = node.types[0]
    assert out is not None
    if node.op in SHAPED:
        return replace(node, args=(node.args[0], (-1, *out.shape[1:]), *node.args[2:]))
    if node.op == _SLICE_BACKWARD:
        grad, sizes, dim, start, end, step = node.args
        if dim % len(sizes) != len(sizes) - 1:
            raise _refusal(node)
        args = (grad, sizes[-1], start or 0, min(sizes[-1], end), step)
        return replace(node, op="autoshard.put_columns.default", args=args)
    if _holds(node.args, count):
        raise _refusal(node)
    return node


def _holds(arg: Arg, count: int) -> bool:
    """Whether a shape among arguments begins with a number of rows."""
    if isinstance(arg, tuple):
        return (len(arg) > 1 and arg[0] == count) or any(_holds(a, count) for a in arg)
    return False


def _refusal(node: Node) -> SlotsError:
    return SlotsError(
        f"{node.op} is called on the rows of experts, of which a batch says how many there are",
        where=node.origin.source or node.origin.fqn,
        why="only ops that treat every row alike can run on them",
        hint="keep the rows of experts along dim 0",
    )
