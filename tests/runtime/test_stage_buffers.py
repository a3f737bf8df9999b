"""Buffers of several programs whose stages are cut at other places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.errors import UsageError
from autoshard.runtime import stage_buffers
from autoshard.runtime.stage_buffers import StageBuffers


def program(stages: tuple[int, ...], *, updates: bool) -> Any:
    port = SimpleNamespace(kind="buffer", target="norm.mean", name="b")
    results = [SimpleNamespace(kind="buffer", target="norm.mean", value="new")] if updates else []
    schedule = SimpleNamespace(owner=(0, 1, 0, 1))
    signature = SimpleNamespace(ports=[port], results=results)
    return SimpleNamespace(stages=SimpleNamespace(schedule=schedule), signature=signature, using=stages)


@pytest.mark.parametrize(
    "rows",
    [
        [((1,), True), ((), False), ((3,), False), ((1, 3), True)],
        [((0,), False), ((1,), False)],
        [((0,), False), ((2,), True), ((2,), False)],
    ],
)
def test_ranks_that_every_update_reaches(
    rows: list[tuple[tuple[int, ...], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_buffers, "holders_of", lambda program, unused: {"b": program.using})
    buffers = StageBuffers()
    for stages, updates in rows:
        buffers.admit(program(stages, updates=updates))


@pytest.mark.parametrize(
    "rows",
    [
        [((1,), True), ((0,), False)],
        [((0,), False), ((1,), True)],
        [((), False), ((1,), True), ((0,), True)],
    ],
)
def test_a_rank_that_an_update_does_not_reach(
    rows: list[tuple[tuple[int, ...], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_buffers, "holders_of", lambda program, unused: {"b": program.using})
    buffers = StageBuffers()
    for stages, updates in rows[:-1]:
        buffers.admit(program(stages, updates=updates))
    stages, updates = rows[-1]
    with pytest.raises(UsageError, match=r"keeps norm\.mean on the pipeline ranks that have it"):
        buffers.admit(program(stages, updates=updates))
