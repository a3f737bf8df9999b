"""What a run tells of itself (`debugging_worker.py`): ranges, NaNs, memory, programs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ranks import HERE, run_ranks
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.errors import UsageError
from autoshard.program.store import load_program
from autoshard.runtime import said

NAMES = [
    "001-LlamaForCausalLM-fsdp=2,tp=2-train-input_ids-8x16-labels-8x16",
    "002-LlamaForCausalLM-fsdp=2,tp=2-train-input_ids-4x16-labels-4x16",
    "003-LlamaForCausalLM-fsdp=2,tp=2-eval-input_ids-8x24-labels-8x24",
]


def test_four_processes(tmp_path: Path) -> None:
    assert "ok" in run_ranks([str(HERE / "debugging_worker.py"), str(tmp_path)])
    programs = sorted((tmp_path / "programs").iterdir())
    assert [p.name for p in programs] == NAMES
    for folder in programs:
        program = load_program(folder)
        assert program.dumps and program.original is not None
    shown = CliRunner().invoke(app, ["explain", str(programs[0]), "model.layers.1.mlp.up_proj.weight"])
    assert shown.exit_code == 0 and "up_proj" in shown.stdout, shown.output
    assert {p.name for p in tmp_path.glob("trace-*.json")} == {f"trace-{r}.json" for r in range(4)}


class Begun:
    """A timer that begins when the test says so."""

    def __init__(self, seconds: float, begin: object) -> None:
        self.seconds, self.begin, self.daemon, self.cancelled = seconds, begin, False, False

    def start(self) -> None:
        TIMERS.append(self)

    def cancel(self) -> None:
        self.cancelled = True


TIMERS: list[Begun] = []


def test_stages_are_said_late(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(threading, "Timer", Begun)
    monkeypatch.delenv("RANK", raising=False)
    with said.stages_said() as say:
        say("capturing")
        say("searching")
        assert capsys.readouterr().err == ""
        TIMERS[-1].begin()  # type: ignore[operator]
        assert "s  searching\n" in capsys.readouterr().err
        say("emitting")
        assert "s  emitting\n" in capsys.readouterr().err
    assert TIMERS[-1].cancelled and TIMERS[-1].seconds == said.LATE


def test_who_says_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Timer", Begun)
    before, given = len(TIMERS), []
    with said.stages_said(given.append) as say:
        say("capturing")
    assert given == ["capturing"]
    monkeypatch.setenv("RANK", "1")
    with said.stages_said():
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("AUTOSHARD_QUIET", "1")
    with said.stages_said():
        pass
    assert len(TIMERS) == before
    monkeypatch.setenv("AUTOSHARD_QUIET", "maybe")
    with pytest.raises(UsageError, match="AUTOSHARD_QUIET"), said.stages_said():
        pass
