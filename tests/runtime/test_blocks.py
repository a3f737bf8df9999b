"""Shards of several blocks: what checkpoints are told of them, and where they are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import UsageError
from autoshard.torch_adapters.blocks import BlockTensor, blocks_of, described, is_described, refusing

WHOLE = torch.arange(4.0 * 24).view(4, 24)
COLUMNS = torch.tensor([k for k in range(24) if k % 8 >= 4])


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """The second of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


def made(mesh: DeviceMesh, placements: Sequence[Placement], local: torch.Tensor) -> DTensor:
    placed = refusing(WHOLE.shape, mesh, placements)
    size, stride = WHOLE.shape, WHOLE.stride()
    return DTensor.from_local(local.clone(), mesh, placed, run_check=False, shape=size, stride=stride)


@pytest.fixture
def fused(mesh: DeviceMesh) -> DTensor:
    """The second half of each of three parts of eight columns."""
    return described(made(mesh, [Replicate(), strided(1, 3)], WHOLE[:, COLUMNS]))


@pytest.mark.parametrize(
    ("placements", "count"),
    [
        ([Replicate(), strided(1, 3)], 3),
        ([Shard(0), strided(1, 3)], 3),
        ([Shard(1), strided(1, 3)], 3),
        ([strided(1, 2), Shard(1)], 1),
        ([strided(1, 12), Replicate()], 12),
        ([strided(1, 6), strided(1, 3)], 3),
        ([strided(0, 2), strided(1, 3)], 6),
    ],
)
def test_blocks_are_what_torch_puts_on_a_rank(
    mesh: DeviceMesh, placements: list[Placement], count: int
) -> None:
    local = WHOLE
    for axis, placed in enumerate(placements):
        if not placed.is_replicate():
            pieces, _ = placed._split_tensor(local, 2, with_padding=False, contiguous=True)  # type: ignore[attr-defined]
            local = pieces[mesh.get_local_rank(axis)]
    blocks = blocks_of(WHOLE.shape, mesh, placements)
    assert len(blocks) == count
    for block in blocks:
        there = WHOLE
        for dim, (start, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            there = there.narrow(dim, start, size)
        assert torch.equal(block.of(local), there)
    assert sum(block.of(local).numel() for block in blocks) == local.numel()
    assert is_described(described(made(mesh, placements, local))) == (count > 1)


def test_checkpoints_are_told_the_blocks(fused: DTensor) -> None:
    chunks = fused.__create_chunk_list__()
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [
        ((0, 4 + 8 * k), (4, 4)) for k in range(3)
    ]
    items = fused.__create_write_items__("w", fused)
    assert [i.tensor_data.chunk for i in items] == chunks and items[0].tensor_data.size == WHOLE.shape
    with torch.no_grad():
        fused.__get_tensor_shard__(MetadataIndex("w", torch.Size((0, 12)))).fill_(-1.0)
    assert (fused.to_local()[:, 4:8] == -1.0).all() and fused.to_local().min() == -1.0


def test_copies_know_their_blocks(fused: DTensor) -> None:
    parameter = torch.nn.Parameter(fused)
    assert type(parameter.data) is DTensor and type(parameter.to_local()) is torch.Tensor
    copies: tuple[Any, ...] = (
        *(parameter.detach(), parameter.detach().clone(), copy.deepcopy(parameter), fused.double()),
        *(torch.zeros_like(parameter), torch.ones_like(fused), 0.5 * fused + fused, fused.to("cpu")),
    )
    for found in copies:
        assert len(found.__create_chunk_list__()) == 3
    for other in (fused.new_zeros(4, 12), fused.new_empty(4, 12), fused.t()):
        assert not is_described(other)
    assert not torch.equal(copies[2].to_local(), (0.5 * fused).to_local())


def test_they_are_printed(fused: DTensor) -> None:
    """Though torch knows no elements of subclasses."""
    assert str(WHOLE[:, COLUMNS]) in str(fused)
    assert fused._local_tensor.tolist() == WHOLE[:, COLUMNS].tolist()
    assert str(fused._local_tensor) == str(WHOLE[:, COLUMNS])


def test_what_nobody_has_told_is_refused(mesh: DeviceMesh, fused: DTensor) -> None:
    plain = made(mesh, fused.placements, torch.zeros(4, 12))
    assert plain.placements == fused.placements
    for call in (plain.__create_chunk_list__, lambda: plain.__create_write_items__("w", plain)):
        with pytest.raises(UsageError, match="several blocks"):
            call()


def test_files_have_plain_dtensors(fused: DTensor) -> None:
    file = io.BytesIO()
    torch.save({"w": fused}, file)
    file.seek(0)
    back = torch.load(file, weights_only=True)["w"]
    assert type(back) is DTensor and not isinstance(back._local_tensor, BlockTensor)
    assert back.placements == fused.placements and torch.equal(back.to_local(), fused.to_local())
