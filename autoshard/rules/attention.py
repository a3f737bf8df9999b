"""Attention as one op: split by batch and heads, and by query rows where no causal mask needs offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dim, Dims, Factored, RuleFn


def _laid(node: Node, shapes: Sequence[TensorType], mask: TensorType | None, causal: bool):  # type: ignore[no-untyped-def]
    """Dims of query, key, value, out, log-sum-exp and mask, with the builder and the fixed factors."""
    q, k, v = shapes
    build = Builder()
    b, h, s = build.new(q.shape[0]), build.new(q.shape[1]), build.new(q.shape[2])
    t, d, e = build.new(k.shape[2]), build.new(q.shape[3]), build.new(v.shape[3])
    fixed = {f for x in (t, d, e) for f in x} | (set(s) if causal else set())
    full: list[Dim] = [b, h, s, t]
    mask_dims: Dims = ()
    if mask is not None:
        lead = 4 - len(mask.shape)
        mask_dims = tuple(full[lead + i] if n != 1 else () for i, n in enumerate(mask.shape))
    return build, (b, h, s, d), (b, h, t, d), (b, h, t, e), (b, h, s, e), (b, h, s), mask_dims, fixed


def flops(q: TensorType, k: TensorType, v: TensorType, causal: bool) -> float:
    """FLOP of the forward: two products over all pairs, or over half of them."""
    b, h, s, d = q.shape
    full = 2.0 * b * h * s * k.shape[2] * (d + v.shape[3])
    return full / 2 if causal else full


def sdpa(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e], optional mask -> (out [b, h, s, e], lse [b, h, s])."""
    causal = bool(node.args[4])
    mask = ins[3] if len(ins) > 3 else None
    build, q, k, v, out, lse, mask_dims, fixed = _laid(node, ins[:3], mask, causal)
    inputs = (q, k, v) if mask is None else (q, k, v, mask_dims)
    flop = flops(ins[0], ins[1], ins[2], causal)
    sizes, whole = tuple(build.sizes), frozenset(fixed)
    return Factored(sizes, inputs, (out, lse), whole, kind="matmul", flops=flop, kernel="attention")


def sdpa_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse, optional mask -> gradients of q, k, v."""
    causal = bool(node.args[7])
    mask = ins[6] if len(ins) > 6 else None
    build, q, k, v, out, lse, mask_dims, fixed = _laid(node, ins[1:4], mask, causal)
    inputs = (out, q, k, v, out, lse) if mask is None else (out, q, k, v, out, lse, mask_dims)
    flop = 2.5 * flops(ins[1], ins[2], ins[3], causal)
    reduce = tuple((f, "sum") for f in q[2])
    return Factored(
        tuple(build.sizes),
        inputs,
        (q, k, v),
        frozenset(fixed),
        reduce,
        ((0,),),
        "matmul",
        flop,
        kernel="attention_backward",
    )


def _tail_flops(q: TensorType, k: TensorType, v: TensorType) -> float:
    """Each of the last s of t positions looks at t - s / 2 of them."""
    s, t = q.shape[2], k.shape[2]
    return flops(q, k, v, False) * (1 - s / (2 * t)) if t else 0.0


def sdpa_tail(node: Node, ins: Sequence[TensorType]) -> Factored:
    """q [b, h, s, d], k [b, h, t, d], v [b, h, t, e] -> (out [b, h, s, e], lse [b, h, s])."""
    build, q, k, v, out, lse, _, fixed = _laid(node, ins, None, True)
    flop = _tail_flops(*ins)
    sizes, whole = tuple(build.sizes), frozenset(fixed)
    return Factored(sizes, (q, k, v), (out, lse), whole, kind="matmul", flops=flop, kernel="attention")


def sdpa_tail_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """grad, q, k, v, out, lse -> gradients of q, k, v."""
    build, q, k, v, out, lse, _, fixed = _laid(node, ins[1:4], None, True)
    flop = 2.5 * _tail_flops(*ins[1:4])
    inputs = (out, q, k, v, out, lse)
    return Factored(
        tuple(build.sizes),
        inputs,
        (q, k, v),
        frozenset(fixed),
        (),
        ((0,),),
        "matmul",
        flop,
        kernel="attention_backward",
    )


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.sdpa.default": sdpa,
        "autoshard.sdpa_backward.default": sdpa_backward,
        "autoshard.sdpa_tail.default": sdpa_tail,
        "autoshard.sdpa_tail_backward.default": sdpa_tail_backward,
    }
)
