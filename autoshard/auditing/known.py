"""Which values of a rank are the reference's: whole, a part of it, a multiple, or adding up to it over
ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

import numpy as np

from autoshard.auditing.recording import OpRecord, Recorder
from autoshard.cluster import Mesh

#: values of a sample that are looked up
_LOOKED_UP = 8
_RTOL = 1e-8
#: of one value, more results of the reference than this tell nothing
_MOST = 64


@dataclass
class ReferenceValues:
    """All values that the reference computes, and the records of the ranks that are asked about."""

    mesh: Mesh
    records: Sequence[Sequence[OpRecord]]
    _values: np.ndarray
    _results: np.ndarray
    _memo: dict[tuple[int, int], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, reference: Recorder, ranks: Sequence[Recorder]) -> ReferenceValues:
        """From a reference that kept its values."""
        arrays = [x.reshape(-1).double().numpy(force=True) for x in reference.values]
        values = np.concatenate(arrays) if arrays else np.zeros(0)
        results = np.repeat(np.arange(len(arrays)), [len(a) for a in arrays])
        order = np.argsort(values, kind="stable")
        return cls(mesh, [r.records for r in ranks], values[order], results[order])

    def is_known(self, rank: int, record: OpRecord) -> bool:
        """Whether a result is one of the reference, or tells nothing (all its values are equal)."""
        key = (rank, record.number)
        if key not in self._memo:
            self._memo[key] = any(self._matches(values) for values in self._forms(rank, record))
        return self._memo[key]

    def _forms(self, rank: int, record: OpRecord) -> Iterator[np.ndarray]:
        """A result's values, times what ranks may scale by, and summed over axes."""
        if not record.samples:
            return
        values = record.samples[0].values
        if np.ptp(values) == 0:
            yield np.zeros(0)
            return
        sizes = [n for n in self.mesh.sizes if n > 1]
        factors = {prod(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
        scales = sorted({float(f) for f in factors} | {1 / f for f in factors}, key=lambda f: abs(f - 1))
        for scale in scales:
            yield values * scale
        for total in self._sums(rank, record):
            for scale in scales:
                yield total * scale

    def _sums(self, rank: int, record: OpRecord) -> Iterator[np.ndarray]:
        coords = self.mesh.coords(rank)
        for count in range(1, len(self.mesh.names) + 1):
            for axes in combinations(range(len(self.mesh.names)), count):
                ranks = [
                    k
                    for k in range(self.mesh.world_size)
                    if all(
                        c == d or i in axes
                        for i, (c, d) in enumerate(zip(self.mesh.coords(k), coords, strict=True))
                    )
                ]
                same = [self._same(k, record) for k in ranks]
                if len(ranks) > 1 and all(s is not None for s in same):
                    yield np.sum([s for s in same if s is not None], axis=0)

    def _same(self, rank: int, record: OpRecord) -> np.ndarray | None:
        """The values of what another rank computes at the same place of its program."""
        others = self.records[rank]
        if record.number >= len(others):
            return None
        other = others[record.number]
        alike = other.op == record.op and other.samples and other.samples[0].shape == record.samples[0].shape
        return other.samples[0].values if alike else None

    def _matches(self, values: np.ndarray) -> bool:
        """Whether one result of the reference has all these values."""
        told = values[np.flatnonzero(np.abs(values) > 1e-12)][:_LOOKED_UP]
        if len(told) < min(2, len(values)):
            return len(values) == 0
        room = np.abs(told) * _RTOL
        first = np.searchsorted(self._values, told - room, side="left")
        last = np.searchsorted(self._values, told + room, side="right")
        results: set[int] | None = None
        for a, b in zip(first, last, strict=True):
            if b - a > _MOST:
                continue
            here = set(self._results[a:b].tolist())
            results = here if results is None else results & here
            if not results:
                return False
        return bool(results)
