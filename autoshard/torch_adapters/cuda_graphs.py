"""CUDA graphs: what a device does in a call, recorded once, and started with one launch from then on.

Leans on ``torch._C._storage_Use_Count``. Tried on torch 2.11 to 2.13; the recording itself on 2.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tag

from autoshard.errors import UsageError

R = TypeVar("R")
#: of ops that wait for the device
UNRECORDABLE = frozenset((Tag.data_dependent_output, Tag.cudagraph_unsafe))


class GraphRecorder(Protocol):
    """Records calls that are made in this order each time."""

    def record(self, call: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """(replay, what the call returned). Values are there after the first replay, and overwritten by every
        later one of any call recorded here."""


class CudaGraphRecorder:
    """Recordings that share memory, on the current device."""

    def __init__(self) -> None:
        self.pool: Any = None

    def record(self, call: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Raises UsageError for what CUDA cannot record: waiting for it, copies from pageable memory."""
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device meanwhile, as that which watches collectives does
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                results = call()
        except RuntimeError as error:
            raise UsageError(
                "a step cannot be recorded as a CUDA graph",
                why=str(error.__context__ or error).split("\n", 1)[0],
                hint="cuda_graphs=False",
            ) from error
        self.pool = graph.pool()
        return graph.replay, results


def users_of(x: torch.Tensor) -> int:
    """How many tensors share the memory of one."""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata))
