"""How the data of a collective moves over a process group, started but not waited for.

Devices use the functional collectives. On the CPU the ranks share cores, and what a message costs is waking
each other up: gloo's gathers and reductions go round a ring in as many turns as there are ranks, so parts are
exchanged directly here, in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from autoshard.runtime.pending import Finish, as_it_is, wait
from autoshard.torch_adapters.groups import group_named

#: waits for what is on its way and gives it
Arrival: TypeAlias = Callable[[], torch.Tensor]

_FUNCTIONAL = torch.ops._c10d_functional
#: bytes of a whole tensor up to which gloo's all-to-all is as quick as that many sends and receives
#: (measured on 4 processes, 2 cores: 1.5 ms against 2.4 ms at 0.25 MiB, 5.7 ms against 5.0 ms at 4 MiB)
_FEW = 1 << 20
#: bytes up to which every rank gets all parts of a sum at once instead of going round the ring twice
_TINY = 1 << 18
#: of direct messages, which arrive in the order in which they are sent; others use small numbers
_TAG = 28_403


def gather(x: torch.Tensor, ways: int, group: str) -> Arrival:
    """The tensors of all ranks of a group, one after the other along dim 0. x: contiguous."""
    if x.device.type != "cpu":
        return partial(wait, _FUNCTIONAL.all_gather_into_tensor(x, ways, group))
    if ways * x.nbytes > _FEW:
        out = torch.empty((ways * x.shape[0], *x.shape[1:]), dtype=x.dtype)
        parts = out.chunk(ways)
        wait_for = _exchange([x] * ways, parts, group)
        parts[dist.get_rank(group_named(group))].copy_(x)
        return partial(_when, wait_for, out)
    shape = (ways * x.shape[0], *x.shape[1:])
    arriving = all_to_all(x.view(-1).repeat(ways), ways, group)
    return lambda: arriving().view(shape)


def scatter(x: torch.Tensor, ways: int, group: str) -> tuple[Arrival, Finish]:
    """(what arrives, how it becomes this rank's part, along dim 0, of the sum over all ranks of a group).
    x: contiguous.

    On the CPU the parts are exchanged and added up here, in the order of the ranks: gloo's own reduce-scatter
    takes as long as its all-reduce, twice as long as this.
    """
    if x.device.type != "cpu":
        return partial(wait, _FUNCTIONAL.reduce_scatter_tensor(x, "sum", ways, group)), as_it_is
    shape = (x.shape[0] // ways, *x.shape[1:])
    if x.nbytes > _FEW:
        rank, parts = dist.get_rank(group_named(group)), x.view(ways, -1)
        got = torch.empty((ways - 1, parts.shape[1]), dtype=x.dtype)
        rows = [*got[:rank], parts[rank], *got[rank:]]
        return partial(_when, _exchange(list(parts), rows, group), got), lambda _: _sum(rows).view(shape)
    return all_to_all(x.view(-1), ways, group), lambda got: got.view(ways, -1).sum(0).view(shape)


def all_reduce(x: torch.Tensor, op: str, ways: int, group: str, own: bool = False) -> tuple[Arrival, Finish]:
    """(what arrives, how it becomes the sum, or another reduction, over all ranks of a group).

    x: contiguous. own: x is nobody else's, and may be overwritten.
    """
    if x.device.type == "cpu" and op == "sum" and ways * x.nbytes <= _TINY:
        arriving = all_to_all(x.view(-1).repeat(ways), ways, group)
        return arriving, lambda got: got.view(ways, *x.shape).sum(0)
    start = _FUNCTIONAL.all_reduce_ if own else _FUNCTIONAL.all_reduce
    return partial(wait, start(x, op, group)), as_it_is


def all_to_all(x: torch.Tensor, ways: int, group: str) -> Arrival:
    """Part k of a flat tensor goes to rank k of a group, and its part comes in that place."""
    counts = [x.numel() // ways] * ways
    return partial(wait, _FUNCTIONAL.all_to_all_single(x, counts, counts, group))


def _exchange(sent: Sequence[torch.Tensor], got: Sequence[torch.Tensor], group: str) -> Callable[[], None]:
    """Sends a tensor to every other rank of a group and receives one from each; waits for them when called.

    sent, got: a tensor per rank, those of this rank unused.
    """
    members, ways = group_named(group), len(sent)
    rank = dist.get_rank(members)
    # each begins with another rank, so that none is the first choice of all
    works = [
        dist.irecv(got[(rank - k) % ways], group=members, group_src=(rank - k) % ways, tag=_TAG)
        for k in range(1, ways)
    ]
    works += [
        dist.isend(sent[(rank + k) % ways], group=members, group_dst=(rank + k) % ways, tag=_TAG)
        for k in range(1, ways)
    ]

    def wait_for() -> None:
        for work in works:
            assert work is not None  # this rank is a member
            work.wait()

    return wait_for


def _when(wait_for: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
    wait_for()
    return tensor


def _sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the order of the ranks, rounded once."""
    dtype = rows[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.add(rows[0].to(wide), rows[1])
    for row in rows[2:]:
        total += row
    return total.to(dtype)
