"""Mixtures of experts: tokens go to the experts that they chose, all products of an expert run there, and
what they make of a token comes back as one sum.

``choices`` [t, k] are the experts of every token. ``route`` gives the slots of a rank: one for every expert
of its own and token that chose it, sorted by expert, with the tokens of one in their order. Values of slots
[s, ...] hold a row for each of them, however many the batch makes of them; nothing is padded. On fake tensors
s counts all pairs of an expert and a token, of which k of E exist (`ir.types.TensorType.filled`).

A slot is an int64: the expert, counted from the first of the rank, above 32 bits that number the pair
(token, choice) among those of the tokens that the rank sees. A choice that is no expert has no slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from autoshard.ops.dropout import mix
from autoshard.torch_adapters.op_library import define

_PAIR_BITS = 32
_PAIRS = (1 << _PAIR_BITS) - 1
#: types whose sums over the experts of a token are in single precision
_HALF = (torch.bfloat16, torch.float16)


def choices(expert: torch.Tensor) -> torch.Tensor:
    """The experts of every token [t, k], which from here on keep their order."""
    return expert.clone()


def route_part(chosen: torch.Tensor, num_experts: int, offset: int) -> torch.Tensor:
    """The slots [s] of the experts ``[offset, offset + num_experts)``. chosen: of all tokens [t, k]."""
    expert = chosen.reshape(-1) - offset
    inside = (expert >= 0) & (expert < num_experts)
    keys = torch.where(inside, expert, num_experts)  # others come last
    keys, pairs = torch.sort(keys, stable=True)
    count = int(inside.sum())
    return (keys[:count] << _PAIR_BITS) | pairs[:count]


def route(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The slots [s] of the experts 0..num_experts-1."""
    return route_part(chosen, num_experts, 0)


