"""Attention as one op: split by batch, heads and query rows; causal attention by rows in a zigzag, and that
of few queries to many keys by keys.

Keys and values [b, h, 1, t, d] are those of groups of query heads that follow each other: h of them.

A rank with rows of a sequence runs ``sdpa_rows``, which is told where they begin, if that says which keys
they attend to: where it is causal, has a window or documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from autoshard.ir import Arg, Graph, LocalOffset, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import (
    COLLECTIVES,
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    CollectiveSpec,
    is_ring,
)
from autoshard.ir.placement import Placement, Shard
from autoshard.ir.views import RESHAPES
from autoshard.ir.window_hops import WindowHops
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall

#: attention of all keys
SDPA = "autoshard.sdpa.default"
#: times as long as without soft caps: on CPUs 1.7 to 2.5 (fp32 and bf16, 512 to 4,096 positions)
_CAPPED = 2.0


def numbers_documents(mask: TensorType) -> bool:
    """Whether a mask of keys is of integers, those of the documents in a sequence."""
    return mask.dtype[0] in "iu"


def merges(node: Node, ins: Sequence[TensorType]) -> bool:
    """Whether merging parts of attention (`ops.attention_parts`) sends less than gathering its keys, and any
    query may attend to any key. node: attention or its gradient. ins: its tensors."""
    backward = node.op != SDPA
    q, k, v, *_ = ins[1:] if backward else ins
    place = 7 if backward else 4
    masks = ins[6 if backward else 3 :]
    if node.args[place] or _window(node, place + 2) or any(map(numbers_documents, masks)):
        return False
    merged = TensorType((*q.shape[:3], v.shape[-1] + 1), "f64" if q.dtype == "f64" else "f32")
    return 2 * merged.nbytes < k.nbytes + v.nbytes


@dataclass(frozen=True)
class _Laid:
    """Dims of the tensors of an attention. fixed: factors that stay whole; zigzag, contiguous and ring as
    those of `Factored`; rows: whether a part of the queries must be told where it begins."""

    sizes: tuple[int, ...]
    query: Dims
    key: Dims
    value: Dims
    out: Dims
    lse: Dims
    masks: tuple[Dims, ...]
    fixed: frozenset[int]
    zigzag: frozenset[int] = frozenset()
    contiguous: frozenset[int] = frozenset()
    ring: tuple[tuple[int, int], ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Factors of the query heads that share keys and values."""
        return tuple(f for f in self.query[1] if f not in self.key[1])

    @property
    def rows(self) -> bool:
        return bool(self.zigzag or self.contiguous)


