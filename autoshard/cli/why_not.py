"""Alternatives to a plan (``--why-not``): how they are written, and the comparison in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from glob import escape
from typing import Any

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError
from autoshard.ir.placement import Placement, parse_placement
from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.explain import Explanation
from autoshard.report.summary import PlanSummary
from autoshard.report.what_if import Changed, WhatIf
from autoshard.search.problem.pins import Pin

#: (axis, placement) pairs
Wanted = tuple[tuple[str, Placement], ...]
_FORM = "write axis=placement, as tp=Replicate, tp=Shard(0) or dp=R,tp=S(1); or mesh=dp=8,tp=8"
_WORDS = {"replicate": "R", "replicated": "R", "partial": "P"}
_SHARD = re.compile(r"^shard\((.*)\)$")
#: other decisions that are listed
_MOST_CHANGES = 12


def alternative_of(text: str, name: str | None) -> Wanted | Mesh:
    """What ``--why-not`` asks for; UsageError if it cannot be read. name: what it is asked about."""
    head, equals, rest = text.partition("=")
    if head.strip() == "mesh" and equals:
        return Mesh.parse(rest)
    if name is None:
        raise UsageError(
            f"--why-not {text} needs a name", hint="autoshard explain DIR NAME --why-not tp=Replicate"
        )
    placements = []
    for part in re.split(r",(?![^(]*\))", text):
        match = re.match(r"^\s*(\w+)\s*[=:]\s*(.+?)\s*$", part)
        if match is None:
            raise UsageError(f"--why-not {text} cannot be read", hint=_FORM)
        placements.append((match.group(1), _placement(match.group(2), text)))
    return tuple(placements)


def _placement(name: str, text: str) -> Placement:
    lower = name.lower()
    shard = _SHARD.match(lower.replace(" ", ""))
    short = f"S({shard.group(1)})" if shard else _WORDS.get(lower, name)
    try:
        return parse_placement(short)
    except ValueError as error:
        raise UsageError(f"--why-not {text} cannot be read", why=str(error), hint=_FORM) from None


def check_axes(alternative: Wanted, mesh: Mesh) -> None:
    """UsageError for an axis that the mesh does not have. mesh: of the ranks of one stage."""
    for axis, _ in alternative:
        mesh.index(axis)


def pin_for(explanation: Explanation, alternative: Wanted) -> Pin:
    """The pin that forces an alternative on what was explained, in all layers that are decided alike."""
    if explanation.kind == "value":
        return Pin(escape(explanation.name), alternative)
    return Pin(_glob(explanation.equivalent or (explanation.name,)), alternative)


def _glob(names: Sequence[str]) -> str:
    """One glob for names that differ in the numbers of their layers."""
    words = [name.split(".") for name in names]
    if len({len(w) for w in words}) > 1:
        return escape(names[0])
    return ".".join(escape(w[0]) if len(set(w)) == 1 else "*" for w in zip(*words, strict=True))


def whatif_lines(answer: WhatIf, *, asks_all: bool = True) -> Iterator[str]:
    """The answer for a terminal. asks_all: whether all wishes behind the stored plan are known."""
    yield f"why not {answer.alternative}?"
    if not answer.same_as_stored:
        cause = "a program folder does not store the pins, tactics and optimizer of its plan"
        why = cause if not asks_all else "planned by another version, or among other configurations"
        yield f"  note: solving again gives another plan ({why}); that one is compared"
    base, forced = answer.base, answer.forced
    if forced is None:
        yield f"  not feasible: {answer.why_not}"
        return
    more = _difference(base.seconds, forced.seconds)
    yield f"  step    {_seconds(base.seconds)} -> {_seconds(forced.seconds)}  {more}, by the cost model"
    if base.step is not None and forced.step is not None:
        for name in ("compute", "exposed", "optimizer"):
            before, after = getattr(base.step, name), getattr(forced.step, name)
            if abs(before - after) > 5e-9:
                label = "exposed communication" if name == "exposed" else name
                yield f"          {label} {seconds_text(before)} -> {seconds_text(after)}"
    before, after = _peak_bytes(base), _peak_bytes(forced)
    if before is not None and after is not None:
        yield f"  memory  {bytes_text(before)} -> {bytes_text(after)} at the peak of the fullest rank"
    if base.gap > 1e-9 or forced.gap > 1e-9:
        gaps = f"{base.gap:.2%} and {forced.gap:.2%}"
        yield f"  gap     {gaps} to the dual bounds: a smaller difference is not significant"
    yield from _change_lines(answer.changed)


def _peak_bytes(summary: PlanSummary) -> float | None:
    """Bytes at the peak: simulated, where that was done."""
    if summary.peak is not None:
        return summary.peak.bytes
    return None if summary.memory is None else summary.memory.total


def _seconds(value: float) -> str:
    """With as many digits as a comparison needs."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= size:
            return f"{value / size:.5g} {unit}"
    return seconds_text(value)


def _difference(before: float, after: float) -> str:
    difference = after - before
    if abs(difference) < 5e-10:
        return "no difference"
    sign = "+" if difference > 0 else "-"
    return f"{sign}{seconds_text(abs(difference))} ({difference / before:+.2%})"


def _change_lines(changed: Sequence[Changed]) -> Iterator[str]:
    if not changed:
        yield "  no other decision changes"
        return
    yield "  1 decision changes" if len(changed) == 1 else f"  {len(changed)} decisions change"
    for row in changed[:_MOST_CHANGES]:
        times = f" x {row.count}" if row.count > 1 else ""
        yield f"    {row.what}{times}: {row.before} -> {row.after}"
    if len(changed) > _MOST_CHANGES:
        yield f"    ... {len(changed) - _MOST_CHANGES} more (--json lists them)"


def whatif_json(answer: WhatIf) -> dict[str, Any]:
    """The same as a document; seconds and bytes."""
    forced = answer.forced
    return {
        "alternative": answer.alternative,
        "feasible": forced is not None,
        "why_not": answer.why_not,
        "same_as_stored": answer.same_as_stored,
        "base": _figures(answer.base),
        "forced": None if forced is None else _figures(forced),
        "added_seconds": answer.seconds,
        "changed": [asdict(row) for row in answer.changed],
    }


def _figures(summary: PlanSummary) -> dict[str, Any]:
    return {
        "mesh": summary.mesh,
        "microbatches": summary.microbatches,
        "seconds": summary.seconds,
        "dual_bound": summary.dual_bound,
        "gap": summary.gap,
        "step": None if summary.step is None else asdict(summary.step),
        "peak_bytes": _peak_bytes(summary),
    }
