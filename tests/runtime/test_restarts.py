"""Runs that are killed and go on, and checkpoints that go on elsewhere."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from calls_worker import backward, batch, build
from kills import killed, left_of, losses_of, named
from ranks import HERE, run_ranks
from torch import nn
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.errors import UsageError
from autoshard.runtime.checkpoints import Checkpoints
from autoshard.runtime.groups import _token


@pytest.mark.parametrize(("mesh", "nodes"), [("dp=2,tp=2", 1), ("pp=2,dp=2", 1), ("dp=2,tp=2", 2)])
def test_losses_of_a_run_whose_ranks_are_killed(mesh: str, nodes: int, tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    peace.mkdir()
    war.mkdir()
    killed(peace, mesh, 4, 30, 0, seed=0)
    assert killed(war, mesh, 4, 30, 2, seed=0, waiting="go on", nodes=nodes) == 2
    assert losses_of(war) == losses_of(peace)


def test_a_stopped_rank_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    peace, war = tmp_path / "peace", tmp_path / "war"
    peace.mkdir()
    war.mkdir()
    killed(peace, "dp=2,tp=2", 4, 30, 0, seed=0)
    assert killed(war, "dp=2,tp=2", 4, 30, 1, seed=0, how=signal.SIGSTOP) == 1
    assert losses_of(war) == losses_of(peace)
    assert named(war) >= 1 and not left_of(war)


def test_a_run_goes_on_on_fewer_ranks(tmp_path: Path) -> None:
    build("Llama").config.save_pretrained(tmp_path)
    config, out = f"hf:{tmp_path / 'config.json'}", str(tmp_path / "program")
    words = f"--cluster cpu-gloo --gpus 4 --also 3 --global-batch 8 --seq 16 --json -o {out}".split()
    made = CliRunner().invoke(app, ["compile", config, *words])
    assert made.exit_code == 0, made.output
    (fewer,) = json.loads(made.stdout)["also"]
    assert fewer["ranks"] == 3
    rows = []
    for ranks in (4, 3):
        said = run_ranks([str(HERE / "fewer_worker.py"), str(tmp_path), "3"], ranks=ranks)
        rows += [line.split() for line in said.splitlines() if line.startswith("loss")]
    assert [row[3] for row in rows] == 3 * [json.loads(made.stdout)["mesh"]] + 3 * [fewer["mesh"]]
    plain = build("Llama")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step, row in enumerate(rows):
        assert float(row[2]) == pytest.approx(backward(plain, batch(8, 16, step)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


def test_checkpoints_of_one_mesh_go_on_on_another(tmp_path: Path) -> None:
    for ranks, meshes in ((4, "fsdp=4;dp=2,tp=2;tp=4;pp=2,dp=2"), (2, "tp=2;pp=2"), (1, "dp=1")):
        said = run_ranks([str(HERE / "pairs_worker.py"), str(tmp_path), "Llama", meshes], ranks=ranks)
        lines = [line for line in said.splitlines() if line.startswith(("ok", "BAD"))]
        assert lines and all(line.startswith("ok") for line in lines), "\n".join(lines)


def test_ranks_agree_on_a_name_whatever_those_before_them_left() -> None:
    store = dist.HashStore()
    names: list[str] = []
    for _ in range(3):
        found = ["", "", ""]

        def agree(rank: int, found: list[str] = found) -> None:
            found[rank] = _token(store, rank, 3, timedelta(seconds=20))

        threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        names += found[:1]
        # one that was killed before the first rank heard of it
        store.set("autoshard/number/1", "gone")
    assert len(set(names)) == 3


def test_a_rank_that_does_not_start_is_named() -> None:
    with pytest.raises(UsageError, match="ranks 1, 2 did not start"):
        _token(dist.HashStore(), 0, 3, timedelta(seconds=0.1))


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    before = signal.getsignal(signal.SIGTERM)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield tmp_path  # type: ignore[misc]
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, before)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_plain_model_loads_the_newest_complete_one(alone: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    checkpoints = Checkpoints(alone, model, optimizer, others={"scheduler": scheduler})
    assert checkpoints.load() == 0
    for step in range(1, 5):
        trained(model, optimizer)
        scheduler.step()
        checkpoints.save(step, wait=step % 2 == 0)
    wanted, drawn = model.weight.detach().clone(), torch.rand(3)
    # the newest one was interrupted
    (alone / "step-9").mkdir()
    (alone / "step-9" / "__0_0.distcp").write_bytes(b"half")
    assert checkpoints.steps() == [3, 4]
    trained(model, optimizer)
    assert checkpoints.load() == 4
    assert torch.equal(model.weight, wanted) and torch.equal(torch.rand(3), drawn)
    assert scheduler.last_epoch == 4
    with pytest.raises(UsageError, match="has no sampler"):
        Checkpoints(alone, model, optimizer, others={"sampler": scheduler}).load()


def test_sigterm_is_told(alone: Path) -> None:
    model = nn.Linear(3, 3)
    checkpoints = Checkpoints(alone, model, torch.optim.SGD(model.parameters()))
    assert not checkpoints.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert checkpoints.should_stop()


def test_one_checkpoint_at_least_is_kept(alone: Path) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="keep=0"):
        Checkpoints(alone, model, torch.optim.SGD(model.parameters()), keep=0)
