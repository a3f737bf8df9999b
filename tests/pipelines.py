"""Pipelines of the test families, cut at any op, for the tests in lockstep and on gloo."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from families import family
from slow_links import slow_cluster
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.ir import Folded
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Progress, Source
from autoshard.program.program import Program
from autoshard.search.plan.plan import Cut, Pipeline

#: sequences of one microbatch
PIECE = 4


def model_and_batch(name: str, microbatches: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and the batch of a step."""
    model, inputs = family(name).make()
    torch.manual_seed(7)
    count = PIECE * microbatches
    order = torch.randint(0, len(inputs["labels"]), (count,))
    batch = {k: x[order].clone() for k, x in inputs.items()}
    batch["labels"] = batch["labels"].clamp(min=0 if batch["labels"].dim() == 1 else 3)
    if batch["labels"].dim() > 1 and microbatches > 1:
        # microbatches have unlike numbers of labels, and one has none
        batch["labels"][:PIECE] = -100
        for row in range(PIECE, count):
            batch["labels"][row, : row % 7] = -100
    if "pixel_values" in batch:
        batch["pixel_values"] += 0.1 * torch.randn(batch["pixel_values"].shape)
    return model, batch


@functools.cache
def analysed(name: str) -> Analysis:
    model, batch = model_and_batch(name, 1)
    return analyse(capture(model, (), batch))


class Known(Source):
    """A model that is captured once with each batch."""

    def analysed(self, say: Progress) -> Analysis:
        key = id(self.model), batch_size(self.kwargs)
        if key not in _ANALYSED:
            _ANALYSED[key] = super().analysed(say)
        return _ANALYSED[key]


_ANALYSED: dict[tuple[int, int], Analysis] = {}


def batch_size(batch: dict[str, torch.Tensor]) -> int:
    return len(next(iter(batch.values())))


@functools.cache
def source(name: str) -> Source:
    model, batch = model_and_batch(name, 1)
    return Known(model, (), batch)


@functools.cache
def planned(name: str, mesh: str) -> Planned:
    found = plan_analysed(analysed(name), [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
    return replace(found, source=source(name))


def cuts_of(folded: Folded, stages: int) -> tuple[Cut, ...]:
    """Cuts behind evenly spaced ops of the forward pass, wherever these are."""
    calls = [c for c in folded.calls if not c.backward]
    places = [
        Cut(k, node.name, call.label)
        for k, call in enumerate(calls)
        for node in folded.segments[call.segment].nodes
        if node.types[0] is not None and node.types[0].is_float
    ]
    return tuple(places[len(places) * k // stages] for k in range(1, stages))


@functools.cache
def pipeline(
    name: str,
    ranks: int,
    mesh: str,
    schedule: str,
    microbatches: int,
    chunks: int = 1,
    position: int = 0,
    keep: bool = False,
) -> Program:
    """A program whose stages begin and end inside layers; keep: gathered parameters for the whole step, and
    gradients as they are made (ZeRO-1)."""
    found = planned(name, mesh)
    cuts = cuts_of(found.analysis.folded, ranks * chunks)
    made = Pipeline(ranks, position, schedule, chunks, cuts)
    plan = replace(found.plan, pipeline=made, microbatches=microbatches)
    if keep:
        split = {k: p.stored != p.use for k, p in plan.params.items()}
        params = {
            k: replace(p, keep=p.keep or split[k], late=p.late or split[k]) for k, p in plan.params.items()
        }
        plan = replace(plan, params=params)
    return compile_analysed(replace(found, plan=plan))


@functools.cache
def sending_cluster() -> Cluster:
    """Slow links, which send while devices compute: tokens are exchanged."""
    slow = slow_cluster(1e7)
    levels = tuple(replace(level, latency=1e-9) for level in slow.levels)
    return replace(slow, levels=levels, device=replace(slow.device, overlap=1.0))


@functools.cache
def paired(
    mesh: str = "ep=2", microbatches: int = 5, chunks: int = 1, schedule: str = "interleaved-overlap"
) -> Program:
    """Of two pipeline ranks."""
    found = plan_analysed(analysed("mixtral-deep"), [Mesh.parse(mesh)], sending_cluster(), reasons=False)
    cuts = cuts_of(found.analysis.folded, 2 * chunks)
    pipeline = Pipeline(2, 0, schedule, chunks, cuts)
    plan = replace(found.plan, pipeline=pipeline, microbatches=microbatches)
    return compile_analysed(replace(found, plan=plan, source=source("mixtral-deep")))
