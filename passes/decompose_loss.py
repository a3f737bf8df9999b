"""Losses that are means over the batch: a sum, divided by the global number of elements or total weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Arg, Node, TensorType
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
    """(loss, total weight): the sum over rows, divided by the total weight."""
    if node.args[3] != _MEAN:
        return None
    steps, out = Steps(node, fresh), first_type(node)
    total, weight = fresh(), node.outs[1]
    args = (*node.args[:3], _SUM, *node.args[4:])
    kwargs = node.kwargs
    summed = steps.add_many(node.op, args, node.types, outs=(total, weight), kwargs=kwargs)
    steps.add("aten.div.Tensor", (summed, replace(summed, name=weight)), out, out=node.outs[0])
    return steps.made


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.mse_loss.default": _mean(2),
        "aten.smooth_l1_loss.default": _mean(2),
        "aten.huber_loss.default": _mean(2),
        "aten.binary_cross_entropy.default": _mean(3),
        "aten.binary_cross_entropy_with_logits.default": _mean(4),
        "aten.mse_loss_backward.default": _mean_backward(3),
        "aten.smooth_l1_loss_backward.default": _mean_backward(3),
        "aten.huber_loss_backward.default": _mean_backward(3),
        "aten.binary_cross_entropy_backward.default": _mean_backward(4),
        "aten.nll_loss_forward.default": _nll,
        "aten.nll_loss2d_forward.default": _nll,
    }
)
