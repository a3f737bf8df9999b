"""Rows of experts that are alike travel as one: their mean, and each gets back what it differs by.

A row is a token and one of its choices. Rows of one expert are a group if all hashes of their tokens agree
(cross-polytope hashing after random projections: Andoni et al., "Practical and Optimal LSH for Angular
Distance", NeurIPS 2015, section 3). The expert computes the mean m of a group, and the result of a row x is
E(m) + (x - m) (Nie et al., "LSH-MoE", NeurIPS 2024, section 3.2). Groups are of a rank's tokens.

``groups`` [t, k] says of every row how many rows before it the first one of its group is, 0 for a first one,
-1 for a choice that is no expert. Values of groups [c, ...] have them in the order of their first rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from autoshard.ir.similar_rows import DIRECTIONS
from autoshard.ops.dropout import mix
from autoshard.ops.experts import sum_type
from autoshard.torch_adapters.op_library import define


def lsh_groups(x: torch.Tensor, chosen: torch.Tensor, experts: int, hashes: int, seed: int) -> torch.Tensor:
    """The groups of rows: x [t, h], chosen [t, k] of so many experts -> [t, k].

    hashes: how many must agree; 0: every row is a group of its own.
    """
    expert = chosen.reshape(-1)
    inside = (expert >= 0) & (expert < experts)
    if not hashes:
        return torch.where(inside, 0, -1).view(chosen.shape)
    codes = _codes(x, hashes, seed).repeat_interleave(chosen.shape[1])
    keys = torch.where(inside, expert * (2 * DIRECTIONS) ** hashes + codes, -1)
    keys, order = torch.sort(keys, stable=True)
    place = torch.arange(len(keys), device=x.device)
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins[1:] = keys[1:] != keys[:-1]
    first = order[torch.where(begins, place, 0).cummax(0).values] if len(keys) else order
    groups = torch.empty_like(order)
    groups[order] = torch.where(keys < 0, -1, order - first)
    return groups.view(chosen.shape)


def _codes(x: torch.Tensor, hashes: int, seed: int) -> torch.Tensor:
    """Per token the numbers of all hashes as one [t]: the direction, or its opposite, that is nearest."""
    count = hashes * DIRECTIONS
    number = torch.arange(x.shape[1] * count, device=x.device)
    signs = (mix(mix(number) ^ mix(torch.full_like(number, seed + 1))) & 1) * 2 - 1
    along = (x @ signs.view(x.shape[1], count).to(x.dtype)).view(-1, hashes, DIRECTIONS)
    nearest = along.abs().argmax(-1, keepdim=True)
    code = (2 * nearest + (along.gather(-1, nearest) < 0)).squeeze(-1)
    powers = (2 * DIRECTIONS) ** torch.arange(hashes, device=x.device)
    return (code * powers).sum(-1)


def _firsts(groups: torch.Tensor) -> torch.Tensor:
    return groups.reshape(-1) == 0


def rows_of(groups: torch.Tensor) -> torch.Tensor:
    """Of every choice its group's number [t, k], that of the last for one that has none."""
    numbers = _firsts(groups).cumsum(0) - 1
    place = torch.arange(groups.numel(), device=groups.device).view(groups.shape)
    return numbers[place - groups.clamp(min=0)] if groups.numel() else groups


