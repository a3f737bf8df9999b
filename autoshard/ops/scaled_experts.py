"""Products of rows of experts (`ops.experts`) with matrices, both cast to 8-bit floats (`ir.scaled`)."""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType, pad

from autoshard.ir.scaled import WORD
from autoshard.ops.experts import expert_mm, expert_outer, experts_of, group_ends, spans
from autoshard.ops.scaled import cast_scaled, on_matrix_units, scale_of, scaled_back
from autoshard.torch_adapters.grouped import scaled_grouped_mm
from autoshard.torch_adapters.op_library import define


def amax_by_expert(
    x: torch.Tensor, slots: torch.Tensor, num_experts: int, element: torch.dtype, scale: torch.dtype
) -> torch.Tensor:
    """The scales of the columns of each expert's rows: x [s, n], slots [s] -> [num_experts, n]."""
    largest = x.new_zeros((num_experts, x.shape[1]))
    index = experts_of(slots).unsqueeze(1).expand_as(x)
    return scale_of(largest.scatter_reduce_(0, index, x.abs(), "amax"), element, scale)


def cast_by_expert(
    x: torch.Tensor, scale: torch.Tensor, element: torch.dtype, slots: torch.Tensor
) -> torch.Tensor:
    """Rows over the scales of their experts: x [s, n], scale [E, n], slots [s] -> [s, n]."""
    return cast_scaled(x, by_slot(scale, slots), element)


