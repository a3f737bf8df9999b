"""Whether what ranks save is what ranks of another mesh need: each element of the reference, where it
belongs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.state import Elements, RankParameter, array, local


def parts_of(model: nn.Module, elements: Elements) -> list[tuple[nn.Parameter, RankParameter]]:
    """The parameters of a rank's model, and what they hold."""
    return [(p, RankParameter(name, elements.held(p))) for name, p in model.named_parameters()]


def clear(parts: Sequence[tuple[nn.Parameter, RankParameter]]) -> None:
    """Take the values away, so that only a load can bring them."""
    with torch.no_grad():
        for p, _ in parts:
            local(p).fill_(float("nan"))


def loaded(
    parts: Sequence[tuple[nn.Parameter, RankParameter]], elements: Elements
) -> list[tuple[str, int, int]]:
    """Parameters that have other values than the reference: name, how many elements do, of how many."""
    wrong = []
    for p, held in parts:
        known = held.elements >= 0
        values, wanted = array(p)[known], elements.values[held.elements[known]]
        differ = int((~np.isclose(values, wanted, rtol=1e-6, atol=0)).sum())
        if differ:
            wrong.append((held.name, differ, int(known.sum())))
    return wrong


def findings_of(wrong: Sequence[Sequence[tuple[str, int, int]]], mesh: str) -> list[AuditFinding]:
    """One finding per parameter. wrong: by rank of the mesh that loads."""
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for rank, names in enumerate(wrong):
        for name, differ, of in names:
            by_name.setdefault(name, []).append((rank, differ, of))
    out = []
    for name, where in by_name.items():
        told = ", ".join(f"{differ} of {of} elements on rank {rank}" for rank, differ, of in where)
        what = f"{name} has other values than were saved once {mesh} has loaded it: {told}"
        out.append(AuditFinding("state", what, (name,), tuple(rank for rank, _, _ in where)))
    return out
