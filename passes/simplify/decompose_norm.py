"""Batch norm in training, and vector norms, as sums over what may be split.

The statistics of a batch are sums over it, which shards add up: the batch stays split, and outputs,
gradients and running statistics are those of the full batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from autoshard.ir import Arg, Node, Ref, TensorType
from autoshard.passes.rewrite import Fresh, Rewrite, Steps, Types, first_type


def _over_batch(x: TensorType) -> tuple[tuple[int, ...], TensorType, int]:
    """(dims that are summed, type of one number per channel that broadcasts, elements per channel)."""
    dims = (0, *range(2, len(x.shape)))
    kept = tuple(n if d == 1 else 1 for d, n in enumerate(x.shape))
    return dims, TensorType(kept, x.dtype), x.numel // max(1, x.shape[1])


def _summable(node: Node, x: TensorType, types: Types) -> bool:
    """Whether all tensors have one wide type and there is a batch to sum over."""
    used = {types[a.name].dtype for a in node.args if isinstance(a, Ref)}
    return used in ({"f32"}, {"f64"}) and x.shape[0] > 1


def _batch_norm(with_stats: bool) -> Rewrite:
    """(out, mean, rstd, and new running statistics ``with_stats``) of a batch norm in training."""

    def rewrite(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
        if with_stats:
            x, weight, bias, run_mean, run_var, training, momentum, eps = node.args
        else:
            x, weight, bias, training, momentum, eps = node.args
            run_mean = run_var = None
        if not training or not _summable(node, types[x.name], types):
            return None
        steps = Steps(node, fresh)
        mean, var = _moments(steps, x, types[x.name])
        flat = TensorType((types[x.name].shape[1],), types[x.name].dtype)
        shifted = steps.add("aten.add.Scalar", (var, eps), flat)
        steps.add("aten.rsqrt.default", (shifted,), flat, out=node.outs[2])
        none = TensorType((0,), flat.dtype)
        steps.add_many(
            "aten._native_batch_norm_legit_no_training.default",
            (x, weight, bias, mean, var, momentum, eps),
            (types[x.name], none, none),
            outs=(node.outs[0], fresh(), fresh()),
        )
        count = _over_batch(types[x.name])[2]
        if run_mean is not None:
            _running(steps, run_mean, mean, flat, momentum, momentum, node.outs[3])
            _running(steps, run_var, var, flat, momentum, momentum * count / (count - 1), node.outs[4])
        return steps.made

    return rewrite


def _moments(steps: Steps, x: Ref, type_: TensorType) -> tuple[Ref, Ref]:
    """Mean and variance of each channel, in two passes as squares of large means lose all digits."""
    dims, kept, count = _over_batch(type_)
    flat = TensorType((type_.shape[1],), type_.dtype)
    total = steps.add("aten.sum.dim_IntList", (x, dims, True), kept)
    wide = steps.add("aten.div.Tensor", (total, count), kept)
    mean = steps.add("aten.reshape.default", (wide, flat.shape), flat, out=steps.node.outs[1])
    centred = steps.add("aten.sub.Tensor", (x, wide), type_)
    squares = steps.add("aten.mul.Tensor", (centred, centred), type_)
    spread = steps.add("aten.sum.dim_IntList", (squares, dims), flat)
    return mean, steps.add("aten.div.Tensor", (spread, count), flat)


def _running(
    steps: Steps, old: Ref, new: Ref, type_: TensorType, rate: float, share: float, out: str
) -> None:
    kept = steps.add("aten.mul.Tensor", (old, 1 - rate), type_)
    fresh = steps.add("aten.mul.Tensor", (new, share), type_)
    steps.add("aten.add.Tensor", (kept, fresh), type_, out=out)


def _batch_norm_backward(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """(input gradient, weight gradient, bias gradient) of a batch norm in training."""
    grad, x, weight, _, _, save_mean, save_rstd, training, _, wanted = node.args
    if not training or not _summable(node, types[x.name], types):
        return None
    steps, full = Steps(node, fresh), types[x.name]
    dims, kept, count = _over_batch(full)
    flat = TensorType((full.shape[1],), full.dtype)
    mean = steps.add("aten.reshape.default", (save_mean, kept.shape), kept)
    rstd = steps.add("aten.reshape.default", (save_rstd, kept.shape), kept)
    centred = steps.add("aten.sub.Tensor", (x, mean), full)
    product = steps.add("aten.mul.Tensor", (grad, centred), full)
    along = steps.add("aten.sum.dim_IntList", (product, dims, True), kept)
    total = steps.add("aten.sum.dim_IntList", (grad, dims, True), kept)
    if wanted[1]:
        scaled = steps.add("aten.mul.Tensor", (along, rstd), kept)
        steps.add("aten.reshape.default", (scaled, flat.shape), flat, out=node.outs[1])
    if wanted[2]:
        steps.add("aten.reshape.default", (total, flat.shape), flat, out=node.outs[2])
    if wanted[0]:
        average = steps.add("aten.div.Tensor", (total, count), kept)
        square = steps.add("aten.mul.Tensor", (rstd, rstd), kept)
        slope = steps.add("aten.mul.Tensor", (along, square), kept)
        slope = steps.add("aten.div.Tensor", (slope, count), kept)
        level = steps.add("aten.sub.Tensor", (grad, average), full)
        tilt = steps.add("aten.mul.Tensor", (centred, slope), full)
        rest = steps.add("aten.sub.Tensor", (level, tilt), full)
        scale = rstd
        if weight is not None:
            gain = steps.add("aten.reshape.default", (weight, kept.shape), kept)
            scale = steps.add("aten.mul.Tensor", (gain, rstd), kept)
        steps.add("aten.mul.Tensor", (rest, scale), full, out=node.outs[0])
    return steps.made


def _vector_norm(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """The root of a sum of powers; the largest for the norm of order infinity."""
    order = float(node.arg(1, "ord", 2))
    source, out = types[node.args[0].name], first_type(node)
    if source.dtype not in ("f32", "f64") or out.dtype != source.dtype or order <= 0 or order == -inf:
        return None
    dims = _dims(node.arg(2, "dim"), len(source.shape))
    keep = bool(node.arg(3, "keepdim", False))
    steps = Steps(node, fresh)
    x: Arg = node.args[0]
    if order != 2:
        x = steps.add("aten.abs.default", (x,), source)
    if order == inf:
        steps.add("aten.amax.default", (x, dims, keep), out, out=node.name)
        return steps.made
    if order != 1:
        x = steps.add("aten.pow.Tensor_Scalar", (x, order), source)
    total = steps.add("aten.sum.dim_IntList", (x, dims, keep), out, out=node.name if order == 1 else None)
    if order == 2:
        steps.add("aten.sqrt.default", (total,), out, out=node.name)
    elif order != 1:
        steps.add("aten.pow.Tensor_Scalar", (total, 1 / order), out, out=node.name)
    return steps.made


def _dims(raw: Arg, rank: int) -> tuple[int, ...]:
    if raw is None or raw == ():
        return tuple(range(rank))
    return raw if isinstance(raw, tuple) else (raw,)


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten._native_batch_norm_legit_functional.default": _batch_norm(True),
        "aten._native_batch_norm_legit.no_stats": _batch_norm(False),
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
        "aten.linalg_vector_norm.default": _vector_norm,
        "aten.norm.ScalarOpt_dim": _vector_norm,
    }
)
