"""Overlapping windows that a model makes by strides of its own, as the reshapes and unfolds that they are.

Strides say where elements lie in the memory of one device, which shards do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class _Part:
    """One dim of the memory, with the dim, or pair of dims (windows, places in one), that run over it."""

    dims: tuple[int, ...]
    stride: int
    used: int
    step: int = 1
    window: int = 0


def as_strided(
    input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """``torch.as_strided``, without strides where the result is made of windows and reshapes."""
    begins = storage_offset is None or storage_offset == input.storage_offset()
    size, stride = [int(n) for n in size], [int(n) for n in stride]
    # dims of size 1 lie anywhere
    kept = [d for d, n in enumerate(size) if n != 1]
    result = _windows(input, tuple(size[d] for d in kept), tuple(stride[d] for d in kept)) if begins else None
    # not torch.as_strided, which is replaced while a model is traced
    if result is None:
        return torch.ops.aten.as_strided.default(input, size, stride, storage_offset)
    return result.reshape(size)


def _windows(x: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor | None:
    order = sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d]), reverse=True)
    flat = x.permute(order)
    parts = _parts(size, stride)
    if not flat.is_contiguous() or parts is None or not parts:
        return None
    above = x.numel()
    shape: list[int] = []
    for part in parts:
        if part.stride == 0 or above % part.stride or part.used > above // part.stride:
            return None
        shape.append(above // part.stride)
        above = part.stride
    if above != 1:
        return None
    out, lead, windows = flat.reshape(shape), [], []
    for dim, part in enumerate(parts):
        out = out.narrow(dim, 0, part.used)
        lead.append(part.dims[0])
        if part.window:
            out = out.unfold(dim, part.window, part.step)
            windows.append(part.dims[1])
    new = [*lead, *windows]
    return out.permute([new.index(d) for d in range(len(size))])


def _parts(size: tuple[int, ...], stride: tuple[int, ...]) -> list[_Part] | None:
    """The asked dims from the largest stride to the smallest, those that overlap together."""
    order = sorted(range(len(size)), key=lambda d: (stride[d], size[d]), reverse=True)
    parts: list[_Part] = []
    rest = list(order)
    while rest:
        dim = rest.pop(0)
        if rest and stride[rest[0]] and stride[dim] < stride[rest[0]] * size[rest[0]]:
            inner = rest.pop(0)
            step, uneven = divmod(stride[dim], stride[inner])
            if uneven:
                return None
            used = (size[dim] - 1) * step + size[inner]
            parts.append(_Part((dim, inner), stride[inner], used, step, size[inner]))
        else:
            parts.append(_Part((dim,), stride[dim], size[dim]))
    return None if any(a.stride <= b.stride for a, b in pairwise(parts)) else parts
