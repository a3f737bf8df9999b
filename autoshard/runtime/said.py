"""What a parallel model says of itself: on rank 0, a line on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from autoshard.errors import UsageError

#: ``1``: nothing is said
VARIABLE = "AUTOSHARD_QUIET"
#: seconds after which planning says what it does
LATE = 2.0


def say_once(text: str) -> None:
    """A line, by one rank for all. Raises UsageError if the variable is neither 0 nor 1."""
    if not _quiet() and dist.is_initialized() and dist.get_rank() == 0:
        _say(text)


@contextmanager
def stages_said(
    given: Callable[[str], None] | None = None, *, here: bool | None = None
) -> Iterator[Callable[[str], None]]:
    """What planning is to tell its stages: ``given``, or lines on stderr from the second `LATE` on, first the
    stage that it is in by then.

    here: whether this rank speaks; None: if it is rank 0, or no process group is known.
    """
    if here is None:
        here = (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0
    if given is not None or not here or _quiet():
        yield given or (lambda _: None)
        return
    start, newest, late = time.perf_counter(), "", False

    def show() -> None:
        _say(f"{time.perf_counter() - start:6.1f} s  {newest}")

    def stage(text: str) -> None:
        nonlocal newest
        newest = text
        if late:
            show()

    def begin() -> None:
        nonlocal late
        late = True
        if newest:
            show()

    timer = threading.Timer(LATE, begin)
    timer.daemon = True
    timer.start()
    try:
        yield stage
    finally:
        timer.cancel()


def _quiet() -> bool:
    quiet = os.environ.get(VARIABLE, "0").strip() or "0"
    if quiet not in ("0", "1"):
        raise UsageError(f"{VARIABLE} is {quiet!r}", hint="1 for no lines about plans, 0 otherwise")
    return quiet == "1"


def _say(text: str) -> None:
    print(f"autoshard: {text}", file=sys.stderr, flush=True)
