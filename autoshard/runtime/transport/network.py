"""Collectives over a process group's own connections: NCCL's on devices, gloo's on CPUs.

On the CPU the ranks share cores, and what a message costs is waking each other up: gloo's gathers and
reductions go round a ring in as many turns as there are ranks, so parts are exchanged directly here, in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autoshard.ir.quantized import FEW
from autoshard.runtime.pending import Finish, as_it_is, wait
from autoshard.runtime.transport.transport import Arrival, Join, reduced, sum_of
from autoshard.torch_adapters.groups import group_named

_FUNCTIONAL = torch.ops._c10d_functional
#: bytes up to which every rank gets all parts of a sum at once instead of going round the ring twice
_TINY = 1 << 18
#: of direct messages, which arrive in the order in which they are sent; others use small numbers
_TAG = 28_403


class Network:
    """A `runtime.transport.transport.Transport`. name: of the process group."""

    def __init__(self, name: str) -> None:
        self.name, self.group = name, group_named(name)
        self.rank, self.ways = dist.get_rank(self.group), dist.get_world_size(self.group)

    def room(self, count: int, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def gather(self, x: torch.Tensor) -> Arrival:
        if x.device.type != "cpu":
            return partial(_given, _FUNCTIONAL.all_gather_into_tensor(x, self.ways, self.name), x)
        shape = (self.ways * x.shape[0], *x.shape[1:])
        if self.ways * x.nbytes > FEW:
            out = torch.empty(shape, dtype=x.dtype)
            parts = out.chunk(self.ways)
            wait_for = self._exchange([x] * self.ways, parts)
            parts[self.rank].copy_(x)
            return partial(_when, wait_for, out)
        arriving = self.all_to_all(x.view(-1).repeat(self.ways))
        return lambda: arriving().view(shape)

    def gather_rows(self, x: torch.Tensor, join: Join) -> Callable[[], Any]:
        arriving = self.gather(x)
        return lambda: join(arriving().view(self.ways, x.numel()).unbind())

    def scatter(self, x: torch.Tensor) -> tuple[Arrival, Finish]:
        """On the CPU the parts are exchanged and added up here, in the order of the ranks: gloo's own
        reduce-scatter takes as long as its all-reduce, twice as long as this."""
        if x.device.type != "cpu":
            given = _FUNCTIONAL.reduce_scatter_tensor(x, "sum", self.ways, self.name)
            return partial(_given, given, x), as_it_is
        shape = (x.shape[0] // self.ways, *x.shape[1:])
        if x.nbytes > FEW:
            rank, parts = self.rank, x.view(self.ways, x.numel() // self.ways)
            got = torch.empty((self.ways - 1, parts.shape[1]), dtype=x.dtype)
            rows = [*got[:rank], parts[rank], *got[rank:]]
            arriving = partial(_when, self._exchange(list(parts), rows), got)
            return arriving, lambda _: sum_of(rows).view(shape)
        return self.all_to_all(x.view(-1)), lambda got: reduced(got.view(self.ways, *shape).unbind(), "sum")

    def all_reduce(self, x: torch.Tensor, op: str, own: bool = False) -> tuple[Arrival, Finish]:
        if x.device.type == "cpu" and op == "sum" and self.ways * x.nbytes <= _TINY:
            arriving = self.all_to_all(x.view(-1).repeat(self.ways))
            return arriving, lambda got: reduced(got.view(self.ways, *x.shape).unbind(), op)
        start = _FUNCTIONAL.all_reduce_ if own else _FUNCTIONAL.all_reduce
        return partial(_given, start(x, op, self.name), x), as_it_is

    def all_to_all(self, x: torch.Tensor) -> Arrival:
        counts = [x.numel() // self.ways] * self.ways
        return self.exchange(x, counts, counts)

    def exchange(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Arrival:
        given = _FUNCTIONAL.all_to_all_single(x, list(received), list(sent), self.name)
        return partial(_given, given, x)

    def pass_on(self, x: torch.Tensor, out: torch.Tensor, after: int, before: int) -> Callable[[], None]:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, group_peer=after),
                dist.P2POp(dist.irecv, out, group=self.group, group_peer=before),
            ]
        )

        def finish() -> None:
            for work in works:
                work.wait()

        return finish

    def _exchange(self, sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Sends a tensor to every other rank and receives one from each; waits for them when called.

        sent, got: a tensor per rank, those of this rank unused.
        """
        # each begins with another rank, so that none is the first choice of all
        after = [(self.rank + k) % self.ways for k in range(1, self.ways)]
        works = [dist.irecv(got[k], group=self.group, group_src=k, tag=_TAG) for k in [*reversed(after)]]
        works += [dist.isend(sent[k], group=self.group, group_dst=k, tag=_TAG) for k in after]

        return partial(_all_done, works, sent)


def _given(result: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """A result of a functional collective, once it is there. held: what must stay alive until then."""
    return wait(result)


def _all_done(works: Sequence[dist.Work | None], held: Sequence[torch.Tensor]) -> None:
    """Waits for sends and receives. held: what must stay alive until then."""
    for work in works:
        assert work is not None  # this rank is a member
        work.wait()


def _when(wait_for: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
    wait_for()
    return tensor
