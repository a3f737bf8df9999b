"""The lines that a difference of gradients comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.auditing.gradients import GradientDifference
from autoshard.auditing.known import Form, ReferenceValues
from autoshard.auditing.locate import (
    behind,
    detached,
    first_unknown,
    lines_of,
    partial_from,
    reductions,
    rescaled,
    twice_summed,
    where_called,
)
from autoshard.auditing.mesh_groups import axes_of, group_of
from autoshard.auditing.recording import OpRecord, Recorder
from autoshard.auditing.state import Elements, Parameters
from autoshard.cluster import Mesh


@dataclass(frozen=True)
class Suspicion:
    """Lines of the user's code, the likeliest first, and what is said of them. twice: one sums what is
    equal."""

    lines: tuple[str, ...]
    details: tuple[str, ...] = ()
    twice: bool = False


@dataclass(frozen=True)
class Evidence:
    """What all ranks did. right: parameters whose gradients are the reference's."""

    mesh: Mesh
    elements: Elements
    ranks: Sequence[Parameters]
    recorders: Sequence[Recorder]
    known: ReferenceValues
    right: frozenset[int]

    def suspicion(self, difference: GradientDifference, wrong: Sequence[int]) -> Suspicion:
        """Where the gradients of some parameters became what they are."""
        traces = [_Trace(self, rank, frozenset(wrong)) for rank in difference.ranks]
        if difference.kind == "missing":
            return self._missing(traces[0])
        if difference.kind == "unreduced":
            return self._unreduced(traces, difference)
        twice = twice_summed(traces[0].records, traces[0].wrong, traces[0].right)
        if twice:
            axes = " and ".join(axes_of(self.mesh, twice[0].ranks)) or "these ranks"
            said = f"{twice[0].line} adds up over {axes} what its ranks have alike"
            return Suspicion(lines_of(twice), (said,), twice=True)
        first = _earliest(traces)
        if difference.kind in ("factor", "factors"):
            return Suspicion(lines_of([*traces[0].rescaled(first), *where_called(first[:1])]))
        return Suspicion(lines_of([*first[:1], *where_called(first[:1]), *first[1:], *traces[0].uses]))

    def _missing(self, trace: _Trace) -> Suspicion:
        """Where parameters leave autograd; where others have the gradient; where backward was called."""
        frozen = any(not self.ranks[trace.rank][k].trained for k in trace.parameters)
        reduced = [
            record
            for rank, mine in enumerate(self.ranks)
            for record in reductions(
                self.recorders[rank].records, self.writers(mine, trace.numbers).values(), (rank,)
            )
        ]
        cuts = detached(trace.records, [r.number for r in trace.uses], self.recorders[trace.rank].cuts)
        called = where_called([r for r in trace.records if r.outer][-1:])
        lines = lines_of([*cuts, *reduced[:1], *trace.uses[:1], *called, *trace.uses])
        return Suspicion(lines, ("requires_grad is False there",) if frozen else ())

    def _unreduced(self, traces: Sequence[_Trace], difference: GradientDifference) -> Suspicion:
        """Where partial values begin, and where the gradients of others are reduced."""
        trace = traces[0]
        group = group_of(self.mesh, trace.rank, difference.axes)
        reduced = list(reductions(trace.records, trace.right - trace.wrong, group))[:1]
        begin = [*partial_from(trace.records, trace.wrong, trace.form), *_earliest(traces)]
        lines = lines_of([*begin[:1], *reduced, *trace.uses, *begin])
        return Suspicion(lines, tuple(f"other gradients are reduced at {r.line}" for r in reduced))

    def writers(self, held: Parameters, wanted: Iterable[int]) -> dict[int, int]:
        """The record that wrote each gradient of some parameters, by the parameter's number."""
        some = set(wanted)
        return {
            number: each.writer
            for each in held
            if each.writer is not None
            for number in some.intersection(self.elements.parameters_of(each.elements))
        }


@dataclass(frozen=True)
class _Trace:
    """A rank's part in a difference. numbers: of the parameters whose gradients are wrong."""

    evidence: Evidence
    rank: int
    numbers: frozenset[int]

    @property
    def records(self) -> Sequence[OpRecord]:
        return self.evidence.recorders[self.rank].records

    @cached_property
    def parameters(self) -> list[int]:
        """Of the rank, those of these numbers, by their place."""
        held, elements = self.evidence.ranks[self.rank], self.evidence.elements
        return [k for k, h in enumerate(held) if self.numbers & set(elements.parameters_of(h.elements))]

    @cached_property
    def uses(self) -> list[OpRecord]:
        """The records that first use them."""
        used = (self.evidence.ranks[self.rank][k].used for k in self.parameters)
        return [self.records[k] for k in dict.fromkeys(used) if k is not None]

    @cached_property
    def wrong(self) -> frozenset[int]:
        """The records that wrote their gradients."""
        return self._written(self.numbers)

    @cached_property
    def right(self) -> frozenset[int]:
        """Those that wrote gradients that are the reference's."""
        return self._written(self.evidence.right)

    @cached_property
    def unknown(self) -> list[OpRecord]:
        return first_unknown(self.records, self.wrong, self.right, self.form)

    def form(self, record: OpRecord) -> Form | None:
        """How a result is the reference's."""
        return self.evidence.known.form(self.rank, record)

    def rescaled(self, first: Sequence[OpRecord]) -> list[OpRecord]:
        """Where multiples change, or values begin to be unknown, and what the gradient went through last."""
        ends = [self.records[end] for end in sorted(self.wrong)]
        multiple = all(self.form(end) is not None for end in ends)
        before = [r for end in ends[:1] for r in behind(self.records, end)]
        changes = rescaled(self.records, self.wrong, self.form)
        scaled = [*(changes if multiple else first)[:1], *changes[-1:]]
        return [*scaled, *ends[:1], *before, *reductions(self.records, self.wrong, ())]

    def _written(self, numbers: Collection[int]) -> frozenset[int]:
        return frozenset(self.evidence.writers(self.evidence.ranks[self.rank], numbers).values())


def _earliest(traces: Sequence[_Trace]) -> list[OpRecord]:
    """What is unknown on the rank where that begins first."""
    some = [trace.unknown for trace in traces if trace.unknown]
    return min(some, key=lambda unknown: unknown[0].number, default=[])
