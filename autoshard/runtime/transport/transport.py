"""How the data of a collective moves between the ranks of a process group, started but not waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from autoshard.runtime.pending import Finish

#: waits for what is on its way and gives it
Arrival: TypeAlias = Callable[[], torch.Tensor]
#: makes something new of a tensor of every rank
Join: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]


class Transport(Protocol):
    """Of one rank in one group. Tensors that are given are contiguous, and stay as they are until the message
    has arrived; what a transport needs of them until then, it holds itself. Errors are RuntimeError, those of
    torch.distributed or `runtime.transport.shared_memory.peers.PeerError`."""

    @property
    def name(self) -> str:
        """Of the process group."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def ways(self) -> int: ...

    def room(self, count: int, like: torch.Tensor) -> torch.Tensor | None:
        """Memory [count] from which a message need not be copied, None where there is no such. It must be
        given to a collective, whole, as its own."""
        ...

    def gather(self, x: torch.Tensor) -> Arrival:
        """The tensors of all ranks, one after the other along dim 0."""
        ...

    def gather_rows(self, x: torch.Tensor, join: Join) -> Callable[[], Any]:
        """What is made of the tensors of all ranks, each of them flat; they are gone when it is made."""
        ...

    def scatter(self, x: torch.Tensor) -> tuple[Arrival, Finish]:
        """(what arrives, how it becomes this rank's part, along dim 0, of the sum over all ranks)."""
        ...

    def all_reduce(self, x: torch.Tensor, op: str, own: bool = False) -> tuple[Arrival, Finish]:
        """(what arrives, how it becomes the sum, or another reduction, over all ranks). own: x is nobody
        else's, and may be overwritten."""
        ...

    def all_to_all(self, x: torch.Tensor) -> Arrival:
        """Part k of a flat tensor goes to rank k, and its part comes in that place."""
        ...

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        """Rows of x, so many to each rank in turn, and those that come from each."""
        ...

    def pass_on(self, x: torch.Tensor, out: torch.Tensor, after: int, before: int) -> Callable[[], None]:
        """x to a rank, out from another; waits for both when called. Every rank sends one and gets one."""
        ...


def sum_of(rows: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """In the order of the ranks, rounded once. out: where to, none of the rows."""
    dtype = rows[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        wide = torch.add(rows[0].float(), rows[1])
        for row in rows[2:]:
            wide += row
        return wide.to(dtype) if out is None else out.copy_(wide)
    total = torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        total += row
    return total


def reduced(rows: Sequence[torch.Tensor], op: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The ``sum`` or ``max`` of all ranks' tensors, in their order, the same on each. out: where to."""
    if len(rows) == 1:
        return rows[0].clone() if out is None else out.copy_(rows[0])
    if op == "sum":
        return sum_of(rows, out)
    if op != "max":
        raise NotImplementedError(f"a reduction by {op!r}")
    most = torch.maximum(rows[0], rows[1], out=out)
    for row in rows[2:]:
        torch.maximum(most, row, out=most)
    return most
