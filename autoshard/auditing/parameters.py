"""What ranks hold of the reference's parameters, and what their steps make of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.locate import lines_of
from autoshard.auditing.recording import Recorder
from autoshard.auditing.state import Elements, Parameters


def uncovered(
    elements: Elements,
    reference: Parameters,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
) -> list[AuditFinding]:
    """Elements of the reference that no rank holds."""
    covered = np.zeros(len(elements.values), bool)
    for held in ranks:
        for each in held:
            covered[each.elements[each.elements >= 0]] = True
    out = []
    used = {h.name for h in reference}
    for number, name in enumerate(elements.names):
        part = covered[elements.slice_of(number)]
        if name not in used or part.all():
            continue
        rows = np.flatnonzero(~part)
        if not part.any():
            what = f"no rank holds {name}"
        else:
            where = _places(rows, elements.shapes[number])
            what = f"no rank holds {len(rows)} of {len(part)} elements of {name}: {where}"
        lines = lines_of(
            [
                recorder.records[k]
                for held, recorder in zip(ranks, recorders, strict=True)
                for h in held
                for k in (h.made, h.used)
                if k is not None and number in elements.parameters_of(h.elements)
            ]
        )
        out.append(AuditFinding("state", what, names=(name,), lines=lines))
    return out


def _places(missing: np.ndarray, shape: tuple[int, ...]) -> str:
    row = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    first, last = int(missing[0]) // row, int(missing[-1]) // row
    return f"rows {first} to {last} of {shape[0]}" if shape else "all"


def unmatched(ranks: list[Parameters]) -> list[str]:
    """What ranks have that is nothing of the reference."""
    names: dict[str, list[int]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        for each in held:
            if len(each.elements) and (each.elements < 0).all():
                names[each.name].append(rank)
    return [
        f"{name} of ranks {', '.join(map(str, where))} holds nothing of the reference and is not compared"
        for name, where in names.items()
    ]


def updates(
    elements: Elements, reference: Parameters, ranks: list[Parameters], tolerance: float
) -> list[AuditFinding]:
    """Parameters that gradients of the reference change in another way than the reference.

    Elements whose gradient is rounding are left out: Adam divides by its size.
    """
    total = len(elements.values)
    wanted, gradient = spread(reference, total, "after"), spread(reference, total, "gradient")
    size = float(np.nanmax(np.abs(gradient), initial=0.0))
    counted = np.abs(gradient) > _ROUNDING * size
    after = [spread(held, total, "after") for held in ranks]
    alike: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for number, name in enumerate(elements.names):
        part = elements.slice_of(number)
        moved = float(
            np.nanmax(np.abs(wanted[part] - elements.values[part]), initial=0.0, where=counted[part])
        )
        # of what is added to a parameter, or of its rounding
        largest = float(np.abs(elements.values[part]).max(initial=0.0))
        bound = tolerance * max(100 * moved, largest / 100)
        wrong = []
        for rank, have in enumerate(after):
            error = np.abs(have[part] - wanted[part])
            here = counted[part] & ~np.isnan(have[part])
            if here.any() and float(error[here].max()) > bound:
                wrong.append(rank)
        if wrong:
            values, known = after[wrong[0]][part], ~np.isnan(after[wrong[0]][part])
            changed = bool((values[known] != elements.values[part][known]).any())
            alike.setdefault((changed, tuple(wrong)), []).append(name)
    lines = optimizer_lines(ranks)
    return [_update_finding(names, changed, wrong, lines) for (changed, wrong), names in alike.items()]


def optimizer_lines(ranks: list[Parameters]) -> tuple[str, ...]:
    """Where ranks call their optimizers."""
    return tuple(dict.fromkeys(h.stepped for held in ranks for h in held if h.stepped))[:3]


def _update_finding(
    names: list[str], changed: bool, ranks: tuple[int, ...], lines: tuple[str, ...]
) -> AuditFinding:
    one = len(names) == 1
    subject = names[0] if one else f"{len(names)} parameters, {names[0]} and so on,"
    verb = ("is" if one else "are") + (" another after the step" if changed else " not changed by the step")
    what = f"{subject} {verb}, though gradients are the reference's"
    return AuditFinding("parameter", what, tuple(names), ranks, lines)


#: relative size below which a gradient is rounding
_ROUNDING = 1e-8


def spread(held: Parameters, total: int, what: str) -> np.ndarray:
    """Values over the elements of the reference, NaN where there are none."""
    out = np.full(total, np.nan)
    for each in sorted(held, key=lambda each: each.in_module):  # what modules have counts
        values = getattr(each, what)
        if values is not None:
            known = each.elements >= 0
            out[each.elements[known]] = values[known]
    return out


def held_elements(held: Parameters, total: int) -> np.ndarray:
    """Whether modules of a rank have an element."""
    out = np.zeros(total, bool)
    for each in held:
        if each.in_module:
            out[each.elements[each.elements >= 0]] = True
    return out


def optimizer_elements(ranks: list[Parameters], total: int) -> np.ndarray:
    """Whether a shard that only an optimizer has holds the gradient of an element, on any rank."""
    out = np.zeros(total, bool)
    for each in (h for held in ranks for h in held if not h.in_module and h.gradient is not None):
        out[each.elements[each.elements >= 0]] = True
    return out
