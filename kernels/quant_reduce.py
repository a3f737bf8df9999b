"""The sum of what several ranks quantised: the second half of a quantised reduce-scatter.

Each rank sends part w of its gradient to rank w as a wire (`kernels/quant.py`); rank w adds up the wires it
gets in fp32, in the order of ranks, and rounds once. G. Wang et al., "ZeRO++", 2023, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch

from autoshard.kernels.launch import launched
from autoshard.kernels.quant import (
    check_float,
    check_wires,
    elements,
    hostile,
    quantise_rows,
    quantise_rows_reference,
)
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, normal
from autoshard.torch_adapters.op_library import define


def dequantise_reduce(
    wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over ways of the elements of wires, uint8 [ways, wire_bytes(numel)] -> [numel].

    Raises UsageError if ``wires`` are not wires of ``numel`` elements.
    """
    return cast(torch.Tensor, torch.ops.autoshard.dequantise_reduce(wires, numel, bits, group, dtype))


def dequantise_reduce_reference(
    wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    check_float(dtype)
    check_wires(wires, numel, bits, group)
    total = wires.new_zeros(numel, dtype=torch.float32)
    for wire in wires.split(1):
        total += elements(wire, numel, bits, group)[0]
    return total.to(dtype)


def _fake(wires: torch.Tensor, numel: int, bits: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    check_wires(wires, numel, bits, group)
    return wires.new_empty(numel, dtype=dtype)


define(
    "dequantise_reduce(Tensor wires, int numel, int bits, int group, ScalarType dtype) -> Tensor",
    dequantise_reduce_reference,
    _fake,
    cuda=launched("triton_quant_reduce", "dequantise_reduce", dequantise_reduce_reference),
)


def _samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits, group in ((8, 256), (4, 64)):
        for ways, numel in ((1, 300), (5, 700)):
            x = normal(g, (ways, numel), torch.float32, device)
            yield quantise_rows_reference(x, bits, group), numel, bits, group, dtype
        x = hostile(torch.float32, device)
        yield quantise_rows_reference(x, bits, group), x.shape[1], bits, group, dtype


def _large(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for bits in (8, 4):
        x = normal(g, (8, 1 << 25), dtype, device)
        yield quantise_rows(x, bits, 256), 1 << 25, bits, 256, dtype


SPECS = (
    KernelSpec(
        "dequantise_reduce",
        dequantise_reduce_reference,
        ("triton_quant_reduce", "dequantise_reduce"),
        all_moved,
        _samples,
        _large,
        exact=True,
    ),
)
