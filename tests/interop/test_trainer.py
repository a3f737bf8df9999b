"""transformers' Trainer: the same logs, evaluations, checkpoints on four processes as on one."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from ranks import HERE, run_ranks
from torch import nn

import autoshard

if find_spec("accelerate") is None:  # not imported here: every worker of xdist collects this file
    pytest.skip("transformers' Trainer needs accelerate", allow_module_level=True)

PIPELINE = "pp=2,dp=2"


@cache
def folder_of(mesh: str, script: str, *others: str) -> Path:
    """Where a script wrote what it found. others: folders that it resumes, too."""
    folder = Path(mkdtemp())
    job = [str(HERE / script), mesh, str(folder), *others]
    # what goes on has the program of what it goes on from
    run_ranks(job, ranks=4 if mesh else 1, AUTOSHARD_CACHE=str(folder / "cache"))
    return folder


def results_of(mesh: str, script: str = "trainer_worker.py", *others: str) -> Any:
    return json.loads((folder_of(mesh, script, *others) / "found.json").read_text())


def close(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            close(value, other[key], f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            close(*pair, f"{where} {number}")
    elif isinstance(one, str):
        assert one == other, where
    else:
        assert one == pytest.approx(other, rel=2e-4, abs=1e-5), where


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2", PIPELINE])
def test_training_logs_evaluates_saves_and_resumes_as_on_one_process(mesh: str) -> None:
    wanted, here = results_of(""), results_of(mesh, *_others(mesh))
    assert len(wanted["log"]) == 6 and len(wanted["resumed"]) == 10
    others = here.pop("others")
    close(here | {"others": []}, wanted)
    # a pipeline resumes what one process wrote
    assert len(others) == (mesh == PIPELINE)
    for resumed in others:
        close(resumed, wanted["resumed"])


@pytest.mark.parametrize("mesh", ["", "fsdp=4"])
def test_checkpoints_of_a_pipeline_resume_elsewhere(mesh: str) -> None:
    written = folder_of(PIPELINE, *_others(PIPELINE))
    (found,) = results_of(mesh, "trainer_worker.py", str(written))["others"]
    close(found, results_of("")["resumed"])


def _others(mesh: str) -> tuple[str, ...]:
    """The script, and what it resumes."""
    script = "trainer_worker.py"
    return (script, str(folder_of("", script))) if mesh == PIPELINE else (script,)


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2"])
def test_accelerate_trains_saves_and_loads_as_on_one_process(mesh: str) -> None:
    wanted, here = (results_of(each, "accelerate_worker.py") for each in ("", mesh))
    # three epochs of seven batches, four of which are followed by a step, and a count
    assert len(wanted) == 3 * (7 + 4 + 1) + 1
    close(here, wanted)


@pytest.mark.parametrize("mesh", ["fsdp=4", "dp=2,tp=2"])
def test_trl_finetunes_as_on_one_process(mesh: str) -> None:
    pytest.importorskip("trl", reason="make test-all installs it")
    wanted, here = (results_of(each, "sft_worker.py") for each in ("", mesh))
    assert len(wanted) == 8
    close(here, wanted)


def test_a_model_that_is_not_parallel_is_refused() -> None:
    from autoshard.interop.trainer import Trainer

    with pytest.raises(autoshard.UsageError, match="not parallel"):
        Trainer(model=nn.Linear(2, 2), args=None)
