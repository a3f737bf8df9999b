"""Buckets whose matrices travel quantised: what one rank sends to another, as a single buffer.

The buffer of a bucket is

    wire    all quantised tensors one after the other, each filled up with zeros to full groups, as one wire
            of `kernels.quant`: no group holds elements of two tensors, as a norm's weight of size 1 beside a
            matrix of size 0.02 would take its digits away
    bytes   the tensors that travel as they are (norms, biases), up to a multiple of 16 bytes

so that a bucket stays one message. Formats: G. Wang et al., "ZeRO++: Extremely Efficient Collective
Communication for Giant Model Training", 2023, sections 3.1 (weights) and 3.3 (gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from autoshard.kernels.quant import dequantise_copy_out, quantise_rows, wire_bytes
from autoshard.kernels.quant_reduce import dequantise_reduce
from autoshard.runtime.shard_utils import join_parts

_ALIGN = 16


@dataclass(frozen=True)
class Packing:
    """How the tensors of a bucket lie in a buffer.

    numels: elements of each tensor's part, of the largest part if ranks have unlike ones. quantised: which
    of them are. bits: 8 or 4. group: elements that share a scale. dtype: of all tensors.
    """

    numels: tuple[int, ...]
    quantised: tuple[bool, ...]
    bits: int
    group: int
    dtype: torch.dtype

    @classmethod
    def of(cls, numels: Sequence[int], bits: Sequence[int], group: int, dtype: torch.dtype) -> Packing:
        """bits: per tensor, 0 for one that travels as it is; all others are alike."""
        used = max(bits)
        return cls(tuple(numels), tuple(b > 0 for b in bits), used, group, dtype)

    @property
    def padded(self) -> tuple[int, ...]:
        """Elements of each quantised tensor, filled up to full groups."""
        chosen = [n for n, q in zip(self.numels, self.quantised, strict=True) if q]
        return tuple(-(-n // self.group) * self.group for n in chosen)

    @property
    def exact(self) -> tuple[int, ...]:
        """Elements of each tensor that travels as it is."""
        return tuple(n for n, q in zip(self.numels, self.quantised, strict=True) if not q)

    @property
    def wire(self) -> int:
        """Bytes of the quantised tensors."""
        return wire_bytes(sum(self.padded), self.bits, self.group) if self.padded else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        rest = sum(self.exact) * self.dtype.itemsize
        return self.wire + -(-rest // _ALIGN) * _ALIGN


def pack(rows: Sequence[Sequence[torch.Tensor]], how: Packing) -> torch.Tensor:
    """Buffers uint8 [rows, how.nbytes] of rows of parts, each with one part per tensor of the bucket."""
    device = rows[0][0].device
    out = torch.zeros((len(rows), how.nbytes), dtype=torch.uint8, device=device)
    if how.padded:
        flat = torch.zeros((len(rows), sum(how.padded)), dtype=how.dtype, device=device)
        _fill(flat, rows, how.quantised, how.padded)
        out[:, : how.wire] = quantise_rows(flat, how.bits, how.group)
    if how.exact:
        flat = torch.zeros((len(rows), sum(how.exact)), dtype=how.dtype, device=device)
        _fill(flat, rows, [not q for q in how.quantised], how.exact)
        rest = flat.view(torch.uint8)
        out[:, how.wire : how.wire + rest.shape[1]] = rest
    return out


def _fill(
    flat: torch.Tensor,
    rows: Sequence[Sequence[torch.Tensor]],
    chosen: Sequence[bool],
    sizes: Sequence[int],
) -> None:
    starts = [0, *accumulate(sizes)]
    for k, row in enumerate(rows):
        parts = [x for x, taken in zip(row, chosen, strict=True) if taken]
        for start, part in zip(starts, parts, strict=False):
            flat[k, start : start + part.numel()] = part.reshape(-1)


def unpack(wires: torch.Tensor, how: Packing) -> list[torch.Tensor]:
    """Per tensor of the bucket what the buffers uint8 [ways, how.nbytes] hold of it: [ways, numel]."""
    ways = wires.shape[0]
    quantised: list[torch.Tensor] = []
    if how.padded:
        wire = wires[:, : how.wire].contiguous()
        flat = dequantise_copy_out(wire, how.padded, how.bits, how.group, how.dtype)
        quantised = [x.view(ways, x.numel() // ways) for x in flat.split([ways * n for n in how.padded])]
    exact = list(_rest(wires, how).split(how.exact, 1)) if how.exact else []
    return _in_order(quantised, exact, how)


def joined(rows: torch.Tensor, shapes: Sequence[Sequence[int]], dim: int, outer: int) -> torch.Tensor:
    """A full tensor from its parts, the rows of [ways, numel], which have these shapes."""
    sizes = [prod(shape) for shape in shapes]
    if dim == 0 and outer == 1 and rows.is_contiguous() and all(n == rows.shape[1] for n in sizes):
        return rows.view(len(shapes) * shapes[0][0], *shapes[0][1:])
    parts = [row[:n].view(*shape) for row, n, shape in zip(rows, sizes, shapes, strict=True)]
    return join_parts(parts, dim, outer)


def sums(wires: torch.Tensor, how: Packing) -> list[torch.Tensor]:
    """Per tensor of the bucket the sum over the buffers, added up in fp32 and rounded once: [numel]."""
    quantised: list[torch.Tensor] = []
    if how.padded:
        wire = wires[:, : how.wire].contiguous()
        flat = dequantise_reduce(wire, sum(how.padded), how.bits, how.group, how.dtype)
        quantised = list(flat.split(how.padded))
    exact: list[torch.Tensor] = []
    if how.exact:
        rest = _rest(wires, how)
        wide = rest.dtype if rest.dtype == torch.float64 else torch.float32
        exact = list(rest.to(wide).sum(0).to(how.dtype).split(how.exact))
    return _in_order(quantised, exact, how)


def _rest(wires: torch.Tensor, how: Packing) -> torch.Tensor:
    """The tensors that travelled as they are, [ways, sum(how.exact)]."""
    end = how.wire + sum(how.exact) * how.dtype.itemsize
    return wires[:, how.wire : end].contiguous().view(how.dtype)


def _in_order(
    quantised: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], how: Packing
) -> list[torch.Tensor]:
    """The tensors of a bucket in its order, without what fills up groups; all [..., numel]."""
    first, second = iter(quantised), iter(exact)
    new = [next(first) if chosen else next(second) for chosen in how.quantised]
    return [x[..., :numel] for x, numel in zip(new, how.numels, strict=True)]
