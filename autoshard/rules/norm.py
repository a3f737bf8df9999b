"""Normalisations: what is normalised together stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Builder, Dims, Factored, RuleFn, broadcast, of_tensors
from autoshard.rules.local import LocalCall


def layer_norm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(out, mean, rstd) of input [..., n], optional weight and bias [n]."""
    rank = len(node.args[1])
    build = Builder()
    dims = build.dims(ins[0].shape)
    lead, own = dims[: len(dims) - rank], dims[len(dims) - rank :]
    stats: Dims = lead + ((),) * rank
    fixed = frozenset(f for d in own for f in d)
    return Factored(tuple(build.sizes), (dims, *([own] * (len(ins) - 1))), (dims, stats, stats), fixed)


def layer_norm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(input gradient, weight gradient, bias gradient) from gradient, input, mean, rstd, weight, bias."""
    rank = len(node.args[2])
    build = Builder()
    dims = build.dims(ins[0].shape)
    lead, own = dims[: len(dims) - rank], dims[len(dims) - rank :]
    stats: Dims = lead + ((),) * rank
    inputs = (dims, dims, stats, stats, *([own] * (len(ins) - 4)))
    outs = tuple(None if t is None else laid for t, laid in zip(node.types, (dims, own, own), strict=True))
    fixed = frozenset(f for d in own for f in d)
    reduce = tuple((f, "sum") for d in lead for f in d)
    return Factored(tuple(build.sizes), inputs, outs, fixed, reduce, ((0,),))


def _image_in_groups(shape: Sequence[int], groups: int) -> tuple[Builder, Dims, Dims, Dims, set[int]]:
    """(builder, dims of an image [n, c, ...], of statistics [n, groups], of a weight [c], fixed factors)."""
    build = Builder()
    n, group, channel = build.new(shape[0]), build.new(groups), build.new(shape[1] // groups)
    space = build.dims(shape[2:])
    c = (*group, *channel)
    return build, (n, c, *space), (n, group), (c,), {f for d in (channel, *space) for f in d}


def group_norm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(out, mean, rstd) of input [n, c, ...], optional weight and bias [c]; full groups may be split."""
    build, image, stats, own, fixed = _image_in_groups(ins[0].shape, node.args[6])
    inputs = of_tensors(node, {0: image, 1: own, 2: own})
    outs = (image, stats, stats)
    return Factored(tuple(build.sizes), inputs, outs, frozenset(fixed), local=_local_groups)


def _local_groups(call: LocalCall) -> Node:
    n, c = call.in_shape(0)[:2]
    return call.with_args({3: n, 4: c, 6: call.out_shape(1)[1]})


def group_norm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(input gradient, weight gradient, bias gradient) from gradient, input, mean, rstd, weight."""
    build, image, stats, own, fixed = _image_in_groups(ins[0].shape, node.args[8])
    inputs = of_tensors(node, {0: image, 1: image, 2: stats, 3: stats, 4: own})
    outs = tuple(None if t is None else d for t, d in zip(node.types, (image, own, own), strict=True))
    reduce = tuple((f, "sum") for f in image[0])
    sizes = tuple(build.sizes)
    return Factored(sizes, inputs, outs, frozenset(fixed), reduce, ((0,),), local=_local_groups_backward)


def _local_groups_backward(call: LocalCall) -> Node:
    n, c = call.in_shape(0)[:2]
    return call.with_args({5: n, 6: c, 8: call.in_shape(2)[1]})


def _image_and_channels(
    node: Node, ins: Sequence[TensorType]
) -> tuple[Builder, tuple[Dims, ...], tuple[Dims | None, ...], set[int]]:
    """(builder, dims of inputs, dims of outputs, all factors but the channels) of a batch norm.

    Tensors are images [n, c, ...], one number per channel [c], or unused and empty.
    """
    build = Builder()
    image = build.dims(ins[0].shape)

    def laid(type_: TensorType) -> Dims:
        if len(type_.shape) > 1:
            return image
        return (image[1],) if type_.shape[0] == ins[0].shape[1] else build.dims(type_.shape)

    before = tuple(laid(t) for t in ins)
    after = tuple(None if t is None else laid(t) for t in node.types)
    return build, before, after, {f for d in (image[0], *image[2:]) for f in d}


def batch_norm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(out, mean, rstd, ...) of input [n, c, ...]: statistics need all of a channel."""
    build, before, after, others = _image_and_channels(node, ins)
    alone = all(t is None or t.numel == 0 for t in node.types[1:])
    every = tuple((f, "sum") for f in range(len(build.sizes)))
    # outputs without elements are sums of nothing
    empty = any(t is not None and t.numel == 0 for t in node.types)
    fixed = frozenset() if alone else frozenset(others)
    return Factored(tuple(build.sizes), before, after, fixed, every if empty else ())


def batch_norm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(input gradient, weight gradient, bias gradient); the batch may be split outside training."""
    build, before, after, others = _image_and_channels(node, ins)
    training = bool(node.args[7])
    reduce = () if training else tuple((f, "sum") for f in sorted(others))
    fixed = frozenset(others) if training else frozenset()
    return Factored(tuple(build.sizes), before, after, fixed, reduce, ((0,),))


def weight_norm(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(weight, norms) of directions v and lengths g; only the dim along which g varies may be split."""
    return _along(ins, node.types, node.arg(2, "dim", 0), ())


def weight_norm_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(v gradient, g gradient) from gradient, v, g, norms."""
    return _along(ins, node.types, node.args[4], ((0,),))


def _along(
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    raw_dim: int,
    linear: tuple[tuple[int, ...], ...],
) -> Factored:
    rank = len(ins[0].shape)
    return broadcast(ins, outs, fixed_dims=[d for d in range(rank) if d != raw_dim % rank], linear=linear)


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "aten.native_layer_norm.default": layer_norm,
        "aten.native_layer_norm_backward.default": layer_norm_backward,
        "aten._weight_norm_interface.default": weight_norm,
        "aten._weight_norm_interface_backward.default": weight_norm_backward,
        "aten.native_group_norm.default": group_norm,
        "aten.native_group_norm_backward.default": group_norm_backward,
        "aten.native_batch_norm.default": batch_norm,
        "aten._native_batch_norm_legit_functional.default": batch_norm,
        "aten._native_batch_norm_legit.no_stats": batch_norm,
        "aten._native_batch_norm_legit_no_training.default": batch_norm,
        "aten.native_batch_norm_backward.default": batch_norm_backward,
    }
)
