"""Muon on sharded matrices: each is put together on one rank, orthogonalised there, and sent back in parts.

Momentum and updates are made on shards. Only what is orthogonalised needs the matrix: bfloat16, to one rank
and back, where gathering sends it to all and makes all compute the same. What replicas have is only sent
back; experts that are divided by number, and have no replicas, are not sent at all.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
for LLM training", 2502.16982 (scale of updates).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.cost.orthogonal import iteration_flop
from autoshard.errors import UsageError, nearest
from autoshard.runtime.optim.optimizer_hooks import local, loss_of
from autoshard.torch_adapters.blocks import PartOfTensor, all_of, part_at
from autoshard.torch_adapters.dtensor import dtensor_as
from autoshard.torch_adapters.groups import group_over

#: bytes of matrices that are under way together
_ROUND_BYTES = 256 << 20
_SCALES = ("original", "match_rms_adamw")


class Muon(torch.optim.Muon):
    """torch's Muon, for parameters that are sharded over any axes of a DeviceMesh.

    Its state is that of torch.optim.Muon, so that checkpoints of either are those of the other. Arguments
    that are not told here are torch's.

    Args:
        params: matrices, or batches of them ([experts, rows, columns]); others take another optimizer.

    Raises:
        UsageError: a parameter has one dim or more than three, or `adjust_lr_fn` is not known.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if adjust_lr_fn is not None and adjust_lr_fn not in _SCALES:
            raise UsageError(f"Muon knows no {adjust_lr_fn!r}", hint=nearest(adjust_lr_fn, _SCALES))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # not torch's Muon's: it refuses batches of matrices
        torch.optim.Optimizer.__init__(self, params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() not in (2, 3):
                    raise UsageError(
                        f"Muon is given a parameter of shape {list(p.shape)}",
                        why="it orthogonalises matrices",
                        hint="give norms and biases, and by custom embeddings and heads, to AdamW",
                    )
        self._shared_matrices = _SharedMatrices()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._shared_matrices = _SharedMatrices()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure does. Collective over the ranks that share parameters."""
        loss = loss_of(closure)
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            updates = [self._update(p, group) for p in given]

            def orthogonal(x: torch.Tensor, group: dict[str, Any] = group) -> torch.Tensor:
                return newton_schulz(x, group["ns_coefficients"], group["ns_steps"], group["eps"])

            for number, update in self._shared_matrices.orthogonalised(given, updates, orthogonal):
                mine, scale = local(given[number]), _scale(given[number].shape, group["adjust_lr_fn"])
                mine.mul_(1 - group["lr"] * group["weight_decay"])
                mine.add_(update.view(mine.shape), alpha=-group["lr"] * scale)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of what is orthogonalised, in bfloat16."""
        assert p.grad is not None
        gradient, state = local(p.grad), self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = dtensor_as(p, torch.zeros_like(gradient))
        buffer = local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.bfloat16()


def _scale(shape: Sequence[int], how: str | None) -> float:
    """What makes updates of all shapes alike in size."""
    rows, columns = shape[-2:]
    if how == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))


