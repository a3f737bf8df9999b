"""What layers keep for backward, by the memory that it lies in: views of one tensor go together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from autoshard.ir import Call, refs_of
from autoshard.ir.lowered import Lowered, PlacedValue, StagePart, uses_of
from autoshard.ir.views import VIEWS, view_roots

#: views that are larger together than so many times what they look at are not worth copying
_COPIES = 2.0


@dataclass(frozen=True)
class StorageGroup:
    """Values of one storage that backward reads.

    maker: place in main of the call behind which they can be stored. nbytes: of the storage on the rank.
    moved: bytes of the values, each copied for itself.
    """

    maker: int
    values: tuple[str, ...]
    nbytes: float
    moved: float


@dataclass(frozen=True)
class _Lies:
    """Where a value lies: a storage, the place in main that makes it (or is sent it), and its bytes."""

    storage: object
    maker: int
    nbytes: float


def groups_of(
    lowered: Lowered,
    parts: Sequence[StagePart],
    fixed: Collection[str],
    nbytes: Callable[[PlacedValue], float],
) -> list[StorageGroup]:
    """The storages that labelled calls in forward of a stage keep, in the order in which they are made.

    parts: of one stage. fixed: parameters; what is gathered from them alone is left out, as the plan decides
    how long it stays, and so are results of the program, and expanded views of something small.
    """
    read = {
        value
        for part in parts
        if part.phase in ("backward", "weight")
        for k in range(part.start, part.stop)
        for value in uses_of(lowered.main[k])
    }
    lies: dict[str, _Lies] = {}
    constant = set(fixed)
    segments = _Segments(lowered, nbytes)
    for part in parts:
        if part.phase in ("gather", "count", "forward"):
            for k in range(part.start, part.stop):
                _follow(lowered, k, lies, segments)
                constant |= _constant(lowered, k, constant, segments)
    result: dict[object, list[str]] = {}
    for value, where in lies.items():
        result.setdefault(where.storage, []).append(value)
    results = set(lowered.results)
    groups = []
    for values in result.values():
        kept = tuple(v for v in values if v in read)
        where = lies[values[0]]
        moved = sum(nbytes(lowered.values[v]) for v in kept)
        ends = not results.isdisjoint(values)
        if (
            kept
            and not ends
            and constant.isdisjoint(kept)
            and where.nbytes > 0
            and moved <= _COPIES * where.nbytes
        ):
            groups.append(StorageGroup(where.maker, kept, where.nbytes, moved))
    return groups


@dataclass(frozen=True)
class _Segments:
    """What is known of segments, which layers have in common. nbytes: of a value on the rank."""

    lowered: Lowered
    nbytes: Callable[[PlacedValue], float]
    _reached: dict[tuple[str, frozenset[str]], frozenset[str]] = field(default_factory=dict)
    _roots: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def reached(self, name: str, inputs: frozenset[str]) -> frozenset[str]:
        """What is made of some inputs alone, with these."""
        key = name, inputs
        if key not in self._reached:
            known = set(inputs)
            for node in self.lowered.segments[name].graph.nodes:
                refs = list(refs_of(node))
                if refs and known.issuperset(refs):
                    known.update(node.outs)
            self._reached[key] = frozenset(known)
        return self._reached[key]

    def roots(self, name: str) -> list[tuple[str, float]]:
        """Of every output the value whose storage it shares, and the bytes of that."""
        if name not in self._roots:
            segment = self.lowered.segments[name]
            types, roots = segment.graph.types(), view_roots(segment)
            each = (roots.get(out, out) for out in segment.graph.outputs)
            self._roots[name] = [
                (root, self.nbytes(PlacedValue(types[root], segment.layouts[root]))) for root in each
            ]
        return self._roots[name]


def _constant(lowered: Lowered, k: int, known: Collection[str], segments: _Segments) -> set[str]:
    """What an instruction makes of known values alone."""
    item = lowered.main[k]
    if not isinstance(item, Call):
        refs = list(refs_of(item))
        return set(item.outs) if refs and all(r in known for r in refs) else set()
    graph = lowered.segments[item.segment].graph
    inputs = frozenset(n for (n, _), arg in zip(graph.inputs, item.args, strict=True) if arg in known)
    reached = segments.reached(item.segment, inputs)
    return {out for out, name in zip(item.outs, graph.outputs, strict=True) if name in reached}


def _follow(lowered: Lowered, k: int, lies: dict[str, _Lies], segments: _Segments) -> None:
    """Note where what an instruction makes lies; 0 bytes for what is not to be stored."""
    item = lowered.main[k]
    if not isinstance(item, Call):
        source = next(refs_of(item), None) if item.op in VIEWS else None
        for out in item.outs:
            lies[out] = lies.get(source, _Lies(source, k, 0.0)) if source else _Lies((k, out), k, 0.0)
        return
    given = dict(zip((n for n, _ in lowered.segments[item.segment].graph.inputs), item.args, strict=True))
    for outer, (root, size) in zip(item.outs, segments.roots(item.segment), strict=True):
        if root in given:
            lies[outer] = lies.get(given[root], _Lies(given[root], k, 0.0))
        else:
            lies[outer] = _Lies((k, root), k, size if item.label else 0.0)