def group_choices(chosen: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The expert of every group: chosen, groups [t, k] -> [c, 1]."""
    return chosen.reshape(-1)[_firsts(groups)].unsqueeze(1)


def _weights(groups: torch.Tensor, dtype: torch.dtype, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The weights of choices, or 1, as rows are added up; 0 of those that have no group."""
    return torch.where(groups >= 0, 1.0 if weights is None else weights, 0.0).to(sum_type(dtype))


def _by_token(values: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per token the weighted sum over its choices' groups: values [c, h], rows, weights [t, k] -> [t, h]."""
    if not len(values):
        return values.new_zeros((len(rows), values.shape[1]))
    return F.embedding_bag(rows.clamp(min=0), values, mode="sum", per_sample_weights=weights)


def _by_group(values: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Per group the weighted sum over its choices' tokens: values [t, h], weights [t, k] -> [c, h]."""
    inside = groups.reshape(-1) >= 0
    rows = rows_of(groups).reshape(-1)
    order = torch.sort(torch.where(inside, rows, len(rows)), stable=True)[1][: int(inside.sum())]
    sizes = _sizes(groups)
    if not len(sizes):
        return values.new_zeros((0, values.shape[1]))
    return F.embedding_bag(
        order // groups.shape[1],
        values,
        sizes.cumsum(0) - sizes,
        mode="sum",
        per_sample_weights=weights.reshape(-1)[order],
    )


def _sizes(groups: torch.Tensor) -> torch.Tensor:
    """How many rows each group has [c]."""
    return torch.bincount(rows_of(groups)[groups >= 0], minlength=int(_firsts(groups).sum()))


def _wide_difference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    wide = sum_type(left.dtype)
    return left.to(wide) - right.to(wide)


def group_means(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The mean of the tokens of every group: x [t, h], groups [t, k] -> [c, h]."""
    total = _by_group(x.to(sum_type(x.dtype)), groups, _weights(groups, x.dtype))
    return (total / _sizes(groups).unsqueeze(1)).to(x.dtype)


def ungroup(
    made: torch.Tensor, x: torch.Tensor, means: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """Per token the weighted sum of what its choices give: what the expert made of the mean of the group, and
    the token's difference from that mean.

    made, means [c, h], x [t, h], weights, groups [t, k] -> [t, h].
    """
    kept = _weights(groups, made.dtype, weights)
    out = _by_token(_wide_difference(made, means), rows_of(groups), kept)
    return out.addcmul_(kept.sum(-1, keepdim=True), x.to(out.dtype)).to(made.dtype)


def ungroup_to_rows(grad: torch.Tensor, weights: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The gradient of what experts made of means: grad [t, h], weights, groups [t, k] -> [c, h]."""
    kept = _weights(groups, grad.dtype, weights)
    return _by_group(grad.to(kept.dtype), groups, kept).to(grad.dtype)


def ungroup_to_weights(
    grad: torch.Tensor,
    made: torch.Tensor,
    x: torch.Tensor,
    means: torch.Tensor,
    weights: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the weights of `ungroup`, of whose sum grad [t, h] is the gradient -> [t, k]."""
    more = _wide_difference(made, means)
    given = grad.to(more.dtype)
    own = (given * x.to(more.dtype)).sum(-1, keepdim=True)
    if not len(more):
        return torch.zeros_like(weights)
    rows = rows_of(groups).clamp(min=0)
    each = [torch.linalg.vecdot(more.index_select(0, row), given) for row in rows.t()]
    return torch.where(groups >= 0, torch.stack(each, -1) + own, 0.0).to(weights.dtype)


def ungroup_to_tokens(
    of_means: torch.Tensor,
    of_made: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    groups: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the tokens, from that of the means as experts took them, of what experts made, and of
    the sum: of_means, of_made [c, h], grad [t, h], weights, groups [t, k] -> [t, h]."""
    each = _wide_difference(of_means, of_made) / _sizes(groups).unsqueeze(1)
    out = _by_token(each, rows_of(groups), _weights(groups, of_means.dtype))
    kept = _weights(groups, of_means.dtype, weights)
    return out.addcmul_(kept.sum(-1, keepdim=True), grad.to(out.dtype)).to(of_means.dtype)


def _some(like: torch.Tensor, groups: torch.Tensor, width: int) -> torch.Tensor:
    """Of as many groups as there may be."""
    return like.new_empty((groups.numel(), width))


define(
    "lsh_groups(Tensor x, Tensor chosen, int experts, int hashes, int seed) -> Tensor",
    lsh_groups,
    lambda x, chosen, experts, hashes, seed: torch.empty_like(chosen),
)
define(
    "group_choices(Tensor chosen, Tensor groups) -> Tensor",
    group_choices,
    lambda chosen, groups: _some(chosen, groups, 1),
    waits=True,
)
define(
    "group_means(Tensor x, Tensor groups) -> Tensor",
    group_means,
    lambda x, groups: _some(x, groups, x.shape[1]),
    waits=True,
)
define(
    "ungroup(Tensor made, Tensor x, Tensor means, Tensor weights, Tensor groups) -> Tensor",
    ungroup,
    lambda made, x, means, weights, groups: made.new_empty(x.shape),
)
define(
    "ungroup_to_rows(Tensor grad, Tensor weights, Tensor groups) -> Tensor",
    ungroup_to_rows,
    lambda grad, weights, groups: _some(grad, groups, grad.shape[1]),
    waits=True,
)
define(
    "ungroup_to_weights(Tensor grad, Tensor made, Tensor x, Tensor means, Tensor weights, Tensor groups) "
    "-> Tensor",
    ungroup_to_weights,
    lambda grad, made, x, means, weights, groups: torch.empty_like(weights),
)
define(
    "ungroup_to_tokens(Tensor of_means, Tensor of_made, Tensor grad, Tensor weights, Tensor groups) "
    "-> Tensor",
    ungroup_to_tokens,
    lambda of_means, of_made, grad, weights, groups: of_means.new_empty(grad.shape),
    waits=True,
)
