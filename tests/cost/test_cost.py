"""Cost formulas against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import (
    Axis,
    Cluster,
    Device,
    Level,
    Links,
    Mesh,
    RankOrder,
    assign_ranks,
    load_cluster,
    mesh_candidates,
    order_seconds,
)
from autoshard.cost import KINDS, AxisLink, compute_seconds, flop_rate, link_of, seconds
from autoshard.cost import link as link_module
from autoshard.errors import UsageError

DEVICE = Device("test", 10**9, {"f32": 1e12, "bf16": 4e12, "f64": 5e11}, 1e11, 0.5, 1e-6)
NODES = Cluster("nodes", None, DEVICE, (Level("node", 4, 1e-6, 100e9), Level("net", None, 1e-5, 10e9, 2)))
#: latency 1 s, bandwidth 1 byte/s, 4 ranks: seconds are steps plus bytes
UNIT = AxisLink(1.0, 1.0, 4)


def link(text: str, axis: int, cluster: Cluster = NODES) -> AxisLink:
    """Without its hops, which have tests of their own."""
    return bare(link_of(cluster, Mesh.parse(text), axis))


def bare(link: AxisLink) -> AxisLink:
    return replace(link, hops=(), nccl=False)


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


@pytest.mark.parametrize(
    ("mesh", "axis", "hops"),
    [
        # 8 ranks in two nodes of 4: 6 of the 7 steps of a ring stay inside
        ("dp=8", 0, ((6, 1e-6), (1, 1e-5))),
        ("dp=16", 0, ((12, 1e-6), (3, 1e-5))),
        ("dp=4,tp=2", 0, ((2, 1e-6), (1, 1e-5))),
        # one rank in each node
        ("dp=4,tp=4", 0, ((3, 1e-5),)),
        ("dp=4,tp=4", 1, ((3, 1e-6),)),
        ("dp=6", 0, ((3, 1e-6), (2, 1e-5))),
    ],
)
def test_every_step_of_a_ring_has_the_latency_of_its_level(
    mesh: str, axis: int, hops: tuple[tuple[int, float], ...]
) -> None:
    found = link_of(NODES, Mesh.parse(mesh), axis)
    assert found.hops == hops and sum(count for count, _ in hops) == found.size - 1


def test_rings_of_nccl_wait_for_all_their_steps() -> None:
    ring = AxisLink(1e-5, 1e9, 64, 1e9, 8, (), ((56, 1e-6), (7, 1e-5)), True)
    around = 56e-6 + 70e-6
    # long messages: the Simple protocol
    assert seconds("all_gather", 64e8, ring) == pytest.approx(around + 6.3)
    # short ones: LL, a fifth of the latency for half of the bandwidth
    assert seconds("all_gather", 64, ring) == pytest.approx(0.2 * around, rel=0.01)
    # a double tree over 8 nodes: 3 steps between them, and a chain of 8 inside each
    assert seconds("all_reduce", 64, ring) == pytest.approx(0.2 * 2 * (7e-6 + 3e-5), rel=0.02)
    # where each node has one rank there is a tree for gathers, too
    alone = AxisLink(1e-5, 1e9, 8, 1e9, 1, (), ((7, 1e-5),), True)
    assert seconds("all_gather", 8e8, alone) == pytest.approx(3e-5 + 0.7)


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


def test_pairs_over_nodes_have_a_card_each() -> None:
    """NVLink is slower than the eight cards of a node together, and faster than each of them."""
    cluster, mesh = load_cluster("h100-dgx"), Mesh.parse("fsdp=2,ep=16")
    over, inside = (
        link_of(cluster.used_by(32), mesh, 1),
        link_of(cluster.used_by(32), Mesh.parse("dp=4,ep=8"), 1),
    )
    node, network = (level.reached for level in cluster.levels[:2])
    assert over.bandwidth == node < 8 * network
    assert (over.alone, over.local, over.together, inside.together) == (network, 8, 8, 0)
    # half of what a rank sends leaves its node, over its own card
    assert seconds("all_to_all", 1e9, over) == pytest.approx(0.5e9 / network, rel=0.02)
    across, within = over.across, over.inside_nodes
    assert (across.size, across.alone, within.size, within.alone) == (2, network, 8, node)
    # a ring crosses over one card, those of a node over all
    assert seconds("hop", 1e9, over) == pytest.approx(1e9 / network, rel=0.01)
    assert seconds("level_hop", 1e9, over) == pytest.approx(1e9 / node, rel=0.1)


def test_the_slowest_level_crossed_counts() -> None:
    slow_inside = Cluster("slow", None, DEVICE, (Level("node", 4, 1e-6, 1e9), Level("net", None, 1e-5, 10e9)))
    assert link("dp=8", 0, slow_inside) == AxisLink(1e-5, 1e9, 8, 1e9, 1)
    # this axis has one rank per node, so that the inside of a node does not matter
    assert link("dp=2,tp=4", 0, slow_inside) == AxisLink(1e-5, 10e9, 2, 10e9, 1)


def test_three_levels() -> None:
    frontier = load_cluster("mi250x-frontier")
    near, _, far = (level.efficiency for level in frontier.levels)
    assert link("dp=8,tp=2", 1, frontier).bandwidth == pytest.approx(near * 200e9)
    inside = link("dp=2,tp=8", 1, frontier)
    assert (inside.latency, inside.size, inside.local) == (3.4e-6, 8, 2)
    assert (inside.bandwidth, inside.alone) == pytest.approx((near * 100e9, near * 50e9))
    assert link("dp=2,tp=8", 0, frontier).bandwidth == pytest.approx(far * 12.5e9)
    assert link("dp=16", 0, frontier).bandwidth == pytest.approx(min(near, far) * 100e9)


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


@pytest.mark.parametrize("name", ["h100-dgx", "mi250x-frontier", "a100-selene", "v100-dgx2", "b200-nvl72"])
def test_links_of_large_meshes_come_in_closed_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster(name)
    meshes = mesh_candidates(cluster, 100_000)
    some = [mesh for mesh in meshes if mesh.sizes[-1] > 1][:3]
    by_rows = [_by_rows(cluster, mesh, axis) for mesh in some for axis in range(len(mesh.axes))]
    found = [link_of(cluster, mesh, axis) for mesh in some for axis in range(len(mesh.axes))]
    assert found == by_rows

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("arrays over all ranks were made")

    monkeypatch.setattr(link_module, "_rows", refuse)
    for mesh in meshes:
        for axis, size in enumerate(mesh.sizes):
            assert link_of(cluster, mesh, axis).size == size


def _by_rows(cluster: Cluster, mesh: Mesh, axis: int) -> AxisLink:
    """By arrays: an order that changes nothing is looked at rank by rank."""
    return link_of(cluster, mesh, axis, RankOrder.identity(mesh.world_size))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([(), (2,), (4,), (8,), (2, 8), (3, 6)]),
)
def test_an_order_that_changes_nothing_changes_no_link(
    axis_sizes: list[int], groups: tuple[int, ...]
) -> None:
    levels = tuple(Level(str(size), size, 1.0 / (k + 2), 10.0 ** (6 - k)) for k, size in enumerate(groups))
    cluster = Cluster("c", None, DEVICE, (*levels, Level("all", None, 5.0, 10.0, 2)))
    mesh = Mesh(tuple(Axis(f"a{k}", size) for k, size in enumerate(axis_sizes)))
    for axis in range(len(axis_sizes)):
        assert link_of(cluster, mesh, axis) == _by_rows(cluster, mesh, axis)


# -- groups of different wiring --------------------------------------------------------------------


def _group(name: str, devices: int, node: int, inside: float, between: float) -> Cluster:
    levels = (Level("node", node, 1e-6, inside), Level("net", None, 1e-5, between, 2))
    return Cluster(name, devices, DEVICE, levels)


MIXED = Cluster.joined(
    "mixed",
    [_group("ib", 8, 4, 100e9, 10e9), _group("roce", 8, 4, 80e9, 6e9)],
    [Level("ethernet", None, 1e-4, 1e9, 4)],
)


def test_axes_inside_groups_wait_for_the_slower_group() -> None:
    assert link("dp=4,tp=4", 1, MIXED) == AxisLink(1e-6, 80e9, 4, 80e9, 1)
    assert link("dp=2,fsdp=2,tp=4", 1, MIXED) == AxisLink(1e-5, 3e9, 2, 3e9, 1)
    # only the first group has ranks
    assert link("dp=2,tp=4", 1, MIXED) == AxisLink(1e-6, 100e9, 4, 100e9, 1)
    assert link("dp=2,tp=4", 0, MIXED) == AxisLink(1e-5, 5e9, 2, 5e9, 1)


def test_axes_over_groups_cross_the_level_that_joins_them() -> None:
    # each rank has a quarter of the Ethernet card of its node
    assert link("dp=2,fsdp=2,tp=4", 0, MIXED) == AxisLink(1e-4, 0.25e9, 2, 0.25e9, 1)
    # one rank in each node of four: two on either side
    assert link("dp=4,tp=4", 0, MIXED) == AxisLink(1e-4, 0.5e9, 4, 0.25e9, 2)
    # all of them: eight on either side
    assert link("dp=16", 0, MIXED) == AxisLink(1e-4, 2e9, 16, 0.25e9, 8)
    # 12 ranks: eight on one side, four on the other
    assert link("dp=12", 0, MIXED) == AxisLink(1e-4, 1e9, 12, 0.25e9, 4)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([(4, 8), (6, 6, 12), (3, 5)]))
def test_links_over_groups_against_counting_rank_by_rank(
    axis_sizes: list[int], sizes: tuple[int, ...]
) -> None:
    groups = [
        Cluster(
            str(k), size, DEVICE, (Level("n", 2, 1e-6 * (k + 1), 1e9 + k), Level("m", None, 1e-5, 1e8 - k))
        )
        for k, size in enumerate(sizes)
    ]
    cluster = Cluster.joined("c", groups, [Level("all", None, 1e-3, 1e7, 3)])
    mesh = Mesh(tuple(Axis(f"a{k}", size) for k, size in enumerate(axis_sizes)))
    if mesh.world_size > sum(sizes):
        with pytest.raises(UsageError, match="do not fit"):
            link_of(cluster, mesh, 0)
        return
    for axis, size in enumerate(axis_sizes):
        found = link_of(cluster, mesh, axis)
        assert found == _by_rows(cluster, mesh, axis)
        if size > 1:
            assert (found.latency, found.bandwidth) == _over_groups(cluster, mesh, axis)


def _over_groups(cluster: Cluster, mesh: Mesh, axis: int) -> tuple[float, float]:
    """The outermost level crossed and the slowest, by looking at every pair of ranks."""
    ends = [*cluster.starts[1:], cluster.devices or 0]
    of = [next(k for k, end in enumerate(ends) if rank < end) for rank in range(mesh.world_size)]
    kinds: list[tuple[Level, dict[int, object], dict[int, object]]] = []  # level, part below and above it
    for number, (start, group) in enumerate(zip(cluster.starts, cluster.groups, strict=True)):
        mine = [rank for rank in range(mesh.world_size) if of[rank] == number]
        nodes = {rank: (rank - start) // 2 for rank in mine}
        kinds.append((group.levels[0], {rank: rank for rank in mine}, nodes))
        kinds.append((group.levels[1], nodes, dict.fromkeys(mine, 0)))
    kinds.append((cluster.levels[0], dict(enumerate(of)), dict.fromkeys(range(mesh.world_size), 0)))
    latency, bandwidth = 0.0, inf
    for level, below, above in kinds:
        crossed, fewest = False, mesh.world_size
        for group in mesh.groups(axis):
            parts = [below[rank] for rank in group if rank in below]
            if len(set(parts)) > 1:
                fewest = min(fewest, *(parts.count(part) for part in parts))
            inside = [rank for rank in group if rank in below]
            crossed |= any(below[a] != below[b] and above[a] == above[b] for a in inside for b in inside)
        if crossed:
            latency = max(latency, level.latency)
            bandwidth = min(bandwidth, level.bandwidth / min(level.shared_by, mesh.world_size) * fewest)
    return latency, bandwidth


# -- measured links --------------------------------------------------------------------------------


def _measured(seed: int, devices: int, *, latency: bool = False) -> Links:
    draw = np.random.default_rng(seed)
    both = draw.uniform(1.0, 10.0, (2, devices, devices)) * (1 - np.eye(devices))
    return Links(both[0], both[1] if latency else None)


def test_measured_links_replace_those_of_the_level() -> None:
    bandwidth = np.full((4, 4), 8.0) - 8 * np.eye(4)
    bandwidth[1, 0], bandwidth[1, 2], bandwidth[0, 2], bandwidth[0, 1] = 7.0, 3.0, 5.0, 6.0
    levels = (Level("node", 2, 1e-6, 100.0), Level("net", None, 1e-5, 10.0, 2))
    cluster = Cluster("c", 4, DEVICE, levels, links=Links(bandwidth))
    # rings of two: 0 -> 1 -> 0 is the slowest
    assert link("dp=2,tp=2", 1, cluster) == AxisLink(1e-6, 6.0, 2, 6.0, 1)
    # 0 <-> 2 and 1 <-> 3; two devices share a card
    assert link("dp=2,tp=2", 0, cluster) == AxisLink(1e-5, 2.5, 2, 2.5, 1)
    # the ring of all crosses at 1 -> 2 and 3 -> 0, on two halves of cards
    assert link("dp=4", 0, cluster) == AxisLink(1e-5, 3.0, 4, 1.5, 2)
    # another order goes around 1 -> 2: 0 1 3 2
    mesh = Mesh.parse("dp=4")
    # inside nodes 0 -> 1 at 6 counts; across 1 -> 3 and 2 -> 0 at 8, on two halves of cards
    assert bare(link_of(cluster, mesh, 0, RankOrder((0, 1, 3, 2)))) == AxisLink(1e-5, 6.0, 4, 6.0, 1)


def test_measured_latency_is_that_of_the_slowest_neighbours() -> None:
    cluster = Cluster("c", 4, DEVICE, (Level("all", None, 1e-5, 10.0),), links=_measured(0, 4, latency=True))
    assert cluster.links is not None and cluster.links.latency is not None
    table = cluster.links.latency
    expected = max(table[0, 2], table[2, 0], table[1, 3], table[3, 1])
    assert link("dp=2,tp=2", 0, cluster).latency == expected


def test_an_order_must_be_of_the_mesh() -> None:
    mesh = Mesh.parse("dp=4")
    for order, text in ((RankOrder((0, 1, 2)), "not 4"), (RankOrder((0, 1, 2, 8)), "no device 8")):
        with pytest.raises(UsageError, match=text):
            link_of(Cluster("few", 8, DEVICE, NODES.levels), mesh, 0, order)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("text", "devices"), [("dp=2,tp=2", 5), ("tp=5", 5), ("dp=3,tp=2", 6), ("dp=5", 6)])
def test_no_order_is_better_than_the_one_found(text: str, devices: int, seed: int) -> None:
    mesh, links = Mesh.parse(text), _measured(seed, devices)
    every = (RankOrder(order) for order in permutations(range(devices), mesh.world_size))
    least = min(order_seconds(mesh, links, order) for order in every)
    assert order_seconds(mesh, links, assign_ranks(mesh, links)) == pytest.approx(least, rel=1e-12)


def test_order_seconds_by_hand() -> None:
    links = Links(np.array([[0, 4, 2, 1], [4, 0, 1, 2], [2, 1, 0, 4], [1, 2, 5, 0.0]]))
    mesh = Mesh.parse("dp=2,tp=2")
    # tp: 0-1 and 2-3 at 4 bytes/s, 8 bytes; dp: 0-2 and 1-3 at 2 bytes/s, 6 bytes
    traffic = {"tp": 8.0, "dp": 6.0}
    assert order_seconds(mesh, links, traffic=traffic) == pytest.approx(8 / 4 + 6 / 2)
    # tp: 0-2 and 1-3 at 2; dp: 0-1 and 2-3 at 4
    assert order_seconds(mesh, links, RankOrder((0, 2, 1, 3)), traffic) == pytest.approx(8 / 2 + 6 / 4)
    assert order_seconds(mesh, links, traffic={"tp": 8.0}) == pytest.approx(2)
    assert order_seconds(Mesh.parse("dp=1"), links) == 0.0


def test_traffic_decides_which_axis_gets_the_fast_links() -> None:
    links = Links(np.array([[0, 9, 1, 1], [9, 0, 1, 1], [1, 1, 0, 9], [1, 1, 9, 0.0]]))
    mesh = Mesh.parse("dp=2,tp=2")
    assert assign_ranks(mesh, links) == RankOrder.identity(4)
    swapped = assign_ranks(mesh, links, {"dp": 100.0, "tp": 1.0})
    assert {frozenset(swapped.devices[0::2]), frozenset(swapped.devices[1::2])} == {
        frozenset((0, 1)),
        frozenset((2, 3)),
    }


def test_hidden_nodes_are_found_among_a_thousand_devices() -> None:
    draw = np.random.default_rng(3)
    node = draw.permutation(1024) // 8
    bandwidth = np.where(node[:, None] == node[None, :], 300e9, 25e9) * draw.uniform(0.8, 1, (1024, 1024))
    links = Links(bandwidth * (1 - np.eye(1024)))
    mesh = Mesh.parse("dp=128,tp=8")
    found = assign_ranks(mesh, links, moves=500)
    assert sorted(found.devices) == list(range(1024))
    for group in mesh.groups("tp"):
        assert len({int(node[found.devices[rank]]) for rank in group}) == 1
    assert order_seconds(mesh, links, found) <= order_seconds(mesh, links) / 3
    assert found == assign_ranks(mesh, links, moves=500)
    # the greedy start is only ever improved
    assert order_seconds(mesh, links, found) <= order_seconds(mesh, links, assign_ranks(mesh, links, moves=0))


def test_slow_devices_are_left_idle() -> None:
    bandwidth = np.full((6, 6), 10.0)
    bandwidth[1], bandwidth[:, 1], bandwidth[4], bandwidth[:, 4] = 1.0, 1.0, 2.0, 2.0
    order = assign_ranks(Mesh.parse("dp=2,tp=2"), Links(bandwidth * (1 - np.eye(6))))
    assert sorted(order.devices) == [0, 2, 3, 5]


def test_wrong_questions_to_assign() -> None:
    mesh, links = Mesh.parse("dp=2,tp=2"), _measured(0, 4)
    with pytest.raises(UsageError, match="no axis"):
        assign_ranks(mesh, links, {"tpp": 1.0})
    with pytest.raises(UsageError, match="traffic of tp is nan"):
        assign_ranks(mesh, links, {"tp": float("nan")})
    with pytest.raises(UsageError, match="8 ranks do not fit on 4"):
        assign_ranks(Mesh.parse("dp=8"), links)
    with pytest.raises(UsageError, match="moves is -1"):
        assign_ranks(mesh, links, moves=-1)
    assert assign_ranks(mesh, links, {}) == RankOrder.identity(4)


# -- compute ---------------------------------------------------------------------------------------


def test_roofline_by_hand() -> None:
    # 4e12 * 0.5 FLOP/s on the matrix units: 2 s, plus the launch
    assert compute_seconds(4e12, 0, "bf16", DEVICE, matmul=True) == pytest.approx(2 + 1e-6)
    # vector units do bf16 at the rate of f32
    assert compute_seconds(4e12, 0, "bf16", DEVICE, matmul=False) == pytest.approx(4 + 1e-6)
    # bound by memory: 1e12 bytes at 0.85 of 1e11 bytes/s
    assert DEVICE.traffic == 0.85e11
    assert compute_seconds(1e12, 1e12, "f32", DEVICE, matmul=True) == pytest.approx(10 / 0.85 + 1e-6)
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
