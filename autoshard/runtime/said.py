"""What a parallel model says of itself: on rank 0, a line on stderr."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from autoshard.errors import UsageError

#: ``1``: nothing is said
VARIABLE = "AUTOSHARD_QUIET"


def say_once(text: str) -> None:
    """A line, by one rank for all. Raises UsageError if the variable is neither 0 nor 1."""
    quiet = os.environ.get(VARIABLE, "0").strip() or "0"
    if quiet not in ("0", "1"):
        raise UsageError(f"{VARIABLE} is {quiet!r}", hint="1 for no lines about plans, 0 otherwise")
    if quiet == "0" and dist.is_initialized() and dist.get_rank() == 0:
        print(f"autoshard: {text}", file=sys.stderr, flush=True)
