"""Random numbers that the code of a model draws in Python or numpy: a program would hold one draw forever."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autoshard.errors import CaptureError


@contextmanager
def no_host_random() -> Iterator[None]:
    """Raise CaptureError if what runs inside draws from the global generator of Python or of numpy.

    Both are put back to where they were.
    """
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    before, numpy_before = random.getstate(), numpy.get_state() if numpy else None
    drawn = []
    try:
        yield
        if random.getstate() != before:
            drawn.append("random")
        if numpy and _words(numpy.get_state()) != _words(numpy_before):
            drawn.append("numpy.random")
    finally:
        random.setstate(before)
        if numpy:
            numpy.set_state(numpy_before)
    if drawn:
        raise CaptureError(
            f"the model draws random numbers with {' and '.join(drawn)}",
            why="Python runs once, while the model is captured: every step would have the same numbers",
            hint="draw with torch.rand or torch.randn, or outside of the model, and pass the numbers as an "
            "argument (speech models of transformers take mask_time_indices, or no masks with "
            "mask_time_prob=0 and mask_feature_prob=0)",
        )


def _words(state: Any) -> tuple[Any, ...]:
    """A state of numpy's generator, comparable."""
    return state[0], state[1].tobytes(), *state[2:]
