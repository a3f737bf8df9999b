"""Tensors of several ranks, each put together at one of them, its owner, and sent back in parts.

For optimizers that need matrices where ranks have parts of them: gathering would send a matrix to all ranks
and make all compute the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.torch_adapters.blocks import PartOfTensor, all_of, part_at
from autoshard.torch_adapters.groups import group_over

#: bytes of matrices that are under way together
_ROUND_BYTES = 256 << 20

#: a mesh and its axes that ranks which share a tensor are over
Among: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]
#: makes of a parameter's number, and of all of what was sent of it, what is sent back; of the last one's type
Compute: TypeAlias = Callable[[int, list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class SharedTensor:
    """A tensor of several ranks. parts: of every rank of the group; copies: which copy of the tensor that is
    of. me: this rank's number in the group. cost: of what the owner computes, in any unit. owner: its number
    in the group, None to decide by the step. number: of its parameter in a step."""

    among: Among
    shape: tuple[int, ...]
    parts: tuple[PartOfTensor, ...]
    copies: tuple[tuple[int, ...], ...]
    me: int
    cost: int
    owner: int | None = None
    number: int = -1

    def sent(self, rank: int, owner: int) -> int:
        """Elements that a rank sends to the owner: those of its copy come from others."""
        return self.parts[rank].numel if self.copies[rank] == self.copies[owner] else 0


class SharedTensors:
    """Which ranks share which parameters: worked out once.

    Args:
        cost: of what an owner computes for a shape, in any unit.
        batched: whether tensors of three dims are batches of matrices, which may stay divided by number.
    """

    def __init__(self, cost: Callable[[Sequence[int]], int], *, batched: bool) -> None:
        self._cost, self._batched = cost, batched
        self._tensors: dict[torch.Tensor, SharedTensor | None] = {}
        self._load: dict[Among, list[int]] = {}
        self._groups: dict[Among, dist.ProcessGroup] = {}

    def of(self, p: torch.Tensor) -> SharedTensor | None:
        """What ranks have of a parameter; None if this rank has it to itself."""
        if p not in self._tensors:
            self._tensors[p] = _shared(p, self._cost, self._batched)
        return self._tensors[p]

    def is_divided(self, p: torch.Tensor) -> bool:
        """Whether an owner has some matrices of a batch, and others have the rest."""
        if not isinstance(p, DTensor):
            return False
        tensor = self.of(p)
        axes = () if tensor is None else tensor.among[1]
        sharded = (k for k, x in enumerate(p.placements) if getattr(x, "dim", None) is not None)
        return any(k not in axes and p.device_mesh.size(k) > 1 for k in sharded)

    def assign_owners(self, params: Iterable[torch.Tensor]) -> None:
        """Decide, for all steps, owners of parameters that have none: the same on all ranks that share them.

        params: in the same order on these.
        """
        among: dict[Among, list[tuple[torch.Tensor, SharedTensor]]] = defaultdict(list)
        for p in params:
            tensor = self.of(p)
            if tensor is not None and tensor.owner is None:
                among[tensor.among].append((p, tensor))
        for key, pairs in among.items():
            load = self._load.setdefault(key, [0] * len(pairs[0][1].parts))
            for p, tensor in sorted(pairs, key=lambda pair: -pair[1].cost):
                self._tensors[p] = replace(tensor, owner=_assign(load, tensor))

    def computed(
        self, params: Sequence[torch.Tensor], values: Sequence[Sequence[torch.Tensor]], compute: Compute
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's parts of what is computed for all parameters, and their numbers. Collective.

        values: of each parameter this rank's parts of what the owner is sent, in their types.
        """
        shared: dict[Among, list[SharedTensor]] = defaultdict(list)
        for number, p in enumerate(params):
            tensor = self.of(p)
            if tensor is None:
                yield number, compute(number, list(values[number]))
            else:
                shared[tensor.among].append(replace(tensor, number=number))
        for among, tensors in shared.items():
            if among not in self._groups:
                self._groups[among] = group_over(*among)
            yield from _exchanged(self._groups[among], tensors, values, compute)


def _shared(p: torch.Tensor, cost: Callable[[Sequence[int]], int], batched: bool) -> SharedTensor | None:
    """What every rank that has a part or a copy of a parameter has, in their order; None if this rank has it
    to itself."""
    if not isinstance(p, DTensor):
        return None
    mesh, place = p.device_mesh, p.device_mesh.get_coordinate()
    assert place is not None
    # the dim that each mesh axis divides, None for replicas
    dims = {k: getattr(x, "dim", None) for k, x in enumerate(p.placements) if mesh.size(k) > 1}
    first = p.dim() - 2 if batched else 0
    divided = any(dim is not None and dim >= first for dim in dims.values())
    axes = tuple(k for k, dim in dims.items() if divided or dim is None)
    if not axes:
        return None
    places = []
    for k in range(prod(mesh.size(axis) for axis in axes)):
        there = list(place)
        for axis in reversed(axes):
            k, there[axis] = divmod(k, mesh.size(axis))
        places.append(there)
    # a group counts its ranks by their numbers in the world, whatever the order of the mesh
    ranks = mesh.mesh
    places.sort(key=lambda there: int(ranks[tuple(there)]))
    copies = tuple(tuple(there[axis] for axis in axes if dims[axis] is None) for there in places)
    me = places.index(list(place))
    if divided:
        parts = tuple(part_at(p.shape, mesh.shape, p.placements, there) for there in places)
        return SharedTensor((mesh, axes), tuple(p.shape), parts, copies, me, cost(p.shape))
    mine = tuple(local(p).shape)  # replicas of all of it, or of the same matrices of a batch
    return SharedTensor((mesh, axes), mine, (all_of(mine),) * len(places), copies, me, cost(mine))


