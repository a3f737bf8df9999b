"""Ranks that others wait for are named."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
from memory_store import Memory

from autoshard.errors import UsageError
from autoshard.runtime.checks import heartbeat
from autoshard.runtime.checks.heartbeat import Heartbeat


@pytest.mark.parametrize(
    ("stopped", "words"),
    [
        (True, ("ranks 0, 1 have been in call 1", "rank 2 has not been heard of")),
        (False, ("ranks 0, 1 have been in call 1", "rank 2 has not come to it: the last was call 0")),
    ],
)
def test_the_rank_that_is_waited_for_is_named_once(
    stopped: bool, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    store = Memory()
    beats = [Heartbeat(store, rank, range(3), 0.3) for rank in range(3)]
    if stopped:
        beats[2].close()
    said = ""
    with ExitStack() as stack:
        for beat in beats[:2]:
            stack.enter_context(beat.call())
        end = time.monotonic() + 60
        while words[1] not in said and time.monotonic() < end:
            time.sleep(0.05)
            said += capfd.readouterr().err
        time.sleep(0.5)
        said += capfd.readouterr().err
    for beat in beats:
        beat.close()
    assert all(word in said for word in words), said
    assert said.count("have been in call") == 1


def test_a_rank_that_waits_too_long_ends(capfd: pytest.CaptureFixture[str]) -> None:
    store, ended = Memory(), threading.Event()
    beats = [
        Heartbeat(store, 0, range(2), 0.3, 1.0, lambda code: ended.set() if code else None),
        Heartbeat(store, 1, range(2), 0.3, 1.0, lambda code: None),
    ]
    beats[1].close()
    with beats[0].call():
        assert ended.wait(60)
    said = capfd.readouterr().err
    beats[0].close()
    assert said.index("rank 1 has not") < said.index("rank 0 ends after") and "AUTOSHARD_TIMEOUT=1" in said


def test_patience_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("", heartbeat.PATIENCE), ("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv(heartbeat.STALL, text)
        assert heartbeat.patience() == (seconds, heartbeat.LIMIT)
    monkeypatch.setenv(heartbeat.TIMEOUT, "4")
    assert heartbeat.patience() == (2.0, 4.0)
    monkeypatch.setenv(heartbeat.STALL, "soon")
    with pytest.raises(UsageError, match="soon"):
        heartbeat.patience()
