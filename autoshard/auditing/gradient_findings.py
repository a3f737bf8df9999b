"""Differences of gradients as findings: one for all parameters that differ from one cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.gradients import GradientDifference, compare
from autoshard.auditing.held_state import held_elements, spread
from autoshard.auditing.known import ReferenceValues
from autoshard.auditing.locate import last_reductions, lines_of, sums_equal, suspects
from autoshard.auditing.recording import Recorder
from autoshard.auditing.state import Elements, Held
from autoshard.cluster import Mesh


@dataclass(frozen=True)
class Compared:
    """A parameter of the reference, and how its gradients differ (None: not at all)."""

    number: int
    difference: GradientDifference | None


def compare_gradients(
    mesh: Mesh, elements: Elements, reference: list[Held], ranks: list[list[Held]], tolerance: float
) -> tuple[list[Compared], float]:
    total = len(elements.values)
    wanted = spread(reference, total, "gradient")
    have = [spread(held, total, "gradient") for held in ranks]
    held_by = [held_elements(held, total) for held in ranks]
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
    ranks: list[list[Held]],
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
    known = ReferenceValues.of(mesh, recorders[0], recorders[1:])
    out: dict[str, AuditFinding] = {}
    for same in sorted(groups.values(), key=lambda group: _CLEAR.index(_kind(group))):
        finding = _finding(mesh, same, right, elements, ranks, recorders[1:], known)
        line = finding.lines[0] if finding.lines else finding.what
        if line in out:  # behind what is said of this line already
            before = out[line]
            more = f"behind it: {', '.join(_some(finding.names))}"
            out[line] = replace(before, names=before.names + finding.names, details=(*before.details, more))
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
    ranks: list[list[Held]],
    recorders: Sequence[Recorder],
    known: ReferenceValues,
) -> AuditFinding:
    difference = same[0].difference
    assert difference is not None
    rank = difference.ranks[0]
    writers = _writers(elements, ranks[rank])
    records = recorders[rank].records
    sound = {writers.get(number) for number in right}
    ends = [writers.get(c.number) for c in same]
    likely = suspects(records, ends, sound, lambda record: known.is_known(rank, record))
    names = tuple(elements.names[c.number] for c in same)
    details: tuple[str, ...] = ()
    if len(names) > 1:
        details = (f"parameters: {', '.join(_some(names))}",)
    if difference.kind == "unreduced":
        over = frozenset(_group(mesh, rank, difference.axes))
        reduced = lines_of(last_reductions(records, sound - set(ends), over), 1)
        if reduced:
            details = (*details, f"other gradients are reduced at {reduced[0]}")
        likely = [r for r in likely if not sums_equal(r)]
    if difference.kind == "factor" and not any(map(sums_equal, likely)):
        group = frozenset({rank})
        likely = [r for r in last_reductions(records, ends, group) if len(r.ranks) > 1][:1] + likely
    twice = next((r for r in likely if sums_equal(r)), None)
    if twice is not None:
        axes = " and ".join(_axes(mesh, twice.ranks)) or "these ranks"
        details = (*details, f"{twice.line} adds up over {axes} what its ranks have alike")
    what = _sentence(mesh, difference, names, twice is None)
    return AuditFinding(
        "gradient", what, names, difference.ranks, lines_of(likely, 3), difference.factor, details
    )


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


def _writers(elements: Elements, held: list[Held]) -> dict[int, int | None]:
    """The record that wrote each parameter's gradient, by the parameter's number."""
    out: dict[int, int | None] = {}
    for each in held:
        known = each.elements[each.elements >= 0]
        for number in np.unique(np.searchsorted(elements.starts, known, side="right") - 1):
            out[int(number)] = each.writer
    return out


def _sentence(mesh: Mesh, d: GradientDifference, names: tuple[str, ...], guesses: bool) -> str:
    """guesses: also which axes a factor may come from."""
    name = names[0] if len(names) == 1 else f"{len(names)} parameters, {names[0]} and so on,"
    of = f"gradient of {name}"
    if d.kind == "missing":
        return f"{of} is missing on ranks that hold it"
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
