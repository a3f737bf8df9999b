"""Estimates against what runs: the meter of bytes, predicted peaks, and the table; no times are asserted."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from estimated import CASES, small_case
from ranks import HERE, run_ranks
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.cluster import load_cluster
from autoshard.errors import UsageError
from autoshard.program.store import save_program
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.step import estimate_step
from benchmarks.estimates import WITHOUT_UPDATE, EstimateRow, StepMeasured, mean_error
from benchmarks.estimates_cases import EstimateCase, cases, program_of
from benchmarks.estimates_table import print_estimates
from benchmarks.estimates_worker import Measured
from benchmarks.live_bytes import LiveBytes
from benchmarks.models import bench_llama

CPU = load_cluster("cpu-gloo")


# -- the meter -------------------------------------------------------------------------------------


def test_the_meter_counts_what_lives_at_once() -> None:
    given = torch.ones(1000)
    with LiveBytes([given]) as live:
        first = given + 1
        second = first * 2  # 4000 bytes each of given, first and second
        del first
        part = second.view(-1)[:10]
        copy = part.clone()
        del second  # which the view keeps
        assert live.now == 4000 + 4000 + 40
        del part
        assert live.now == 4000 + 40
    assert live.peak == 12000
    assert copy.sum() == 40.0


def test_the_meter_counts_a_storage_once_and_what_autograd_keeps() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes([weight, weight.detach()]) as live:
        assert live.now == 4000
        loss = weight.exp().exp().sum()  # two results of exp are kept for backward
        assert live.now == 3 * 4000 + 4
        loss.backward()
        assert live.now == 2 * 4000 + 4  # the gradient is there instead
        weight.grad = None
        del loss
        assert live.now == 4000


# -- predicted peaks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Rank 0 of four, without the others: what collectives give means nothing, its size does."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
@pytest.mark.usefixtures("alone")
def test_predicted_peaks_are_those_of_the_runtime(case: EstimateCase, tmp_path: Path) -> None:
    program = program_of(case)
    save_program(program, tmp_path / "program")
    run = Measured(autoshard.load(tmp_path / "program", case.model()), case.step_batch())
    run.timed()  # makes the optimizer's state
    # there is nobody to share memory with
    behaviour = replace(WITHOUT_UPDATE, transport="network")
    predicted = estimate_step(program, CPU, behaviour=behaviour).fullest
    assert predicted.peak == pytest.approx(run.peak(), rel=0.05)
    assert 0 <= predicted.peak - predicted.at_peak.total < predicted.peak


def test_predicted_peaks_are_those_of_ranks_that_share_memory(tmp_path: Path) -> None:
    programs = [program_of(case) for case in CASES]
    for number, program in enumerate(programs):
        save_program(program, tmp_path / str(number))
    run_ranks([str(HERE / "peaks_worker.py"), str(tmp_path)])
    predicted = [estimate_step(each, CPU, behaviour=WITHOUT_UPDATE).fullest.peak for each in programs]
    assert predicted == pytest.approx(json.loads((tmp_path / "peaks.json").read_text()), rel=0.05)


def test_buffers_of_gradients_are_there_all_the_time() -> None:
    program = program_of(small_case("tp=4"))
    made, buffers = (
        estimate_step(program, CPU, behaviour=Behaviour(gradient_buffers=b)).fullest for b in (False, True)
    )
    assert made.at_peak.gradients == 0  # all activations, and no gradient yet
    assert buffers.at_peak.gradients == buffers.held.gradients > 0
    assert made.peak < buffers.peak


# -- cases and the table ---------------------------------------------------------------------------


def test_cases_are_told_apart() -> None:
    texts = [case.text for case in cases()]
    assert len(set(texts)) == len(texts) == 10
    assert "gpt2 pp=4,dp=1, 8 microbatches" in texts
    with pytest.raises(UsageError, match="no layers that are alike"):
        program_of(replace(small_case("dp=4", again=True), model=lambda: bench_llama(1, 128, 512)))


def test_rows_as_a_table() -> None:
    rows = [
        EstimateRow("a dp=4", StepMeasured(0.1, 100 * 2**20), 0.12, 99.0 * 2**20),
        EstimateRow("b tp=4", StepMeasured(0.2, 50 * 2**20), 0.18, 51.5 * 2**20),
    ]
    out = io.StringIO()
    print_estimates(Console(file=out, width=150), rows)
    text = out.getvalue()
    for shown in ("a dp=4", "100", "120", "+20%", "100.0", "99.0", "-1.0%", "-10%", "51.5", "+3.0%"):
        assert shown in text
    assert "mean error of time 15.0%, of bytes 2.0%" in text
    assert mean_error([-0.5, 0.25]) == 0.375
