"""Says which rank a job waits for: every rank tells the others, through the store, that it is alive.

A thread of every rank counts in the store. A rank that is inside a call of the model for long looks whose
counts stand still (stopped, or gone) and who is in no call or in another one, and says so on stderr. After
much longer it ends its process, so that torchrun ends or restarts the others.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autoshard.errors import UsageError
from autoshard.runtime.checks.collective_watchdog import Store, ranks_text

STALL, TIMEOUT = "AUTOSHARD_STALL", "AUTOSHARD_TIMEOUT"
#: seconds inside one call after which a rank asks where the others are
PATIENCE = 30.0
#: seconds inside one call after which a rank ends, as torch's process groups do
LIMIT = 1800.0
#: beats between two looks at the others
_BEATS = 3


def patience() -> tuple[float, float]:
    """Seconds after which ranks that do not come are named, and after which a rank that waits for them ends;
    0 for never. Raises UsageError if a variable of these is no number."""
    limit = _seconds(TIMEOUT, LIMIT)
    stall = _seconds(STALL, PATIENCE)
    return min(stall, limit / 2) if limit and stall else stall, limit


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        raise UsageError(f"{variable} is {text!r}", hint="give seconds, 0 for never") from None
    return max(0.0, seconds)


class Heartbeat:
    """Of one rank. rank: in the world. ranks: of the program. seconds, limit: see `patience`. leave: ends the
    process."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        seconds: float,
        limit: float = 0.0,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.store, self.rank, self.ranks, self.seconds = store, rank, tuple(ranks), seconds
        self.limit, self._leave = limit, leave
        self.calls, self.since = 0, 0.0
        self._said = -1
        #: every rank binds the same programs in the same order
        self.number = store.add(f"autoshard/heartbeats/{rank}", 1)
        # the store is one process: thousands of ranks write to it less often
        self.period = max(seconds / 6, len(self.ranks) / 200)
        self._end = threading.Event()
        threading.Thread(target=self._run, name="autoshard-heartbeat", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """No more beats."""
        self._end.set()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside: this rank may wait for others."""
        self.calls, self.since = self.calls + 1, time.monotonic()
        try:
            yield
        finally:
            self.since = 0.0

    def _run(self) -> None:
        count, asked = 0, 0
        before: dict[int, Any] = {}
        while not self._end.wait(self.period):
            count += 1
            note = {"count": count, "calls": self.calls, "inside": bool(self.since)}
            try:
                self.store.set(self._key(self.rank), json.dumps(note))
                since = self.since
                waited = time.monotonic() - since if since else 0.0
                if self.limit and waited > self.limit:
                    return self._give_up(waited)
                if waited <= self.seconds or self._said == self.calls:
                    before = {}
                elif not before:
                    asked, before = count, self._notes()
                elif count >= asked + _BEATS:
                    self._said = self.calls
                    self._report(before)
            except RuntimeError:
                return  # the store is gone: the job ends

    def _give_up(self, waited: float) -> None:
        """End the process: torch cannot be told to stop waiting."""
        text = f"autoshard: rank {self.rank} ends after {waited:.0f} s in call {self.calls} of the model"
        print(f"{text} ({TIMEOUT}={self.limit:g})", file=sys.stderr, flush=True)
        self._leave(1)

    def _report(self, before: dict[int, Any]) -> None:
        now = self._notes()
        silent = [
            r for r in self.ranks if now[r] is None or (before[r] or {}).get("count") == now[r]["count"]
        ]
        others = [r for r in self.ranks if r not in silent]
        waiting = [r for r in others if now[r]["inside"] and now[r]["calls"] >= self.calls]
        behind = [r for r in others if r not in waiting]
        if self.rank != min([*waiting, self.rank]):
            return  # one of those that wait says it
        seconds = time.monotonic() - self.since
        who = f"{ranks_text(waiting)} {_have(waiting)}"
        lines = [f"autoshard: {who} been in call {self.calls} of the model for {seconds:.0f} s"]
        if silent:
            lines.append(f"  {ranks_text(silent)} {_have(silent)} not been heard of: stopped, or gone")
        if behind:
            lines.append(f"  {ranks_text(behind)} {_have(behind)} not come to it: {_doing(behind, now)}")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _notes(self) -> dict[int, Any]:
        return {
            r: json.loads(self.store.get(self._key(r))) if self.store.check([self._key(r)]) else None
            for r in self.ranks
        }

    def _key(self, rank: int) -> str:
        return f"autoshard/heartbeat/{self.number}/{rank}"


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _doing(ranks: Sequence[int], notes: dict[int, Any]) -> str:
    calls = sorted({int(notes[r]["calls"]) for r in ranks})
    return f"the last was call {', '.join(map(str, calls))}"
