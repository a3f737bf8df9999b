"""Which values of a rank are the reference's: all of one, a part, a multiple, or adding up to it over
ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod

import numpy as np

from autoshard.auditing.mesh_groups import group_of
from autoshard.auditing.recording import OpRecord, Recorder
from autoshard.auditing.state import Elements
from autoshard.capture.origins import CodeLine
from autoshard.cluster import Mesh

_RTOL = 1e-8
#: by which values of a sum may differ that cancel out, where the order of rounding varies
_ATOL = 1e-14
#: what values are scaled by beside the sizes of axes: counts of microbatches, mostly
_COUNTS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Form:
    """How a result is the reference's: summed over axes, it is the multiple ``1 / scale`` of one."""

    scale: float = 1.0
    axes: tuple[str, ...] = ()


#: of a result whose values are all equal, which tells nothing
PLAIN = Form()


@dataclass(frozen=True)
class RecordPlace:
    """Where a rank's program computes a result: the n-th of an op on a line that has this shape.

    Ranks have equal places in another order: autograd runs branches of backward in the order in which they
    are ready.
    """

    op: str
    line: CodeLine
    shape: tuple[int, ...]
    turn: int

    @classmethod
    def each(cls, records: Sequence[OpRecord]) -> Iterator[RecordPlace]:
        """Those of all records."""
        turns: Counter[tuple[str, CodeLine, tuple[int, ...]]] = Counter()
        for record in records:
            key = (record.op, record.line, record.samples[0].shape if record.samples else ())
            yield cls(*key, turns[key])
            turns[key] += 1


class Numbers:
    """How values are compared that differ by rounding."""

    def read(self, values: np.ndarray) -> np.ndarray:
        """Values of tensors, to calculate with."""
        return values

    def total(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Their sum."""
        result: np.ndarray = np.sum(parts, axis=0)
        return result

    def times(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Values by each scale; [scales, values]."""
        result: np.ndarray = np.multiply.outer(scales, values)
        return result

    def among(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Of each row, whether all are known (sorted), each to more digits than two share by chance."""
        told = np.isfinite(values) & (np.abs(values) > 1e-12)
        room = np.maximum(np.abs(values) * _RTOL, _ATOL)
        first = np.searchsorted(known, values - room, side="left")
        there = np.searchsorted(known, values + room, side="right") > first
        result: np.ndarray = (there | ~told).all(1) & (told.sum(1) >= min(2, values.shape[1]))
        return result


@dataclass
class ReferenceValues:
    """All values that the reference has or computes, and the records of the ranks that are asked about."""

    mesh: Mesh
    records: Sequence[Sequence[OpRecord]]
    scales: np.ndarray
    numbers: Numbers
    _values: np.ndarray
    _memo: dict[tuple[int, int], Form | None] = field(default_factory=dict)

    @cached_property
    def _places(self) -> list[list[RecordPlace]]:
        return [list(RecordPlace.each(records)) for records in self.records]

    @cached_property
    def _at(self) -> list[dict[RecordPlace, OpRecord]]:
        return [dict(zip(*each, strict=True)) for each in zip(self._places, self.records, strict=True)]

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        elements: Elements,
        reference: Recorder,
        ranks: Sequence[Recorder],
        numbers: Numbers,
    ) -> ReferenceValues:
        """From the parameters of a reference, and a recorder that kept its values."""
        arrays = [elements.values[elements.slice_of(k)] for k in range(len(elements.names))]
        arrays += [x.reshape(-1).double().numpy(force=True) for x in reference.values]
        values = numbers.read(np.concatenate(arrays) if arrays else np.zeros(0))
        known = np.sort(values[np.isfinite(values)])
        return cls(mesh, [r.records for r in ranks], _scales(mesh), numbers, known)

    def form(self, rank: int, record: OpRecord) -> Form | None:
        """How a result is the reference's, None if it is not."""
        key = (rank, record.number)
        if key not in self._memo:
            self._memo[key] = self._form(rank, record)
        return self._memo[key]

    def _form(self, rank: int, record: OpRecord) -> Form | None:
        if not record.samples:
            return None
        values = self.numbers.read(record.samples[0].values)
        if not np.isfinite(values).any() or (np.ptp(values) == 0 and (len(values) > 1 or not values[0])):
            return PLAIN
        scales = self.scales if len(values) > 1 else self.scales[:1]
        with np.errstate(over="ignore", invalid="ignore"):
            for axes, total in ((), values), *self._sums(rank, record):
                fits = self.numbers.among(self.numbers.times(total, scales), self._values)
                if fits.any():
                    return Form(float(scales[fits.argmax()]), axes)
        return None

    def _sums(self, rank: int, record: OpRecord) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        """The values summed over axes."""
        place = self._places[rank][record.number]
        for count in range(1, len(self.mesh.names) + 1):
            for axes in combinations(self.mesh.names, count):
                ranks = group_of(self.mesh, rank, axes)
                same = [self._at[k].get(place) for k in ranks]
                if len(ranks) > 1 and all(same):
                    yield (
                        axes,
                        self.numbers.total([self.numbers.read(s.samples[0].values) for s in same if s]),
                    )


def _scales(mesh: Mesh) -> np.ndarray:
    """What programs scale gradients by, the likeliest first."""
    sizes = [n for n in mesh.sizes if n > 1]
    products = {prod(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
    both = [{float(f) for f in each} | {1 / f for f in each} for each in (products, {1, *_COUNTS})]
    every = sorted({a * b for a in both[0] for b in both[1]}, key=lambda f: abs(np.log(f)))
    return np.array(every)
