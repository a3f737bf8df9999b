"""Block quantisation to 8 or 4 bits, payload and scales in one buffer, so that one collective carries both.

The wire of n elements, in groups of ``group``:

    payload   ceil(n / group) * group * bits / 8 bytes; the last group is filled up with zeros. 8 bits: int8.
              4 bits: byte j of a group holds element j (low half) and element j + group / 2 (high half)
    scales    one fp32 per group
    zeros     up to a multiple of 16 bytes

An element is q * scale, q the nearest whole number (ties to even) to x / scale, scale = max|x| / L of its
group, L = 127 or 7: the error is at most scale / 2. A group of which all |x| < L * 2^-126 becomes zeros. A
group with an infinity or a NaN becomes NaN throughout, so that overflow is seen on the other side.

Used as in G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
2023, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import nan
from typing import Any, cast

import torch

from autoshard.errors import UsageError
from autoshard.kernels.launch import launched
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, normal, whole
from autoshard.torch_adapters.op_library import define

#: scales below this are 0: their inverse would not be finite
SMALLEST_SCALE = 2.0**-126
_SCALE_BYTES = 4
_WIRE_ALIGN = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def limit_of(bits: int) -> int:
    """The largest whole number of a payload."""
    return (1 << (bits - 1)) - 1


def payload_bytes(numel: int, bits: int, group: int) -> int:
    """Bytes before the scales."""
    return -(-numel // group) * group * bits // 8


def wire_bytes(numel: int, bits: int, group: int) -> int:
    """Bytes of the wire of ``numel`` elements.

    Raises UsageError unless bits is 8 or 4 and group a power of two from 32 to 4096.
    """
    check_format(bits, group)
    used = payload_bytes(numel, bits, group) + -(-numel // group) * _SCALE_BYTES
    return -(-used // _WIRE_ALIGN) * _WIRE_ALIGN


def check_format(bits: int, group: int) -> None:
    """UsageError unless the format exists."""
    if bits not in (4, 8) or group & (group - 1) or not 32 <= group <= 4096:
        raise UsageError(
            f"no wire of {bits} bits in groups of {group}",
            hint="use 8 or 4 bits, and a group that is a power of two from 32 to 4096",
        )


def check_wires(wires: torch.Tensor, numel: int, bits: int, group: int) -> None:
    """UsageError unless the last dim of ``wires`` is a wire of ``numel`` elements."""
    if wires.dtype != torch.uint8 or not wires.shape or wires.shape[-1] != wire_bytes(numel, bits, group):
        raise UsageError(
            f"a {wires.dtype} buffer {tuple(wires.shape)} is no wire of {numel} elements",
            why=f"{bits} bits in groups of {group} take {wire_bytes(numel, bits, group)} bytes",
            hint="give numel, bits and group that it was made with",
        )


def check_float(dtype: torch.dtype) -> None:
    """UsageError unless elements of this type can be quantised, or be made from a wire."""
    if dtype not in _DTYPES:
        raise UsageError(f"{dtype} cannot be quantised", hint="use fp32, bf16, fp16 or fp64")


# what people call: torch picks the implementation


def quantise(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The wire (uint8 [wire_bytes]) of a floating tensor of any shape, in its order of elements."""
    return cast(torch.Tensor, torch.ops.autoshard.quantise(x, bits, group))


