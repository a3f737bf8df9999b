"""Gradients that every rank keeps whole are reduced once a step, in large messages across layers.

An all-reduce does not make a gradient smaller, so nothing is lost by waiting for more of them, nor for
further microbatches: gradients leave their segment unreduced, are summed over the microbatches, and go out
together, `BUCKET_BYTES` at a time (the size that DistributedDataParallel uses). Reductions that scatter
stay where they are, since they free memory, but for those of parameters whose gradients the plan keeps whole
until the end of the step (ZeRO-1: Rajbhandari et al., SC'20, section 5.1).

A gradient that is reduced over two axes is taken out in two rounds: the last reduction first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoshard.ir import Call, Graph, Node, Origin, refs_of
from autoshard.ir.collectives import (
    BUCKET_BYTES,
    TensorTransfer,
    collective,
    exact_transfer,
    kept_outs,
    transfers_of,
)
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart, with_parts


def defer_reductions(
    lowered: Lowered, grads: Collection[str], late: Collection[str] = (), message: int = BUCKET_BYTES
) -> Lowered:
    """The program with the last reductions of gradients in a part of its own, ``reduce``, for every stage.

    grads: values that are gradients of parameters. late: those of them that stay whole until then although
    they are scattered. message: bytes after which one is sent; 0 to send each gradient alone.
    """
    stages = sorted({p.stage for p in lowered.parts})
    before: dict[int, list[Instruction]] = {stage: [] for stage in stages}
    waiting, scattered = frozenset(grads), frozenset(late)
    while True:
        round_ = _Round(lowered, waiting, scattered, message)
        lowered = round_.lowered
        if not round_.pairs:
            break
        for stage, messages in round_.messages.items():
            before[stage] = [*messages, *before[stage]]
        # the values before these reductions wait, too, beside gradients that travel with them
        scattered |= {source for source, out in round_.pairs if out in scattered}
        waiting |= {source for source, _ in round_.pairs}
    pieces: list[tuple[StagePart, Sequence[Instruction]]] = [
        (part, lowered.of(part)) for part in lowered.parts
    ]
    pieces += [(StagePart(stage, "reduce", 0, 0), before[stage]) for stage in stages]
    return with_parts(lowered, pieces)


#: a reduction over an axis
_Deferred: TypeAlias = tuple[TensorTransfer, str]


def _deferred(node: Node) -> dict[str, _Deferred]:
    """Output of a reduction -> what it is."""
    return {t.out: (t, str(node.args[1])) for t in transfers_of(node) or ()}


@dataclass
class _Bucket:
    """Gradients waiting for one message, by their values in main."""

    moves: list[TensorTransfer] = field(default_factory=list)
    bytes: int = 0


class _Round:
    """One reduction of every gradient that ends with one, taken out of a program.

    ends: values that nothing in the program waits for. scattered: those of them whose reductions may scatter.
    pairs: (unreduced, reduced) main values of what was taken out; messages: per stage, what reduces them.
    """

    def __init__(
        self, lowered: Lowered, ends: frozenset[str], scattered: frozenset[str], message: int
    ) -> None:
        self.source, self.ends, self.scattered, self.message = lowered, ends, scattered, message
        self.used = {a for i in lowered.main for a in (i.args if isinstance(i, Call) else refs_of(i))}
        self.values = dict(lowered.values)
        self.pairs: list[tuple[str, str]] = []
        self.buckets: dict[tuple[int, str, str, bool], _Bucket] = {}
        self.messages: dict[int, list[Instruction]] = {}
        self.waiting: set[tuple[int, str]] = set()
        self.calls: dict[str, list[Call]] = {}
        for item in lowered.main:
            if isinstance(item, Call):
                self.calls.setdefault(item.segment, []).append(item)
        self.found, self.barred = self._agreed({name: self._in_segment(name) for name in lowered.segments})
        self.lowered = self._rebuilt()

    # -- what can wait ---------------------------------------------------------------------------------

    def _may_wait(self, node: Node, values: Collection[str]) -> bool:
        """Whether a reduction, whose results are these main values, can be done at the end."""
        transfer = exact_transfer(node)
        if transfer not in ("all_reduce", "reduce_scatter") or node.kwarg("op", "sum") != "sum":
            return False
        allowed = self.ends if transfer == "all_reduce" else self.scattered
        return all(v in allowed and v not in self.used for v in values)

    def _in_segment(self, name: str) -> dict[str, _Deferred]:
        """Output of a segment -> its reduction, where only results use it."""
        calls = self.calls.get(name, ())
        if not calls or not calls[0].backward:
            return {}
        graph = self.source.segments[name].graph
        used_inside = {r for n in graph.nodes for r in refs_of(n)}
        result: dict[str, _Deferred] = {}
        for node in graph.nodes:
            free = [o for o in node.outs if o in graph.outputs and o not in used_inside]
            for out in free:
                leaving = {call.outs[k] for call in calls for k, o in enumerate(graph.outputs) if o == out}
                if self._may_wait(node, leaving):
                    result[out] = _deferred(node)[out]
        return result

    def _agreed(
        self, result: dict[str, dict[str, _Deferred]]
    ) -> tuple[dict[str, dict[str, _Deferred]], frozenset[str]]:
        """Without what only some of those defer that add to a gradient in a stage: slices of a sequence.

        A sum of terms that are reduced and terms that are not would be neither. Second: results of reductions
        in main that must stay where they are.
        """
        rows = list(self._made())
        new = Counter((stage, out) for stage, _, _, out in rows)
        several = [row for row in rows if new[row[0], row[3]] > 1]
        reads: dict[tuple[int, str], set[tuple[str, ...]]] = {}
        for stage, item, _, out in several:
            if isinstance(item, Node):
                reads.setdefault((stage, out), set()).add(tuple(refs_of(item)))
        # slices that reduce values of their own in main would each have to wait for another
        barred = {out for (_, out), sources in reads.items() if len(sources) > 1}

        def waits(item: Instruction, inner: str) -> bool:
            if isinstance(item, Call):
                return inner in result[item.segment]
            return self._main_waits(item) and inner not in barred

        while several:
            ways: dict[tuple[int, str], set[bool]] = {}
            for stage, item, inner, out in several:
                ways.setdefault((stage, out), set()).add(waits(item, inner))
            mixed = [
                (item, inner)
                for stage, item, inner, out in several
                if len(ways[stage, out]) > 1 and waits(item, inner)
            ]
            if not mixed:
                break
            for item, inner in mixed:
                if isinstance(item, Call):
                    result[item.segment].pop(inner, None)
                else:
                    barred.update(item.outs)
        return result, frozenset(barred)

    def _made(self) -> Iterator[tuple[int, Instruction, str, str]]:
        """(stage, instruction, its own name for it, value) of everything that main makes."""
        for part in self.source.parts:
            for item in self.source.of(part):
                own = item.outs
                if isinstance(item, Call):
                    own = self.source.segments[item.segment].graph.outputs
                for inner, out in zip(own, item.outs, strict=True):
                    yield part.stage, item, inner, out

    def _main_waits(self, item: Node) -> bool:
        """Whether an instruction of main is a reduction that can be done at the end."""
        return item.backward and self._may_wait(item, item.outs)

    # -- the program without them ----------------------------------------------------------------------

    def _rebuilt(self) -> Lowered:
        segments = {name: _without(s, self.found[name]) for name, s in self.source.segments.items()}
        pieces = [(part, self._part(part)) for part in self.source.parts]
        for key in list(self.buckets):
            self._send(key)
        return with_parts(replace(self.source, segments=segments, values=self.values), pieces)

    def _part(self, part: StagePart) -> list[Instruction]:
        """The instructions of a part that are left."""
        main: list[Instruction] = []
        for item in self.source.of(part):
            if isinstance(item, Call):
                main.append(self._call(item, part.stage) if self.found[item.segment] else item)
            elif self._main_waits(item) and not self.barred.intersection(item.outs):
                for moved, axis in _deferred(item).values():
                    self._wait(part.stage, moved, axis)
            else:
                main.append(item)
        return main

    def _call(self, call: Call, stage: int) -> Call:
        """The call with unreduced outputs, which are put into buckets."""
        segment = self.source.segments[call.segment]
        outs = list(call.outs)
        for position, output in enumerate(segment.graph.outputs):
            if output not in self.found[call.segment]:
                continue
            moved, axis = self.found[call.segment][output]
            reduced = call.outs[position]
            outs[position] = f"{reduced}_partial"
            types = segment.graph.types()
            self.values[outs[position]] = PlacedValue(types[moved.source], segment.layouts[moved.source])
            self._wait(stage, TensorTransfer(outs[position], reduced, moved.where), axis)
        return replace(call, outs=tuple(outs))

    def _wait(self, stage: int, moved: TensorTransfer, axis: str) -> None:
        """Put a reduction into the message that is being filled; once, if every slice adds a term to it."""
        if (stage, moved.out) in self.waiting:
            return
        self.waiting.add((stage, moved.out))
        self.pairs.append((moved.source, moved.out))
        type_ = self.values[moved.out].type
        key = (stage, axis, type_.dtype, bool(moved.where))
        bucket = self.buckets.setdefault(key, _Bucket())
        bucket.moves.append(moved)
        bucket.bytes += type_.nbytes
        if bucket.bytes >= self.message:
            self._send(key)

    def _send(self, key: tuple[int, str, str, bool]) -> None:
        self.messages.setdefault(key[0], []).append(self._node(key[1], self.buckets.pop(key)))

    def _node(self, axis: str, bucket: _Bucket) -> Node:
        types = [self.values[t.out].type for t in bucket.moves]
        if bucket.moves[0].where:
            return collective("reduce_scatter", axis, bucket.moves, types, Origin(), True, bucket=True)
        return collective("all_reduce", axis, bucket.moves, types, Origin(), True)


def _without(segment: LoweredSegment, deferred: dict[str, _Deferred]) -> LoweredSegment:
    graph = segment.graph
    nodes = tuple(
        kept for n in graph.nodes if (kept := kept_outs(n, set(n.outs) - set(deferred))) is not None
    )
    outputs = tuple(deferred[o][0].source if o in deferred else o for o in graph.outputs)
    return replace(segment, graph=Graph(graph.name, graph.inputs, nodes, outputs))
