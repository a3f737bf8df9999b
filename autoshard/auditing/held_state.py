"""What ranks hold of the reference's parameters, and what their steps make of it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.state import Elements, Held


def uncovered(elements: Elements, reference: list[Held], ranks: list[list[Held]]) -> list[AuditFinding]:
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
        out.append(AuditFinding("state", what, names=(name,)))
    return out


def _places(missing: np.ndarray, shape: tuple[int, ...]) -> str:
    row = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    first, last = int(missing[0]) // row, int(missing[-1]) // row
    return f"rows {first} to {last} of {shape[0]}" if shape else "all"


def strangers(ranks: list[list[Held]]) -> list[str]:
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
    elements: Elements, reference: list[Held], ranks: list[list[Held]], tolerance: float
) -> list[AuditFinding]:
    """Parameters that gradients of the reference change in another way than the reference.

    Elements whose gradient is rounding are left out: Adam divides by its size.
    """
    total = len(elements.values)
    wanted, gradient = spread(reference, total, "after"), spread(reference, total, "gradient")
    size = float(np.nanmax(np.abs(gradient), initial=0.0))
    counted = np.abs(gradient) > _ROUNDING * size
    out = []
    for number, name in enumerate(elements.names):
        part = elements.slice_of(number)
        moved = float(
            np.nanmax(np.abs(wanted[part] - elements.values[part]), initial=0.0, where=counted[part])
        )
        wrong = []
        for rank, held in enumerate(ranks):
            have = spread(held, total, "after")[part]
            error = np.abs(have - wanted[part])
            here = counted[part] & ~np.isnan(have)
            if here.any() and float(error[here].max()) > 100 * tolerance * max(moved, _ROUNDING):
                wrong.append(rank)
        if wrong:
            how = (
                "is not changed by the step"
                if _unchanged(elements, ranks[wrong[0]], part)
                else "is another after the step"
            )
            out.append(
                AuditFinding(
                    "parameter",
                    f"{name} {how}, though its gradient is the reference's",
                    (name,),
                    tuple(wrong),
                )
            )
    return out


#: relative size below which a gradient is rounding
_ROUNDING = 1e-8


def _unchanged(elements: Elements, held: list[Held], part: slice) -> bool:
    have = spread(held, len(elements.values), "after")[part]
    known = ~np.isnan(have)
    return bool((have[known] == elements.values[part][known]).all())


def spread(held: list[Held], total: int, what: str) -> np.ndarray:
    """Values over the elements of the reference, NaN where there are none."""
    out = np.full(total, np.nan)
    for each in held:
        values = getattr(each, what)
        if values is not None:
            known = each.elements >= 0
            out[each.elements[known]] = values[known]
    return out


def held_elements(held: list[Held], total: int) -> np.ndarray:
    out = np.zeros(total, bool)
    for each in held:
        if each.trained:
            out[each.elements[each.elements >= 0]] = True
    return out
