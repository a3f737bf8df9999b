"""Attention as one op: split by batch, heads and query rows; causal attention by rows in a zigzag.

A rank with rows of a causal sequence runs ``sdpa_rows``, which is told where they begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from autoshard.ir import Arg, Node, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn
from autoshard.rules.local import LocalCall


def _laid(node: Node, shapes: Sequence[TensorType], mask: TensorType | None, causal: bool):  # type: ignore[no-untyped-def]
    """Dims of query, key, value, out, log-sum-exp and mask, with the builder and the fixed factors."""
    q, k, v = shapes
    build = Builder()
    b, h, s = build.new(q.shape[0]), build.new(q.shape[1]), build.new(q.shape[2])
    t, d, e = build.new(k.shape[2]), build.new(q.shape[3]), build.new(v.shape[3])
    by_keys = mask is None or mask.shape[-2:-1] in ((), (1,))
    turned = frozenset(s) if causal and by_keys and q.shape[2] == k.shape[2] else frozenset()
    fixed = {f for x in (t, d, e) for f in x} | (set(s) if causal and not turned else set())
    full: list[Dim] = [b, h, s, t]
    masks: tuple[Dims, ...] = ()
    if mask is not None:
        lead = 4 - len(mask.shape)
        masks = (tuple(full[lead + i] if n != 1 else () for i, n in enumerate(mask.shape)),)
    return build, (b, h, s, d), (b, h, t, d), (b, h, t, e), (b, h, s, e), (b, h, s), masks, fixed, turned


def flops(q: TensorType, k: TensorType, v: TensorType, causal: bool, window: int = 0) -> float:
    """FLOP of the forward: two products over all pairs, over half of them, or over those in a window."""
    b, h, s, d = q.shape
    pairs = s * k.shape[2] / 2 if causal else float(s * k.shape[2])
    if window:
        pairs = min(pairs, s * window - window * (window - 1) / 2)
    return 2.0 * b * h * pairs * (d + v.shape[3])


def _window(node: Node, place: int) -> int:
    """The last argument, which may be left out."""
    return int(node.args[place]) if len(node.args) > place else 0


def sdpa(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e], optional mask -> (out [b, h, s, e], lse [b, h, s])."""
    causal = bool(node.args[4])
    mask = ins[3] if len(ins) > 3 else None
    build, q, k, v, out, lse, masks, fixed, turned = _laid(node, ins[:3], mask, causal)
    flop = flops(ins[0], ins[1], ins[2], causal, _window(node, 6))
    return Factored(
        tuple(build.sizes),
        (q, k, v, *masks),
        (out, lse),
        frozenset(fixed),
        kind="matmul",
        flops=flop,
        local=partial(_rows, scale=5) if turned else None,
        zigzag=turned,
        kernel="attention",
    )


def rows_args(node: Node, scale: int, start: Arg, mask: Arg, *, zigzag: bool = False) -> tuple[Arg, ...]:
    """The last arguments of attention of rows that begin at ``start``, behind the tensors of the causal one.

    scale: which argument of the node that is. mask: of keys, None without one.
    """
    window = _window(node, scale + 1)
    return (node.args[scale], start, zigzag, *((mask, window) if window or mask is not None else ()))


def _rows(call: LocalCall, scale: int) -> Node:
    """Attention of the rows that a rank has; scale: which argument that is. Keys are whole."""
    if not call.in_split(0, 2):
        return call.node
    mask = call.node.args[scale - 2]
    args = (
        *call.node.args[: scale - 2],
        *rows_args(call.node, scale, call.in_offset(0, 2), mask, zigzag=True),
    )
    return replace(call.node, op=call.node.op.replace("sdpa", "sdpa_rows"), args=args)


def sdpa_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse, optional mask -> gradients of q, k, v."""
    causal = bool(node.args[7])
    mask = ins[6] if len(ins) > 6 else None
    build, q, k, v, out, lse, masks, fixed, turned = _laid(node, ins[1:4], mask, causal)
    flop = 2.5 * flops(ins[1], ins[2], ins[3], causal, _window(node, 9))
    reduce = tuple((f, "sum") for f in q[2])
    return Factored(
        tuple(build.sizes),
        (out, q, k, v, out, lse, *masks),
        (q, k, v),
        frozenset(fixed),
        reduce,
        ((0,),),
        "matmul",
        flop,
        local=partial(_rows, scale=8) if turned else None,
        zigzag=turned,
        kernel="attention_backward",
    )


def _rows_flops(node: Node, scale: int, q: TensorType, k: TensorType, v: TensorType) -> float:
    """Of t keys each of s rows looks at half of its block and all before; in a zigzag, at half of them.

    scale: which argument that is."""
    start, zigzag = node.args[scale + 1 : scale + 3]
    seen = 0.5 if zigzag else (start + q.shape[2] / 2) / max(1, k.shape[2])
    window = _window(node, scale + 4)
    if window:
        seen = min(seen, window / max(1, k.shape[2]))
    return flops(q, k, v, False) * seen


def sdpa_rows(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v, optional mask of keys -> (out [b, h, s, e], lse [b, h, s])."""
    mask = ins[3] if len(ins) > 3 else None
    build, q, k, v, out, lse, masks, fixed, _ = _laid(node, ins[:3], mask, True)
    sizes, whole = tuple(build.sizes), frozenset((*fixed, *q[2]))
    flop = _rows_flops(node, 3, *ins[:3])
    return Factored(
        sizes, (q, k, v, *masks), (out, lse), whole, kind="matmul", flops=flop, kernel="attention"
    )


def sdpa_rows_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse, optional mask of keys -> gradients of q, k, v."""
    mask = ins[6] if len(ins) > 6 else None
    build, q, k, v, out, lse, masks, fixed, _ = _laid(node, ins[1:4], mask, True)
    return Factored(
        tuple(build.sizes),
        (out, q, k, v, out, lse, *masks),
        (q, k, v),
        frozenset((*fixed, *q[2])),
        (),
        ((0,),),
        "matmul",
        2.5 * _rows_flops(node, 6, *ins[1:4]),
        kernel="attention_backward",
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.sdpa.default": sdpa,
        "autoshard.sdpa_backward.default": sdpa_backward,
        "autoshard.sdpa_rows.default": sdpa_rows,
        "autoshard.sdpa_rows_backward.default": sdpa_rows_backward,
    }
)
