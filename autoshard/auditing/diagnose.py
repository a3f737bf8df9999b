"""From what ranks did to findings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.auditing.endings import stops, unread
from autoshard.auditing.findings import AuditReport
from autoshard.auditing.gradient_findings import compare_gradients, gradient_findings
from autoshard.auditing.parameters import uncovered, unmatched, updates
from autoshard.auditing.rank_threads import RankEnd
from autoshard.auditing.recording import Recorder
from autoshard.auditing.rendezvous import Rendezvous
from autoshard.auditing.state import Elements, Parameters, add_partials
from autoshard.cluster import Mesh

#: by the narrowest type that anything was computed in
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_HALF = 5e-2


def diagnose(
    mesh: Mesh,
    elements: Elements,
    reference: Parameters,
    ranks: list[Parameters],
    recorders: Sequence[Recorder],
    ends: Sequence[RankEnd],
    messages: Rendezvous,
    tolerance: float | None,
) -> AuditReport:
    """All findings. recorders: of the reference, then of the ranks."""
    ranks = add_partials(ranks)
    tolerance = tolerance or _tolerance(recorders)
    findings = stops(ends, messages)
    notes: list[str] = []
    worst = 0.0
    if not findings:
        findings += unread(messages)
        findings += uncovered(elements, reference, ranks, recorders[1:])
        differences, worst = compare_gradients(mesh, elements, reference, ranks, tolerance)
        findings += gradient_findings(mesh, differences, elements, ranks, recorders)
        if not findings:
            findings += updates(elements, reference, ranks, tolerance)
        notes += unmatched(ranks)
    collectives = sum(bool(r.ranks) for recorder in recorders[1:] for r in recorder.records)
    return AuditReport(
        str(mesh), tuple(findings), tuple(notes), len(elements.names), collectives, worst, tolerance
    )


def _tolerance(recorders: Sequence[Recorder]) -> float:
    kinds = set().union(*(recorder.dtypes for recorder in recorders))
    return max((_TOLERANCES.get(kind, _HALF) for kind in kinds), default=1e-6)
