"""Losses that are means over the batch: a sum, divided by the global number of elements or total weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Arg, Dtype, Node, Ref, TensorType
from autoshard.passes.rewrite import Fresh, Rewrite, Steps, Types, first_type
from autoshard.rules.core import broadcast_shape

_NONE, _MEAN, _SUM = range(3)


def _with(node: Node, position: int, value: Arg) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments with another reduction; what stood between may have been left out."""
    kwargs = tuple((k, v) for k, v in node.kwargs if k != "reduction")
    if position < len(node.args):
        args = tuple(value if k == position else a for k, a in enumerate(node.args))
        return args, kwargs
    return node.args, (*kwargs, ("reduction", value))


def _mean(position: int) -> Rewrite:
    """A loss of elements; ``position`` of the argument that says how they are reduced."""

    def rewrite(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
        if node.arg(position, "reduction", _MEAN) != _MEAN:
            return None
        shape = broadcast_shape([types[a.name].shape for a in node.args[:2]])
        steps, out = Steps(node, fresh), first_type(node)
        args, kwargs = _with(node, position, _NONE)
        each = steps.add(node.op, args, TensorType(shape, out.dtype), kwargs=kwargs)
        total = steps.add("aten.sum.default", (each,), out)
        count = TensorType(shape, out.dtype).numel
        steps.add("aten.div.Tensor", (total, count), out, out=node.name)
        return steps.made

    return rewrite


def _mean_backward(position: int) -> Rewrite:
    """The gradient of a sum, with the gradient that comes in divided."""

    def rewrite(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
        if node.arg(position, "reduction", _MEAN) != _MEAN:
            return None
        incoming = types[node.args[0].name]
        steps = Steps(node, fresh)
        shape = broadcast_shape([types[a.name].shape for a in node.args[1:3]])
        share = steps.add("aten.div.Tensor", (node.args[0], TensorType(shape, "f32").numel), incoming)
        args, kwargs = _with(node, position, _SUM)
        return [*steps.made, replace(node, args=(share, *args[1:]), kwargs=kwargs)]

    return rewrite


def _nll(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """(loss, total weight): the sum over rows, divided by a weight made of targets alone."""
    if node.args[3] != _MEAN:
        return None
    steps, out = Steps(node, fresh), first_type(node)
    args = (*node.args[:3], _SUM, *node.args[4:])
    summed = steps.add_many(node.op, args, node.types, outs=(fresh(), fresh()), kwargs=node.kwargs)
    weight = _total_weight(steps, node, types, node.outs[1])
    steps.add("aten.div.Tensor", (summed, weight), out, out=node.outs[0])
    return steps.made


def _total_weight(steps: Steps, node: Node, types: Types, out: str) -> Ref:
    """The sum of the weights of all targets that are not ignored, 1 each where there are no weights."""
    target, weights, ignored = node.args[1], node.args[2], node.args[4]
    type_, rows = node.types[1], types[target.name].shape
    assert type_ is not None
    counts = steps.add("aten.ne.Scalar", (target, ignored), TensorType(rows, "bool"))
    if weights is None:
        dtype = (("dtype", Dtype(type_.dtype)),)
        return steps.add("aten.sum.default", (counts,), type_, out=out, kwargs=dtype)
    valid = steps.add("aten.where.ScalarOther", (counts, target, 0), types[target.name])
    each = steps.add("aten.index.Tensor", (weights, (valid,)), TensorType(rows, type_.dtype))
    used = steps.add("aten.where.ScalarOther", (counts, each, 0.0), TensorType(rows, type_.dtype))
    return steps.add("aten.sum.default", (used,), type_, out=out)


def _nll_backward(node: Node, types: Types, fresh: Fresh) -> list[Node] | None:
    """The total weight only counts in a mean; else the gradient depends on no sum over the batch."""
    if node.args[4] == _MEAN or not isinstance(node.args[6], Ref):
        return None
    type_ = types[node.args[6].name]
    steps = Steps(node, fresh)
    one = steps.add("aten.full.default", (type_.shape, 1), type_, kwargs=(("dtype", Dtype(type_.dtype)),))
    return [*steps.made, replace(node, args=(*node.args[:6], one))]


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.mse_loss.default": _mean(2),
        "aten.smooth_l1_loss.default": _mean(2),
        "aten.soft_margin_loss.default": _mean(2),
        "aten.huber_loss.default": _mean(2),
        "aten.binary_cross_entropy.default": _mean(3),
        "aten.binary_cross_entropy_with_logits.default": _mean(4),
        "aten.mse_loss_backward.default": _mean_backward(3),
        "aten.smooth_l1_loss_backward.default": _mean_backward(3),
        "aten.soft_margin_loss_backward.default": _mean_backward(3),
        "aten.huber_loss_backward.default": _mean_backward(3),
        "aten.binary_cross_entropy_backward.default": _mean_backward(4),
        "aten.nll_loss_forward.default": _nll,
        "aten.nll_loss2d_forward.default": _nll,
        "aten.nll_loss_backward.default": _nll_backward,
        "aten.nll_loss2d_backward.default": _nll_backward,
    }
)