def _laid(
    shapes: Sequence[TensorType],
    mask: TensorType | None,
    causal: bool,
    window: int = 0,
    *,
    by_keys: bool = False,
) -> _Laid:
    """by_keys: whether the keys may be divided where the queries are not."""
    q, k, v = shapes
    build = Builder()
    b, keys, s = build.new(q.shape[0]), build.new(k.shape[1]), build.new(q.shape[2])
    h = (*keys, *build.new(q.shape[1] // max(1, k.shape[1])))
    t, d, e = build.new(k.shape[-2]), build.new(q.shape[3]), build.new(v.shape[-1])
    of_keys_alone = mask is None or mask.shape[-2:-1] in ((), (1,))
    documents = mask is not None and numbers_documents(mask)
    plain = mask is None or not mask.is_float
    divided = of_keys_alone and plain and q.shape[2] == k.shape[-2]
    rows = frozenset(s) if causal or window or documents else frozenset()
    fixed = frozenset(f for x in (d, e, () if by_keys else t) for f in x) | (frozenset() if divided else rows)
    zigzag = rows - fixed if causal else frozenset[int]()
    # with a window all ranks have about the same work in either order
    contiguous = rows - fixed if window or not causal else frozenset[int]()
    ring = ((s[0], t[0]),) if divided and s and t else ()
    # the mask of keys that go round stays whole
    full: list[Dim] = [b, h, s, build.new(k.shape[-2]) if ring and mask is not None else t]
    fixed |= {*full[3]} if full[3] != t or not by_keys else frozenset()
    masks: tuple[Dims, ...] = ()
    if mask is not None:
        lead = 4 - len(mask.shape)
        masks = (tuple(full[lead + i] if n != 1 else () for i, n in enumerate(mask.shape)),)
    of_keys = (b, keys, ()) if len(k.shape) == 5 else (b, keys)
    dims = (b, h, s, d), (*of_keys, t, d), (*of_keys, t, e), (b, h, s, e), (b, h, s)
    return _Laid(tuple(build.sizes), *dims, masks, fixed, zigzag, contiguous, ring)


def _pairs(rows: int, keys: int, causal: bool, window: int) -> float:
    """Of a row and a key that it attends to: all, half of them, or those in the window."""
    pairs = rows * keys / 2 if causal else float(rows * keys)
    if not window:
        return pairs
    sides = 1 if causal else 2
    return min(pairs, rows * window + (sides - 1) * rows * (window - 1) - sides * window * (window - 1) / 2)


def flops(q: TensorType, k: TensorType, v: TensorType, causal: bool, window: int = 0) -> float:
    """FLOP of the forward: two products over the pairs of a row and a key that it attends to.

    Documents, which are known in each step alone, count as one.
    """
    b, h, s, d = q.shape
    return 2.0 * b * h * _pairs(s, k.shape[-2], causal, window) * (d + v.shape[-1])


def _window(node: Node, place: int) -> int:
    """An argument that may be left out."""
    return int(node.args[place]) if len(node.args) > place else 0


def _softcap(node: Node, place: int) -> tuple[float, ...]:
    """The last argument, () if it is left out or says nothing."""
    return (float(node.args[place]),) if len(node.args) > place and node.args[place] else ()


def _slowdown(node: Node, place: int) -> float:
    """With a soft cap, a hyperbolic tangent beside every exponential; place: of the soft cap."""
    return _CAPPED if _softcap(node, place) else 1.0


def sdpa(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e], optional mask -> (out [b, h, s, e], lse [b, h, s])."""
    causal, window = bool(node.args[4]), _window(node, 6)
    laid = _laid(ins[:3], ins[3] if len(ins) > 3 else None, causal, window)
    return Factored(
        laid.sizes,
        (laid.query, laid.key, laid.value, *laid.masks),
        (laid.out, laid.lse),
        laid.fixed,
        contiguous=laid.contiguous,
        kind="matmul",
        flops=flops(ins[0], ins[1], ins[2], causal, window),
        local=partial(_rows, scale=5, rows=laid.rows) if laid.rows or laid.ring else None,
        zigzag=laid.zigzag,
        ring=laid.ring,
        window=window,
        kernel="attention",
        slowdown=_slowdown(node, 7),
    )


def sdpa_parts(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e], optional mask -> [b, h, s, e + 1]."""
    laid = _laid(ins[:3], ins[3] if len(ins) > 3 else None, False, by_keys=True)
    width = len(laid.sizes)
    return Factored(
        (*laid.sizes, ins[2].shape[-1] + 1),
        (laid.query, laid.key, laid.value, *laid.masks),
        ((*laid.lse, (width,)),),
        laid.fixed | {width},
        tuple((f, "attention") for f in laid.key[-2]),
        kind="matmul",
        flops=flops(ins[0], ins[1], ins[2], False),
        rate=ins[0].dtype,
        copies=(0.0,) * len(ins),
        kernel="attention",
        slowdown=_slowdown(node, 5),
    )


def sdpa_joined(node: Node, ins: Sequence[TensorType]) -> Factored:
    """[b, h, s, e + 1] -> (out [b, h, s, e], lse [b, h, s])."""
    build = Builder()
    rows = build.dims(ins[0].shape[:3])
    parts, out = build.new(ins[0].shape[3]), build.new(ins[0].shape[3] - 1)
    return Factored(tuple(build.sizes), ((*rows, parts),), ((*rows, out), rows), frozenset((*parts, *out)))


def rows_args(node: Node, scale: int, start: Arg, mask: Arg, *, zigzag: bool = False) -> tuple[Arg, ...]:
    """The last arguments of attention of rows that begin at ``start``, behind the tensors.

    scale: which argument of the node that is. mask: of keys, None without one.
    """
    window, causal = _window(node, scale + 1), bool(node.args[scale - 1])
    softcap = _softcap(node, scale + 2)
    rest: tuple[Arg, ...] = () if causal and not window and mask is None and not softcap else (mask, window)
    return (node.args[scale], start, zigzag, *rest, *((causal,) if softcap or not causal else ()), *softcap)


def _rows(call: LocalCall, scale: int, rows: bool) -> Node:
    """Attention of the rows that a rank has, with all keys or with those that come by. scale: which argument
    that is. rows: whether it must be told where they begin."""
    if not call.in_split(0, 2):
        return call.node
    if call.in_split(KEYS[call.node.op], 2):
        return _round(call, scale)
    if not rows:
        return call.node
    mask, zigzag = call.node.args[scale - 2], any(_in_zigzag(p) for p in call.in_layouts[0])
    args = (
        *call.node.args[: scale - 2],
        *rows_args(call.node, scale, call.in_offset(0, 2), mask, zigzag=zigzag),
    )
    return replace(call.node, op=call.node.op.replace("sdpa", "sdpa_rows"), args=args)


def _in_zigzag(placed: Placement) -> bool:
    return isinstance(placed, Shard) and placed.dim == 2 and placed.outer < 0


def _round(call: LocalCall, scale: int) -> Node:
    """Attention with keys that go round the axis that divides them and the rows, or as far as a window."""
    (at,) = (n for n, p in enumerate(call.in_layouts[0]) if isinstance(p, Shard) and p.dim == 2)
    args, window = call.node.args, _window(call.node, scale + 1)
    tensors = tuple(a for a in args[: scale - 1] if a is not None)
    told, softcap = args[scale - 1 : scale + 1], _softcap(call.node, scale + 2)
    if window:
        zigzag = _in_zigzag(call.in_layouts[0][at])
        positions, ways = call.ins[0].shape[2], call.mesh.sizes[at]
        way = WindowHops.over(positions, ways, window, causal=bool(told[0]), zigzag=zigzag)
        told = (*told, *(softcap or (0.0,)), window, zigzag, way.count)
    else:
        told = (*told, *softcap)
    return replace(call.node, op=RINGS[call.node.op].op, args=(tensors, call.mesh.names[at], *told))


def keys_of(node: Node) -> tuple[Arg, Arg]:
    """Keys and values of attention (`KEYS`)."""
    args, at = node.args[0] if is_ring(node) else node.args, KEYS[node.op]
    return args[at], args[at + 1]


def repeats_of(node: Node, graph: Graph) -> int:
    """How many times attention is given every head of the keys, as it is expanded for groups of heads."""
    makers = {out: each for each in graph.nodes for out in each.outs}
    (keys, _), types = keys_of(node), graph.types()
    flat = makers.get(keys.name) if isinstance(keys, Ref) else None
    wide = makers.get(next(refs_of(flat), "")) if flat is not None and flat.op in RESHAPES else None
    if wide is None or wide.op != "aten.expand.default":
        return 1
    before, after = (types[name].shape for name in (next(refs_of(wide)), wide.name))
    grouped = len(before) == len(after) == 5 and before[2] == 1
    return after[2] if grouped else 1


def with_keys(node: Node, keys: Arg, values: Arg) -> Node:
    """Attention with other keys and values."""
    args, at = node.args[0] if is_ring(node) else node.args, KEYS[node.op]
    args = (*args[:at], keys, values, *args[at + 2 :])
    return replace(node, args=(args, *node.args[1:]) if is_ring(node) else args)


def is_windowed(node: Node) -> bool:
    """Whether a window ends the way of keys that go round."""
    return len(node.args) > 5


def of_all_keys(node: Node) -> Node:
    """Attention on full tensors, of one of keys that go round."""
    tensors, _, causal, scale, *rest = node.args
    softcap, window = rest[0] if rest else 0.0, rest[1] if len(rest) > 1 else 0
    backward = node.op == RING_ATTENTION_BACKWARD.op
    count = 6 if backward else 3
    mask = tensors[count] if len(tensors) > count else None
    told = (window, softcap) if softcap else (window,) if window else ()
    args = (*tensors[:count], mask, causal, scale, *told)
    return replace(node, op=COLLECTIVES[node.op].product, args=args, kwargs=())


def sdpa_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse, optional mask -> gradients of q, k, v."""
    causal, window, by_keys = bool(node.args[7]), _window(node, 9), merges(node, ins)
    laid = _laid(ins[1:4], ins[6] if len(ins) > 6 else None, causal, window, by_keys=by_keys)
    keys = laid.key[-2] if by_keys else ()
    return Factored(
        laid.sizes,
        (laid.out, laid.query, laid.key, laid.value, laid.out, laid.lse, *laid.masks),
        (laid.query, laid.key, laid.value),
        laid.fixed,
        tuple((f, "sum") for f in (*laid.query[2], *laid.groups, *keys)),
        ((0,),),
        "matmul",
        2.5 * flops(ins[1], ins[2], ins[3], causal, window),
        contiguous=laid.contiguous,
        local=partial(_rows, scale=8, rows=laid.rows) if laid.rows or laid.ring else None,
        zigzag=laid.zigzag,
        ring=laid.ring,
        window=window,
        kernel="attention_backward",
        slowdown=_slowdown(node, 10),
    )


def _rows_flops(node: Node, scale: int, q: TensorType, k: TensorType, v: TensorType) -> float:
    """Of t keys each of s rows attends to half of its block and all before; in a zigzag, to half of them.
    Where that depends on the rank, of the last one.

    scale: which argument that is."""
    start, zigzag = node.args[scale + 1 : scale + 3]
    start = k.shape[-2] - q.shape[2] if isinstance(start, LocalOffset) else start
    causal = bool(node.args[scale + 5]) if len(node.args) > scale + 5 else True
    window, seen = _window(node, scale + 4), 1.0
    if causal:
        seen = 0.5 if zigzag else (start + q.shape[2] / 2) / max(1, k.shape[-2])
    if window:
        seen = min(seen, (window if causal else 2 * window - 1) / max(1, k.shape[-2]))
    return flops(q, k, v, False) * seen


def sdpa_rows(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v, optional mask of keys -> (out [b, h, s, e], lse [b, h, s])."""
    laid = _laid(ins[:3], ins[3] if len(ins) > 3 else None, True)
    return Factored(
        laid.sizes,
        (laid.query, laid.key, laid.value, *laid.masks),
        (laid.out, laid.lse),
        laid.fixed | {*laid.query[2]},
        kind="matmul",
        flops=_rows_flops(node, 3, *ins[:3]),
        kernel="attention",
        slowdown=_slowdown(node, 9),
    )


def sdpa_rows_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse, optional mask of keys -> gradients of q, k, v."""
    laid = _laid(ins[1:4], ins[6] if len(ins) > 6 else None, True)
    return Factored(
        laid.sizes,
        (laid.out, laid.query, laid.key, laid.value, laid.out, laid.lse, *laid.masks),
        (laid.query, laid.key, laid.value),
        laid.fixed | {*laid.query[2]},
        tuple((f, "sum") for f in laid.groups),
        ((0,),),
        "matmul",
        2.5 * _rows_flops(node, 6, *ins[1:4]),
        kernel="attention_backward",
        slowdown=_slowdown(node, 12),
    )


#: attention of all keys -> that of keys that go round
RINGS: Mapping[str, CollectiveSpec] = MappingProxyType(
    {spec.product: spec for spec in (RING_ATTENTION, RING_ATTENTION_BACKWARD)}
)
#: ops -> which of their tensors the keys are; values follow
KEYS: Mapping[str, int] = MappingProxyType(
    {
        SDPA: 1,
        "autoshard.sdpa_parts.default": 1,
        "autoshard.sdpa_rows.default": 1,
        "autoshard.sdpa_backward.default": 2,
        "autoshard.sdpa_rows_backward.default": 2,
        RING_ATTENTION.op: 1,
        RING_ATTENTION_BACKWARD.op: 2,
    }
)
RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        SDPA: sdpa,
        "autoshard.sdpa_parts.default": sdpa_parts,
        "autoshard.sdpa_backward.default": sdpa_backward,
        "autoshard.sdpa_rows.default": sdpa_rows,
        "autoshard.sdpa_rows_backward.default": sdpa_rows_backward,
    }
)
#: what follows from merged parts of attention
JOINED: Mapping[str, RuleFn] = MappingProxyType({"autoshard.sdpa_joined.default": sdpa_joined})
