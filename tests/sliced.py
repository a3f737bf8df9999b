"""Pipelines whose microbatches are divided along their sequence, for the tests in lockstep and on gloo."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from families import FAMILIES, Family, family
from pipelines import PIECE, Known, cuts_of
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.search.plan.plan import Pipeline

SEQ = 32


def family_of(name: str) -> Family:
    return {f.name: f for f in FAMILIES}.get(name) or family(name)


def model_and_batch(name: str, microbatches: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and the batch of a step, 32 positions each; some labels count for nothing.

    name: of a family, with ``+padding`` if some positions at the end of some sequences are none.
    """
    model, inputs = family_of(name.removesuffix("+padding")).make()
    torch.manual_seed(11)
    top = int(inputs["input_ids"].max())
    shape = (PIECE * microbatches, SEQ)
    ids, labels = torch.randint(3, top, shape), torch.randint(3, top, shape)
    for row in range(len(labels)):
        # microbatches have unlike numbers of labels, and of several one has none
        labels[row, 5 : 9 + row % 5] = -100
        if microbatches > 1 and row < PIECE:
            labels[row] = -100
    batch = {"input_ids": ids, "labels": labels}
    if name.endswith("+padding"):
        batch["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        for piece in range(microbatches):
            batch["attention_mask"][PIECE * piece + 1, 20:] = 0
            labels[PIECE * piece + 1, 20:] = -100
    return model, batch


@functools.cache
def analysed(name: str) -> Analysis:
    model, batch = model_and_batch(name, 1)
    return analyse(capture(model, (), batch))


@functools.cache
def planned(name: str, mesh: str) -> Planned:
    found = plan_analysed(analysed(name), [Mesh.parse(mesh)], load_cluster("cpu-gloo"), reasons=False)
    return replace(found, source=source(name))


@functools.cache
def source(name: str) -> Source:
    model, batch = model_and_batch(name, 1)
    return Known(model, (), batch)


def program_of(
    name: str,
    ranks: int,
    mesh: str,
    slices: int,
    microbatches: int,
    parts: tuple[int, ...] = (),
    **changes: object,
) -> Program:
    found = planned(name, mesh)
    cuts = cuts_of(found.analysis.folded, ranks)
    pipeline = Pipeline(ranks, 0, "seq1f1b", 1, cuts, slices, parts)
    plan = replace(found.plan, pipeline=pipeline, microbatches=microbatches, **changes)  # type: ignore[arg-type]
    return compile_analysed(replace(found, plan=plan))
