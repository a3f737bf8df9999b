"""The buffers that a step leaves, such as running statistics or the biases of a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.gradients import compare
from autoshard.auditing.state import array, has_memory
from autoshard.cluster import Mesh


@dataclass(frozen=True)
class Buffer:
    """A rank's values of a buffer. lines: of the user's code that wrote them, the last first."""

    values: np.ndarray
    lines: tuple[str, ...] = ()


class CopiedBuffers:
    """Which buffers of the reference those of a copy are, however the copy's modules are put together.

    Those that a module makes anew are known by the module, those that another module takes over by
    themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {id(module): module for module in model.modules()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._buffers = {id(x): (name, x) for name, x in model.named_buffers()}

    def of(self, module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The buffers of a module itself: name in the reference, key in the module, values."""
        for key, x in module.named_buffers(recurse=False):
            inside = self._names.get(id(module))
            by_module = None if inside is None else f"{inside}.{key}".removeprefix(".")
            name = self._buffers[id(x)][0] if id(x) in self._buffers else by_module
            if name is not None and not x.is_meta and has_memory(x):
                yield name, key, x


def buffer_findings(
    mesh: Mesh,
    before: Mapping[str, np.ndarray],
    reference: Mapping[str, Buffer],
    ranks: Sequence[Mapping[str, Buffer]],
    tolerance: float,
) -> tuple[list[AuditFinding], list[str]]:
    """Buffers that a step of ranks leaves otherwise than the reference's, and notes.

    before: the reference's buffers ahead of the step. ranks: of modules that they called.
    """
    findings, notes = [], []
    for name, wanted in reference.items():
        size = wanted.values.shape
        named = {k: held[name] for k, held in enumerate(ranks) if name in held}
        have = {k: each for k, each in named.items() if each.values.shape == size}
        given = [have[k].values if k in have else np.full(size, np.nan) for k in range(len(ranks))]
        moved = [values - before[name] for values in (wanted.values, *given)]
        largest = float(np.abs(wanted.values).max(initial=0.0)) or 1.0
        difference, _ = compare(mesh, moved[0], moved[1:], largest, tolerance)
        if difference is None:
            continue
        if difference.kind == "unreduced":
            axes = " and ".join(difference.axes)
            notes.append(
                f"buffer {name} has a part of the reference's on each rank, to be added up over {axes}"
            )
            continue
        factor = "" if difference.factor is None else f": it changes by {difference.factor:.4g} times as much"
        lines = tuple(dict.fromkeys(line for k in difference.ranks for line in have[k].lines))[:4]
        what = f"buffer {name} is another after the step{factor}"
        findings.append(AuditFinding("buffer", what, (name,), difference.ranks, lines, difference.factor))
    return findings, notes


def values_of(model: nn.Module) -> dict[str, np.ndarray]:
    """All buffers of a model."""
    return {name: array(x) for name, x in model.named_buffers()}
