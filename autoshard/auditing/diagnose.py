"""From what ranks did to findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from autoshard.auditing.buffers import buffer_findings
from autoshard.auditing.endings import stops, unread
from autoshard.auditing.findings import AuditReport
from autoshard.auditing.gradient_findings import compare_gradients, gradient_findings
from autoshard.auditing.parameters import uncovered, unmatched, updates
from autoshard.auditing.rank_threads import RankEnd
from autoshard.auditing.recording import Recorder
from autoshard.auditing.rendezvous import Rendezvous
from autoshard.auditing.state import Elements, add_partials
from autoshard.auditing.step import StepState
from autoshard.cluster import Mesh

#: by the narrowest type that anything was computed in
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_HALF = 5e-2


def diagnose(
    mesh: Mesh,
    elements: Elements,
    before: Mapping[str, np.ndarray],
    reference: StepState,
    ends: Sequence[StepState],
    recorders: Sequence[Recorder],
    threads: Sequence[RankEnd],
    messages: Rendezvous,
    tolerance: float | None,
) -> AuditReport:
    """All findings. before: the buffers ahead of a step. recorders: of the reference, then of the ranks."""
    ranks = add_partials([end.parameters for end in ends])
    tolerance = tolerance or _tolerance(recorders)
    findings = stops(threads, messages)
    notes: list[str] = []
    worst = 0.0
    if not findings:
        findings += unread(messages)
        findings += uncovered(elements, reference.parameters, ranks, recorders[1:])
        differences, worst = compare_gradients(mesh, elements, reference.parameters, ranks, tolerance)
        findings += gradient_findings(mesh, differences, elements, ranks, recorders)
        if not findings:
            findings += updates(elements, reference.parameters, ranks, tolerance)
            others, parts = buffer_findings(
                mesh, before, reference.buffers, [end.buffers for end in ends], tolerance
            )
            findings, notes = findings + others, notes + parts
        notes += unmatched(ranks)
    collectives = sum(bool(r.ranks) for recorder in recorders[1:] for r in recorder.records)
    return AuditReport(
        str(mesh), tuple(findings), tuple(notes), len(elements.names), collectives, worst, tolerance
    )


def _tolerance(recorders: Sequence[Recorder]) -> float:
    kinds = set().union(*(recorder.dtypes for recorder in recorders))
    return max((_TOLERANCES.get(kind, _HALF) for kind in kinds), default=1e-6)
