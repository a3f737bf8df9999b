"""How the ranks' gradients of a parameter differ from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from autoshard.auditing.mesh_groups import groups_over
from autoshard.cluster import Mesh


@dataclass(frozen=True)
class GradientDifference:
    """kind: ``missing``, ``factor``, ``factors``, ``unreduced``, ``part`` or ``other``. factor: of the
    reference.

    axes: over which the ranks' gradients add up to it. share: of elements that differ. error: relative to the
    largest element.
    """

    kind: str
    ranks: tuple[int, ...]
    error: float
    factor: float | None = None
    factors: tuple[float, ...] = ()
    axes: tuple[str, ...] = ()
    share: float = 1.0


def compare(
    mesh: Mesh, wanted: np.ndarray, ranks: Sequence[np.ndarray | None], scale: float, tolerance: float
) -> tuple[GradientDifference | None, float]:
    """Compare what ranks have of a gradient (NaN where nothing) with the reference's.

    ranks: None for one that holds the parameter and has no gradient. scale: below which times `tolerance` a
    value is rounding.

    Returns the difference, None if there is none, and the largest relative error.
    """
    size = max(float(np.abs(wanted).max(initial=0.0)), scale)
    without = tuple(k for k, g in enumerate(ranks) if g is None)
    if without and float(np.abs(wanted).max(initial=0.0)) > tolerance * scale:
        return GradientDifference("missing", without, 1.0), 0.0
    have = {k: g for k, g in enumerate(ranks) if g is not None and not np.isnan(g).all()}
    errors = {k: _error(g, wanted) / size for k, g in have.items()}
    wrong = tuple(k for k, e in errors.items() if not e <= tolerance)
    worst = max((e for e in errors.values() if e == e), default=0.0)
    if not wrong:
        return None, worst
    near = _near(wanted, size, tolerance)
    alone = {k: near(g) for k, g in have.items()}
    if all(c is not None for c in alone.values()):
        values = [c for c in alone.values() if c is not None]
        if max(values) - min(values) <= 1e-3 * max(map(abs, values)):
            return GradientDifference("factor", wrong, worst, float(np.mean(values))), worst
        summed = _partial(mesh, have, near) if len(wanted) == 1 else None  # one number tells less
        if summed is None or abs(summed[1] - 1) > 1e-3:
            return GradientDifference("factors", wrong, worst, factors=tuple(values)), worst
    partial = _partial(mesh, have, near)
    if partial:
        axes, factor = partial
        return GradientDifference("unreduced", wrong, worst, factor, axes=axes), worst
    return GradientDifference(
        "other", wrong, worst, share=_share(have, wrong, wanted, tolerance * size)
    ), worst


def _error(g: np.ndarray, wanted: np.ndarray) -> float:
    held = ~np.isnan(g)
    return float(np.abs(g[held] - wanted[held]).max(initial=0.0))


def _near(wanted: np.ndarray, size: float, tolerance: float) -> Callable[[np.ndarray], float | None]:
    """The number that makes the reference into a gradient, None if there is none."""

    def near(g: np.ndarray) -> float | None:
        held = ~np.isnan(g)
        want, have = wanted[held], g[held]
        square = float(want @ want)
        if not square or not np.isfinite(have).all():
            return None
        factor = float(have @ want) / square
        bound = 10 * tolerance * size * max(abs(factor), 1.0)
        if abs(factor) < 1e-12 or float(np.abs(have - factor * want).max()) > bound:
            return None
        return factor

    return near


def _partial(
    mesh: Mesh, have: dict[int, np.ndarray], near: Callable[[np.ndarray], float | None]
) -> tuple[tuple[str, ...], float] | None:
    """The fewest axes over which gradients add up to the reference's, and the factor that is left."""
    for count in range(1, len(mesh.names) + 1):
        for axes in combinations(mesh.names, count):
            factors = [near(total) for total in _sums(mesh, have, axes)]
            known = [f for f in factors if f is not None]
            if known and len(known) == len(factors) and max(known) - min(known) <= 1e-3 * abs(known[0]):
                return axes, float(np.mean(known))
    return None


def _sums(mesh: Mesh, have: dict[int, np.ndarray], axes: Sequence[str]) -> list[np.ndarray]:
    sums = []
    for group in groups_over(mesh, axes):
        members = [have[rank] for rank in group if rank in have]
        if not members:
            continue
        stacked = np.stack(members)
        nothing = np.isnan(stacked).all(0)
        sums.append(np.where(nothing, np.nan, np.nansum(stacked, 0)))
    return sums


def _share(have: dict[int, np.ndarray], wrong: Sequence[int], wanted: np.ndarray, bound: float) -> float:
    held = [have[k] for k in wrong]
    counted = sum(int((~np.isnan(g)).sum()) for g in held)
    differ = sum(int((np.abs(g - wanted) > bound).sum()) for g in held)
    return differ / max(counted, 1)
