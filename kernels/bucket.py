"""Tensors in one buffer for one collective, cast and scaled on the way.

A bucket of ways shards is [ways, sum of the shards' sizes]: row w has of every tensor its w-th part, one
after the other. That is what a reduce-scatter takes (with ``ways`` its ranks) and what an all-gather gives;
an all-reduce has one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from autoshard.errors import UsageError
from autoshard.kernels.launch import launched
from autoshard.kernels.norm import wide
from autoshard.kernels.registry import KernelSpec, all_moved
from autoshard.kernels.samples import Generator, normal
from autoshard.torch_adapters.op_library import define


def check_parts(tensors: Sequence[torch.Tensor], ways: int) -> None:
    """UsageError unless every tensor divides into ``ways`` parts, and there is one."""
    odd = next((t for t in tensors if t.numel() % ways), None)
    if not tensors or odd is not None:
        raise UsageError(
            "there is no tensor to pack"
            if odd is None
            else f"a tensor {tuple(odd.shape)} has no {ways} parts",
            hint="pad tensors to a multiple of the ways",
        )


def check_bucket(bucket: torch.Tensor, sizes: Sequence[int]) -> None:
    """UsageError unless the bucket [ways, n] holds parts of these sizes."""
    if bucket.dim() != 2 or bucket.shape[1] != sum(sizes):
        raise UsageError(
            f"a bucket {tuple(bucket.shape)} does not hold parts of {sum(sizes)} elements",
            hint="give [ways, sum of sizes]",
        )


def bucket_pack(tensors: Sequence[torch.Tensor], ways: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Tensors, each of a multiple of ``ways`` elements, times ``scale`` -> bucket [ways, n]."""
    check_parts(tensors, ways)
    parts = [wide(t.reshape(ways, -1)) for t in tensors]
    return torch.cat(parts, 1).mul_(scale).to(dtype)


def bucket_unpack(
    bucket: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """bucket [ways, sum(sizes)] times ``scale`` -> [ways * sum(sizes)], tensor by tensor."""
    check_bucket(bucket, sizes)
    ends = accumulate(sizes)
    parts = [bucket[:, end - n : end].reshape(-1) for n, end in zip(sizes, ends, strict=True)]
    return (wide(torch.cat(parts)) * scale).to(dtype) if parts else bucket.new_empty(0, dtype=dtype)


def _fake_pack(tensors: Sequence[torch.Tensor], ways: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    check_parts(tensors, ways)
    return tensors[0].new_empty((ways, sum(t.numel() // ways for t in tensors)), dtype=dtype)


def _fake_unpack(
    bucket: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, scale: float
) -> torch.Tensor:
    check_bucket(bucket, sizes)
    return bucket.new_empty(bucket.numel(), dtype=dtype)


define(
    "bucket_pack(Tensor[] tensors, int ways, ScalarType dtype, float scale) -> Tensor",
    bucket_pack,
    _fake_pack,
    cuda=launched("triton_bucket", "bucket_pack", bucket_pack),
)
define(
    "bucket_unpack(Tensor bucket, int[] sizes, ScalarType dtype, float scale) -> Tensor",
    bucket_unpack,
    _fake_unpack,
    cuda=launched("triton_bucket", "bucket_unpack", bucket_unpack),
)


def _pack_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield [normal(g, (n,), torch.float32, device) for n in (48, 6, 1200)], 3, dtype, 0.125
    yield [normal(g, (5, 7), dtype, device)], 1, torch.float32, 1.0


def _unpack_samples(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield normal(g, (3, 1337), dtype, device), [1000, 330, 7, 0], torch.float32, 0.5
    yield normal(g, (1, 64), torch.float32, device), [64], dtype, 1.0


_SIZES = (4096 * 4096, 4096 * 1024, 4096 * 14336)


def _large_pack(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    yield [normal(g, (n,), torch.float32, device) for n in _SIZES], 8, dtype, 0.125


def _large_unpack(g: Generator, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    sizes = [n // 8 for n in _SIZES]
    yield normal(g, (8, sum(sizes)), dtype, device), sizes, torch.float32, 0.125


SPECS = (
    KernelSpec(
        "bucket_pack",
        bucket_pack,
        ("triton_bucket", "bucket_pack"),
        all_moved,
        _pack_samples,
        _large_pack,
        exact=True,
    ),
    KernelSpec(
        "bucket_unpack",
        bucket_unpack,
        ("triton_bucket", "bucket_unpack"),
        all_moved,
        _unpack_samples,
        _large_unpack,
        exact=True,
    ),
)
