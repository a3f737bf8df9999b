"""One plan for batches of any length in a range: where its peak is, and that it fits there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_length_plans import MESH, model_and_inputs
from typer.testing import CliRunner

import autoshard
from autoshard import api
from autoshard.cli.main import app
from autoshard.planner.compiling import compile_analysed
from autoshard.planner.length_plans import parse_lengths
from autoshard.planner.length_range import LengthRange, parse_range
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.stage_costs import StagePrices


def test_a_range_is_told_from_a_distribution() -> None:
    assert parse_range("1:8192") == LengthRange(1, 8192)
    assert LengthRange(1, 8192).looked_at == (8192, 8191, 4097, 2)
    assert LengthRange(8191, 8192).looked_at == (8192, 8191)
    assert LengthRange(1, 2).looked_at == (2,)
    for text in ("512:1", "512:0.7,4096:0.3", "512", "8:8", ""):
        assert parse_range(text) is None
    with pytest.raises(autoshard.UsageError, match="lengths"):
        parse_range("0:8")
    # where programs are made for each length, a range is no length with a large share
    with pytest.raises(autoshard.UsageError, match="range"):
        parse_lengths("1:8192")
    assert [s.length for s in parse_lengths("512:1")] == [512]


def test_the_peak_is_the_largest_of_all_lengths() -> None:
    model, inputs = model_and_inputs(16)
    found = api.plan_length_range(
        model, MESH, example_inputs=inputs, lengths=LengthRange(2, 2048), cluster="h100-dgx"
    )
    by_length = {p.length: p for p in found.peaks}
    assert list(by_length) == [2048, 2047, 1025, 2]
    # the longest is planned as it would be alone
    alone = api.plan(model, MESH, example_inputs=model_and_inputs(2048)[1], cluster="h100-dgx")
    assert found.planned.plan.optimality.seconds == alone.plan.optimality.seconds
    program = compile_analysed(alone)
    peaks = Peaks(StagePrices(program, alone.cluster)).all
    assert by_length[2048].bytes == pytest.approx(max(peak for _, peak in peaks))
    assert found.fullest.length == 2048
    assert by_length[2].bytes < by_length[1025].bytes < by_length[2048].bytes
    assert not by_length[1025].own  # the batch is divided, not the length


def test_a_range_that_does_not_fit_is_refused() -> None:
    model, inputs = model_and_inputs(16)
    with pytest.raises(autoshard.InfeasibleError):
        api.plan_length_range(
            model,
            MESH,
            example_inputs=inputs,
            lengths=LengthRange(2, 2048),
            cluster="h100-dgx",
            memory=2**21,
        )


def test_the_command_says_where_the_peak_is(tmp_path: Path) -> None:
    target = f"{Path(__file__).parent / 'test_length_plans.py'}:target"
    command = ["plan", target, "--mesh", MESH, "--cluster", "h100-dgx", "--lengths", "1:64"]
    printed = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "plan")])
    assert printed.exit_code == 0, printed.output
    assert "at 64 tokens" in printed.output and (tmp_path / "plan").exists()
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert found["lengths"]["fullest"] == 64 and found["device"]["verdict"] == "fits"
    refused = CliRunner().invoke(app, [*command, "--also", "8"])
    assert refused.exit_code == 2


def test_inputs_without_a_length_have_no_range() -> None:
    with pytest.raises(autoshard.UsageError, match="sequence"):
        api.plan_length_range(
            torch.nn.Linear(8, 8), "dp=2", example_inputs=torch.zeros(8), lengths=LengthRange(1, 8)
        )
