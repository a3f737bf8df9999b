"""Differences of gradients as findings: one for all parameters that differ from one cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.gradients import GradientDifference, compare
from autoshard.auditing.known import Form, ReferenceValues
from autoshard.auditing.locate import (
    Forms,
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
from autoshard.auditing.parameters import held_elements, spread
from autoshard.auditing.recording import OpRecord, Recorder
from autoshard.auditing.state import Elements, Parameters
from autoshard.cluster import Mesh


@dataclass(frozen=True)
class Compared:
    """A parameter of the reference, and how its gradients differ (None: not at all)."""

    number: int
    difference: GradientDifference | None


def compare_gradients(
    mesh: Mesh,
    elements: Elements,
    reference: Parameters,
    ranks: list[Parameters],
    tolerance: float,
) -> tuple[list[Compared], float]:
    total = len(elements.values)
    wanted = spread(reference, total, "gradient")
    have = [spread(held, total, "gradient") for held in ranks]
    held_by = [held_elements(held, total) for held in ranks]
    sharded = np.zeros(total, bool)
    for each in (h for rank in ranks for h in rank if not h.in_module and h.gradient is not None):
        sharded[each.elements[each.elements >= 0]] = True
    known = wanted[~np.isnan(wanted)]
    scale = float(np.abs(known).max(initial=0.0)) * 1e-6
    out, worst = [], 0.0
    for number in range(len(elements.names)):
        part = elements.slice_of(number)
        want = wanted[part]
        if not len(want) or np.isnan(want).all():
            continue
        mine: list[np.ndarray | None] = []
        for gradient, holding in zip(have, held_by, strict=True):
            held, g = holding[part], gradient[part]
            held = held & ~sharded[part]  # those have their gradient in an optimizer's shard
            lacks = bool(held.any()) and bool(np.isnan(g[held]).all())
            mine.append(None if lacks else g)
        difference, error = compare(mesh, want, mine, scale, tolerance)
        if difference is None:
            worst = max(worst, error)
        out.append(Compared(number, difference))
    return out, worst


def gradient_findings(
    mesh: Mesh,
    compared: list[Compared],
    elements: Elements,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
) -> list[AuditFinding]:
    """One finding for all parameters that differ in the same way or from one line."""
    groups: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for each in compared:
        d = each.difference
        if d is not None:
            factor = None if d.factor is None else float(f"{d.factor:.3g}")
            groups[(d.kind, d.ranks, d.axes, factor, tuple(f"{f:.3g}" for f in d.factors))].append(each)
    right = {c.number for c in compared if c.difference is None}
    known = ReferenceValues.of(mesh, elements, recorders[0], recorders[1:])
    out: dict[str, AuditFinding] = {}
    for same in sorted(groups.values(), key=lambda group: _CLEAR.index(_kind(group))):
        finding = _finding(mesh, same, right, elements, ranks, recorders[1:], known)
        line = finding.lines[0] if finding.lines else finding.what
        if line in out:  # behind what is said of this line already
            before = out[line]
            more = f"behind it: {', '.join(_some(finding.names))}"
            out[line] = replace(
                before,
                names=before.names + finding.names,
                ranks=tuple(sorted({*before.ranks, *finding.ranks})),
                lines=tuple(dict.fromkeys((*before.lines, *finding.lines))),
                details=(*before.details, more),
            )
        else:
            out[line] = finding
    return list(out.values())


#: kinds of differences, those that say most first
_CLEAR = ("factor", "unreduced", "factors", "missing", "other")


def _kind(group: list[Compared]) -> str:
    assert group[0].difference is not None
    return group[0].difference.kind


def _some(names: Sequence[str]) -> list[str]:
    return [*names[:6], *([f"{len(names) - 6} more"] if len(names) > 6 else [])]


def _finding(
    mesh: Mesh,
    same: list[Compared],
    right: set[int],
    elements: Elements,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
    known: ReferenceValues,
) -> AuditFinding:
    difference = same[0].difference
    assert difference is not None
    wrong = [c.number for c in same]
    names = tuple(elements.names[k] for k in wrong)
    lines, details, twice = _lines(mesh, difference, wrong, right, elements, ranks, recorders, known)
    if len(names) > 1:
        details = (f"parameters: {', '.join(_some(names))}", *details)
    what = _sentence(mesh, difference, names, not twice)
    return AuditFinding("gradient", what, names, difference.ranks, lines, difference.factor, details)


def _lines(
    mesh: Mesh,
    difference: GradientDifference,
    wrong: Sequence[int],
    right: set[int],
    elements: Elements,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
    known: ReferenceValues,
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Likely lines, what is said of them, and whether one sums what is equal already."""
    rank = difference.ranks[0]
    records = recorders[rank].records
    used = _uses(elements, ranks[rank], wrong)
    uses = [records[k] for k in used]
    if difference.kind == "missing":
        held = [h for h in ranks[rank] if set(elements.parameters_of(h.elements)) & set(wrong)]
        details = () if all(h.trained for h in held) else ("requires_grad is False there",)
        cuts = detached(records, used, recorders[rank].cuts)
        called = where_called([r for r in records if r.outer][-1:])
        reduced = [
            r
            for k, mine in enumerate(ranks)
            for r in reductions(recorders[k].records, _writers(elements, mine, wrong).values(), (k,))
        ]
        return lines_of([*cuts, *reduced[:1], *uses[:1], *called, *uses]), details, False
    traces = [
        _Trace.of(k, wrong, right, elements, ranks[k], recorders[k].records, known) for k in difference.ranks
    ]
    trace = traces[0]
    if difference.kind != "unreduced":
        twice = twice_summed(trace.records, trace.wrong, trace.right)
        if twice:
            axes = " and ".join(_axes(mesh, twice[0].ranks)) or "these ranks"
            said = f"{twice[0].line} adds up over {axes} what its ranks have alike"
            return lines_of(twice), (said,), True
    first = min((t.unknown for t in traces if t.unknown), key=lambda found: found[0].number, default=[])
    if difference.kind in ("factor", "factors"):
        ends = [records[end] for end in sorted(trace.wrong)]
        multiple = all(trace.form(end) is not None for end in ends)
        before = [r for end in ends[:1] for r in behind(records, end)]
        changes = rescaled(records, trace.wrong, trace.form)
        scaled = [*(changes if multiple else first)[:1], *changes[-1:]]
        likely = [*scaled, *ends[:1], *before, *reductions(records, trace.wrong, ())]
        return lines_of([*likely, *where_called(first[:1])]), (), False
    if difference.kind == "unreduced":
        group = _group(mesh, rank, difference.axes)
        reduced = list(reductions(records, trace.right - trace.wrong, group))[:1]
        others = tuple(f"other gradients are reduced at {record.line}" for record in reduced)
        begin = [*partial_from(records, trace.wrong, trace.form), *first]
        return lines_of([*begin[:1], *reduced, *uses, *begin]), others, False
    return lines_of([*first[:1], *where_called(first[:1]), *first[1:], *uses]), (), False


