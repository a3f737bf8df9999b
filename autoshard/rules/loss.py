"""Losses; above all cross-entropy over a vocabulary that may be split.

``passes/decompose`` writes that loss as statistics of each row (over the vocabulary) and what follows
from them; the statistics of vocabulary shards merge associatively, so they are a partial value of the
reduction ``lse``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import (
    Builder,
    Dim,
    Dims,
    Factored,
    RuleFn,
    broadcast,
    broadcast_shape,
    einsum,
    of_tensors,
)
from autoshard.rules.local import LocalCall


def stats(node: Node, ins: Sequence[TensorType]) -> Factored:
    """logits [n, v], targets [n] -> [n, 4]."""
    return einsum(
        "n v, n -> n four", ins, node.types, fixed="four", reduce="lse", local=_offset_last, contiguous="v"
    )


def finish(node: Node, ins: Sequence[TensorType]) -> Factored:
    """statistics [n, 4], targets [n] -> (loss of each row [n], log-sum-exp [n])."""
    return einsum("n four, n -> n, n", ins, node.types, fixed="four")


def backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """row gradients [n], logits [n, v], targets [n], log-sum-exp [n] -> [n, v]."""
    return einsum(
        "n, n v, n, n -> n v", ins, node.types, linear=((0,),), local=_offset_last_out, contiguous="v"
    )


def _offset_last(call: LocalCall) -> Node:
    return call.with_args({len(call.node.args) - 1: call.in_offset(0, 1)})


def _offset_last_out(call: LocalCall) -> Node:
    return call.with_args({len(call.node.args) - 1: call.in_offset(1, 1)})


def ctc(node: Node, ins: Sequence[TensorType]) -> Factored:
    """log-probabilities [t, b, c], two [b, s], two lengths [b] -> (losses [b], gradient [t, b, c])."""
    return einsum("t b c, b s, b s, b, b -> b, t b c", ins, node.types, fixed="t s c")


NONE, MEAN, SUM = range(3)


def nll(node: Node, ins: Sequence[TensorType]) -> Factored:
    """(loss, total weight) of log-probabilities [n, c, ...] and targets [n, ...], weights [c]."""
    scores, rows, classes = _classes(ins[0])
    reduction = node.args[3]
    sizes = ins[0].shape
    fixed = {*classes, *(f for d in rows for f in d if reduction == MEAN)}
    reduce = tuple((f, "sum") for d in rows for f in d)
    inputs = of_tensors(node, {0: scores, 1: rows, 2: (classes,)})
    return Factored(_sizes(sizes), inputs, (rows if reduction == NONE else (), ()), frozenset(fixed), reduce)


def nll_backward(node: Node, ins: Sequence[TensorType]) -> Factored:
    """Gradient of the log-probabilities; the total weight is that of the full batch."""
    scores, rows, classes = _classes(ins[1])
    grad = rows if node.args[4] == NONE else ()
    inputs = of_tensors(node, {0: grad, 1: scores, 2: rows, 3: (classes,), 6: ()})
    return Factored(_sizes(ins[1].shape), inputs, (scores,), frozenset(classes), linear=((0,),))


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _classes(scores: TensorType) -> tuple[Dims, Dims, Dim]:
    """Dims of scores [c] or [n, c, ...], of everything but the classes, and of the classes."""
    laid = Builder().dims(scores.shape)
    at = min(1, len(laid) - 1)
    return laid, laid[:at] + laid[at + 1 :], laid[at]


def _elementwise(position: int) -> RuleFn:
    """Rule of a loss of each element; ``position`` of the argument that says how they are reduced."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        reduction = node.arg(position, "reduction", MEAN)
        shape = broadcast_shape([t.shape for t in ins])
        each = broadcast(ins, [TensorType(shape, ins[0].dtype)])
        if reduction == NONE:
            return each
        every = tuple((f, "sum") for f in range(len(each.sizes)))
        fixed = frozenset(range(len(each.sizes))) if reduction == MEAN else frozenset()
        return replace(each, outputs=((),), reduce=every, fixed=fixed)

    return rule


def _elementwise_backward(position: int) -> RuleFn:
    """A mean is divided by the number of elements at hand, so it must see them all."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        each = broadcast(ins, node.types, linear=((0,),))
        if node.arg(position, "reduction", MEAN) == MEAN:
            return replace(each, fixed=frozenset(range(len(each.sizes))))
        return each

    return rule


def _margins(scores_at: int, reduction_at: int, beside: Sequence[int] = (), weight_at: int = -1) -> RuleFn:
    """Rule of a loss that compares the classes of each row, [n, c] or [c].

    By position of the argument: scores, how losses are reduced, what has the shape of the scores, weights of
    classes. What comes before the scores is the gradient of the loss; a target is one of each row otherwise.
    """
    backward, target_at = scores_at > 0, scores_at + 1

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        reduction = node.arg(reduction_at, "reduction", MEAN)
        scores = Builder().dims(ins[scores_at].shape)
        sizes, rows, classes = _sizes(ins[scores_at].shape), scores[:-1], scores[-1]
        losses = rows if reduction == NONE else ()
        known = {target_at: rows, **dict.fromkeys((scores_at, *beside), scores), weight_at: (classes,)}
        inputs = of_tensors(node, {0: losses, **known} if backward else known)
        fixed = frozenset(range(len(sizes)) if reduction == MEAN else classes)
        if backward:
            return Factored(sizes, inputs, (scores,), fixed, linear=((0,),))
        reduce = () if reduction == NONE else tuple((f, "sum") for d in rows for f in d)
        return Factored(sizes, inputs, (losses, scores)[: len(node.types)], fixed, reduce)

    return rule


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.ctc.default": ctc,
        "autoshard.xent_stats.default": stats,
        "autoshard.xent_finish.default": finish,
        "autoshard.xent_part_backward.default": backward,
        "aten.nll_loss_forward.default": nll,
        "aten.nll_loss_backward.default": nll_backward,
        "aten.nll_loss2d_forward.default": nll,
        "aten.nll_loss2d_backward.default": nll_backward,
        "aten.multi_margin_loss.default": _margins(0, 5, weight_at=4),
        "aten.multi_margin_loss_backward.default": _margins(1, 6, weight_at=5),
        "aten.multilabel_margin_loss_forward.default": _margins(0, 2, beside=(1,)),
        "aten.multilabel_margin_loss_backward.default": _margins(1, 3, beside=(2, 4)),
        "aten.soft_margin_loss.default": _elementwise(2),
        "aten.soft_margin_loss_backward.default": _elementwise_backward(3),
        "aten.mse_loss.default": _elementwise(2),
        "aten.mse_loss_backward.default": _elementwise_backward(3),
        "aten.smooth_l1_loss.default": _elementwise(2),
        "aten.smooth_l1_loss_backward.default": _elementwise_backward(3),
        "aten.huber_loss.default": _elementwise(2),
        "aten.huber_loss_backward.default": _elementwise_backward(3),
        "aten.binary_cross_entropy.default": _elementwise(3),
        "aten.binary_cross_entropy_backward.default": _elementwise_backward(4),
        "aten.binary_cross_entropy_with_logits.default": _elementwise(4),
    }
)
