"""Reductions, and ops that need a full dim: softmax, sort, cumulative sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dims, Factored, RuleFn, broadcast


def _reduced_dims(node: Node, rank: int) -> tuple[int, ...]:
    raw = node.arg(1, "dim")
    if isinstance(raw, int) and not isinstance(raw, bool):
        raw = (raw,)
    return tuple(d % rank for d in raw) if raw and rank else tuple(range(rank))


def _over(node: Node, ins: Sequence[TensorType], dims: Sequence[int], reduce: str | None) -> Factored:
    """A reduction over ``dims``; reduce None: these dims must be whole."""
    build = Builder()
    source = build.dims(ins[0].shape)
    gone = {f for d in dims for f in source[d]}
    out = node.types[0]
    assert out is not None
    keep = len(out.shape) == len(source)
    after: Dims = tuple(() if d in dims else x for d, x in enumerate(source) if keep or d not in dims)
    return Factored(
        tuple(build.sizes),
        (source,),
        tuple(None if o is None else after for o in node.types),
        frozenset() if reduce else frozenset(gone),
        tuple((f, reduce) for f in sorted(gone)) if reduce else (),
        ((0,),) if reduce == "sum" and ins[0].is_float else (),
    )


def sum_(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, _reduced_dims(node, len(ins[0].shape)), "sum")


def sum_all(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, range(len(ins[0].shape)), "sum")


def amax(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, _reduced_dims(node, len(ins[0].shape)), "max")


def max_all(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, range(len(ins[0].shape)), "max")


def full_reduction(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, _reduced_dims(node, len(ins[0].shape)), None)


def full_all(node: Node, ins: Sequence[TensorType]) -> Factored:
    return _over(node, ins, range(len(ins[0].shape)), None)


def counted(node: Node, ins: Sequence[TensorType]) -> Factored:
    """A sum of something that is not linear in the input: of how many elements are not zero."""
    return replace(sum_(node, ins), linear=())


def counted_over(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The same over one dim, or over all of them."""
    dim, rank = node.arg(1, "dim", None), len(ins[0].shape)
    return replace(_over(node, ins, range(rank) if dim is None else (dim % rank,), "sum"), linear=())


def _full_dims(position: int, default: int | None = None) -> RuleFn:
    """Rule of a reduction that needs the dims named by an argument whole."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        rank = len(ins[0].shape)
        raw = node.arg(position, "dim", default)
        named = raw if isinstance(raw, tuple) else () if raw is None else (raw,)
        over = tuple(d % rank for d in named) if named and rank else tuple(range(rank))
        return _over(node, ins, over, None)

    return rule


def _along(position: int, default: int | None = None, linear: tuple[tuple[int, ...], ...] = ()) -> RuleFn:
    """Rule of an op that keeps the shape and needs the dim named by an argument whole."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        dim = node.arg(position, "dim", default)
        rank = len(ins[0].shape)
        return broadcast(ins, node.types, fixed_dims=[dim % rank] if rank else [], linear=linear)

    return rule


def topk(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(values, indices) of the k largest along a dim, which must be whole."""
    dim = node.arg(2, "dim", -1) % len(ins[0].shape)
    build = Builder()
    source = build.dims(ins[0].shape)
    out = node.types[0]
    assert out is not None
    kept = build.new(out.shape[dim])
    after = tuple(kept if d == dim else x for d, x in enumerate(source))
    fixed = frozenset((*source[dim], *kept))
    return Factored(tuple(build.sizes), (source,), (after, after), fixed)


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.sum.dim_IntList": sum_,
        "aten.sum.default": sum_all,
        "aten.amax.default": amax,
        "aten.max.default": max_all,
        "aten.min.default": full_all,
        "aten.amin.default": full_reduction,
        "aten.max.dim": full_reduction,
        "aten.min.dim": full_reduction,
        "aten.argmax.default": full_reduction,
        "aten.argmin.default": full_reduction,
        "aten.any.default": full_all,
        "aten.all.default": full_all,
        "aten.any.dim": full_reduction,
        "aten.all.dim": full_reduction,
        "aten.prod.dim_int": full_reduction,
        "aten.logsumexp.default": full_reduction,
        "aten.var.correction": full_reduction,
        "aten.std.correction": full_reduction,
        "aten.var_mean.correction": full_reduction,
        "aten.std_mean.correction": full_reduction,
        "aten.median.dim": full_reduction,
        "aten.nanmedian.dim": full_reduction,
        "aten.median.default": full_all,
        "aten.nanmedian.default": full_all,
        "aten.mode.default": _full_dims(1, -1),
        "aten.trace.default": full_all,
        "aten.kthvalue.default": _full_dims(2, -1),
        "aten.linalg_vector_norm.default": _full_dims(2),
        "aten.norm.ScalarOpt_dim": _full_dims(2),
        "aten.norm.Scalar": full_all,
        "aten.prod.default": full_all,
        "aten.any.dims": full_reduction,
        "aten.all.dims": full_reduction,
        "aten.aminmax.default": _full_dims(1),
        "aten.nansum.default": counted,
        "aten.count_nonzero.dim_IntList": counted,
        "aten.count_nonzero.default": counted_over,
        "aten._softmax.default": _along(1),
        "aten._log_softmax.default": _along(1),
        "aten._safe_softmax.default": _along(1),
        "aten._softmax_backward_data.default": _along(2, linear=((0,),)),
        "aten._log_softmax_backward_data.default": _along(2, linear=((0,),)),
        "aten.cumsum.default": _along(1, linear=((0,),)),
        "aten.cumprod.default": _along(1),
        "aten.logcumsumexp.default": _along(1),
        "aten.cummax.default": _along(1),
        "aten.cummin.default": _along(1),
        "aten.sort.default": _along(1, -1),
        "aten.argsort.default": _along(1, -1),
        "aten.sort.stable": _along(2, -1),
        "aten.argsort.stable": _along(2, -1),
        "aten.flip.default": lambda node, ins: broadcast(
            ins, node.types, fixed_dims=[d % len(ins[0].shape) for d in node.args[1]], linear=((0,),)
        ),
        "aten.tril.default": lambda node, ins: broadcast(
            ins, node.types, fixed_dims=[-2, -1], linear=((0,),)
        ),
        "aten.triu.default": lambda node, ins: broadcast(
            ins, node.types, fixed_dims=[-2, -1], linear=((0,),)
        ),
        "aten.topk.default": topk,
    }
)
