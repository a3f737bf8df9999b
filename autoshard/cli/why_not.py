"""Alternatives that someone asks about: how they are written, and the answer in words."""

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
    wanted = []
    for part in re.split(r",(?![^(]*\))", text):
        match = re.match(r"^\s*(\w+)\s*[=:]\s*(.+?)\s*$", part)
        if match is None:
            raise UsageError(f"--why-not {text} cannot be read", hint=_FORM)
        wanted.append((match.group(1), _placement(match.group(2), text)))
    return tuple(wanted)


def _placement(word: str, text: str) -> Placement:
    lower = word.lower()
    shard = _SHARD.match(lower.replace(" ", ""))
    short = f"S({shard.group(1)})" if shard else _WORDS.get(lower, word)
    try:
        return parse_placement(short)
    except ValueError as error:
        raise UsageError(f"--why-not {text} cannot be read", why=str(error), hint=_FORM) from None


def check_axes(wanted: Wanted, mesh: Mesh) -> None:
    """UsageError for an axis that the mesh does not have. mesh: of the ranks of one stage."""
    for axis, _ in wanted:
        mesh.index(axis)


def pin_for(found: Explanation, wanted: Wanted) -> Pin:
    """The pin that forces an alternative on what was explained, in all layers that are decided alike."""
    if found.kind == "value":
        return Pin(escape(found.name), wanted)
    return Pin(_glob(found.alike or (found.name,)), wanted)


def _glob(names: Sequence[str]) -> str:
    """One glob for names that differ in the numbers of their layers."""
    words = [name.split(".") for name in names]
    if len({len(w) for w in words}) > 1:
        return escape(names[0])
    return ".".join(escape(w[0]) if len(set(w)) == 1 else "*" for w in zip(*words, strict=True))


def whatif_lines(answer: WhatIf, *, asks_all: bool = True) -> Iterator[str]:
    """The answer for a terminal. asks_all: whether all wishes behind the stored plan are known."""
    yield f"why not {answer.asked}?"
    if not answer.same_as_stored:
        cause = "a program folder does not say with which pins, tactics or optimizer it was planned"
        said = cause if not asks_all else "it was planned by another version, or among other configurations"
        yield f"  note: solved again, the plan is another one ({said}); that one is compared"
    base, forced = answer.base, answer.forced
    if forced is None:
        yield f"  it cannot be: {answer.why_not}"
        return
    more = _more(base.seconds, forced.seconds)
    yield f"  step    {_seconds(base.seconds)} -> {_seconds(forced.seconds)}  {more}, as the search prices it"
    if base.step is not None and forced.step is not None:
        for name in ("compute", "exposed", "update"):
            was, would = getattr(base.step, name), getattr(forced.step, name)
            if abs(was - would) > 5e-9:
                word = {"exposed": "communication", "update": "optimizer", "compute": "computing"}[name]
                yield f"          {word} {seconds_text(was)} -> {seconds_text(would)}"
    was, would = _held(base), _held(forced)
    if was is not None and would is not None:
        yield f"  memory  {bytes_text(was)} -> {bytes_text(would)} at the peak of the fullest rank"
    if base.gap > 1e-9 or forced.gap > 1e-9:
        gaps = f"{base.gap:.2%} and {forced.gap:.2%}"
        yield f"  proof   {gaps} from the lower bounds: a smaller difference means nothing"
    yield from _change_lines(answer.changed)


def _held(summary: PlanSummary) -> float | None:
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


def _more(was: float, would: float) -> str:
    difference = would - was
    if abs(difference) < 5e-10:
        return "the same"
    sign = "+" if difference > 0 else "-"
    return f"{sign}{seconds_text(abs(difference))} ({difference / was:+.2%})"


def _change_lines(changed: Sequence[Changed]) -> Iterator[str]:
    if not changed:
        yield "  nothing else would be decided otherwise"
        return
    many = len(changed) > 1
    yield f"  {len(changed)} decision{'s' * many} would be {'others' if many else 'another'}"
    for row in changed[:_MOST_CHANGES]:
        times = f" x {row.count}" if row.count > 1 else ""
        yield f"    {row.what}{times}: {row.was} -> {row.would}"
    if len(changed) > _MOST_CHANGES:
        yield f"    ... {len(changed) - _MOST_CHANGES} more (--json lists them)"


def whatif_json(answer: WhatIf) -> dict[str, Any]:
    """The same as a document; seconds and bytes."""
    forced = answer.forced
    return {
        "asked": answer.asked,
        "possible": forced is not None,
        "why_not": answer.why_not,
        "same_as_stored": answer.same_as_stored,
        "base": _figures(answer.base),
        "forced": None if forced is None else _figures(forced),
        "seconds": answer.seconds,
        "changed": [asdict(row) for row in answer.changed],
    }


def _figures(summary: PlanSummary) -> dict[str, Any]:
    return {
        "mesh": summary.mesh,
        "microbatches": summary.microbatches,
        "seconds": summary.seconds,
        "lower_bound": summary.lower_bound,
        "gap": summary.gap,
        "step": None if summary.step is None else asdict(summary.step),
        "memory_bytes": _held(summary),
    }
