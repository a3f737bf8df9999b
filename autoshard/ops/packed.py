"""Operands of matrix products in 4-bit floats (e2m1), two in a byte, with two levels of scales.

NVIDIA, "Pretraining large language models with NVFP4", 2025, section 2 and appendix B: x is about
code * scale * whole, with whole = max|x| / (6 * 448) of the tensor in fp32, scale = max|block| / 6 / whole
of 16 elements in e4m3. Of two elements in a byte the first has the low bits (``torch.float4_e2m1fn_x2``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch.nn.functional import ScalingType, SwizzleType, pad
from torch.nn.functional import scaled_mm as torch_scaled_mm

from autoshard.ir.scaled import FP4_BLOCK, elements
from autoshard.ops.dropout import mix
from autoshard.torch_adapters.op_library import define

#: what a code of 3 bits stands for; the fourth is the sign
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: smallest and largest e4m3
_LEAST_SCALE, _MOST_SCALE = 2.0**-9, 448.0
#: how scales of blocks, and the one of a tensor, lie in memory
_SWIZZLES = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
#: signs of the rows of `rotated`; any do (paper, section 4.2: one vector of random signs for all layers)
_SIGNS = (1, 1, -1, 1, -1, -1, 1, 1, -1, 1, 1, 1, -1, -1, -1, 1)


def block_scale(
    x: torch.Tensor, whole: torch.Tensor, element: torch.dtype, block: Sequence[int]
) -> torch.Tensor:
    """The scales of blocks of a matrix [m, n] -> [m / block[0], n / block[1]], in ``element``."""
    largest = x.abs().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax((1, 3))
    scale = (largest.float() / _VALUES[-1] / whole).clamp(_LEAST_SCALE, _MOST_SCALE)
    return scale.to(element)


def _steps(scale: torch.Tensor, whole: torch.Tensor, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    """By what each element of a matrix is divided."""
    factors = (n // size for n, size in zip(shape, scale.shape, strict=True))
    full = scale.to(kind)
    for dim, times in enumerate(factors):
        full = full.repeat_interleave(times, dim)
    return full * whole.to(kind)


def cast_packed(
    x: torch.Tensor,
    scale: torch.Tensor,
    element: torch.dtype,
    whole: torch.Tensor,
    dim: int,
    stochastic: bool,
) -> torch.Tensor:
    """A matrix over its scales, rounded to codes, in pairs along a dim.

    element: uint8 for codes; complex64 for pairs of quotients that are not rounded. stochastic: whether to
    one of the two codes beside a quotient, the nearer one more often (`dither`), or to the nearest, ties to
    even.
    """
    quotient = (x.float() / _steps(scale, whole, x.shape, torch.float32)).movedim(dim, -1)
    if element.is_complex:
        pairs = torch.view_as_complex(quotient.unflatten(-1, (-1, 2)).contiguous())
        return pairs.movedim(-1, dim).contiguous()
    size = quotient.abs().clamp(max=_VALUES[-1])
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    sign = (quotient < 0).to(torch.uint8) << 3
    codes = sign | _code(torch.round(size / step) * step)
    if stochastic:
        noise = dither(codes, scale.movedim(dim, -1), whole)
        codes = sign | _code(torch.floor(size / step + noise) * step)
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).movedim(-1, dim).contiguous()


def _code(size: torch.Tensor) -> torch.Tensor:
    """The code of a number that has one."""
    return torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)


def dither(codes: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of 24 bits, one for each code of a matrix [m, n].

    They are a hash (`ops.dropout.mix`) of the nearest codes of a block of 16, its scale, upper bits of the
    tensor's scale and the place in the block: no seed, and the same wherever a block lies.
    """
    blocks = codes.unflatten(-1, (-1, 2, FP4_BLOCK // 2)).long()
    shifts = 4 * torch.arange(FP4_BLOCK // 2, device=codes.device)
    low, high = (blocks << shifts).sum(-1).unbind(-1)
    salt = mix((whole.view(torch.int32).long() >> 12) & 0xFFFFFFFF)
    key = mix(low ^ mix(high ^ mix(scale.contiguous().view(torch.uint8).long() ^ salt)))
    place = mix(1 + torch.arange(FP4_BLOCK, device=codes.device))
    return ((mix(key.unsqueeze(-1) ^ place) >> 8).float() / (1 << 24)).flatten(-2)


def quotients(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """What codes, two in a byte along a dim, stand for over their scales."""
    pairs = codes.movedim(dim, -1)
    if codes.is_complex():
        return torch.view_as_real(pairs.contiguous()).flatten(-2).movedim(-1, dim)
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], device=codes.device)
    both = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return table[both.long()].movedim(-1, dim)


def unpacked(codes: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """What codes stand for."""
    values = quotients(codes, dim)
    return values * _steps(scale, whole, values.shape, torch.float32)


def packed_mm(
    whole_a: torch.Tensor,
    whole_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    packed_a: int,
    packed_b: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """a [m, k] @ b [k, n] of what codes stand for, added up in fp32. packed_a, packed_b: dims along which two
    elements share a byte."""
    return (unpacked(a, scale_a, whole_a, packed_a) @ unpacked(b, scale_b, whole_b, packed_b)).to(dtype)


def on_matrix_units(
    whole_a: torch.Tensor,
    whole_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    packed_a: int,
    packed_b: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The same on matrix units of 4 bits; of bf16 where there are none, or for other sizes than theirs."""
    (rows, depth), (_, columns) = elements(a.shape, packed_a), elements(b.shape, packed_b)
    if not _has_units(a.device) or dtype != torch.bfloat16 or any(n % 32 for n in (rows, depth, columns)):
        # codes times their scales are exact in bf16
        one = whole_a.new_ones(())
        left, right = (
            (quotients(x, dim) * _steps(scale, one, elements(x.shape, dim), torch.float32)).bfloat16()
            for x, scale, dim in ((a, scale_a, packed_a), (b, scale_b, packed_b))
        )
        return ((left @ right).float() * (whole_a * whole_b)).to(dtype)
    left, right = along(a, packed_a, 1), along(b, packed_b, 0).t().contiguous()
    scales = (tiled(_by_row(scale_a, rows)), tiled(_by_row(scale_b.t(), columns)))
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    return torch_scaled_mm(
        left.view(torch.float4_e2m1fn_x2),
        right.view(torch.float4_e2m1fn_x2).t(),
        [scales[0], whole_a.reshape(())],
        kinds,
        [scales[1], whole_b.reshape(())],
        kinds,
        swizzle_a=_SWIZZLES,
        swizzle_b=_SWIZZLES,
        output_dtype=dtype,
    )


def _has_units(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (10, 0)


def along(codes: torch.Tensor, dim: int, wanted: int) -> torch.Tensor:
    """The codes of a matrix in pairs along another dim, in one piece."""
    if dim == wanted:
        return codes.contiguous()
    single = torch.stack((codes & 15, codes >> 4), dim + 1).flatten(dim, dim + 1)
    first, second = single.unflatten(wanted, (-1, 2)).unbind(wanted + 1)
    return (first | (second << 4)).contiguous()


def _by_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of blocks of a single row."""
    return scale.repeat_interleave(rows // scale.shape[0], 0)


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] as matrix units read them: tiles of 128 rows by 4 blocks, where rows r, r + 32,
    r + 64 and r + 96 lie side by side (NVIDIA, cuBLAS documentation, "1D block scaling factors layout")."""
    rows, blocks = scale.shape
    full = pad(scale.contiguous().view(torch.uint8), (0, -blocks % 4, 0, -rows % 128))
    tiles = full.view(full.shape[0] // 128, 4, 32, full.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def rotated(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Each 16 elements along a dim times an orthogonal matrix of +-1/4 (Hadamard's with signs), which spreads
    outliers and leaves products that are summed over that dim as they are (paper, section 4.2)."""
    return (
        (x.movedim(dim, -1).unflatten(-1, (-1, FP4_BLOCK)) @ _rotation(x))
        .flatten(-2)
        .movedim(-1, dim)
        .contiguous()
    )


def _rotation(like: torch.Tensor) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < FP4_BLOCK:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor(_SIGNS, dtype=matrix.dtype)[:, None]
    return (signs * matrix / sqrt(FP4_BLOCK)).to(device=like.device, dtype=like.dtype)


def _product_shape(a: torch.Tensor, b: torch.Tensor, packed_a: int, packed_b: int) -> tuple[int, int]:
    return elements(a.shape, packed_a)[0], elements(b.shape, packed_b)[1]


define(
    "block_scale(Tensor x, Tensor whole, ScalarType element, int[] block) -> Tensor", block_scale, block_scale
)
define(
    "cast_packed(Tensor x, Tensor scale, ScalarType element, Tensor whole, int dim, bool stochastic)"
    " -> Tensor",
    cast_packed,
    cast_packed,
)
define("rotated(Tensor x, int dim) -> Tensor", rotated, lambda x, dim: torch.empty_like(x))
define(
    "packed_mm(Tensor whole_a, Tensor whole_b, Tensor scale_a, Tensor scale_b, Tensor a, Tensor b, "
    "int packed_a, int packed_b, ScalarType dtype) -> Tensor",
    packed_mm,
    lambda whole_a, whole_b, scale_a, scale_b, a, b, packed_a, packed_b, dtype: a.new_empty(
        _product_shape(a, b, packed_a, packed_b), dtype=dtype
    ),
    cuda=on_matrix_units,
)
