"""Lockstep runs the collectives that really run, over ranks of one process."""

from __future__ import annotations

import pytest
import torch
from collective_cases import CASES, WAYS, Case, in_one_process
from empties import PartialRotary
from ranks import HERE, run_ranks

import autoshard
from autoshard.verify.lockstep import verify


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lockstep_gives_what_a_collective_is(case: Case) -> None:
    for rank, found in enumerate(in_one_process(case)):
        wanted = case.wanted(rank)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert rank + 1 == WAYS


@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2", "fsdp=4"])
def test_a_model_with_empty_tensors_equals_eager(mesh: str) -> None:
    model, x = PartialRotary(), torch.randn(4, 8, 32)
    program = autoshard.compile(model, autoshard.plan(model, mesh, example_inputs=(x,))).program
    report = verify(program, model, (x,), {})
    assert report.ok, report.worst()


def test_processes_give_what_lockstep_gives() -> None:
    """The same cases over the network and through shared memory, and a model with empty tensors."""
    run_ranks([str(HERE / "collectives_worker.py")])