def route_one(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The slots [s] of one of ``num_experts`` experts, which chosen [t, k] calls 0; other choices are -1."""
    return (chosen.reshape(-1) == 0).nonzero()[:, 0]


def stands_for(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of a shape that a model takes some rows to have, while it is traced; in no program."""
    raise RuntimeError("a tensor that stands for rows of experts has no values")


def row_dropout(x: torch.Tensor, key: torch.Tensor, p: float, offset: int) -> torch.Tensor:
    """Zero elements with probability ``p`` and scale the others by ``1 / (1 - p)``.

    x: rows [s, n], of all columns from ``offset`` on. key: [s], uniform in [0, 1), of 24 bits; which elements
    of a row are zero is a function of its key and of their columns.
    """
    column = torch.arange(offset, offset + x.shape[1], device=x.device)
    word = (key * (1 << 24)).to(torch.int64).unsqueeze(1)
    kept = mix(mix(word + 1) ^ mix(column ^ 0x5BD1E995)) >= min(int(p * 2**32), 2**32 - 1)
    return x * kept * (1.0 / (1.0 - p))


def _pairs(slots: torch.Tensor) -> torch.Tensor:
    return slots & _PAIRS


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which rows are added up."""
    return torch.float32 if dtype in _HALF else dtype


def sum_rows(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Per number below ``count`` the sum of the rows that have it: x [r, ...], index [r] -> [count, ...]."""
    wide = sum_type(x.dtype)
    out = torch.zeros((count, *x.shape[1:]), dtype=wide, device=x.device)
    return out.index_add_(0, index, x.to(wide)).to(x.dtype)


def _tokens(slots: torch.Tensor, choices_each: int) -> torch.Tensor:
    return _pairs(slots) // choices_each


def dispatch(x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The row of its token for every slot: x [t, h], chosen [t, k], slots [s] -> [s, h]."""
    return x.index_select(0, _tokens(slots, chosen.shape[1]))


def combine(x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Per token the sum over its slots: x [s, h], chosen [t, k], slots [s] -> [t, h]."""
    tokens, each = chosen.shape
    if len(slots) == tokens * each and each > 1:  # all are here: the rows of a token as one sum
        order = torch.empty_like(slots)
        order[_pairs(slots)] = torch.arange(len(slots), device=slots.device)
        return x.index_select(0, order).view(tokens, each, x.shape[1]).sum(dim=1)
    return sum_rows(x, _tokens(slots, each), tokens)


def dispatch_weights(weights: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The weight of every slot: weights [t, k], chosen [t, k], slots [s] -> [s]."""
    return weights.reshape(-1).index_select(0, _pairs(slots))


def combine_weights(x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """For every choice what its slot has, 0 without one: x [s], chosen [t, k], slots [s] -> [t, k]."""
    out = x.new_zeros(chosen.numel())
    out[_pairs(slots)] = x
    return out.view(chosen.shape)


def experts_of(slots: torch.Tensor) -> torch.Tensor:
    """The expert of every slot."""
    return slots >> _PAIR_BITS


def group_ends(slots: torch.Tensor, count: int) -> torch.Tensor:
    """Where the slots of each expert end."""
    numbers = torch.arange(count, device=slots.device)
    return torch.searchsorted(experts_of(slots), numbers, right=True, out_int32=True)


def _grouped(*matrices: torch.Tensor) -> bool:
    """Whether torch multiplies groups of rows of these in one call, without asking how many there are.

    Rows begin at multiples of 16 bytes; on CUDA in bf16, from compute capability 8.0 on (torch 2.11 to 2.13).
    """
    x = matrices[0]
    if not len(x) or x.dtype not in (torch.bfloat16, torch.float32) or not all(map(_aligned, matrices)):
        return False
    if not x.is_cuda:
        return x.device.type == "cpu"
    return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _aligned(x: torch.Tensor) -> bool:
    first, *strides = sorted(x.stride())  # of one column there are two that are 1
    return first == 1 and x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in strides)


def spans(slots: torch.Tensor, count: int) -> Iterator[tuple[int, slice]]:
    """(expert, its range among the slots) of all experts."""
    begin = 0
    for number, end in enumerate(group_ends(slots, count).tolist()):
        yield number, slice(begin, end)
        begin = end


def expert_mm(x: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Every row times the matrix of its expert.

    x [s, k], slots [s], weight [E, k, n] ([E, n, k] if ``transposed``) -> [s, n].
    """
    matrices = weight.transpose(1, 2) if transposed else weight
    if _grouped(x, matrices):
        return F.grouped_mm(x, matrices, offs=group_ends(slots, weight.shape[0]))
    out = x.new_empty((x.shape[0], matrices.shape[2]))
    for number, span in spans(slots, weight.shape[0]):
        torch.mm(x[span], matrices[number], out=out[span])
    return out


def expert_outer(
    x: torch.Tensor, grad: torch.Tensor, slots: torch.Tensor, num_experts: int, transposed: bool
) -> torch.Tensor:
    """The gradient of the matrices of `expert_mm`: per expert the sum of ``outer(x[i], grad[i])``.

    x [s, k], grad [s, n], slots [s] -> [num_experts, k, n] ([num_experts, n, k] if ``transposed``).
    """
    left, right = (grad, x) if transposed else (x, grad)
    if _grouped(left, right):
        return F.grouped_mm(left.t(), right, offs=group_ends(slots, num_experts))
    out = x.new_empty((num_experts, left.shape[1], right.shape[1]))
    for number, span in spans(slots, num_experts):
        torch.mm(left[span].t(), right[span], out=out[number])  # zeros of an expert without rows
    return out


def expert_rows(table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The row of its expert for every slot: table [E, n], slots [s] -> [s, n]."""
    return table.index_select(0, experts_of(slots))


def expert_sum(x: torch.Tensor, slots: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The gradient of the table of `expert_rows`: x [s, n], slots [s] -> [num_experts, n]."""
    return sum_rows(x, experts_of(slots), num_experts)


def scale_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows times their weights, rounded once: x [s, n], weights [s] -> [s, n]."""
    return torch.mul(x, weights.unsqueeze(-1)).to(x.dtype)


def row_dots(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights of `scale_rows`: x, y [s, n] -> [s], of half precision in single."""
    wide = sum_type(x.dtype)
    return torch.mul(x.to(wide), y.to(wide)).sum(dim=-1)


def put_columns(grad: torch.Tensor, size: int, start: int, end: int, step: int) -> torch.Tensor:
    """The gradient of ``x[..., start:end:step]``, however many rows x has: [s, ..., m] -> [s, ..., size]."""
    out = grad.new_zeros((*grad.shape[:-1], size))
    out[..., start:end:step] = grad
    return out


def _check_rows(x: torch.Tensor, slots: torch.Tensor) -> None:
    torch._check(
        x.shape[0] == slots.shape[0], lambda: f"{x.shape[0]} rows of {slots.shape[0]} slots of experts"
    )


def _fake_mm(x: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    k, n = (2, 1) if transposed else (1, 2)
    _check_rows(x, slots)
    torch._check(x.shape[1] == weight.shape[k], lambda: f"x has {x.shape[1]} columns, not {weight.shape[k]}")
    return x.new_empty((x.shape[0], weight.shape[n]))


def _fake_outer(
    x: torch.Tensor, grad: torch.Tensor, slots: torch.Tensor, num_experts: int, transposed: bool
) -> torch.Tensor:
    _check_rows(x, slots)
    k, n = x.shape[1], grad.shape[1]
    return x.new_empty((num_experts, n, k) if transposed else (num_experts, k, n))


_ops = torch.ops.autoshard


def _adjoint(name: str) -> Any:
    """The gradient of an op on (x, chosen, slots): another one on its gradient."""
    return lambda ctx, grad: (getattr(_ops, name)(grad, *ctx.saved_tensors), None, None)


def _save(*kept: int) -> Any:
    """Saves some inputs for backward."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*(inputs[k] for k in kept))

    return save


def _save_mm(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _mm_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """dx is the same product with the matrices turned; dW sums the outer products of rows and gradients."""
    x, slots, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = _ops.expert_mm(grad, slots, weight, not ctx.transposed)
    if ctx.needs_input_grad[2]:
        grad_weight = _ops.expert_outer(x, grad, slots, weight.shape[0], ctx.transposed)
    return grad_x, None, grad_weight, None


def _save_drop(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, key, ctx.p, ctx.offset = inputs
    ctx.save_for_backward(key)


def _drop_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (key,) = ctx.saved_tensors
    return _ops.row_dropout(grad, key, ctx.p, ctx.offset), None, None, None


def _scale_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = ctx.saved_tensors
    return _ops.scale_rows(grad, weights), _ops.row_dots(grad, x).to(weights.dtype)


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    table, slots = inputs
    ctx.count = table.shape[0]
    ctx.save_for_backward(slots)


define("choices(Tensor expert) -> Tensor", choices, torch.empty_like)
define(
    "route(Tensor chosen, int num_experts) -> Tensor",
    route,
    lambda chosen, num_experts: chosen.new_empty((num_experts * chosen.shape[0],)),
    waits=True,
)
define(
    "route_part(Tensor chosen, int num_experts, int offset) -> Tensor",
    route_part,
    lambda chosen, num_experts, offset: chosen.new_empty((num_experts * chosen.shape[0],)),
    waits=True,
)
define(
    "route_one(Tensor chosen, int num_experts) -> Tensor",
    route_one,
    lambda chosen, num_experts: chosen.new_empty((chosen.shape[0],)),
    waits=True,
)
define(
    "stands_for(Tensor rows, int[] shape) -> Tensor",
    stands_for,
    lambda rows, shape: rows.new_empty(shape),
)
for _op, _adjoint_name, _fake in (
    (dispatch, "combine", lambda x, chosen, slots: x.new_empty((slots.shape[0], x.shape[1]))),
    (combine, "dispatch", lambda x, chosen, slots: x.new_empty((chosen.shape[0], x.shape[1]))),
    (dispatch_weights, "combine_weights", lambda x, chosen, slots: x.new_empty(slots.shape)),
    (combine_weights, "dispatch_weights", lambda x, chosen, slots: x.new_empty(chosen.shape)),
):
    _schema = f"{_op.__name__}(Tensor x, Tensor chosen, Tensor slots) -> Tensor"
    define(_schema, _op, _fake, backward=_adjoint(_adjoint_name), save=_save(1, 2))
define(
    "expert_mm(Tensor x, Tensor slots, Tensor weight, bool transposed) -> Tensor",
    expert_mm,
    _fake_mm,
    backward=_mm_backward,
    save=_save_mm,
)
define(
    "expert_outer(Tensor x, Tensor grad, Tensor slots, int num_experts, bool transposed) -> Tensor",
    expert_outer,
    _fake_outer,
)
define(
    "expert_rows(Tensor table, Tensor slots) -> Tensor",
    expert_rows,
    lambda table, slots: table.new_empty((slots.shape[0], table.shape[1])),
    backward=lambda ctx, grad: (_ops.expert_sum(grad, *ctx.saved_tensors, ctx.count), None),
    save=_save_rows,
)
define(
    "expert_sum(Tensor x, Tensor slots, int num_experts) -> Tensor",
    expert_sum,
    lambda x, slots, num_experts: x.new_empty((num_experts, x.shape[1])),
)
define(
    "scale_rows(Tensor x, Tensor weights) -> Tensor",
    scale_rows,
    lambda x, weights: torch.empty_like(x),
    backward=_scale_backward,
    save=_save(0, 1),
)
define(
    "row_dropout(Tensor x, Tensor key, float p, int offset) -> Tensor",
    row_dropout,
    lambda x, key, p, offset: torch.empty_like(x),
    backward=_drop_backward,
    save=_save_drop,
)
define(
    "row_dots(Tensor x, Tensor y) -> Tensor",
    row_dots,
    lambda x, y: x.new_empty(x.shape[:1], dtype=sum_type(x.dtype)),
)
define(
    "put_columns(Tensor grad, int size, int start, int end, int step) -> Tensor",
    put_columns,
    lambda grad, size, start, end, step: grad.new_empty((*grad.shape[:-1], size)),
)
