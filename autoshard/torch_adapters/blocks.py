"""Shards of several blocks, as torch.distributed.checkpoint must see them.

A strided shard of one mesh axis (the part of a fused query-key-value weight that a rank of tp holds) is
several blocks of the tensor. torch takes every shard of a DTensor for one block: it would save blocks that
overlap, and load the wrong elements without an error. What `described` returns tells torch its blocks;
everything else that lies like that has placements (`refusing`) that raise where torch asks for the one block.

The same local parts make torch's GradScaler right, which asks after infinities only where the first gradient
is split.

Leans on ``DTensor._local_tensor``, on its ``__create_write_items__``, ``__create_chunk_list__`` and
``__get_tensor_shard__``, which ask the local tensor first, on ``_StridedShard``, and on
``torch._C._DisableTorchDispatch``. Tried on torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from autoshard.errors import UsageError
from autoshard.ir.placement import chunk

#: ops whose result is the same part of something as their operand, beside those that go element by element
_KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *("detach", "alias", "clone", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like"),
        *("rand_like", "randn_like"),
    )
)
#: of no dimensions, it is what torch copies into when it copies a tensor
_NEW = torch.ops.aten.new_empty.default

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


class BlockShard(_StridedShard):
    """A strided shard that is several blocks; torch gets every answer but where "the" block lies."""

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> Any:
        # torch 2.11 and 2.12 ask for all offsets by the first name, 2.13 by the second
        mode = kwargs.get("offset_mode")
        if kwargs.get("return_first_offset") is False or getattr(mode, "name", "") == "ALL":
            raise UsageError(
                "a tensor whose shard is several blocks is saved, loaded or distributed as if it were one",
                where=repr(self),
                why="the blocks are known of the parameters of a parallel model, their gradients, what "
                "optimizers make of them, and copies of these; not of what was distributed since",
                hint="call set_model_state_dict with full_state_dict=True and without broadcast_from_rank0; "
                "take an optimizer step before its loaded state is saved",
            )
        return super()._local_shard_size_and_offset(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockShard:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return strided, (self.dim, self.split_factor)


def strided(dim: int, split_factor: int) -> _StridedShard:
    """What a file has of a `BlockShard`."""
    return _StridedShard(dim, split_factor=split_factor)


# as torch does for its own placements
torch.serialization.add_safe_globals([strided])


@dataclass(frozen=True)
class ShardBlock:
    """A box of a tensor that a rank holds: where it begins in the tensor and in the local part, its sizes."""

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of it in the local part."""
        return _box(local, self.starts, self.sizes)

    def in_full(self, full: torch.Tensor) -> torch.Tensor:
        """The view of it in the tensor."""
        return _box(full, self.offsets, self.sizes)


