"""Cost formulas against values worked out by hand."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Axis, Cluster, Device, Level, Mesh, load_cluster
from autoshard.cost import KINDS, AxisLink, compute_seconds, flop_rate, link_of, seconds
from autoshard.errors import UsageError

DEVICE = Device("test", 10**9, {"f32": 1e12, "bf16": 4e12, "f64": 5e11}, 1e11, 0.5, 1e-6)
NODES = Cluster("nodes", None, DEVICE, (Level("node", 4, 1e-6, 100e9), Level("net", None, 1e-5, 10e9, 2)))
#: latency 1 s, bandwidth 1 byte/s, 4 ranks: seconds are steps plus bytes
UNIT = AxisLink(1.0, 1.0, 4)


def link(text: str, axis: int, cluster: Cluster = NODES) -> AxisLink:
    return link_of(cluster, Mesh.parse(text), axis)


# -- collectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "nbytes", "expected"),
    [
        # 2 steps (recursive doubling) and 3/4 of the bytes; a ring would take 3 steps
        ("all_gather", 100, 2 + 75),
        ("reduce_scatter", 100, 2 + 75),
        ("all_reduce", 100, 2 * (2 + 75)),
        # pairwise: 3 steps and 3/4 of the bytes; Bruck: 2 steps of half the bytes
        ("all_to_all", 100, 3 + 75),
        ("all_to_all", 2, 2 * (1 + 1)),
        # scatter (2 steps) and all-gather (2 steps); binomial: 2 steps of everything
        ("broadcast", 100, 2 + 75 + 2 + 75),
        ("broadcast", 2, 2 * (1 + 2)),
        ("send", 100, 1 + 100),
    ],
)
def test_formulas_by_hand(kind: str, nbytes: float, expected: float) -> None:
    assert seconds(kind, nbytes, UNIT) == pytest.approx(expected)


def test_ring_beats_tree_where_ranks_share_a_side() -> None:
    # 8 ranks, 4 on each side of a link of 1 byte/s per rank: rings get 4 bytes/s
    link = AxisLink(1.0, 4.0, 8, 1.0, 4)
    assert seconds("all_gather", 800, link) == pytest.approx(7 + 700 / 4)
    assert seconds("all_gather", 0.8, link) == pytest.approx(3 + 0.7)
    assert seconds("all_reduce", 8000, link) == pytest.approx(2 * (7 + 7000 / 4))
    # in between, the double tree: 2 * 3 steps, all bytes up and down
    assert seconds("all_reduce", 8, link) == pytest.approx(2 * 3 + 2 * 8 / 4)
    # half of the bytes leave the side, each rank's over its own link
    assert seconds("all_to_all", 800, link) == pytest.approx(7 + 400)
    assert seconds("send", 100, link) == pytest.approx(1 + 100)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_or_no_bytes_cost_nothing(kind: str) -> None:
    assert seconds(kind, 1e9, AxisLink(0.0, inf, 1)) == 0.0
    assert seconds(kind, 0, UNIT) == 0.0


links = st.builds(
    AxisLink, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.integers(2, 4096), st.none(), st.just(1)
)
sizes = st.lists(st.integers(0, 10**12), min_size=1, max_size=8)


@given(st.sampled_from(KINDS), sizes, links)
def test_arrays_give_what_numbers_give_and_more_bytes_never_cost_less(
    kind: str, nbytes: list[int], link: AxisLink
) -> None:
    ordered = sorted(nbytes)
    together = seconds(kind, np.array(ordered, dtype=np.float64), link)
    assert isinstance(together, np.ndarray)
    assert together.tolist() == [seconds(kind, n, link) for n in ordered]
    assert all(np.diff(together) >= 0)


@given(st.integers(1, 10**12), links)
def test_all_reduce_is_never_dearer_than_its_two_halves(nbytes: int, link: AxisLink) -> None:
    halves = seconds("reduce_scatter", nbytes, link) + seconds("all_gather", nbytes, link)
    assert seconds("all_reduce", nbytes, link) <= halves * (1 + 1e-12)


def test_unknown_kind() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'"):
        seconds("allreduce", 1, UNIT)


# -- links -----------------------------------------------------------------------------------------


def test_axis_inside_a_node() -> None:
    assert link("dp=2,tp=4", 1) == AxisLink(1e-6, 100e9, 4, 100e9, 1)
    assert link("dp=2,fsdp=2,tp=2", 1) == AxisLink(1e-6, 100e9, 2, 100e9, 1)


def test_axis_over_nodes_shares_their_links() -> None:
    # four groups cross at once, two devices per network card of 10 GB/s
    assert link("dp=2,tp=4", 0) == AxisLink(1e-5, 5e9, 2, 5e9, 1)
    # two groups of four; each has two ranks, so two halves of cards, in each node
    assert link("dp=4,tp=2", 0) == AxisLink(1e-5, 10e9, 4, 5e9, 2)
    # one group has both cards of a node
    assert link("dp=8", 0) == AxisLink(1e-5, 20e9, 8, 5e9, 4)


def test_the_slowest_level_crossed_counts() -> None:
    slow_inside = Cluster("slow", None, DEVICE, (Level("node", 4, 1e-6, 1e9), Level("net", None, 1e-5, 10e9)))
    assert link("dp=8", 0, slow_inside) == AxisLink(1e-5, 1e9, 8, 1e9, 1)
    # this axis has one rank per node, so that the inside of a node does not matter
    assert link("dp=2,tp=4", 0, slow_inside) == AxisLink(1e-5, 10e9, 2, 10e9, 1)


def test_three_levels() -> None:
    frontier = load_cluster("mi250x-frontier")
    assert link("dp=8,tp=2", 1, frontier).bandwidth == 200e9
    assert link("dp=2,tp=8", 1, frontier) == AxisLink(3.4e-6, 100e9, 8, 50e9, 2)
    assert link("dp=2,tp=8", 0, frontier).bandwidth == 12.5e9
    assert link("dp=16", 0, frontier).bandwidth == 100e9


def test_a_mesh_that_does_not_fill_nodes() -> None:
    # 6 ranks: 4 in the first node, 2 in the second; a group of 3 may leave 1 alone
    assert link("dp=6", 0) == AxisLink(1e-5, 10e9, 6, 5e9, 2)
    assert link("dp=2,tp=3", 1) == AxisLink(1e-5, 5e9, 3, 5e9, 1)
    assert link("tp=3", 0) == AxisLink(1e-6, 100e9, 3, 100e9, 1)
    # a shared link is shared by the devices in use
    shared = Cluster("bus", None, DEVICE, (Level("bus", None, 1e-6, 8e9, 8),))
    assert link("dp=2", 0, shared).bandwidth == 4e9


def test_axis_of_one_rank_and_wrong_axes() -> None:
    assert link("dp=1,tp=4", 0).size == 1
    assert seconds("all_reduce", 1e9, link("dp=1", 0)) == 0.0
    with pytest.raises(UsageError, match="no axis 1"):
        link("dp=4", 1)
    with pytest.raises(UsageError, match="do not fit"):
        link("dp=8", 0, Cluster("few", 4, DEVICE, NODES.levels))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([(), (2,), (4,), (8,), (2, 8), (3, 6)]),
)
def test_links_against_counting_rank_by_rank(axis_sizes: list[int], groups: tuple[int, ...]) -> None:
    levels = tuple(
        Level(str(size), size, 1.0 / (k + 2), 10.0 ** (6 - k), k + 1) for k, size in enumerate(groups)
    )
    cluster = Cluster("c", None, DEVICE, (*levels, Level("all", None, 5.0, 10.0, 2)))
    mesh = Mesh(tuple(Axis(f"a{k}", size) for k, size in enumerate(axis_sizes)))
    for axis, size in enumerate(axis_sizes):
        if size > 1:
            found = link_of(cluster, mesh, axis)
            assert (found.latency, found.bandwidth) == _by_counting(cluster, mesh, axis)


def _by_counting(cluster: Cluster, mesh: Mesh, axis: int) -> tuple[float, float]:
    latency, bandwidth, below = 0.0, inf, 1
    for level in cluster.levels:
        above = level.size or mesh.world_size
        crossed, fewest = False, mesh.world_size
        for group in mesh.groups(axis):
            parts = [rank // below for rank in group]
            crossed |= any(
                a // below != b // below and a // above == b // above for a in group for b in group
            )
            if len(set(parts)) > 1:
                fewest = min(fewest, *(parts.count(part) for part in parts))
        if crossed:
            latency = level.latency
            bandwidth = min(bandwidth, level.bandwidth / min(level.shared_by, mesh.world_size) * fewest)
        below = above
    return latency, bandwidth


# -- compute ---------------------------------------------------------------------------------------


def test_roofline_by_hand() -> None:
    # 4e12 * 0.5 FLOP/s on the matrix units: 2 s, plus the launch
    assert compute_seconds(4e12, 0, "bf16", DEVICE, matmul=True) == pytest.approx(2 + 1e-6)
    # vector units do bf16 at the rate of f32
    assert compute_seconds(4e12, 0, "bf16", DEVICE, matmul=False) == pytest.approx(4 + 1e-6)
    # bound by memory: 1e12 bytes at 1e11 bytes/s
    assert compute_seconds(1e12, 1e12, "f32", DEVICE, matmul=True) == pytest.approx(10 + 1e-6)
    assert compute_seconds(0, 0, "f32", DEVICE, matmul=False) == 0.0


def test_rates() -> None:
    assert flop_rate("f64", DEVICE, matmul=False) == 5e11
    assert flop_rate("i64", DEVICE, matmul=False) == 1e12
    assert flop_rate("f16", DEVICE, matmul=True) == 5e11
    with pytest.raises(UsageError, match="no dtype 'fp32'"):
        flop_rate("fp32", DEVICE, matmul=True)


def test_compute_of_arrays() -> None:
    flops, moved = np.array([0.0, 1e12, 1e12]), np.array([0.0, 0.0, 1e12])
    found = compute_seconds(flops, moved, "f32", DEVICE, matmul=False)
    expected = [compute_seconds(f, m, "f32", DEVICE, matmul=False) for f, m in zip(flops, moved, strict=True)]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == expected
    broadcast = compute_seconds(1e12, moved, "f32", DEVICE, matmul=False)
    assert np.shape(broadcast) == (3,)
