"""Operands of matrix products in 8-bit floats with scales, and their products (`ir.scaled`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn.functional import ScalingType, pad
from torch.nn.functional import scaled_mm as torch_scaled_mm

from autoshard.ir.scaled import AMAX_SCALE, CAST_SCALED, WORD, scale_shape
from autoshard.kernels.norm import wide
from autoshard.torch_adapters.op_library import define

#: amax of what is zero, so that nothing is divided by zero
_LEAST = 1e-12


def amax_scale(
    x: torch.Tensor, dim: int | None, block: int, element: torch.dtype, scale: torch.dtype
) -> torch.Tensor:
    """By what x is divided so that its largest element is the largest of ``element``.

    dim: along which elements share a scale, all of it or ``block`` of them; None: all of x do. scale: type of
    the result; where that holds powers of two only, they are rounded up, so that nothing overflows (Mishra et
    al., "Recipes for pre-training LLMs with MXFP8", 2025, section 3).
    """
    size = x.abs()
    if not len(x):  # a rank without rows
        largest = size.new_zeros(scale_shape(x.shape, dim, block))
    elif dim is None:
        largest = size.amax(tuple(range(x.dim())), keepdim=True)
    elif block:
        largest = size.unflatten(dim, (-1, block)).amax(dim + 1)
    else:
        largest = size.amax(dim, keepdim=True)
    return scale_of(largest, element, scale)


def scale_of(largest: torch.Tensor, element: torch.dtype, scale: torch.dtype) -> torch.Tensor:
    """By what elements are divided of which these are the largest."""
    # of 4 bits the largest code, 6, times the largest scale of a block (`ops.packed`)
    most = 6.0 * 448.0 if element == torch.uint8 else torch.finfo(element).max
    result = largest.float().clamp_min(_LEAST) / most
    return result if scale == torch.float32 else torch.exp2(torch.ceil(torch.log2(result))).to(scale)


def _by_block(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with a dim of its own for the elements of a block, and scales that broadcast to it."""
    for dim, (n, size) in enumerate(zip(scale.shape, x.shape, strict=True)):
        if n not in (1, size):
            return x.unflatten(dim, (n, size // n)), scale.unsqueeze(dim + 1)
    return x, scale


def cast_scaled(x: torch.Tensor, scale: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    """x / scale, rounded to ``element``; what is larger than its largest becomes that."""
    largest = torch.finfo(element).max
    blocks, scales = _by_block(wide(x), scale.float())
    return (blocks / scales).clamp(-largest, largest).to(element).reshape(x.shape)


def scaled_mm(
    scale_a: torch.Tensor, scale_b: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(a [m, k] * scale_a) @ (b [k, n] * scale_b), added up in fp32 (fp64 for that dtype)."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    if scale_a.shape[1] == scale_b.shape[0] == 1:
        return (a.to(kind) @ b.to(kind)).mul_(scale_a.to(kind)).mul_(scale_b.to(kind)).to(dtype)
    return (scaled_back(a, scale_a, kind) @ scaled_back(b, scale_b, kind)).to(dtype)


def scaled_back(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """What the elements of a cast stand for."""
    blocks, scales = _by_block(x.to(kind), scale.to(kind))
    return (blocks * scales).reshape(x.shape)


def on_matrix_units(
    scale_a: torch.Tensor, scale_b: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same on matrix units of 8 bits, which take rows of a and columns of b that lie contiguous."""
    if scale_a.dtype != torch.float32:
        # elements times a power of two are exact in bf16, and their products in the fp32 that adds them up
        half = torch.bfloat16
        return (scaled_back(a, scale_a, half) @ scaled_back(b, scale_b, half)).to(dtype)
    rows, columns = a.shape[0], b.shape[1]
    deeper, wider = -a.shape[1] % WORD, -columns % WORD
    # casts are bytes: not every torch pads 8-bit floats
    left = pad(a.view(torch.uint8), (0, deeper)).view(a.dtype).contiguous()
    right = pad(b.t().contiguous().view(torch.uint8), (0, deeper, 0, wider)).view(b.dtype).t()
    by_row, scales, made_in = scale_a.numel() > 1 or scale_b.numel() > 1, (scale_a, scale_b), dtype
    # scales of rows only come with results in bf16
    after = by_row and dtype != torch.bfloat16
    if after:
        scales, made_in = (torch.ones((), dtype=torch.float32, device=a.device),) * 2, torch.float32
    elif by_row:
        scales = (
            scale_a.expand(rows, 1).contiguous(),
            pad(scale_b.expand(1, columns), (0, wider)).contiguous(),
        )
    kind = ScalingType.RowWise if by_row and not after else ScalingType.TensorWise
    new = torch_scaled_mm(left, right, scales[0], kind, scales[1], kind, output_dtype=made_in)[:, :columns]
    return (new * scale_a * scale_b).to(dtype) if after else new.contiguous()


#: op of a program -> what it calls, for compilers that fuse it with what is around it
MADE_OF: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {AMAX_SCALE: amax_scale, CAST_SCALED: cast_scaled}
)


define(
    "amax_scale(Tensor x, int? dim, int block, ScalarType element, ScalarType scale) -> Tensor",
    amax_scale,
    amax_scale,
)
define("cast_scaled(Tensor x, Tensor scale, ScalarType element) -> Tensor", cast_scaled, cast_scaled)
define(
    "scaled_mm(Tensor scale_a, Tensor scale_b, Tensor a, Tensor b, ScalarType dtype) -> Tensor",
    scaled_mm,
    scaled_mm,
    cuda=on_matrix_units,
)