def newton_schulz(
    x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """The nearest orthogonal matrix, about: singular values come to lie around 1. x: [..., rows, columns] in
    bfloat16."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class _Shared:
    """A matrix of several ranks. parts: of every rank of the group; copies: which copy of the matrix that is
    of. among: the mesh and its axes that they are over. number: of its parameter in a step."""

    among: tuple[DeviceMesh, tuple[int, ...]]
    shape: tuple[int, ...]
    parts: tuple[PartOfTensor, ...]
    copies: tuple[tuple[int, ...], ...]
    number: int = -1

    @property
    def flop(self) -> int:
        """Of an iteration."""
        return iteration_flop(self.shape)

    def sent(self, rank: int, owner: int) -> int:
        """Elements that a rank sends to the owner: those of its copy come from others."""
        return self.parts[rank].numel if self.copies[rank] == self.copies[owner] else 0


class _SharedMatrices:
    """Which ranks share which matrices: worked out once."""

    def __init__(self) -> None:
        self._matrices: dict[torch.Tensor, _Shared | None] = {}
        self._groups: dict[tuple[DeviceMesh, tuple[int, ...]], dist.ProcessGroup] = {}

    def orthogonalised(
        self,
        params: Sequence[torch.Tensor],
        updates: Sequence[torch.Tensor],
        orthogonal: Callable[[torch.Tensor], torch.Tensor],
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's parts of all updates once orthogonal, and the parameters' numbers. Collective."""
        shared: dict[tuple[DeviceMesh, tuple[int, ...]], list[_Shared]] = defaultdict(list)
        for number, p in enumerate(params):
            if p not in self._matrices:
                self._matrices[p] = _shared(p)
            matrix = self._matrices[p]
            if matrix is None:
                yield number, orthogonal(updates[number])
            else:
                shared[matrix.among].append(replace(matrix, number=number))
        for among, matrices in shared.items():
            if among not in self._groups:
                self._groups[among] = group_over(*among)
            yield from _exchanged(self._groups[among], matrices, updates, orthogonal)


def _shared(p: torch.Tensor) -> _Shared | None:
    """What every rank that has a part or a copy of a parameter's matrices has, in their order; None if this
    rank has them to itself."""
    if not isinstance(p, DTensor):
        return None
    mesh, place = p.device_mesh, p.device_mesh.get_coordinate()
    assert place is not None
    # the dim that each mesh axis divides, None for replicas
    dims = {k: getattr(x, "dim", None) for k, x in enumerate(p.placements) if mesh.size(k) > 1}
    divided = any(dim is not None and dim >= p.dim() - 2 for dim in dims.values())
    axes = tuple(k for k, dim in dims.items() if divided or dim is None)
    parts, copies = [], []
    for k in range(prod(mesh.size(axis) for axis in axes)):
        there = list(place)
        for axis in reversed(axes):
            k, there[axis] = divmod(k, mesh.size(axis))
        parts.append(part_at(p.shape, mesh.shape, p.placements, there))
        copies.append(tuple(there[axis] for axis in axes if dims[axis] is None))
    if divided:
        return _Shared((mesh, axes), tuple(p.shape), tuple(parts), tuple(copies))
    mine = tuple(local(p).shape)  # replicas of experts: theirs is all of it
    return _Shared((mesh, axes), mine, (all_of(mine),) * len(parts), tuple(copies)) if axes else None


def _exchanged(
    group: dist.ProcessGroup,
    matrices: Sequence[_Shared],
    updates: Sequence[torch.Tensor],
    orthogonal: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rounds of matrices, each to its owner and back; the next one comes while one is computed."""
    ways, me = dist.get_world_size(group), dist.get_rank(group)
    rounds = [_owned(some, ways) for some in _rounds(matrices, ways)]
    coming = _to_owners(group, rounds[0], updates)
    going: list[tuple[list[list[_Shared]], torch.Tensor, Any]] = []
    for number, owned in enumerate(rounds):
        arrived, work = coming
        if number + 1 < len(rounds):
            coming = _to_owners(group, rounds[number + 1], updates)
        work.wait()
        results = [orthogonal(full) for full in _joined(arrived, owned[me], me, ways)]
        going.append((owned, *_to_parts(group, owned, results, arrived[:0], me)))
    for owned, parts, work in going:
        work.wait()
        sizes = [matrix.parts[me].numel for each in owned for matrix in each]
        for matrix, flat in zip((m for each in owned for m in each), parts.split(sizes), strict=True):
            yield matrix.number, flat.view(matrix.parts[me].shape)


def _rounds(matrices: Sequence[_Shared], ways: int) -> Iterator[list[_Shared]]:
    """As many matrices as ranks can share, in as few bytes as that takes."""
    some: list[_Shared] = []
    nbytes = 0
    for matrix in sorted(matrices, key=lambda m: (-m.flop, m.number)):
        some.append(matrix)
        nbytes += 2 * prod(matrix.shape)
        if len(some) >= ways and nbytes >= _ROUND_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _owned(matrices: Sequence[_Shared], ways: int) -> list[list[_Shared]]:
    """The matrices of each rank: the longest first, always to the rank that has least to do."""
    owned: list[list[_Shared]] = [[] for _ in range(ways)]
    load = [0] * ways
    for matrix in matrices:
        rank = min(range(ways), key=load.__getitem__)
        owned[rank].append(matrix)
        load[rank] += matrix.flop
    return owned


def _all_to_all(
    group: dist.ProcessGroup, sent: list[torch.Tensor], received: list[int]
) -> tuple[torch.Tensor, Any]:
    """Parts of bfloat16 to all ranks. received: elements of each."""
    out = torch.empty(sum(received), dtype=torch.bfloat16, device=sent[0].device)
    # as bytes: gloo knows fewer types
    work = dist.all_to_all_single(
        out.view(torch.uint8),
        torch.cat(sent).view(torch.uint8),
        [2 * n for n in received],
        [2 * len(x) for x in sent],
        group=group,
        async_op=True,
    )
    return out, work


def _to_owners(
    group: dist.ProcessGroup, owned: list[list[_Shared]], updates: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Any]:
    me = dist.get_rank(group)
    nothing = updates[0].new_empty(0)
    sent = [
        torch.cat([nothing, *(updates[m.number].reshape(-1) for m in each if m.sent(me, owner))])
        for owner, each in enumerate(owned)
    ]
    received = [sum(m.sent(k, me) for m in owned[me]) for k in range(len(owned))]
    return _all_to_all(group, sent, received)


def _joined(arrived: torch.Tensor, mine: list[_Shared], me: int, ways: int) -> Iterator[torch.Tensor]:
    """The matrices of this rank, of the parts of one copy."""
    given = [(k, m) for k in range(ways) for m in mine if m.sent(k, me)]
    flats = arrived.split([m.sent(k, me) for k, m in given])
    full = {m.number: arrived.new_empty(m.shape) for m in mine}
    for (k, m), flat in zip(given, flats, strict=True):
        m.parts[k].write(full[m.number], flat.view(m.parts[k].shape))
    return iter(full.values())


def _to_parts(
    group: dist.ProcessGroup,
    owned: list[list[_Shared]],
    results: list[torch.Tensor],
    nothing: torch.Tensor,
    me: int,
) -> tuple[torch.Tensor, Any]:
    sent = [
        torch.cat(
            [nothing, *(m.parts[k].read(x).reshape(-1) for m, x in zip(owned[me], results, strict=True))]
        )
        for k in range(len(owned))
    ]
    received = [sum(m.parts[me].numel for m in each) for each in owned]
    return _all_to_all(group, sent, received)