def _box(x: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


def blocks_of(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[ShardBlock, ...]:
    """The blocks of this rank's shard, none if it holds nothing."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    return _blocks(tuple(shape), tuple(mesh.shape), tuple(coordinates), tuple(placements))


@dataclass(frozen=True)
class PartOfTensor:
    """What a rank of a mesh has of a tensor."""

    shape: tuple[int, ...]
    blocks: tuple[ShardBlock, ...]

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    def read(self, full: torch.Tensor) -> torch.Tensor:
        """The part of a full tensor."""
        part = full.new_empty(self.shape)
        for block in self.blocks:
            block.of(part).copy_(block.in_full(full))
        return part

    def write(self, full: torch.Tensor, part: torch.Tensor) -> None:
        """Put the part into a full tensor."""
        for block in self.blocks:
            block.in_full(full).copy_(block.of(part))


def all_of(shape: Sequence[int]) -> PartOfTensor:
    """Of a tensor that nobody divides."""
    block = ShardBlock((0,) * len(shape), (0,) * len(shape), tuple(shape))
    return PartOfTensor(tuple(shape), (block,))


def part_at(
    shape: Sequence[int], ways: Sequence[int], placements: Sequence[Placement], place: Sequence[int]
) -> PartOfTensor:
    """What the rank at a place of a mesh has of a tensor. ways: sizes of the mesh."""
    blocks = _blocks(tuple(shape), tuple(ways), tuple(place), tuple(placements))
    ends = [max((b.starts[dim] + b.sizes[dim] for b in blocks), default=0) for dim in range(len(shape))]
    return PartOfTensor(tuple(ends), blocks)


@functools.lru_cache(maxsize=4096)
def _blocks(
    shape: tuple[int, ...], ways: tuple[int, ...], place: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[ShardBlock, ...]:
    runs = []
    for dim, size in enumerate(shape):
        index = torch.arange(size)
        for placed, parts, part in zip(placements, ways, place, strict=True):
            if isinstance(placed, (Shard, _StridedShard)) and placed.dim == dim:
                index = _cut(index, placed, parts, part)
        runs.append(_runs(index.tolist()))
    boxes = itertools.product(*runs)
    return tuple(ShardBlock(*(tuple(dim[k] for dim in box) for k in range(3))) for box in boxes)


def _cut(index: torch.Tensor, placed: Any, ways: int, place: int) -> torch.Tensor:
    """The elements of a rank, in the order in which it has them."""
    outer = int(placed.split_factor) if isinstance(placed, _StridedShard) else 1
    blocks = (index.narrow(0, *chunk(len(index), outer, k)) for k in range(outer))
    return torch.cat([block.narrow(0, *chunk(len(block), ways, place)) for block in blocks])


def _runs(index: list[int]) -> list[tuple[int, int, int]]:
    """(first of the tensor, first of the part, count) of what follows one another."""
    result: list[tuple[int, int, int]] = []
    for place, element in enumerate(index):
        if result and element == result[-1][0] + result[-1][2]:
            result[-1] = (*result[-1][:2], result[-1][2] + 1)
        else:
            result.append((element, place, 1))
    return result


def refusing(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Placement]:
    """The same placements, which raise where torch would take a shard of several blocks for one."""
    if not any(isinstance(p, _StridedShard) for p in placements) or mesh.get_coordinate() is None:
        return list(placements)
    if len(blocks_of(shape, mesh, placements)) < 2:
        return list(placements)
    return [
        BlockShard(p.dim, split_factor=p.split_factor) if isinstance(p, _StridedShard) else p
        for p in placements
    ]


@dataclass(frozen=True)
class LocalPart:
    """What a local part is of its tensor: whole and local are the shapes of both.

    agree: makes what a rank has found in gradients, infinities, known to all that have a part of the model;
    None where torch, which asks the ranks that share the first gradient, does so.
    """

    whole: torch.Size
    local: torch.Size
    blocks: tuple[ShardBlock, ...]
    agree: Callable[[torch.Tensor], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalPart:
        return self


class BlockTensor(torch.Tensor):
    """The local part of a DTensor that knows what it is a part of.

    Copies and what is made of it element by element know the same, results of other operations are plain.
    """

    _part: LocalPart
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own class methods are typed as instance methods
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            out = func(*args, **(kwargs or {}))
        if func in _KEPT or func is _NEW or torch.Tag.pointwise in func.tags:
            source = next((x for x in args if isinstance(x, BlockTensor)), None)
            if source is not None and type(out) is torch.Tensor:
                alike = not out.dim() if func is _NEW else out.shape == source.shape
                return _with_part(out, source._part) if alike else out
        elif func is _UNSCALE:
            agree = next((x._part.agree for x in args[0] if isinstance(x, BlockTensor)), None)
            if agree is not None:
                agree(args[1])
        return out

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes the text of its elements as well
        return repr(plain_local(self))

    def tolist(self) -> Any:
        return plain_local(self).tolist()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        assert self.shape == self._part.local, "not the part that it was a copy of"
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self._part.blocks]

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(plain_local(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._part.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        block = next(b for b in self._part.blocks if torch.Size(b.offsets) == index.offset)
        return block.of(plain_local(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain_local(self).__reduce_ex__(protocol)


def _with_part(local: torch.Tensor, part: LocalPart) -> BlockTensor:
    new: BlockTensor = torch.Tensor._make_subclass(BlockTensor, local)
    new._part = part
    return new


def plain_local(local: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, without gradients."""
    # most are: an optimizer asks for five of every parameter
    if type(local) is torch.Tensor and not local.requires_grad:
        return local
    with torch._C._DisableTorchDispatch():
        return local.detach()


def part_of(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return x._local_tensor if isinstance(x, DTensor) else x


def described(x: DTensor) -> DTensor:
    """A DTensor in the same memory that knows its blocks, where `refusing` has found several; else x."""
    if is_described(x) or not any(isinstance(p, BlockShard) for p in x.placements):
        return x
    return _told(x, None)


def agreeing(x: DTensor, agree: Callable[[torch.Tensor], None]) -> DTensor:
    """A gradient in the same memory by which torch's GradScaler finds what `LocalPart` says."""
    return _told(x, agree)


def _told(x: DTensor, agree: Callable[[torch.Tensor], None] | None) -> DTensor:
    local = plain_local(x._local_tensor)
    part = LocalPart(x.shape, local.shape, blocks_of(x.shape, x.device_mesh, x.placements), agree)
    return DTensor(_with_part(local, part), x._spec, requires_grad=False)


def is_described(x: Any) -> TypeGuard[DTensor]:
    """Whether something is a DTensor that knows its blocks."""
    return isinstance(x, DTensor) and isinstance(x._local_tensor, BlockTensor)