def by_slot(scale: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The scales of every row: [E, n] -> [s, n]."""
    return scale.index_select(0, experts_of(slots))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _of_columns(scale: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The scales of the columns of each row's matrix [s, n]: of a stack's, one for each or one for all."""
    return by_slot(scale.flatten(1), slots) if scale.numel() > 1 else scale.flatten(1)


def scaled_expert_mm(
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Every row times the matrix of its expert, added up in fp32 (fp64 for that dtype).

    x [s, k], slots [s], weight [E, k, n] ([E, n, k] if ``transposed``) -> [s, n].
    """
    kind = _wide(dtype)
    if scale_x.shape[1] == scale_weight.shape[2 if transposed else 1] == 1:
        new = expert_mm(x.to(kind), slots, weight.to(kind), transposed)
        return new.mul_(scale_x.to(kind)).mul_(_of_columns(scale_weight, slots).to(kind)).to(dtype)
    rows, matrices = scaled_back(x, scale_x, kind), scaled_back(weight, scale_weight, kind)
    return expert_mm(rows, slots, matrices, transposed).to(dtype)


def scaled_expert_outer(
    scale_x: torch.Tensor,
    scale_grad: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    slots: torch.Tensor,
    num_experts: int,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Per expert the sum of ``outer(x[i], grad[i])``, added up in fp32 (fp64 for that dtype).

    x [s, k], grad [s, n], slots [s], scales [num_experts, k] and [num_experts, n], or one for all
    -> [num_experts, k, n] ([num_experts, n, k] if ``transposed``).
    """
    kind = _wide(dtype)
    new = expert_outer(x.to(kind), grad.to(kind), slots, num_experts, transposed)
    down, across = (scale_grad, scale_x) if transposed else (scale_x, scale_grad)
    return new.mul_(down.to(kind).unsqueeze(2)).mul_(across.to(kind).unsqueeze(1)).to(dtype)


def _grouped(dtype: torch.dtype, *codes: torch.Tensor) -> bool:
    """Whether torch multiplies groups of rows of these in one call (`scaled_grouped_mm`, torch 2.11 to 2.13):
    on Hopper and Blackwell, e4m3 by e4m3 into bf16."""
    alike = dtype == torch.bfloat16 and all(x.dtype == torch.float8_e4m3fn and len(x) for x in codes)
    return alike and torch.cuda.get_device_capability(codes[0].device) in ((9, 0), (10, 0))


def mm_on_matrix_units(
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`scaled_expert_mm` on matrix units of 8 bits; one product per expert where torch has none for all."""
    if scale_x.dtype != torch.float32:  # exact in bf16, see `ops.scaled.on_matrix_units`
        half = torch.bfloat16
        rows, matrices = scaled_back(x, scale_x, half), scaled_back(weight, scale_weight, half)
        return expert_mm(rows, slots, matrices, transposed).to(dtype)
    columns_last = weight if transposed else weight.transpose(1, 2)
    count, columns, depth = columns_last.shape
    if _grouped(dtype, x, weight):
        of_columns = scale_weight.reshape(-1, columns) if scale_weight.numel() > 1 else scale_weight[0]
        new = scaled_grouped_mm(
            _padded(x, -depth % WORD),
            _padded(columns_last, -depth % WORD, -columns % WORD).transpose(1, 2),
            scale_x.expand(len(x), 1).reshape(-1).contiguous(),
            ScalingType.RowWise,
            pad(of_columns.expand(count, columns), (0, -columns % WORD)).contiguous(),
            ScalingType.RowWise,
            offs=group_ends(slots, count),
            output_dtype=dtype,
        )
        return new[:, :columns].contiguous()
    out = torch.empty((len(x), columns), dtype=dtype, device=x.device)
    turned_scale = scale_weight if transposed else scale_weight.transpose(1, 2)
    for number, span in spans(slots, count):
        if span.stop > span.start:
            of_rows = scale_x[span] if scale_x.numel() > 1 else scale_x
            of_matrix = turned_scale[number if len(turned_scale) > 1 else 0].t()
            out[span] = on_matrix_units(of_rows, of_matrix, x[span], columns_last[number].t(), dtype)
    return out


def outer_on_matrix_units(
    scale_x: torch.Tensor,
    scale_grad: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    slots: torch.Tensor,
    num_experts: int,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`scaled_expert_outer` on matrix units of 8 bits; one product per expert as above."""
    (left, of_left), (right, of_right) = (x, scale_x), (grad, scale_grad)
    if transposed:
        (left, of_left), (right, of_right) = (right, of_right), (left, of_left)
    if _grouped(dtype, left, right):
        place, ends, room = words_of_groups(slots, num_experts)
        scales = (
            pad(scale.expand(num_experts, n.shape[1]), (0, -n.shape[1] % WORD)).reshape(-1)
            for scale, n in ((of_left, left), (of_right, right))
        )
        new = scaled_grouped_mm(
            _laid_out(left, place, room),
            _laid_out(right, place, room).t(),
            next(scales),
            ScalingType.RowWise,
            next(scales),
            ScalingType.RowWise,
            offs=ends,
            output_dtype=dtype,
        )
        return new[:, : left.shape[1], : right.shape[1]].contiguous()
    out = torch.zeros((num_experts, left.shape[1], right.shape[1]), dtype=dtype, device=x.device)
    for number, span in spans(slots, num_experts):
        if span.stop > span.start:
            down, across = (s[number : number + 1] if len(s) > 1 else s for s in (of_left, of_right))
            out[number] = on_matrix_units(down.t(), across, left[span].t(), right[span], dtype)
    return out


def _padded(x: torch.Tensor, more: int, rows: int = 0) -> torch.Tensor:
    """Codes with zeros behind their last dim, and behind the one before it."""
    return pad(x.view(torch.uint8), (0, more, 0, rows)).view(x.dtype).contiguous()


def words_of_groups(slots: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(place of every slot, where the slots of each expert end, places in all) where those of an expert begin
    at a multiple of `WORD`, as matrix units want of what is summed over. Nothing waits for the device."""
    ends = group_ends(slots, count)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = (sizes + WORD - 1) // WORD * WORD
    new_ends = padded.cumsum(0, dtype=torch.int32)
    moved = (new_ends - padded) - (ends - sizes)
    place = torch.arange(len(slots), device=slots.device) + moved.index_select(0, experts_of(slots))
    return place, new_ends, (len(slots) + count * (WORD - 1) + WORD - 1) // WORD * WORD


def _laid_out(x: torch.Tensor, place: torch.Tensor, room: int) -> torch.Tensor:
    """Codes [s, n] as [n, room], with zeros where there is no row."""
    rows = -(-x.shape[1] // WORD) * WORD
    out = torch.zeros((rows, room), dtype=torch.uint8, device=x.device)
    out[: x.shape[1]].index_copy_(1, place, x.view(torch.uint8).t())
    return out.view(x.dtype)


define(
    "amax_by_expert(Tensor x, Tensor slots, int num_experts, ScalarType element, ScalarType scale) -> Tensor",
    amax_by_expert,
    lambda x, slots, num_experts, element, scale: x.new_empty((num_experts, x.shape[1]), dtype=scale),
)
define(
    "cast_by_expert(Tensor x, Tensor scale, ScalarType element, Tensor slots) -> Tensor",
    cast_by_expert,
    lambda x, scale, element, slots: torch.empty_like(x, dtype=element),
)
define(
    "scaled_expert_mm(Tensor scale_x, Tensor scale_weight, Tensor x, Tensor slots, Tensor weight, "
    "bool transposed, ScalarType dtype) -> Tensor",
    scaled_expert_mm,
    lambda scale_x, scale_weight, x, slots, weight, transposed, dtype: x.new_empty(
        (x.shape[0], weight.shape[1 if transposed else 2]), dtype=dtype
    ),
    cuda=mm_on_matrix_units,
)
define(
    "scaled_expert_outer(Tensor scale_x, Tensor scale_grad, Tensor x, Tensor grad, Tensor slots, "
    "int num_experts, bool transposed, ScalarType dtype) -> Tensor",
    scaled_expert_outer,
    lambda scale_x, scale_grad, x, grad, slots, num_experts, transposed, dtype: x.new_empty(
        (num_experts, grad.shape[1], x.shape[1]) if transposed else (num_experts, x.shape[1], grad.shape[1]),
        dtype=dtype,
    ),
    cuda=outer_on_matrix_units,
)
