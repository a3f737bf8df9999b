"""``autoshard check``: every op without a rule, at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.report.coverage import Uneven, coverage

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        y = x + self.up.weight.put(torch.arange(4), torch.zeros(4)).mean()
        return y * torch.special.hermite_polynomial_h(self.up(x).detach(), 2)


class Exotic(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList([block(), block(), block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(16, 33), nn.Linear(33, 8)

    def forward(self, x):
        values, _ = torch.sort(self.head(torch.relu(self.up(x))).flatten())
        return values.square().mean()


class Branching(Plain):
    def forward(self, x):
        return x.sum() if x.sum() > 0 else self.up(x).sum()


def exotic():
    return Exotic(Block), torch.randn(7, 16)


def plain():
    return Plain(), torch.randn(8, 16)


def branching():
    return Branching(), torch.randn(8, 16)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "checked_models.py"
    path.write_text(MODELS)
    return path


def test_all_missing_rules_are_told_at_once(models: Path) -> None:
    outcome = CliRunner().invoke(app, ["check", f"{models}:exotic", "--json"])
    assert outcome.exit_code == 3, outcome.output
    document = json.loads(outcome.stdout)
    assert document["ok"] is False
    missing = {row["op"]: row for row in document["missing"]}
    assert "aten.special_hermite_polynomial_h.n_scalar" in missing
    assert any("aten.put" in op for op in missing)
    hermite = missing["aten.special_hermite_polynomial_h.n_scalar"]
    assert hermite["count"] == 3
    assert all("checked_models.py:" in source for source in hermite["sources"])
    assert hermite["modules"]
    assert [row for row in document["uneven"] if row["size"] == 7]


def test_the_table_names_ops_lines_and_modules(models: Path) -> None:
    outcome = CliRunner().invoke(app, ["check", f"{models}:exotic"])
    assert outcome.exit_code == 3
    for text in (
        "no rule",
        "aten.special_hermite_polynomial_h.n_scalar",
        "checked_models.py:",
        "layers.",
        "--rules",
    ):
        assert text in outcome.stdout


def test_a_covered_model_passes(models: Path) -> None:
    outcome = CliRunner().invoke(app, ["check", f"{models}:plain", "--json"])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document["ok"] is True and document["missing"] == []
    assert "aten.sort.default" in {row["op"] for row in document["replicated"]} | {
        row["op"].replace(".stable", ".default") for row in document["replicated"]
    }
    assert {(row["name"], row["size"]) for row in document["uneven"]} == {
        ("up.weight", 33),
        ("head.weight", 33),
    }


def test_what_cannot_be_captured_ends_with_the_same_code(models: Path) -> None:
    outcome = CliRunner().invoke(app, ["check", f"{models}:branching"])
    assert outcome.exit_code == 3
    assert "asks for the value of a tensor" in outcome.output


def test_a_config_is_a_target_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 97,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--batch", "4", "--seq", "8"]
    outcome = CliRunner().invoke(app, ["check", f"hf:{tmp_path}/config.json", *options])
    assert outcome.exit_code == 0, outcome.output
    assert "every op has one" in outcome.stdout and "97" in outcome.stdout


def test_a_deep_model_is_checked_in_seconds() -> None:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(60)]
    joint = capture(nn.Sequential(*layers), (torch.randn(4, 16),))
    start = time.perf_counter()
    found = coverage(joint)
    assert not found.missing and not found.uneven
    assert time.perf_counter() - start < 10


def test_uneven_sizes() -> None:
    joint = capture(
        nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 2)), (torch.zeros(5, 2, dtype=torch.int64),)
    )
    found = coverage(joint).uneven
    assert Uneven("0.weight", 11, (11, 6)) in found
    assert Uneven("args[0]", 5, (5, 2)) in found
    assert len(found) == 2
