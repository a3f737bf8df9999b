"""One matrix per expert: products in which every row names the expert whose matrix it meets.

Rows stay in the order they come in, so that a graph of a mixture of experts holds no sort over tokens and
the rows may be split like any other dim. Rows are sorted inside the ops only.

All ops take ``expert``: int64 [r], the expert of every row; a row whose expert lies outside of those that
``weight`` holds counts for nothing. The ``_part`` ops are those of a rank that holds the experts
``[offset, offset + E)`` of more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autoshard.torch_adapters.op_library import define


def _by_expert(expert: torch.Tensor, count: int, offset: int) -> tuple[torch.Tensor, list[int]]:
    """Rows of the experts ``[offset, offset + count)``, sorted by expert; and where each expert's rows end.

    expert [r] -> (row numbers [at most r], ends [count]).
    """
    local = expert - offset
    inside = (local >= 0) & (local < count)
    keys = torch.where(inside, local, count)  # rows of other experts come last
    order = torch.argsort(keys, stable=True)
    ends = torch.bincount(keys, minlength=count + 1)[:count].cumsum(0).tolist()
    return order[: ends[-1] if ends else 0], ends


def _spans(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its range among the sorted rows) of all experts that have rows."""
    begin = 0
    for number, end in enumerate(ends):
        if end > begin:
            yield number, slice(begin, end)
        begin = end


def expert_mm_part(
    x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool, offset: int
) -> torch.Tensor:
    """``y[i] = x[i] @ weight[expert[i] - offset]``, zeros for rows of experts that are not here.

    x [r, k], expert [r], weight [E, k, n] ([E, n, k] if ``transposed``) -> [r, n].
    """
    matrices = weight.transpose(1, 2) if transposed else weight
    rows, ends = _by_expert(expert, weight.shape[0], offset)
    out = x.new_zeros((x.shape[0], matrices.shape[2]))
    if rows.numel():
        sorted_x = x[rows]
        made = out.new_empty((rows.shape[0], matrices.shape[2]))
        for number, span in _spans(ends):
            torch.mm(sorted_x[span], matrices[number], out=made[span])
        out[rows] = made
    return out


def expert_mm(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """``y[i] = x[i] @ weight[expert[i]]``, zeros where the expert is none of 0..E-1; shapes as above."""
    return expert_mm_part(x, expert, weight, transposed, 0)


def expert_outer_part(
    x: torch.Tensor, grad: torch.Tensor, expert: torch.Tensor, num_experts: int, transposed: bool, offset: int
) -> torch.Tensor:
    """Per expert of ``[offset, offset + num_experts)`` the sum over its rows of ``outer(x[i], grad[i])``.

    x [r, k], grad [r, n], expert [r] -> [num_experts, k, n] ([num_experts, n, k] if ``transposed``).
    """
    left, right = (grad, x) if transposed else (x, grad)
    rows, ends = _by_expert(expert, num_experts, offset)
    out = x.new_zeros((num_experts, left.shape[1], right.shape[1]))
    left, right = left[rows], right[rows]
    for number, span in _spans(ends):
        torch.mm(left[span].t(), right[span], out=out[number])
    return out


def expert_outer(
    x: torch.Tensor, grad: torch.Tensor, expert: torch.Tensor, num_experts: int, transposed: bool
) -> torch.Tensor:
    """The gradient of the weight of `expert_mm`; shapes as in `expert_outer_part`."""
    return expert_outer_part(x, grad, expert, num_experts, transposed, 0)


def _fake_mm(
    x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, transposed: bool, offset: int = 0
) -> torch.Tensor:
    k, n = (2, 1) if transposed else (1, 2)
    torch._check(
        x.dim() == 2 and weight.dim() == 3 and expert.dim() == 1, lambda: "x [r, k], weight [E, k, n]"
    )
    torch._check(x.shape[1] == weight.shape[k], lambda: f"x has {x.shape[1]} columns, not {weight.shape[k]}")
    torch._check(x.shape[0] == expert.shape[0], lambda: f"{expert.shape[0]} experts of {x.shape[0]} rows")
    return x.new_empty((x.shape[0], weight.shape[n]))


def _fake_outer(
    x: torch.Tensor,
    grad: torch.Tensor,
    expert: torch.Tensor,
    num_experts: int,
    transposed: bool,
    offset: int = 0,
) -> torch.Tensor:
    torch._check(x.dim() == 2 and grad.dim() == 2 and expert.dim() == 1, lambda: "x [r, k], grad [r, n]")
    torch._check(x.shape[0] == grad.shape[0] == expert.shape[0], lambda: "rows of x, grad and expert differ")
    k, n = x.shape[1], grad.shape[1]
    return x.new_empty((num_experts, n, k) if transposed else (num_experts, k, n))


def _save_mm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, expert, weight, ctx.transposed = inputs
    ctx.save_for_backward(x, expert, weight)


def _mm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """dx is the same product with the matrices turned; dW sums the outer products of rows and gradients."""
    x, expert, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.autoshard.expert_mm(grad, expert, weight, not ctx.transposed)
    if ctx.needs_input_grad[2]:
        grad_weight = torch.ops.autoshard.expert_outer(x, grad, expert, weight.shape[0], ctx.transposed)
    return grad_x, None, grad_weight, None


define(
    "expert_mm(Tensor x, Tensor expert, Tensor weight, bool transposed) -> Tensor",
    expert_mm,
    _fake_mm,
    backward=_mm_backward,
    save=_save_mm,
)
define(
    "expert_mm_part(Tensor x, Tensor expert, Tensor weight, bool transposed, int offset) -> Tensor",
    expert_mm_part,
    _fake_mm,
)
define(
    "expert_outer(Tensor x, Tensor grad, Tensor expert, int num_experts, bool transposed) -> Tensor",
    expert_outer,
    _fake_outer,
)
define(
    "expert_outer_part(Tensor x, Tensor grad, Tensor expert, int num_experts, bool transposed, int offset) "
    "-> Tensor",
    expert_outer_part,
    _fake_outer,
)
