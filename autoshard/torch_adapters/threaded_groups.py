"""Process groups of ranks that are threads of one process.

Leans on torch's world of a thread (``torch.testing._internal.distributed.multi_threaded_pg``), on the mode
that keeps group names of threads apart, and on the methods that ``torch.distributed`` and functional
collectives call on a group that is written in Python. Tried on torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import current_thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Work
from torch.torch_version import TorchVersion

from autoshard.errors import UsageError

BACKEND = "audit"
_OLDEST = TorchVersion("2.13")


class Exchange(Protocol):
    """What carries the messages of threads."""

    def collective(
        self,
        group: ThreadedGroup,
        kind: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        **how: Any,
    ) -> Callable[[], None]:
        """Take part in a collective. Returns what waits for its end."""

    def send(self, group: ThreadedGroup, tensor: torch.Tensor, to: int, tag: int) -> Callable[[], None]: ...

    def receive(
        self, group: ThreadedGroup, tensor: torch.Tensor, source: int | None, tag: int
    ) -> Callable[[], None]: ...


class _Work(Work):
    """A message under way. wait: returns once it has arrived."""

    def __init__(self, wait: Callable[[], None], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._wait, self._outputs = wait, list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        return True

    def synchronize(self) -> None:
        self._wait()

    def is_completed(self) -> bool:
        self._wait()
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        self._wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class ThreadedGroup(dist.ProcessGroup):
    """A group whose ranks are threads. ranks: those of the world, in the group's order."""

    def __init__(self, exchange: Exchange, ranks: Sequence[int], rank: int, store: Any) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.exchange, self.ranks, self.position, self._store = exchange, tuple(ranks), rank, store
        self._coalesced: list[_Work] | None = None

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.position

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    def get_group_store(self) -> Any:
        return self._store

    def _collective(
        self, kind: str, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], **how: Any
    ) -> _Work:
        return self._work(_Work(self.exchange.collective(self, kind, sent, received, **how), received))

    def _work(self, work: _Work) -> _Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _Work:
        works, self._coalesced = self._coalesced or [], None

        def wait() -> None:
            for work in works:
                work.wait()

        return _Work(wait, [tensor for work in works for tensor in work.result()])

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> _Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._collective("all_reduce", tensors, tensors, reduction=_reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *more: Any) -> _Work:
        return self._collective(
            "reduce", tensors, tensors, reduction=_reduction(opts), root=int(opts.rootRank)
        )

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> _Work:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = opts if isinstance(opts, int) else int(opts.rootRank)
        return self._collective("broadcast", tensors, tensors, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._collective("all_gather", inputs, [x for each in outputs for x in each])

    allgather_coalesced = allgather  # type: ignore[assignment]

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self._collective("all_gather", [tensor], _parts(output, self.size()))

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        parts = [part for output in outputs for part in _parts(output, self.size())]
        return self._collective("all_gather", inputs, parts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> _Work:
        received = [x for each in outputs for x in each]
        return self._collective("gather", inputs, received, root=int(opts.rootRank))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> _Work:
        sent = [x for each in inputs for x in each]
        return self._collective("scatter", sent, outputs, root=int(opts.rootRank))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any) -> _Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        sent = [x for each in inputs for x in each]
        return self._collective("reduce_scatter", sent, outputs, reduction=_reduction(opts))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _Work:
        return self._collective(
            "reduce_scatter", _parts(tensor, self.size()), [output], reduction=_reduction(opts)
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        sent = [part for tensor in inputs for part in _parts(tensor, self.size())]
        return self._collective("reduce_scatter", sent, outputs, reduction=_reduction(opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Any, sent: Any, opts: Any = None
    ) -> _Work:
        return self._collective(
            "all_to_all", _split(tensor, sent, self.size()), _split(output, received, self.size())
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        return self._collective("all_to_all", inputs, outputs)

    def barrier(self, opts: Any = None) -> _Work:
        return self._collective("barrier", [], [])

    def send(self, tensors: Any, to: int, tag: int) -> _Work:
        return self._work(_Work(self.exchange.send(self, tensors[0], to, tag), tensors))

    def recv(self, tensors: Any, source: int, tag: int) -> _Work:
        return self._work(_Work(self.exchange.receive(self, tensors[0], source, tag), tensors))

    def recv_anysource(self, tensors: Any, tag: int) -> _Work:
        return self._work(_Work(self.exchange.receive(self, tensors[0], None, tag), tensors))


def _reduction(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _parts(tensor: torch.Tensor, ways: int) -> list[torch.Tensor]:
    """Equal parts of what lies in memory, as collectives on one tensor take it."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    return list(flat.split(flat.numel() // ways)) if flat.numel() else [flat] * ways


def _split(tensor: torch.Tensor, sizes: Any, ways: int) -> list[torch.Tensor]:
    return list(tensor.split(list(sizes) if sizes else tensor.shape[0] // ways))


def _create(options: Any, _: Any = None) -> ThreadedGroup:
    exchange: Exchange = current_thread().exchange  # type: ignore[attr-defined]
    ranks = options.global_ranks_in_group or range(options.group_size)
    return ThreadedGroup(exchange, tuple(ranks), options.group_rank, options.store)


def check_torch() -> None:
    """Raise UsageError before torch 2.13: 2.11 ends in a segmentation fault in DTensor."""
    if TorchVersion(torch.__version__) < _OLDEST:
        raise UsageError(
            f"ranks cannot be threads with torch {torch.__version__}",
            why="its DTensor is not made for threads that take turns",
            hint="use torch 2.13",
        )


@contextmanager
def threads_are_ranks() -> Iterator[None]:
    """Inside, ``torch.distributed`` keeps a world of groups for every thread."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    hook = sys.excepthook  # `init_process_group` puts another one, on every rank
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        threaded._uninstall_threaded_pg()
        sys.excepthook = hook


def new_store() -> Any:
    """What the ranks of one world share."""
    return HashStore()


def join_world(rank: int, size: int, store: Any) -> None:
    """Make this thread a rank of the world. Its attribute ``exchange`` carries its messages."""
    dist.init_process_group(BACKEND, rank=rank, world_size=size, store=store)


def leave_world() -> None:
    """Forget the groups of this thread."""
    dist.destroy_process_group()
