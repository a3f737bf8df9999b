"""Differences of gradients as findings: one for all parameters that differ from one cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.auditing.evidence import Evidence
from autoshard.auditing.findings import AuditFinding, some_of
from autoshard.auditing.gradients import GradientDifference, compare
from autoshard.auditing.known import Numbers, ReferenceValues
from autoshard.auditing.parameters import held_elements, optimizer_elements, spread
from autoshard.auditing.recording import Recorder
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
    """Every parameter's gradients on all ranks beside the reference's; the largest error of those equal."""
    total = len(elements.values)
    wanted = spread(reference, total, "gradient")
    have = [spread(held, total, "gradient") for held in ranks]
    held_by = [held_elements(held, total) for held in ranks]
    sharded = optimizer_elements(ranks, total)
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
    if not groups:
        return []
    right = frozenset(c.number for c in compared if c.difference is None)
    known = ReferenceValues.of(mesh, elements, recorders[0], recorders[1:], Numbers())
    evidence = Evidence(mesh, elements, ranks, recorders[1:], known, right)
    out: dict[str, AuditFinding] = {}
    for same in sorted(groups.values(), key=lambda group: _CLEAR.index(_kind(group))):
        finding = _finding(evidence, same)
        line = finding.lines[0] if finding.lines else finding.what
        if line in out:  # behind what is said of this line already
            before = out[line]
            more = f"behind it: {', '.join(some_of(finding.names))}"
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


def _finding(evidence: Evidence, same: list[Compared]) -> AuditFinding:
    difference = same[0].difference
    assert difference is not None
    wrong = [c.number for c in same]
    names = tuple(evidence.elements.names[k] for k in wrong)
    result = evidence.suspicion(difference, wrong)
    some = (f"parameters: {', '.join(some_of(names))}",) if len(names) > 1 else ()
    what = _sentence(evidence.mesh, difference, names, not result.twice)
    details = (*some, *result.details)
    return AuditFinding("gradient", what, names, difference.ranks, result.lines, difference.factor, details)


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
