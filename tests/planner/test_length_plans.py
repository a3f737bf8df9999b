"""Plans for a distribution of sequence lengths share the placements of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.errors import UsageError
from autoshard.options import PlanOptions
from autoshard.planner.compiling import compile_analysed, options_on, stored_parameters
from autoshard.planner.length_plans import parse_lengths, resized_inputs

MESH = "fsdp=2,tp=2"


class Tokens(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model_and_inputs(length: int = 16) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        ids = torch.zeros(8, length, dtype=torch.int64)
        return Tokens(), {"ids": ids, "labels": ids}


def target() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """For the command line."""
    return model_and_inputs()


@pytest.mark.parametrize("lengths", ["4:1,2048:1", "4:9,2048:1", "2048"])
def test_the_expected_step_is_the_shortest_of_all_shared_placements(lengths: str) -> None:
    model, inputs = model_and_inputs()
    found = autoshard.plan_lengths(model, MESH, example_inputs=inputs, lengths=lengths, cluster="h100-dgx")
    shares = parse_lengths(lengths)
    assert [(p.length, p.share) for p in found.plans] == [(s.length, s.share) for s in shares]
    programs = [compile_analysed(p.planned) for p in found.plans]
    assert len({stored_parameters([p]) for p in programs}) == 1  # switching moves nothing
    alone = {
        s.length: autoshard.plan(
            model, MESH, example_inputs=model_and_inputs(s.length)[1], cluster="h100-dgx"
        )
        for s in shares
    }
    assert [p.alone for p in found.plans] == [alone[s.length].plan.optimality.seconds for s in shares]
    expected = []
    for first in alone.values():
        options = options_on(PlanOptions(), [compile_analysed(first)])
        steps = [
            autoshard.plan(
                model,
                MESH,
                example_inputs=model_and_inputs(s.length)[1],
                cluster="h100-dgx",
                options=options,
            ).plan.optimality.seconds
            for s in shares
        ]
        expected.append(sum(s.share * step for s, step in zip(shares, steps, strict=True)))
    assert found.seconds == pytest.approx(min(expected), rel=1e-9)
    assert found.dual_bound <= found.seconds * (1 + 1e-9)
    least = sum(p.share * p.alone for p in found.plans)
    assert found.seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize("text", ["", "x:1", "0:1", "8:-1", "8:1,8:2", "8:nan", "8:inf"])
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(autoshard.UsageError, match="lengths"):
        parse_lengths(text)


def test_shares_add_up_to_one() -> None:
    assert [(s.length, s.share) for s in parse_lengths("64:1, 32:3")] == [(32, 0.75), (64, 0.25)]


def test_inputs_without_a_length_are_refused() -> None:
    with pytest.raises(autoshard.UsageError, match="sequence"):
        autoshard.plan_lengths(nn.Linear(8, 8), "dp=2", example_inputs=torch.zeros(8), lengths="8:1")


def test_the_command_prints_every_length(tmp_path: Path) -> None:
    command = ["plan", f"{__file__}:target", "--mesh", MESH, "--cluster", "h100-dgx", "--lengths"]
    printed = CliRunner().invoke(app, [*command, "4:1,2048:3"])
    assert printed.exit_code == 0, printed.output
    assert "75%" in printed.output and "expected step" in printed.output
    refused = CliRunner().invoke(app, [*command, "4:1", "-o", str(tmp_path / "plan")])
    assert refused.exit_code == 2 and not (tmp_path / "plan").exists()


def test_memory_is_what_the_program_holds() -> None:
    model, inputs = model_and_inputs()
    for limit in (200 << 20, 40 << 20):
        found = autoshard.plan_lengths(
            model, MESH, example_inputs=inputs, lengths="4:1,2048:1", cluster="h100-dgx", memory=limit
        )
        for each in found.plans:
            assert each.planned.peak is not None
            assert each.bytes == each.planned.peak.bytes <= limit
            assert each.seconds >= each.alone * (1 - 1e-9)
        assert found.dual_bound <= found.seconds * (1 + 1e-9)


def test_images_have_no_length() -> None:
    """Dim 1 of an image is its channels."""
    with pytest.raises(UsageError, match="no example input has a sequence") as caught:
        resized_inputs(((), {"pixel_values": torch.zeros(4, 3, 8, 8)}), 16)
    assert "[4, 3, 8, 8]" in (caught.value.why or "")
    beside = {"pixel_values": torch.zeros(4, 3, 8, 8), "input_ids": torch.zeros(4, 6, dtype=torch.long)}
    _, resized = resized_inputs(((), beside), 16)
    assert resized["pixel_values"].shape == (4, 3, 8, 8) and resized["input_ids"].shape == (4, 16)
