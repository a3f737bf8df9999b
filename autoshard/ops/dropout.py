"""Dropout whose mask is a function of a seed, a call number and global positions only.

Any sharding of a tensor therefore drops the same elements as one device does, and the backward needs
nothing saved: it is the same op on the gradient.

The mask, exactly (all unsigned 32-bit, ``mix`` is the two-round multiply-xorshift of lowbias32): with
the global linear index ``low + 2**32 * high`` of an element,

    k1 = mix(seed_low ^ mix(site + 0x9E3779B9)),  k2 = mix(seed_high ^ k1 ^ 0x85EBCA6B)
    x = low ^ k1 ^ (mix(high ^ k2) if high else 0)
    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= k2;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

and the element is kept if ``x >= p * 2**32``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from autoshard.torch_adapters.op_library import define

_WORD = 0xFFFFFFFF
_C1, _C2 = 0x7FEB352D, 0x846CA68B


def _signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int64 tensors that hold 32-bit words."""
    x = ((x ^ (x >> 16)) * _C1) & _WORD
    x = ((x ^ (x >> 15)) * _C2) & _WORD
    return x ^ (x >> 16)


def _as_int32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 tensor as int32."""
    low = x & _WORD
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _keys(seed: torch.Tensor, site: int) -> tuple[torch.Tensor, torch.Tensor]:
    salt = mix(torch.full_like(seed, (site + 0x9E3779B9) & _WORD))
    k1 = mix((seed & _WORD) ^ salt)
    k2 = mix(((seed >> 32) & _WORD) ^ k1 ^ 0x85EBCA6B)
    return k1, k2


def _positions(
    shape: Sequence[int], offsets: Sequence[int], full_shape: Sequence[int], like: torch.Tensor
) -> list[torch.Tensor]:
    """Per dim, the contribution of its indices to the global linear index, shaped to broadcast."""
    parts = []
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        stride = prod(full_shape[dim + 1 :])
        index = torch.arange(offset, offset + size, device=like.device, dtype=torch.int64) * stride
        parts.append(index.view(-1, *([1] * (len(shape) - dim - 1))))
    return parts


def keep_mask(
    shape: Sequence[int],
    p: float,
    seed: torch.Tensor,
    site: int,
    offsets: Sequence[int],
    full_shape: Sequence[int],
) -> torch.Tensor:
    """The mask [*shape] (bool, True: kept) of the part of a tensor that begins at ``offsets``."""
    k1, k2 = _keys(seed, site)
    parts = _positions(shape, offsets, full_shape, seed)
    x = torch.zeros(tuple(shape), dtype=torch.int32, device=seed.device)
    for part in parts:
        x += _as_int32(part)
    x ^= _as_int32(k1)
    if prod(full_shape) > 1 << 32:
        index = torch.zeros((), dtype=torch.int64, device=seed.device)
        for part in parts:
            index = index + part
        high = index >> 32
        x ^= _as_int32(torch.where(high > 0, mix(high ^ k2), 0))
    x ^= (x >> 16) & 0xFFFF
    x *= _C1
    x ^= _as_int32(k2)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(_C2)
    x ^= (x >> 16) & 0xFFFF
    x ^= -(1 << 31)  # from here on the signed order is that of the unsigned words
    return x >= min(int(p * 2**32), _WORD) - (1 << 31)


def dropout(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    offsets: Sequence[int],
    full_shape: Sequence[int],
) -> torch.Tensor:
    """Zero elements with probability ``p`` and scale the others by ``1 / (1 - p)``.

    x: the part of a tensor of ``full_shape`` that begins at ``offsets``. seed: int64 scalar. site: number
    of the dropout call in the forward.
    """
    out = torch.empty_like(x)
    keep = keep_mask(x.shape, p, seed, site, offsets, full_shape)
    torch.mul(x, keep, out=out)
    return out.mul_(1.0 / (1.0 - p))


def _fake(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    offsets: Sequence[int],
    full_shape: Sequence[int],
) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.p, seed, ctx.site, ctx.offsets, ctx.full_shape = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (seed,) = ctx.saved_tensors
    out = torch.ops.autoshard.dropout(grad, ctx.p, seed, ctx.site, ctx.offsets, ctx.full_shape)
    return out, None, None, None, None, None


define(
    "dropout(Tensor x, float p, Tensor seed, int site, int[] offsets, int[] full_shape) -> Tensor",
    dropout,
    _fake,
    backward=_backward,
    save=_save,
)
