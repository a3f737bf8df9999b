"""Bytes of quantised messages, and the text of gathers of rows that are quantised already.

The buffers themselves are made in `runtime.transport.quantized_buffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.ir.graph import Arg, Node, Ref
from autoshard.ir.types import Dtype

#: bytes of a full tensor up to which gloo's all-to-all is as quick as that many sends and receives
#: (measured on 4 processes, 2 cores: 1.5 ms against 2.4 ms at 0.25 MiB, 5.7 ms against 5.0 ms at 4 MiB)
FEW = 1 << 20

#: of the rows that leave a norm quantised
WIRE_BITS = 8
_SCALE, _ALIGN = 4, 16


def packed_bytes(numels: Sequence[int], bits: Sequence[int], group: int, width: int) -> int:
    """Bytes of the buffer in which a rank sends its parts of a bucket.

    numels: elements of each part. bits: per tensor, 0 for one that travels as it is, ``width`` bytes an
    element. group: elements that share a scale of 4 bytes.
    """
    groups = sum(-(-n // group) for n, b in zip(numels, bits, strict=True) if b)
    wire = _up(groups * (group * max(bits) // 8 + _SCALE)) if groups else 0
    return wire + _up(sum(n for n, b in zip(numels, bits, strict=True) if not b) * width)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class WireGather:
    """A gather as its text says it; see `autoshard.rules.quantized_gather`."""

    wire: str
    axis: str
    where: tuple[Arg, ...]
    group: int
    shape: tuple[int, ...]
    dtype: str


def wire_gather(node: Node) -> WireGather | None:
    """What a gather of wires says, None if its text is not that of one."""
    args = node.args
    if len(args) != 6 or node.kwargs or len(node.outs) != 1:
        return None
    wire, axis, where, group, shape, dtype = args
    if not isinstance(wire, Ref) or not isinstance(axis, str):
        return None
    if not isinstance(where, tuple) or len(where) != 4 or not isinstance(dtype, Dtype):
        return None
    if type(group) is not int or not isinstance(shape, tuple) or not all(type(n) is int for n in shape):
        return None
    return WireGather(wire.name, axis, where, group, shape, dtype.name)