def _exchanged(
    group: dist.ProcessGroup,
    tensors: Sequence[SharedTensor],
    values: Sequence[Sequence[torch.Tensor]],
    compute: Compute,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Rounds of tensors, each to its owner and back; the next one comes while one is computed."""
    ways, me = dist.get_world_size(group), dist.get_rank(group)
    rounds = [_owned(some, ways) for some in _rounds(tensors, values, ways)]
    coming = _to_owners(group, rounds[0], values)
    going: tuple[list[list[SharedTensor]], torch.Tensor, Any] | None = None
    for number, owned in enumerate(rounds):
        arrived, work = coming
        if number + 1 < len(rounds):
            coming = _to_owners(group, rounds[number + 1], values)
        work.wait()
        full = _joined(arrived, owned[me], values, me, ways)
        results = [compute(tensor.number, full.pop(tensor.number)) for tensor in owned[me]]
        sent = (owned, *_to_parts(group, owned, values, results, arrived[:0]))
        del results
        if going is not None:
            yield from _back(*going, values, me)
        going = sent
    assert going is not None
    yield from _back(*going, values, me)


def _rounds(
    tensors: Sequence[SharedTensor], values: Sequence[Sequence[torch.Tensor]], ways: int
) -> Iterator[list[SharedTensor]]:
    """As many tensors as ranks can share, in as few bytes as that takes."""
    some: list[SharedTensor] = []
    nbytes = 0
    for tensor in sorted(tensors, key=lambda t: (-t.cost, t.number)):
        some.append(tensor)
        nbytes += _width(values[tensor.number]) * prod(tensor.shape)
        if len(some) >= ways and nbytes >= _ROUND_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def _owned(tensors: Sequence[SharedTensor], ways: int) -> list[list[SharedTensor]]:
    """The tensors of each rank; of those without an owner the longest first, always to the rank that has
    least to do."""
    owned: list[list[SharedTensor]] = [[] for _ in range(ways)]
    load = [0] * ways
    for tensor in tensors:
        owned[_assign(load, tensor)].append(tensor)
    return owned


def _assign(load: list[int], tensor: SharedTensor) -> int:
    """The owner of a tensor, whose cost is added to what that rank has to do."""
    rank = min(range(len(load)), key=load.__getitem__) if tensor.owner is None else tensor.owner
    load[rank] += tensor.cost
    return rank


def _all_to_all(
    group: dist.ProcessGroup, sent: list[list[torch.Tensor]], received: list[int], empty: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Tensors to all ranks, as bytes: gloo knows few types. received: bytes of each. empty: a
    tensor of no bytes on the device."""
    out = empty.new_empty(sum(received))
    flats = [[x.reshape(-1).view(torch.uint8) for x in each] for each in sent]
    work = dist.all_to_all_single(
        out,
        torch.cat([empty, *(x for each in flats for x in each)]),
        received,
        [sum(map(len, each)) for each in flats],
        group=group,
        async_op=True,
    )
    return out, work


def _to_owners(
    group: dist.ProcessGroup, owned: list[list[SharedTensor]], values: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, Any]:
    me = dist.get_rank(group)
    sent = [
        [x for t in each if t.sent(me, owner) for x in values[t.number]] for owner, each in enumerate(owned)
    ]
    received = [sum(t.sent(k, me) * _width(values[t.number]) for t in owned[me]) for k in range(len(owned))]
    empty = torch.empty(0, dtype=torch.uint8, device=values[0][0].device)
    return _all_to_all(group, sent, received, empty)


def _joined(
    arrived: torch.Tensor,
    mine: list[SharedTensor],
    values: Sequence[Sequence[torch.Tensor]],
    me: int,
    ways: int,
) -> dict[int, list[torch.Tensor]]:
    """All of what was sent of the tensors of this rank, by their numbers, of the parts of one copy."""
    full = {
        t.number: [torch.empty(t.shape, dtype=x.dtype, device=arrived.device) for x in values[t.number]]
        for t in mine
    }
    given = [(t.parts[k], x) for k in range(ways) for t in mine if t.sent(k, me) for x in full[t.number]]
    flats = arrived.split([part.numel * x.element_size() for part, x in given])
    for (part, x), flat in zip(given, flats, strict=True):
        part.write(x, _typed(flat, x.dtype).view(part.shape))
    return full


def _to_parts(
    group: dist.ProcessGroup,
    owned: list[list[SharedTensor]],
    values: Sequence[Sequence[torch.Tensor]],
    results: list[torch.Tensor],
    empty: torch.Tensor,
) -> tuple[torch.Tensor, Any]:
    me = dist.get_rank(group)
    sent = [[t.parts[k].read(x) for t, x in zip(owned[me], results, strict=True)] for k in range(len(owned))]
    received = [sum(t.parts[me].numel * _width(values[t.number][-1:]) for t in each) for each in owned]
    return _all_to_all(group, sent, received, empty)


def _back(
    owned: list[list[SharedTensor]],
    arrived: torch.Tensor,
    work: Any,
    values: Sequence[Sequence[torch.Tensor]],
    me: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's parts of a round that was computed."""
    work.wait()
    tensors = [t for each in owned for t in each]
    sizes = [t.parts[me].numel * _width(values[t.number][-1:]) for t in tensors]
    for t, flat in zip(tensors, arrived.split(sizes), strict=True):
        yield t.number, _typed(flat, values[t.number][-1].dtype).view(t.parts[me].shape)


def _width(values: Sequence[torch.Tensor]) -> int:
    """Bytes of an element of each."""
    return sum(x.element_size() for x in values)


def _typed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as what they are of; where tensors of several types lie, they may have to be moved for that."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)
