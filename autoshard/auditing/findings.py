"""What an audit says: one finding per cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AuditFinding:
    """One difference between the ranks' programs and the reference.

    kind: ``gradient``, ``parameter``, ``state``, ``collective``, ``deadlock`` or ``error``. what: one
    sentence. names: parameters. ranks: which differ. lines: of the user's code, the most likely first.
    factor: of the reference, where it is one.
    """

    kind: str
    what: str
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    factor: float | None = None
    details: tuple[str, ...] = ()

    def text(self) -> str:
        """Several lines for people."""
        out = [self.what]
        if self.ranks:
            out.append(f"  ranks: {', '.join(map(str, self.ranks))}")
        out += _listed(self.lines)
        out += [f"  {detail}" for detail in self.details]
        return "\n".join(out)


def some_of(names: Sequence[str]) -> list[str]:
    """The first names, and how many there are more."""
    return [*names[:6], *([f"{len(names) - 6} more"] if len(names) > 6 else [])]


def _listed(lines: tuple[str, ...]) -> list[str]:
    return [f"{'' if k else 'line:':>7}  {line}" for k, line in enumerate(lines)]


@dataclass(frozen=True)
class Proof:
    """Whether ranks compute the reference's formulas.

    elements: of gradients, and of parameters after the step, that all ranks have and that were compared. why:
    there is no proof, or "". names: parameters that are computed by other formulas. lines: of the user's
    code where these begin, the most likely first.
    """

    elements: int = 0
    why: str = ""
    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def text(self) -> str:
        """For people."""
        if self.why:
            return "\n".join([f"not proved: {self.why}", *_listed(self.lines)])
        return f"proved: {self.elements} elements of gradients and parameters are the reference's formulas"


@dataclass(frozen=True)
class AuditReport:
    """The findings of an audit, and what was compared.

    parameters: of the reference. worst: largest relative error of a gradient without finding. tolerance:
    relative. collectives: of all ranks. proof: None where it was not tried.
    """

    mesh: str
    findings: tuple[AuditFinding, ...]
    notes: tuple[str, ...]
    parameters: int
    collectives: int
    worst: float
    tolerance: float
    proof: Proof | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def text(self) -> str:
        """All of it, for people."""
        head = f"{self.mesh}  {self.parameters} parameters"
        if self.tolerance:
            head += f", {self.collectives} collectives, gradients equal to {self.tolerance:.0e}"
        parts = [head, *(f"note: {note}" for note in self.notes)]
        parts += [f"{number}. {finding.text()}" for number, finding in enumerate(self.findings, 1)]
        parts += [self.proof.text()] if self.proof else []
        count = len(self.findings)
        parts.append("no difference" if self.ok else f"{count} difference{'s' if count > 1 else ''}")
        return "\n".join(parts)
