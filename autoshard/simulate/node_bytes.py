"""What each op of a program makes, takes and frees in memory, in the order in which a rank runs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoshard.ir import DTYPES, Node, refs_of
from autoshard.ir.collectives import is_message, is_ring
from autoshard.ir.lowered import LoweredSegment, PlacedValue
from autoshard.ir.offload import STORE
from autoshard.ir.views import view_roots
from autoshard.simulate.framework_saved import logits_of
from autoshard.simulate.in_flight import OnTheWay, message_of, turn_of
from autoshard.simulate.segment_work import Sheets

K = TypeVar("K")


@dataclass(frozen=True)
class Taken:
    """Bytes that an op needs while it runs. message: what it issues, None if it is no message, or if it is
    waited for at once. stored: whether that counts from the end of the op on."""

    brief: float = 0.0
    message: OnTheWay | None = None
    stored: bool = False


@dataclass(frozen=True)
class NodeBytes:
    """An op of a segment. needs, turn: what has to arrive before it, see `in_flight.Messages`. makes: values
    with their bytes, each storage once. loss: bytes of a loss at its peak. frees: what is not used again.
    leaves: inputs that are not."""

    needs: frozenset[str]
    turn: str
    makes: tuple[tuple[str, float], ...]
    taken: Taken
    loss: float
    frees: tuple[tuple[str, float], ...]
    leaves: frozenset[str] = frozenset()


def taken_by(node: Node, values: Mapping[str, PlacedValue], sheets: Sheets) -> Taken:
    """What an op takes beside its results."""
    if node.op == STORE:  # what it copies is still there
        return Taken(message=message_of(node, values, sheets.ops), stored=True)
    if not is_message(node) or is_ring(node):
        return Taken(sheets.ops.workspace(node, values))
    own = message_of(node, values, sheets.ops)
    return Taken(message=own) if sheets.behaviour.late_waits else Taken(own.held + own.finish)


def rows_of(
    name: str, segment: LoweredSegment, lying: Collection[str], sheets: Sheets
) -> tuple[NodeBytes, ...]:
    """The ops of a segment. lying: outputs that are summed where they lie."""
    nodes, values = segment.graph.nodes, segment.placed()
    roots = view_roots(segment)
    fused: frozenset[str] = frozenset()
    if sheets.behaviour.fused_bytes:
        fused = sheets.fused(nodes, segment.graph.outputs, sheets.dropped(name)).inside
    loss, of_loss = _loss(segment, sheets)
    given = {n for n, _ in segment.graph.inputs}
    inputs = given | of_loss | {roots.get(v, v) for v in lying}
    last: dict[str, int] = {}
    for k, node in enumerate(nodes):
        for ref in refs_of(node):
            last[roots.get(ref, ref)] = k
    for output in segment.graph.outputs:
        last[roots.get(output, output)] = len(nodes)
    live: dict[str, float] = {}
    rows: list[NodeBytes] = []
    for k, node in enumerate(nodes):
        new: list[tuple[str, float]] = []
        for out in () if node.op == STORE else node.outs:
            if out in values and out not in roots and out not in inputs and out not in fused:
                live[out] = sheets.ops.nbytes(values[out])
                new.append((out, live[out]))
        needs = frozenset(refs_of(node))
        gone = dict.fromkeys(roots.get(n, n) for n in (*refs_of(node), *node.outs))
        frees = [(n, live.pop(n)) for n in gone if n in live and last.get(n, k) <= k]
        own = loss if node.op.startswith("autoshard.xent_") else 0.0
        taken = taken_by(node, values, sheets)
        leaves = frozenset(n for n in gone if n in given and last[n] == k)
        rows.append(NodeBytes(needs, turn_of(node), tuple(new), taken, own, tuple(frees), leaves))
    return tuple(rows)


def gone_after(rows: Sequence[NodeBytes], moved: Mapping[K, frozenset[str]]) -> dict[int, list[K]]:
    """Number of an op -> what of ``moved`` it is the last to use. moved: names of inputs of which a call
    alone holds the storage."""
    used = {name: number for number, row in enumerate(rows) for name in row.leaves}
    result: dict[int, list[K]] = {}
    for key, names in moved.items():
        if used.keys() >= names:
            result.setdefault(max(used[name] for name in names), []).append(key)
    return result


def _loss(segment: LoweredSegment, sheets: Sheets) -> tuple[float, set[str]]:
    """(bytes that the loss holds beside what it keeps, values of the segment that this counts)."""
    how, logits = sheets.behaviour, logits_of(segment)
    if how.loss_peak is None or how.loss_kept is None or logits is None:
        return 0.0, set()
    types = segment.graph.types()
    large = {n for n, t in types.items() if t.is_float and t.numel == types[logits].numel}
    count = sheets.ops.nbytes(segment.placed()[logits]) / DTYPES[types[logits].dtype][1]
    backward = any("xent" in node.op and "backward" in node.op for node in segment.graph.nodes)
    return count * (how.loss_peak - (how.loss_kept if backward else 0.0)), large
