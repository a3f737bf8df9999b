"""When Python looks for garbage: a trace and a search make millions of small objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: thresholds of `gc.set_threshold` that suit a search: looking through what it keeps takes a third of its
#: time otherwise (DeepSeek-V3 on 2,048 GPUs)
RARELY = (5_000_000, 20, 100)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Collect garbage rarely, then as before; nothing changes where that is rarer still."""
    before = gc.get_threshold()
    if 0 < before[0] < RARELY[0]:
        gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def not_collected() -> Iterator[None]:
    """Collect no garbage, then as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
