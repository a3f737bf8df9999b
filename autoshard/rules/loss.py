"""Cross-entropy over a vocabulary that may be split.

``passes/normalize`` writes the loss as statistics of each row (over the vocabulary) and what follows
from them; the statistics of vocabulary shards merge associatively, so they are a partial value of the
reduction ``lse``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.rules.core import Factored, RuleFn, einsum
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


RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        "autoshard.xent_stats.default": stats,
        "autoshard.xent_finish.default": finish,
        "autoshard.xent_part_backward.default": backward,
    }
)
