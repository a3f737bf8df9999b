"""Norms whose rows leave as a wire of 8 bits: what sequence parallel ranks gather is half as long.

The same as `kernels/norm.py` followed by `kernels/quant.py`, without writing the rows in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.kernels.launch import launched
from autoshard.kernels.norm import (
    TWICE,
    add_layer_norm,
    add_rms_norm,
    fake_stat,
    fake_sum,
    layer_norm,
    rms_norm,
)
from autoshard.kernels.quant import quantise_reference, wire_bytes
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, eighths, normal
from autoshard.torch_adapters.op_library import define

BITS = 8


def check_groups(width: int, group: int) -> None:
    """UsageError unless rows are full groups."""
    if width % group:
        raise UsageError(
            f"rows of {width} are not whole groups of {group}",
            why="a group that spans two rows would wait for both",
            hint="use a group that divides the rows",
        )


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H], weight [H] -> (wire of the normalised rows, rstd [..., 1] in fp32)."""
    check_groups(x.shape[-1], group)
    y, rstd = rms_norm(x, weight, eps, narrow)
    return quantise_reference(y, BITS, group), rstd


def add_rms_norm_quantise(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a + b [..., H], wire of its normalised rows, rstd [..., 1])."""
    check_groups(a.shape[-1], group)
    x, y, rstd = add_rms_norm(a, b, weight, eps, narrow)
    return x, quantise_reference(y, BITS, group), rstd


def layer_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., H], weight and bias [H] -> (wire of the normalised rows, mean and rstd [..., 1] in fp32)."""
    check_groups(x.shape[-1], group)
    y, mean, rstd = layer_norm(x, weight, bias, eps)
    return quantise_reference(y, BITS, group), mean, rstd


def add_layer_norm_quantise(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a + b [..., H], wire of its normalised rows, mean, rstd [..., 1])."""
    check_groups(a.shape[-1], group)
    x, y, mean, rstd = add_layer_norm(a, b, weight, bias, eps)
    return x, quantise_reference(y, BITS, group), mean, rstd


def _wire(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.new_empty(wire_bytes(x.numel(), BITS, group), dtype=torch.uint8)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _wire(x, group), fake_stat(x)


def _fake_add(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, narrow: bool, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = fake_sum(a, b)
    return x, _wire(x, group), fake_stat(x)


def _fake_layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _wire(x, group), fake_stat(x), fake_stat(x)


def _fake_add_layer(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = fake_sum(a, b)
    return x, _wire(x, group), fake_stat(x), fake_stat(x)


define(
    "rms_norm_quantise(Tensor x, Tensor weight, float eps, bool narrow, int group) -> (Tensor, Tensor)",
    rms_norm_quantise,
    _fake,
    cuda=launched("triton_norm_quant", "rms_norm_quantise", rms_norm_quantise),
)
define(
    "add_rms_norm_quantise(Tensor a, Tensor b, Tensor weight, float eps, bool narrow, int group) "
    "-> (Tensor, Tensor, Tensor)",
    add_rms_norm_quantise,
    _fake_add,
    cuda=launched("triton_norm_quant", "add_rms_norm_quantise", add_rms_norm_quantise),
)
define(
    "layer_norm_quantise(Tensor x, Tensor weight, Tensor? bias, float eps, int group) "
    "-> (Tensor, Tensor, Tensor)",
    layer_norm_quantise,
    _fake_layer,
    cuda=launched("triton_norm_quant", "layer_norm_quantise", layer_norm_quantise),
)
define(
    "add_layer_norm_quantise(Tensor a, Tensor b, Tensor weight, Tensor? bias, float eps, int group) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    add_layer_norm_quantise,
    _fake_add_layer,
    cuda=launched("triton_norm_quant", "add_layer_norm_quantise", add_layer_norm_quantise),
)


def _plain_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h, group in ((3, 192, 64), (2, 32, 32), (5, 512, 128)):
        yield normal(g, (m, h), dtype, device, 2.0), normal(g, (h,), dtype, device) + 1, 1e-6, True, group


def _add_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h, group in ((3, 192, 64), (2, 256, 256)):
        a, b = (eighths(g, (m, h), dtype, device) for _ in range(2))
        yield a, b, normal(g, (h,), dtype, device) + 1, 1e-6, False, group


def _layer_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for a, _, weight, bias, eps, group in _add_layer_samples(g, dtype, device):
        yield a, weight, bias, eps, group


def _add_layer_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for k, (m, h, group) in enumerate(((3, 192, 64), (2, 256, 256), (5, 96, 32))):
        # rows far from zero: what a mean is for
        a, b = (eighths(g, (m, h), dtype, device) + 1 for _ in range(2))
        bias = normal(g, (h,), dtype, device) if k != 1 else None
        yield a, b, normal(g, (h,), dtype, device) + 1, bias, 1e-5, group


def _large(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for m, h in ((8192, 8192), (8192, 4096)):
        yield normal(g, (m, h), dtype, device), normal(g, (h,), dtype, device), 1e-6, True, 256


def _large_add(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, weight, eps, narrow, group in _large(g, dtype, device):
        yield x, normal(g, x.shape, dtype, device), weight, eps, narrow, group


def _large_layer(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for k, (x, weight, eps, _, group) in enumerate(_large(g, dtype, device)):
        bias = None if k else normal(g, weight.shape, dtype, device)
        yield x, weight, bias, eps, group


def _large_add_layer(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    for x, *rest in _large_layer(g, dtype, device):
        yield x, normal(g, x.shape, dtype, device), *rest


SPECS = (
    KernelSpec(
        "rms_norm_quantise",
        rms_norm_quantise,
        ("triton_norm_quant", "rms_norm_quantise"),
        all_moved,
        _plain_samples,
        _large,
        codes=1,
    ),
    KernelSpec(
        "add_rms_norm_quantise",
        add_rms_norm_quantise,
        ("triton_norm_quant", "add_rms_norm_quantise"),
        all_moved,
        _add_samples,
        _large_add,
        codes=1,
    ),
    KernelSpec(
        "layer_norm_quantise",
        layer_norm_quantise,
        ("triton_norm_quant", "layer_norm_quantise"),
        all_moved,
        _layer_samples,
        _large_layer,
        TWICE,
        codes=1,
    ),
    KernelSpec(
        "add_layer_norm_quantise",
        add_layer_norm_quantise,
        ("triton_norm_quant", "add_layer_norm_quantise"),
        all_moved,
        _add_layer_samples,
        _large_add_layer,
        TWICE,
        codes=1,
    ),
)
