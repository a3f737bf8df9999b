"""Whether ranks compute the formulas of the reference: both steps in exact arithmetic modulo a prime.

Every element of the reference's parameters is a residue at random. Sums, products and quotients are exact,
other functions are hashes of what they take (`functions`), so results agree if the formulas are equal by the
laws of a field and those of `Functions`. Two polynomials of degree d that differ agree at a random point with
probability at most d / P (Schwartz, 1980); Mirage (Wu and others, OSDI 2025) checks kernels in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.auditing.evidence import Evidence
from autoshard.auditing.field.functions import Functions
from autoshard.auditing.field.mode import FieldMode
from autoshard.auditing.field.residues import (
    COUNTS,
    InexactError,
    P,
    product,
    random_residues,
    reduced,
    residues,
)
from autoshard.auditing.findings import AuditFinding, Proof
from autoshard.auditing.gradients import GradientDifference
from autoshard.auditing.known import Numbers, ReferenceValues
from autoshard.auditing.parameters import held_elements, optimizer_elements, optimizer_lines, spread
from autoshard.auditing.recording import Recorder
from autoshard.auditing.state import Elements, Parameters, add_partials
from autoshard.auditing.step import run_step
from autoshard.cluster import Mesh


@contextmanager
def residues_in(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, the parameters of a model are residues of which no two are equal."""
    before = [(p, p.detach().clone()) for p in model.parameters()]
    drawn = torch.from_numpy(random_residues(sum(p.numel() for p, _ in before), seed))
    try:
        with torch.no_grad():
            for (p, _), values in zip(before, drawn.split([p.numel() for p, _ in before]), strict=True):
                p.copy_(values.reshape(p.shape))
        yield
    finally:
        with torch.no_grad():
            for p, values in before:
                p.copy_(values)


@dataclass
class ExactSteps:
    """The steps of the reference and of ranks in exact arithmetic. errors: why there is no proof."""

    seed: int
    errors: list[InexactError] = field(default_factory=list)
    _reference: Parameters = field(default_factory=list)
    _ranks: dict[int, Parameters] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slope = int(np.random.default_rng(self.seed).integers(COUNTS, P))
        self.functions = Functions(slope)

    def reference(self, step: Callable[[], Any], elements: Elements, recorder: Recorder) -> None:
        """Run the reference's step."""
        mode = FieldMode(self.functions, recorder)
        try:
            self._reference = run_step(step, elements, recorder, mode=mode).parameters
        except Exception as error:
            self.errors.append(mode.error or InexactError(f"the second run raised {_first_line(error)}"))

    def rank(self, rank: int, step: Callable[[], Any], elements: Elements, recorder: Recorder) -> None:
        """Run a rank's step, in its thread."""
        mode = FieldMode(self.functions, recorder)
        try:
            self._ranks[rank] = run_step(step, elements, recorder, mode=mode).parameters
        finally:
            if mode.error is not None:
                self.errors.append(mode.error)

    def proof(
        self,
        mesh: Mesh,
        elements: Elements,
        recorders: Sequence[Recorder],
        findings: Sequence[AuditFinding],
    ) -> Proof:
        """What has been proved.

        recorders: of the reference, then of the ranks; if they kept records, lines are named. findings: why
        ranks did not come to their end, and messages that are left.
        """
        if self.errors:
            error = self.errors[0]
            return Proof(why=f"{error.what} ({error.line})" if error.line else error.what)
        if findings:
            return Proof(why=f"in the second run {findings[0].what}")
        infinite = [h.name for h in self._reference if not (_finite(h.gradient) and _finite(h.after))]
        if infinite:
            return Proof(why=f"the gradient of {infinite[0]} is infinite in exact arithmetic")
        ranks = add_partials([self._ranks[k] for k in sorted(self._ranks)])
        count = 0
        for values in ("gradient", "after"):
            compared, differ = self._compared(elements, ranks, values)
            if differ:
                return _difference(mesh, elements, ranks, recorders, values, differ)
            count += compared
        return Proof(count) if count else Proof(why="ranks have no values of the reference")

    def _compared(
        self, elements: Elements, ranks: list[Parameters], values: str
    ) -> tuple[int, dict[int, np.ndarray]]:
        """How many elements are the reference's, and which are not, by rank."""
        total = len(elements.values)
        sharded = optimizer_elements(ranks, total)
        wanted = _exact(spread(self._reference, total, values))
        count, wrong = 0, {}
        for rank, held in enumerate(ranks):
            have = _exact(spread(held, total, values))
            lacks = held_elements(held, total) & ~sharded & np.isnan(have) & (wanted != 0)
            if values == "after":  # of parameters without memory nothing is known
                lacks &= not all(_finite(each.after) for each in held)
            differ = ~np.isnan(wanted) & (~np.isnan(have) & (have != wanted) | lacks)
            if differ.any():
                wrong[rank] = np.flatnonzero(differ)
            count += int((~np.isnan(wanted) & ~np.isnan(have)).sum())
        return count, wrong


def _difference(
    mesh: Mesh,
    elements: Elements,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
    values: str,
    differ: dict[int, np.ndarray],
) -> Proof:
    """differ: elements that are other formulas, by rank."""
    wrong = sorted({k for some in differ.values() for k in elements.parameters_of(some)})
    names = tuple(elements.names[k] for k in wrong)
    told = ", ".join(names[:2]) + (" and so on" if len(names) > 2 else "")
    where = f"rank{'s' if len(differ) > 1 else ''} {', '.join(map(str, differ))}"
    if values == "after":
        why = f"the value after the step of {told} on {where} is another formula"
        return Proof(0, why, names, optimizer_lines(ranks))
    lines: tuple[str, ...] = ()
    if recorders[0].keeps_records:
        known = ReferenceValues.of(mesh, elements, recorders[0], recorders[1:], Residues())
        right = frozenset(range(len(elements.names))).difference(wrong)
        evidence = Evidence(mesh, elements, ranks, recorders[1:], known, right)
        lines = evidence.suspicion(GradientDifference("other", tuple(differ), 0.0), wrong).lines
    return Proof(0, f"the gradient of {told} on {where} is another formula", names, lines)


class Residues(Numbers):
    """How residues are compared: exactly."""

    def read(self, values: np.ndarray) -> np.ndarray:
        """Residues that values stand for."""
        return _exact(values)

    def total(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Their sum."""
        return reduced(torch.from_numpy(super().total(parts))).numpy()

    def times(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Values by each scale."""
        by = _exact(scales)[:, None]
        return product(torch.from_numpy(by), torch.from_numpy(values)).numpy()

    def among(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Of each row, whether all are known (sorted) and some are no counts, which are equal by chance."""
        if not len(known):
            return np.zeros(len(values), bool)
        told = np.isfinite(values)
        there = known[np.searchsorted(known, values).clip(max=len(known) - 1)] == values
        result: np.ndarray = (there | ~told).all(1) & (told & (values >= COUNTS)).any(1)
        return result


def _finite(values: np.ndarray | None) -> bool:
    return values is None or bool(np.isfinite(values).all())


def _exact(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = residues(torch.from_numpy(values)).numpy()
    return result


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
