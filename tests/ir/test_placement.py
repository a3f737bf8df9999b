"""Placements: shards partition what they split, sizes and offsets agree with them, and with torch."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.ir import TensorType
from autoshard.ir.local_bytes import held_bytes, held_numel, held_shape
from autoshard.ir.placement import (
    Layout,
    Partial,
    R,
    Replicate,
    Shard,
    chunk,
    dims_compatible,
    is_even,
    is_part_in_one_piece,
    layout_ok,
    local_extent,
    local_outer,
    local_shape,
    parse_placement,
    shard_of_digit,
    shards_of_dim,
)
from autoshard.kernels.vocab_ce import merge_stats
from autoshard.runtime.shard_utils import join_parts, reduce_parts, shard_tensor, take_part

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 18, 20, 24, 30, 32, 36, 40, 48, 60, 64, 72, 96]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[tuple[Shard, int]]]:
    """A size and one to three ways to split it, legal or not."""
    size = draw(st.sampled_from(SIZES))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        outer = draw(st.sampled_from(divisors(size)))
        inner = draw(st.sampled_from([1, 1, *divisors(size // outer)]))
        if outer % 2 == 0 and draw(st.booleans()):
            outer, inner = -outer, 1
        found.append((Shard(0, outer, inner), draw(st.integers(1, 4))))
    return size, found


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, tuple[int, ...]]:
    """A shape, a layout and the mesh it is meant for, legal or not."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    layout: list[Replicate | Shard] = []
    for ways in sizes:
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim < 0:
            layout.append(R)
            continue
        outer = draw(st.sampled_from(divisors(shape[dim])))
        middle = draw(st.sampled_from(divisors(shape[dim] // outer)))
        outer = draw(st.sampled_from([outer, -outer]))
        layout.append(shard_of_digit(shape[dim], dim, outer, middle, ways) or R)
    return shape, tuple(layout), sizes


def every_rank(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*(range(n) for n in sizes)))


def held(size: int, shards: list[tuple[Shard, int]]) -> list[torch.Tensor]:
    """The global indices of every rank, by the definition that the runtime uses."""
    layout, sizes = tuple(s for s, _ in shards), tuple(w for _, w in shards)
    return [shard_tensor(torch.arange(size), layout, sizes, c) for c in every_rank(sizes)]


@given(splits())
@settings(max_examples=600)
def test_shards_of_one_dim_partition_it(case: tuple[int, list[tuple[Shard, int]]]) -> None:
    size, shards = case
    assume(dims_compatible(size, shards))
    parts = held(size, shards)
    assert all(len(p) for p in parts), "a rank holds nothing"
    assert torch.cat(parts).sort().values.tolist() == list(range(size))
    for part, coords in zip(parts, every_rank(tuple(w for _, w in shards)), strict=True):
        extent = local_extent(size, [(s, w, c) for (s, w), c in zip(shards, coords, strict=True)])
        assert extent == (int(part[0]), len(part))
        assert int(part.min()) == extent[0]


@given(tensors())
@settings(max_examples=300)
def test_layouts_of_a_tensor(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    """Every element is held once per replica group, in shards of the promised shape."""
    shape, layout, sizes = case
    assume(layout_ok(shape, layout, sizes))
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    count = torch.zeros(index.numel(), dtype=torch.int64)
    for coords in every_rank(sizes):
        part = shard_tensor(index, layout, sizes, coords)
        assert tuple(part.shape) == local_shape(shape, layout, sizes, coords)
        assert part.numel() > 0
        count[part.reshape(-1)] += 1
        first = [local_extent(n, shards_of_dim(layout, d, sizes, coords))[0] for d, n in enumerate(shape)]
        assert int(index[tuple(first)]) == int(part.reshape(-1)[0])
    replicas = torch.Size(w for p, w in zip(layout, sizes, strict=True) if p == R).numel()
    assert count.tolist() == [replicas] * index.numel()


@given(tensors())
@settings(max_examples=300)
def test_no_rank_holds_more_than_the_first(case: tuple[tuple[int, ...], Layout, tuple[int, ...]]) -> None:
    shape, layout, sizes = case
    assume(layout_ok(shape, layout, sizes))
    everywhere = [local_shape(shape, layout, sizes, coords) for coords in every_rank(sizes)]
    assert held_shape(shape, layout, sizes) == everywhere[0] == tuple(map(max, *everywhere, everywhere[0]))
    assert held_numel(shape, layout, sizes) == max(map(prod, everywhere))
    assert held_bytes(TensorType(shape, "bf16"), layout, sizes) == 2 * max(map(prod, everywhere))


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_plain_shards_of_one_dim_may_nest_if_all_but_the_last_are_even(size: int, ways: list[int]) -> None:
    left = size
    for w in ways[:-1]:
        left = left // w if left % w == 0 else 0
    wanted = left > 0 and chunk(left, ways[-1], ways[-1] - 1)[1] > 0
    assert dims_compatible(size, [(Shard(0), w) for w in ways]) == wanted


@pytest.mark.parametrize("size", [8, 12, 16, 24, 36])
def test_pairs_of_even_splits_go_together_if_their_parts_do_not_overlap(size: int) -> None:
    pairs = [(Shard(0, o), w) for o in divisors(size) for w in (2, 3, 4) if is_even(size, Shard(0, o), w)]
    for first, second in product(pairs, pairs):
        (a, ways), (b, _) = sorted((first, second), key=lambda x: x[0].outer)
        if a.outer == b.outer:
            left = size // a.outer // first[1]
            wanted = chunk(left, second[1], second[1] - 1)[1] > 0
        else:
            wanted = b.outer % (a.outer * ways) == 0
        assert dims_compatible(size, [first, second]) == wanted, (first, second)


@pytest.mark.parametrize(
    ("size", "shards"),
    [
        (3, [(Shard(0), 2), (Shard(0), 2)]),  # 3 -> 2, 1 -> the last rank holds nothing
        (5, [(Shard(0), 2), (Shard(0), 2)]),  # an uneven split may not be split again
        (5, [(Shard(0), 4)]),  # 2, 2, 1, 0
        (3, [(Shard(0), 4)]),
        (8, [(Shard(0), 4), (Shard(0, outer=2), 2)]),  # 4 ways reach into the part below 2
        (8, [(Shard(0, outer=2), 2), (Shard(0), 4)]),
        (20, [(Shard(0, outer=5), 2), (Shard(0, inner=4), 2)]),  # uneven, and not the innermost
        (20, [(Shard(0, inner=4), 2), (Shard(0, outer=5), 2)]),
        (12, [(Shard(0, outer=5), 2)]),
        (12, [(Shard(0, inner=5), 2)]),
        (16, [(Shard(0), 2), (Shard(0), 2), (Shard(0, outer=2), 2)]),
        (12, [(Shard(0, outer=-2), 4)]),  # a zigzag is even
        (16, [(Shard(0), 2), (Shard(0, outer=-2), 2)]),  # and keeps pairs of blocks
        (16, [(Shard(0, outer=-2), 2), (Shard(0), 2)]),
    ],
)
def test_incompatible_splits(size: int, shards: list[tuple[Shard, int]]) -> None:
    assert not dims_compatible(size, shards)


@pytest.mark.parametrize(
    ("size", "shards", "coords", "extent"),
    [
        (12, [(Shard(0, outer=3), 2)], (1,), (2, 6)),  # rows of 4: 2 3 | 6 7 | 10 11
        (12, [(Shard(0, outer=4), 3), (Shard(0), 2)], (2, 1), (8, 2)),  # rows of 3: 8 | 11
        (12, [(Shard(0), 2), (Shard(0, outer=4), 3)], (1, 2), (8, 2)),
        (20, [(Shard(0, inner=4), 3)], (2,), (16, 4)),
        (16, [(Shard(0, outer=4), 2), (Shard(0, outer=4), 2)], (1, 0), (2, 4)),
        (16, [(Shard(0, outer=-2), 4)], (1,), (2, 4)),  # 2 3 | 12 13
        (32, [(Shard(0), 2), (Shard(0, outer=-4), 4)], (1, 1), (18, 4)),  # of the second half
    ],
)
def test_extent_of_strided_shards(
    size: int, shards: list[tuple[Shard, int]], coords: tuple[int, ...], extent: tuple[int, int]
) -> None:
    assert local_extent(size, [(s, w, c) for (s, w), c in zip(shards, coords, strict=True)]) == extent
    part = held(size, shards)[every_rank(tuple(w for _, w in shards)).index(coords)]
    assert (int(part[0]), len(part)) == extent


def test_a_zigzag_gives_all_ranks_the_same_causal_work() -> None:
    parts = held(48, [(Shard(0, outer=-2), 4)])
    assert parts[1].tolist() == [*range(6, 12), *range(36, 42)]
    assert len({int((part + 1).sum()) for part in parts}) == 1
    assert str(Shard(1, outer=-2)) == "S(1,zigzag=2)" and parse_placement("S(1,zigzag=2)") == Shard(
        1, outer=-2
    )


@given(st.sampled_from(SIZES), st.data())
def test_is_even_means_equal_shards(size: int, data: st.DataObject) -> None:
    outer = data.draw(st.sampled_from(divisors(size)))
    inner = data.draw(st.sampled_from(divisors(size // outer)))
    ways = data.draw(st.integers(1, 5))
    shard = Shard(0, outer, inner)
    lengths = {len(take_part(torch.arange(size), 0, ways, k, outer, inner)) for k in range(ways)}
    assert is_even(size, shard, ways) == (len(lengths) == 1)


@given(st.sampled_from(SIZES), st.data())
def test_digits_give_shards_that_keep_the_part_whole(size: int, data: st.DataObject) -> None:
    """Splitting the part (outer, middle) of a dim is splitting that dim of the unflattened tensor."""
    outer = data.draw(st.sampled_from(divisors(size)))
    middle = data.draw(st.sampled_from(divisors(size // outer)))
    ways = data.draw(st.integers(2, 4))
    shard = shard_of_digit(size, 0, outer, middle, ways)
    whole = middle > 1 and chunk(middle, ways, ways - 1)[1] > 0
    assert (shard is not None) == whole
    if shard is not None:
        index = torch.arange(size)
        for k in range(ways):
            apart = take_part(index.view(outer, middle, -1), 1, ways, k).reshape(-1)
            assert shard_tensor(index, (shard,), (ways,), (k,)).tolist() == apart.tolist()


@given(st.sampled_from(SIZES), st.integers(1, 4), st.data())
def test_parts_join_to_the_whole(size: int, ways: int, data: st.DataObject) -> None:
    outer = data.draw(st.sampled_from(divisors(size)))
    middle = data.draw(st.sampled_from(divisors(size // outer)))
    outer = data.draw(st.sampled_from([outer, -outer]))
    x = torch.arange(3 * size * 2).view(3, size, 2)
    shard = shard_of_digit(size, 1, outer, middle, ways)
    assume(shard is not None)
    assert shard is not None
    parts = [take_part(x, 1, ways, k, shard.outer, shard.inner) for k in range(ways)]
    assert torch.equal(join_parts(parts, 1, shard.outer), x)


def two_by_two(rank: int) -> DeviceMesh:
    """A mesh that needs no process group."""
    ranks = torch.arange(4).reshape(2, 2)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"), _init_backend=False, _rank=rank)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (shape, layout)
        for shape in [(8, 4), (6, 5), (7, 3), (12, 7), (2, 2), (10, 6)]
        for layout in product([R, Shard(0), Shard(1)], repeat=2)
        if layout_ok(shape, layout, (2, 2))
    ],
    ids=str,
)
def test_plain_shards_are_those_of_dtensor(shape: tuple[int, int], layout: Layout) -> None:
    placements = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout]
    for rank, coords in enumerate(every_rank((2, 2))):
        mesh = two_by_two(rank)
        theirs = compute_local_shape_and_global_offset(shape, mesh, placements)
        offsets = tuple(
            local_extent(n, shards_of_dim(layout, d, (2, 2), coords))[0] for d, n in enumerate(shape)
        )
        assert (local_shape(shape, layout, (2, 2), coords), offsets) == theirs


@pytest.mark.parametrize(
    ("size", "outer", "ways"), [(12, 3, 2), (24, 2, 4), (24, 4, 3), (16, 8, 2), (6, 3, 2)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_outer_parts_are_the_split_factor_of_dtensor(size: int, outer: int, ways: int, dim: int) -> None:
    x = torch.arange(size * 5).view((size, 5) if dim == 0 else (5, size))
    theirs, _ = _StridedShard(dim, split_factor=outer)._split_tensor(x, ways, with_padding=False)
    for k, their in enumerate(theirs):
        assert torch.equal(shard_tensor(x, (Shard(dim, outer),), (ways,), (k,)), their)


def test_reductions_of_parts() -> None:
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]), torch.tensor([4.0, 0.0])]
    assert reduce_parts(parts, "sum").tolist() == [5.5, 1.0]
    assert reduce_parts(parts, "max").tolist() == [4.0, 3.0]
    alone = reduce_parts(parts[:1], "sum")
    assert alone.tolist() == [1.0, -2.0] and alone.data_ptr() != parts[0].data_ptr()


@given(st.integers(1, 4), st.integers(0, 2**31))
def test_merged_statistics_are_those_of_the_whole_row(parts: int, seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 4 * parts, dtype=torch.float64, generator=make) * 30
    rows[0, :4] = -torch.inf

    def stats(x: torch.Tensor) -> torch.Tensor:
        top = x.amax(1)
        return torch.stack((top, torch.exp(x - top.clamp_min(-1e300)[:, None]).sum(1), x[:, 0], x[:, 1]), 1)

    merged = merge_stats([stats(p) for p in rows.split(4, 1)])
    torch.testing.assert_close(merged[:, 0] + merged[:, 1].log(), rows.logsumexp(1))
    torch.testing.assert_close(merged[:, 2], rows[:, ::4].sum(1))


def test_placements_print_short() -> None:
    layout: Layout = (R, Shard(1), Shard(0, outer=3, inner=2), Partial(), Partial("max"))
    assert [str(p) for p in layout] == ["R", "S(1)", "S(0,outer=3,inner=2)", "P", "P(max)"]


@given(st.data())
def test_parts_in_one_piece_are_views_that_follow_each_other(data: st.DataObject) -> None:
    sizes = (2, 2)
    choices = [R, *(Shard(d, o) for d in range(3) for o in (1, 2, 4, -4))]
    shape = tuple(data.draw(st.tuples(*[st.sampled_from((1, 2, 4, 8))] * 3)))
    layout = data.draw(
        st.tuples(*[st.sampled_from(choices)] * 2).filter(lambda c: layout_ok(shape, c, sizes))
    )
    placed = layout[1]
    if not isinstance(placed, Shard):
        assert is_part_in_one_piece(shape, layout, sizes, 1)
        return
    # what a rank has without the last axis, and where in it lies what each rank of that axis has
    held = prod(local_shape(shape, (layout[0], R), sizes, (0, 0)))
    whole = torch.arange(held).view(local_shape(shape, (layout[0], R), sizes, (0, 0)))
    before = [(p.blocks, 2) for p in layout[:1] if isinstance(p, Shard) and p.dim == placed.dim]
    outer = local_outer(placed, before) * (1 if placed.outer > 0 else -1)
    parts = [take_part(whole, placed.dim, 2, k, outer).flatten().tolist() for k in (0, 1)]
    assert is_part_in_one_piece(shape, layout, sizes, 1) == (
        [*parts[0], *parts[1]] == list(range(held)) and outer == 1
    )
    assert not is_part_in_one_piece(shape, layout, sizes, 1, 2.0) or placed.dim == 0