def quantise_rows(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """One wire per row: x [ways, n] -> uint8 [ways, wire_bytes(n)]."""
    return cast(torch.Tensor, torch.ops.autoshard.quantise_rows(x, bits, group))


def dequantise(wire: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements [numel] of a wire, rounded once from fp32 to ``dtype``."""
    return cast(torch.Tensor, torch.ops.autoshard.dequantise(wire, numel, bits, group, dtype))


def dequantise_rows(
    wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Of each wire its elements: uint8 [ways, wire_bytes] -> [ways, numel]."""
    return cast(torch.Tensor, torch.ops.autoshard.dequantise_rows(wires, numel, bits, group, dtype))


def dequantise_copy_out(
    wires: torch.Tensor, sizes: Sequence[int], bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """What an all-gather of buckets brought, parameter by parameter.

    wires: [ways, wire_bytes(sum(sizes))], of each rank its parts of all parameters one after the other, of
    ``sizes`` elements. Gives [ways * sum(sizes)]: of the first parameter the parts of all ranks, then those
    of the second, so that each parameter is one contiguous slice of it.
    """
    new = torch.ops.autoshard.dequantise_copy_out(wires, list(sizes), bits, group, dtype)
    return cast(torch.Tensor, new)


# references


def quantise_rows_reference(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    check_format(bits, group)
    check_float(x.dtype)
    ways, numel = x.shape
    wire = x.new_zeros((ways, wire_bytes(numel, bits, group)), dtype=torch.uint8)
    if not x.numel():
        return wire
    groups, limit = -(-numel // group), limit_of(bits)
    wide = torch.nn.functional.pad(x.float(), (0, groups * group - numel))
    rows = wide.reshape(ways, groups, group)
    top = torch.linalg.vector_norm(rows, float("inf"), 2)
    finite = torch.isfinite(top)
    scale = top * (1.0 / limit)
    scale = scale.masked_fill(scale < SMALLEST_SCALE, 0.0)
    inverse = torch.where(finite & (scale > 0), scale.reciprocal(), 0.0)
    q = (rows * inverse.unsqueeze(2)).round_().clamp_(-limit, limit)
    if not bool(finite.all()):
        q.masked_fill_(~finite.unsqueeze(2), 0.0)
    codes = q.to(torch.int8)
    if bits == 4:
        low, high = codes[..., : group // 2], codes[..., group // 2 :]
        codes = (low & 15) | (high << 4)
    end = payload_bytes(numel, bits, group)
    wire[:, :end] = codes.reshape(ways, end).view(torch.uint8)
    stored = scale.masked_fill(~finite, nan)
    wire[:, end : end + groups * _SCALE_BYTES] = stored.view(torch.uint8)
    return wire


def quantise_reference(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    return quantise_rows_reference(x.reshape(1, -1), bits, group)[0]


def elements(wires: torch.Tensor, numel: int, bits: int, group: int) -> torch.Tensor:
    """fp32 [ways, numel] of wires [ways, bytes]."""
    check_wires(wires, numel, bits, group)
    if not numel or not wires.shape[0]:
        return wires.new_zeros((wires.shape[0], numel), dtype=torch.float32)
    ways, groups, end = wires.shape[0], -(-numel // group), payload_bytes(numel, bits, group)
    # a copy, as scales of a wire within others need not lie where fp32 may be read
    scales = wires[:, end : end + groups * _SCALE_BYTES].clone(memory_format=torch.contiguous_format)
    codes = wires[:, :end].view(torch.int8).reshape(ways, groups, group * bits // 8)
    if bits == 4:
        codes = torch.cat(((codes << 4) >> 4, codes >> 4), 2)
    values = codes.to(torch.float32).mul_(scales.view(torch.float32).unsqueeze(2))
    return values.reshape(ways, groups * group)[:, :numel]


def dequantise_rows_reference(
    wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_float(dtype)
    return elements(wires, numel, bits, group).to(dtype).contiguous()


def dequantise_reference(
    wire: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    return dequantise_rows_reference(wire.unsqueeze(0), numel, bits, group, dtype)[0]


def dequantise_copy_out_reference(
    wires: torch.Tensor, sizes: Sequence[int], bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_float(dtype)
    values = elements(wires, sum(sizes), bits, group)
    ends = accumulate(sizes)
    parts = [values[:, end - n : end].reshape(-1) for n, end in zip(sizes, ends, strict=True)]
    return torch.cat(parts).to(dtype) if parts else values.new_empty(0, dtype=dtype)


# ops


def _fake_quantise(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    return x.new_empty(wire_bytes(x.numel(), bits, group), dtype=torch.uint8)


def _fake_quantise_rows(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], wire_bytes(x.shape[1], bits, group)), dtype=torch.uint8)


def _fake_dequantise(
    wire: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_wires(wire, numel, bits, group)
    return wire.new_empty(numel, dtype=dtype)


def _fake_dequantise_rows(
    wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_wires(wires, numel, bits, group)
    return wires.new_empty((wires.shape[0], numel), dtype=dtype)


def _fake_copy_out(
    wires: torch.Tensor, sizes: Sequence[int], bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_wires(wires, sum(sizes), bits, group)
    return wires.new_empty(wires.shape[0] * sum(sizes), dtype=dtype)


define(
    "quantise(Tensor x, int bits, int group) -> Tensor",
    quantise_reference,
    _fake_quantise,
    cuda=launched("triton_quant", "quantise", quantise_reference),
)
define(
    "quantise_rows(Tensor x, int bits, int group) -> Tensor",
    quantise_rows_reference,
    _fake_quantise_rows,
    cuda=launched("triton_quant", "quantise_rows", quantise_rows_reference),
)
define(
    "dequantise(Tensor wire, int numel, int bits, int group, ScalarType dtype) -> Tensor",
    dequantise_reference,
    _fake_dequantise,
    cuda=launched("triton_quant", "dequantise", dequantise_reference),
)
define(
    "dequantise_rows(Tensor wires, int numel, int bits, int group, ScalarType dtype) -> Tensor",
    dequantise_rows_reference,
    _fake_dequantise_rows,
    cuda=launched("triton_quant", "dequantise_rows", dequantise_rows_reference),
)
define(
    "dequantise_copy_out(Tensor wires, int[] sizes, int bits, int group, ScalarType dtype) -> Tensor",
    dequantise_copy_out_reference,
    _fake_copy_out,
    cuda=launched("triton_quant", "dequantise_copy_out", dequantise_copy_out_reference),
)


# samples


def _noise(g: Generator, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal values whose size differs from group to group."""
    sizes = torch.exp2(whole(g, -8, 8, (shape[0], 1), device).float())
    return (normal(g, shape, torch.float32, device) * sizes).to(dtype)


def hostile(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[4, 300]: zeros, ties, the smallest numbers, and an infinity in the last group of the last row."""
    x = torch.zeros(4, 300, dtype=torch.float32)
    x[0, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    x[1, 5] = 1e-38
    x[1, 270] = 3e-5
    x[2] = torch.linspace(-1, 1, 300)
    x[3] = 0.25
    x[3, 299] = float("inf")
    return x.to(device=device, dtype=dtype)


def _quantise_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 4):
        yield _noise(g, (3, 1000), dtype, device), bits, 256
        yield _noise(g, (2, 31), dtype, device), bits, 32
        yield hostile(dtype, device), bits, 64


def _dequantise_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, bits, group in _quantise_samples(g, dtype, device):
        yield quantise_rows_reference(x, bits, group), x.shape[1], bits, group, dtype


def _copy_out_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 4):
        for sizes in ([512, 256, 1024], [5, 300, 1, 0, 77]):
            x = _noise(g, (3, sum(sizes)), dtype, device)
            yield quantise_rows_reference(x, bits, 256), sizes, bits, 256, dtype


def _large_quantise(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 4):
        yield normal(g, (1, 1 << 28), dtype, device), bits, 256


def _large_dequantise(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 4):
        x = normal(g, (8, 1 << 25), dtype, device)
        yield quantise_rows(x, bits, 256), 1 << 25, bits, 256, dtype


def _large_copy_out(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    sizes = [4096 * 4096 // 8] * 4 + [4096 * 11008 // 8] * 3
    for bits in (8, 4):
        x = torch.randn(8, sum(sizes), generator=g, device=device, dtype=dtype)
        yield quantise_rows(x, bits, 256), sizes, bits, 256, dtype


SPECS = (
    KernelSpec(
        "quantise_rows",
        quantise_rows_reference,
        ("triton_quant", "quantise_rows"),
        all_moved,
        _quantise_samples,
        _large_quantise,
        exact=True,
    ),
    KernelSpec(
        "dequantise_rows",
        dequantise_rows_reference,
        ("triton_quant", "dequantise_rows"),
        all_moved,
        _dequantise_samples,
        _large_dequantise,
        exact=True,
    ),
    KernelSpec(
        "dequantise_copy_out",
        dequantise_copy_out_reference,
        ("triton_quant", "dequantise_copy_out"),
        all_moved,
        _copy_out_samples,
        _large_copy_out,
        exact=True,
    ),
)
