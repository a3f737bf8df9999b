"""Whether a tensor has other bits than before: changes through ``.data`` raise no version."""

from __future__ import annotations

import zlib

import torch

#: elements that are looked at together
_PIECE = 1 << 24
#: odd numbers that spread the positions and the bits of elements over 64 bits
_POSITION, _BITS = 0x5851F42D4C957F2D, 0x14057B7EF767814F
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """int64 [] on the device of ``x``; tensors with other bits have the same with a chance of about 2^-32.

    In host memory a CRC (IEEE 802.3), else a sum of bits times weights of their positions, modulo 2^64.
    """
    plain = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    flat = plain.contiguous().view(-1)
    if flat.device.type == "cpu":
        return torch.tensor(zlib.crc32(flat.view(torch.uint8).numpy().data))
    bits = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + piece.numel(), device=x.device) * _POSITION
        total += ((piece + 1) * _BITS * (weights ^ (weights >> 29) | 1)).sum()
    return total
