"""Rows of experts that are grouped where they are alike (`autoshard.ops.similar_rows`): each rank groups the
tokens that it has.

A dim of groups is (tokens, choices), of which as many exist as `TensorType.share` says. A token's columns
stay whole where it is hashed. That another division of the tokens makes other groups is what was allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from autoshard.ir import Node, TensorType
from autoshard.ir.similar_rows import (
    DIRECTIONS,
    GROUP_CHOICES,
    GROUP_MEANS,
    LSH_GROUPS,
    UNGROUP,
    UNGROUP_TO_ROWS,
    UNGROUP_TO_TOKENS,
    UNGROUP_TO_WEIGHTS,
)
from autoshard.rules.core import Builder, Dims, Factored, RuleFn, einsum


def lsh_groups(node: Node, ins: Sequence[TensorType]) -> Factored:
    """x [t, h], chosen [t, k] -> [t, k]."""
    flops = 2.0 * ins[0].numel * node.args[3] * DIRECTIONS
    return einsum("t h, t k -> t k", ins, node.types, fixed="h k", kind="matmul", flops=flops)


def _rule(inputs: str, output: str, linear: tuple[tuple[int, ...], ...] = ()) -> RuleFn:
    """Of letters: t: [t, h], g: of groups [(t k), h], w: [t, k], c: choices of groups [(t k), 1]. The last
    input is [t, k]."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        build = Builder()
        tokens, choices = (build.new(n) for n in ins[-1].shape)
        widths = [t.shape[1] for letter, t in zip(inputs, ins, strict=True) if letter in "tg"]
        width = build.new(widths[0]) if widths else ()
        laid: dict[str, Dims] = {
            "t": (tokens, width),
            "g": ((*tokens, *choices), width),
            "w": (tokens, choices),
            "c": ((*tokens, *choices), ()),
        }
        summed = tuple((f, "sum") for f in width if output == "w")
        dims = tuple(laid[letter] for letter in inputs)
        return Factored(tuple(build.sizes), dims, (laid[output],), frozenset(choices), summed, linear)

    return rule


group_choices: Callable[..., Factored] = _rule("ww", "c")
group_means: Callable[..., Factored] = _rule("tw", "g", ((0,),))
ungroup: Callable[..., Factored] = _rule("gtgww", "t", ((0, 1, 2),))
ungroup_to_rows: Callable[..., Factored] = _rule("tww", "g", ((0,),))
ungroup_to_weights: Callable[..., Factored] = _rule("tgtgww", "w", ((0,),))
ungroup_to_tokens: Callable[..., Factored] = _rule("ggtww", "t", ((0, 1, 2),))

RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        LSH_GROUPS: lsh_groups,
        GROUP_CHOICES: group_choices,
        GROUP_MEANS: group_means,
        UNGROUP: ungroup,
        UNGROUP_TO_ROWS: ungroup_to_rows,
        UNGROUP_TO_WEIGHTS: ungroup_to_weights,
        UNGROUP_TO_TOKENS: ungroup_to_tokens,
    }
)