@dataclass(frozen=True)
class _Trace:
    """A rank's records, and those that wrote wrong and right gradients."""

    records: Sequence[OpRecord]
    wrong: frozenset[int]
    right: frozenset[int]
    form: Forms
    unknown: list[OpRecord]

    @classmethod
    def of(
        cls,
        rank: int,
        wrong: Sequence[int],
        right: set[int],
        elements: Elements,
        held: Parameters,
        records: Sequence[OpRecord],
        known: ReferenceValues,
    ) -> _Trace:
        bad, good = (frozenset(_writers(elements, held, some).values()) for some in (wrong, right))

        def form(record: OpRecord) -> Form | None:
            return known.form(rank, record)

        return cls(records, bad, good, form, first_unknown(records, bad, good, form))


def _uses(elements: Elements, held: Parameters, wrong: Sequence[int]) -> list[int]:
    """The records that first use parameters."""
    used = [h.used for h in held if set(elements.parameters_of(h.elements)) & set(wrong)]
    return list(dict.fromkeys(k for k in used if k is not None))


def _axes(mesh: Mesh, ranks: Sequence[int]) -> list[str]:
    """The axes in which ranks differ."""
    at = [mesh.coords(rank) for rank in ranks]
    return [name for k, name in enumerate(mesh.names) if len({coords[k] for coords in at}) > 1]


def _group(mesh: Mesh, rank: int, axes: Sequence[str]) -> list[int]:
    """The ranks that differ from a rank in these axes only."""
    free = {mesh.index(axis) for axis in axes}
    mine = mesh.coords(rank)
    others = ((k, mesh.coords(k)) for k in range(mesh.world_size))
    return [k for k, at in others if all(i in free or at[i] == mine[i] for i in range(len(mine)))]


def _writers(elements: Elements, held: Parameters, wanted: Iterable[int]) -> dict[int, int]:
    """The record that wrote each gradient of some parameters, by the parameter's number."""
    some = set(wanted)
    return {
        number: each.writer
        for each in held
        if each.writer is not None
        for number in some.intersection(elements.parameters_of(each.elements))
    }


def _sentence(mesh: Mesh, d: GradientDifference, names: tuple[str, ...], guesses: bool) -> str:
    """guesses: also which axes a factor may come from."""
    name = names[0] if len(names) == 1 else f"{len(names)} parameters, {names[0]} and so on,"
    of = f"gradient of {name}"
    if d.kind == "missing":
        return f"{of} is missing on ranks that have the parameter"
    if d.kind == "factor":
        assert d.factor is not None
        return f"{of} is {d.factor:.4g} times that of the reference" + (
            _reason(mesh, d.factor) if guesses else ""
        )
    if d.kind == "factors":
        told = ", ".join(f"{f:.4g}" for f in dict.fromkeys(d.factors))
        return f"{of} is scaled differently on ranks: {told} times that of the reference"
    if d.kind == "unreduced":
        axes = " and ".join(d.axes)
        rest = (
            "" if d.factor is None or abs(d.factor - 1) < 1e-3 else f" (their sum is {d.factor:.4g} times it)"
        )
        return f"{of} is not reduced over {axes}: only the sum of its ranks is that of the reference{rest}"
    return f"{of} differs in {d.share:.0%} of its elements, by up to {d.error:.2g} of its largest"


def _reason(mesh: Mesh, factor: float) -> str:
    """Which axes explain a factor."""
    times = [a for a, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1 and abs(factor - n) < 1e-3 * n]
    parts = [a for a, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1 and abs(factor * n - 1) < 1e-3]
    if times:
        return f": as if summed once too often over {' or '.join(times)}"
    if parts:
        return f": as if divided once too often by the size of {' or '.join(parts)}"
    return ""
