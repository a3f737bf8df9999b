"""What quantising does to the values of a program, measured while it runs in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.ir import Node
from autoshard.ir.collectives import sent_bits, transfer_of
from autoshard.ir.quantized import WIRE_BITS
from autoshard.ir.scaled import CAST_BY_EXPERT, CAST_PACKED, CASTS, ELEMENTS
from autoshard.ir.similar_rows import GROUP_MEANS
from autoshard.kernels.quant import dequantise, dequantise_rows, quantise_rows
from autoshard.ops.packed import unpacked
from autoshard.ops.scaled import scaled_back
from autoshard.ops.scaled_experts import by_slot
from autoshard.ops.similar_rows import rows_of
from autoshard.rules.quantized_gather import NORMS, WIRED
from autoshard.runtime.resolve import find_op
from autoshard.runtime.shard_utils import join_parts, reduce_parts, take_part

_PLAIN = {wired: norm for norm, wired in WIRED.items()}


@dataclass(frozen=True)
class Rounding:
    """What quantising did to a value: |changed - exact| / |exact|, both in the 2-norm.

    name: of the value. bits: 8 or 4, the fewest that anything in the message has. kind: all_gather,
    reduce_scatter, cast for an operand of a product, or group for rows of experts of which a share travels as
    means. segment: that the value is in, "" for main.
    """

    kind: str
    name: str
    bits: int
    error: float
    segment: str = ""
    share: float = 1.0


def of_message(node: Node, outs: Sequence[Any], exact: Sequence[Any], segment: str) -> list[Rounding]:
    """Per quantised tensor of a bucket, over the ranks of a group.

    outs, exact: per rank what the message gave, and what it would have given with all bits.
    """
    result = []
    for t, (name, bits) in enumerate(zip(node.outs, sent_bits(node), strict=True)):
        if bits:
            pairs = [(a[t], b[t]) for a, b in zip(outs, exact, strict=True)]
            result.append(Rounding(str(transfer_of(node)), name, bits, _error(pairs), segment))
    return result


def exact_message(node: Node, given: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What a quantised message would give a group's ranks with all bits. given: the tensors of each."""
    ways, rows = len(given), list(zip(*given, strict=True))
    wheres = list(zip(rows, node.args[2], strict=True))
    if transfer_of(node) == "all_gather":
        joined = [join_parts(parts, dim, outer) for parts, (dim, outer, _, _) in wheres]
        return [joined] * ways
    sums = [(reduce_parts(parts, "sum"), where) for parts, where in wheres]
    return [[take_part(x, w[0], ways, k, w[1], w[2]) for x, w in sums] for k in range(ways)]


def of_tokens(node: Node, given: Sequence[Sequence[Any]], segment: str) -> Rounding:
    """Of the rows of tokens that are sent to experts, over all ranks. given: the arguments of each."""
    told = node.kwarg("bits", 0), node.kwarg("group", 0)
    rows = [args[0][0] for args in given]
    pairs = [(dequantise_rows(quantise_rows(x, *told), x.shape[1], *told, x.dtype), x) for x in rows]
    return Rounding("dispatch", node.name, told[0], _error(pairs), segment)


def rounded_output(node: Node) -> int | None:
    """Which output of an op is rounded to 8 bits, or has means of rows; None for other ops."""
    if node.op == GROUP_MEANS:
        return 0
    if node.op in CASTS:
        return 0 if node.args[2].name in ELEMENTS else None
    return NORMS[node.op][0] if node.op in NORMS else None


def of_op(node: Node, given: Sequence[Sequence[Any]], outs: Sequence[torch.Tensor], segment: str) -> Rounding:
    """Of an op with a `rounded_output`, over all ranks. given: its arguments per rank. outs: that output."""
    if node.op == GROUP_MEANS:
        return _of_groups(node, given, outs, segment)
    if node.op == CAST_PACKED:
        pairs = [(unpacked(out, args[1], *args[3:5]), args[0]) for args, out in zip(given, outs, strict=True)]
        return Rounding("cast", node.name, 4, _error(pairs), segment)
    if node.op in CASTS:
        scales = [by_slot(args[1], args[3]) if node.op == CAST_BY_EXPERT else args[1] for args in given]
        casts = zip(given, outs, scales, strict=True)
        back = [(scaled_back(out, scale), args[0]) for args, out, scale in casts]
        return Rounding("cast", node.name, WIRE_BITS, _error(back), segment)
    norm = find_op(_PLAIN[node.op])
    place, last = NORMS[node.op]
    pairs = []
    for args, wire in zip(given, outs, strict=True):
        exact = norm(*args[:last])[place]
        changed = dequantise(wire, exact.numel(), WIRE_BITS, args[last], exact.dtype)
        pairs.append((changed.view_as(exact), exact))
    return Rounding("all_gather", node.outs[place], WIRE_BITS, _error(pairs), segment)


def _of_groups(
    node: Node, given: Sequence[Sequence[Any]], outs: Sequence[torch.Tensor], segment: str
) -> Rounding:
    pairs, rows = [], 0
    for (x, groups), means in zip(given, outs, strict=True):
        token, choice = (groups >= 0).nonzero(as_tuple=True)
        rows += len(token)
        pairs.append((means[rows_of(groups)[token, choice]], x[token]))
    return Rounding("group", node.name, 0, _error(pairs), segment, sum(map(len, outs)) / max(1, rows))


def _error(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    wide = [(a.double(), b.double()) for a, b in pairs]
    lost = sum(float((a - b).square().sum()) for a, b in wide)
    full = sum(float(b.square().sum()) for _, b in wide)
    return float((lost / full) ** 0.5) if full else 0.0
