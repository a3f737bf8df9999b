"""AUTOSHARD_CHECK: replicas that differ are named, and a collective that fails says where every rank is."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import golden_models
import pytest
import torch
from memory_store import Memory
from ranks import HERE, run_ranks

import autoshard
from autoshard.errors import UsageError
from autoshard.ir.collectives import is_message
from autoshard.program.collectives import collectives_of
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.runtime.checks.check_mode import checksum, failure, is_failure, period
from autoshard.runtime.checks.collective_watchdog import PERIOD, Watch, lines_of, ranks_text


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What both ranks were told, from one start of two processes."""
    folder = tmp_path_factory.mktemp("guard")
    run_ranks([str(HERE / "guard_worker.py"), str(folder)], ranks=2, timeout=240, AUTOSHARD_CHECK="2")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_equal_replicas_pass(told: list[dict[str, str]]) -> None:
    for each in told:
        assert (each["clean"], each["clean again"], each["pipeline"]) == ("", "", "")


@pytest.mark.parametrize("kind, name", [("parameter", "norm.weight"), ("buffer", "scale")])
def test_a_bit_that_differs_is_named(kind: str, name: str, told: list[dict[str, str]]) -> None:
    for each in told:
        assert (
            f"VerificationError: {kind} {name} is not the same on ranks that should hold the same"
            in each[name]
        )
        assert "ranks 0, 1" in each[name] and "rank 0 has" in each[name] and "rank 1 has" in each[name]


def test_shards_need_not_be_equal(told: list[dict[str, str]]) -> None:
    assert [each["up.weight"] for each in told] == ["", ""]


def test_a_loss_that_differs_is_named(told: list[dict[str, str]]) -> None:
    for each in told:
        assert each["loss"].startswith("VerificationError: output 0 is not the same on ranks"), each["loss"]


def test_a_late_rank_is_found(told: list[dict[str, str]]) -> None:
    """Rank 0 waits in a collective of the program; rank 1 has not come there."""
    text = told[0]["late rank"]
    assert text.startswith("CollectiveError: c0") and " over tp" in text and "on rank 0" in text
    assert "rank 0 waits in c0" in text
    assert "rank 1 is in no collective" in text
    assert "torch.distributed says" in text
    assert "guard_worker.py:" in text, "the user's line"


# -- parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_checksums_see_every_bit(dtype: torch.dtype) -> None:
    x = (torch.arange(37) % 5).to(dtype)
    wanted = checksum(x)
    assert checksum(x.clone()) == wanted and checksum(x[:36]) != wanted
    raw = x.view(torch.uint8)
    for bit in range(0, 8 * raw.numel(), 7):
        raw[bit // 8] ^= 1 << bit % 8
        assert checksum(x) != wanted, bit
        raw[bit // 8] ^= 1 << bit % 8
    assert checksum(x) == wanted


def test_checksums_of_odd_tensors() -> None:
    assert checksum(torch.zeros(0)) == 0
    x = torch.randn(6, 4)
    assert checksum(x.t()) == checksum(x.t().contiguous()) != checksum(x)
    assert checksum(x[1:]) == checksum(x[1:].clone())
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("text, steps", [("", 0), ("0", 0), ("1", 1), (" 50 ", 50)])
def test_the_variable(text: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CHECK", text)
    assert period() == steps


@pytest.mark.parametrize("text", ["yes", "-1", "1.5", "½"])
def test_a_wrong_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CHECK", text)
    with pytest.raises(UsageError, match="AUTOSHARD_CHECK"):
        period()


def test_names_of_collectives(tmp_path: Path) -> None:
    """Every collective has its own number, and a stored program has the same."""
    model, batch = golden_models.made()
    planned = autoshard.plan(model, "tp=2", example_inputs=batch)
    made = autoshard.compile(model, planned).program
    found = collectives_of(made)
    nodes = [n for s in made.lowered.segments.values() for n in s.graph.nodes if is_message(n)]
    assert len(found) >= len(nodes) > 0
    assert [c.name for c in found.values()] == [f"c{k:03}" for k in range(len(found))]
    assert any(c.fqn.endswith(".out") and "over tp, layers" in str(c) for c in found.values()), found
    text = program_text(made)
    assert all(f"# {c.name}" in text for c in found.values())
    save_program(made, tmp_path / "p")
    read = collectives_of(load_program(tmp_path / "p"))
    assert {k: (c.name, c.op, c.axis) for k, c in read.items()} == {
        k: (c.name, c.op, c.axis) for k, c in found.items()
    }


def test_other_errors_are_left_alone() -> None:
    assert not is_failure(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))
    for text in ("[gloo/transport/tcp/pair.cc:1] Timed out waiting 1000ms", "Connection closed by peer"):
        assert is_failure(RuntimeError(text))


def test_ranks_tell_where_they_are() -> None:
    store = Memory()
    watches = [Watch(store, rank, range(4)) for rank in range(3)]
    try:
        for watch in watches:
            watch.begin_step(7)
            with watch.inside("c001 all_reduce over tp"):
                pass
        entered, leave = threading.Event(), threading.Event()

        def wait() -> None:
            with watches[0].inside("c002 all_gather over tp"):
                entered.set()
                leave.wait()

        thread = threading.Thread(target=wait)
        thread.start()
        entered.wait()
        lines = watches[0].report(patience=3 * PERIOD)
        leave.set()
        thread.join()
    finally:
        for watch in watches:
            watch.close()
    assert lines[0].startswith("rank 0 waits in c002 all_gather over tp, step 7, collective 2 of it")
    assert any(x.startswith("ranks 1, 2 are in no collective") for x in lines)
    assert any(x == "rank 3 has written nothing" for x in lines)


def test_a_slow_collective_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    watch = Watch(Memory(), 0, (0,), slow=0.1)
    try:
        with watch.inside("c003 all_reduce over dp"):
            for _ in range(100):
                if "c003" in (text := capfd.readouterr().err):
                    break
                time.sleep(0.1)
    finally:
        watch.close()
    assert "autoshard: c003 all_reduce over dp takes more than" in text and "rank 0 waits in c003" in text


def test_texts() -> None:
    assert ranks_text([3]) == "rank 3" and ranks_text([0, 1, 2, 3, 7, 9, 10]) == "ranks 0 to 3, 7, 9, 10"
    note = {"inside": True, "step": 1, "count": 2, "name": "c001", "layer": "layers.0", "seconds": 1.0}
    assert lines_of(0, {0: None, 1: note}) == [
        "rank 1 waits in c001, in layers.0, step 1, collective 2 of it, for 1.0 s",
        "rank 0 has written nothing",
    ]


def test_without_the_variable_the_hint_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    error = failure("c005 all_gather over fsdp, layers.0", RuntimeError("Timed out waiting 100ms"), None)
    assert "c005 all_gather over fsdp, layers.0 timed out on rank 2" in str(error)
    assert "AUTOSHARD_CHECK=1" in str(error)
