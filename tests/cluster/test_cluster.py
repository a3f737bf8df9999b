"""Cluster files, meshes and what their errors say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

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
    catalog_names,
    load_cluster,
    meaning_of,
    mesh_candidates,
    parse_cluster,
    parse_target,
    usable_memory,
)
from autoshard.cluster.cluster import bounding
from autoshard.cluster.mesh import divisors, expert_candidates
from autoshard.errors import UsageError

CATALOG = files("autoshard.cluster").joinpath("catalog")
DEVICE = Device("test", 10**9, {"f32": 1e12, "bf16": 4e12}, 1e11, 0.5, 1e-6)
FILE = """
name = "two"
devices = 4
[device]
name = "d"
memory_bytes = 1000
peak_flops = { f32 = 1e9 }
memory_bandwidth = 1e9
matmul_efficiency = 0.5
launch_overhead = 0
[[level]]
name = "node"
size = 2
latency = 1e-6
bandwidth = 1e9
[[level]]
name = "net"
latency = 1e-5
bandwidth = 1e8
shared_by = 2
"""

names = st.lists(st.sampled_from(["dp", "fsdp", "tp", "x", "seq"]), min_size=1, max_size=4, unique=True)
meshes = names.flatmap(
    lambda chosen: st.tuples(*(st.integers(1, 5) for _ in chosen)).map(
        lambda sizes: Mesh(tuple(Axis(name, size) for name, size in zip(chosen, sizes, strict=True)))
    )
)


def cluster_of(*sizes: int, devices: int | None = None) -> Cluster:
    levels = [Level(f"level{size}", size, 1e-6, 1e9) for size in sizes]
    return Cluster("test", devices, DEVICE, (*levels, Level("all", None, 1e-5, 1e8)))


# -- catalog ---------------------------------------------------------------------------------------


def test_catalog_holds_the_promised_machines() -> None:
    promised = {
        "a100-h100-mixed",
        "a100-selene",
        "b200-nvl72",
        "cpu-gloo",
        "h100-dgx",
        "h200-dgx",
        "holmes-ib-roce",
        "mi250x-frontier",
        "v100-dgx2",
    }
    assert promised <= set(catalog_names())


@pytest.mark.parametrize("name", catalog_names())
def test_catalog_file_loads_and_every_figure_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.levels[-1].size is None
    table = tomllib.loads(CATALOG.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    parts = [*table["level"]] if "group" in table else [table["device"], *table["level"]]
    for group in table.get("group", ()):
        assert set(group["source"]) == {"nodes"}
        parts += [group["device"], *group["level"]]
    devices = [part for part in parts if "memory_bytes" in part]
    assert devices and all("host" in device for device in devices)
    parts += [device[table] for device in devices for table in ("kernels", "host") if table in device]
    for part in parts:
        figures = set(part) - {"name", "source", "kernels", "host"}
        assert figures == set(part["source"])
        assert all(len(text) > 6 for text in part["source"].values())


def test_catalog_figures() -> None:
    h100 = load_cluster("h100-dgx")
    assert h100.device.peak_flops["bf16"] == 989e12
    assert h100.device.memory_bandwidth == 3.35e12
    assert [(level.size, level.bandwidth) for level in h100.levels] == [(8, 450e9), (None, 50e9)]
    assert load_cluster("mi250x-frontier").group_sizes == (2, 8)
    assert usable_memory(DEVICE) == 940_000_000


def test_clusters_are_hashable_values() -> None:
    assert hash(load_cluster("h100-dgx")) == hash(load_cluster("h100-dgx"))
    assert load_cluster("h100-dgx") == load_cluster("h100-dgx") != load_cluster("h200-dgx")


# -- files -----------------------------------------------------------------------------------------


def test_a_file_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    cluster = load_cluster(path)
    assert (cluster.devices, cluster.levels[1].shared_by) == (4, 2)
    assert cluster == load_cluster(str(path)) == parse_target(path) == parse_target(str(path))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("memory_bytes", "memory_byte", ["unknown key 'memory_byte'", "did you mean 'memory_bytes'"]),
        ("latency = 1e-6", "latncy = 1e-6", ["level 1", "did you mean 'latency'"]),
        ("f32 = 1e9", "f32 = 1e9, fp16 = 1e9", ["unknown key 'fp16'", "did you mean 'f16'"]),
        ("f32 = 1e9", "f16 = 1e9", ["peak_flops has no f32"]),
        ("devices", "device_count", ["did you mean 'device"]),
        ("[device]", "[devicee]", ["did you mean 'device"]),
        ('name = "d"', "", ["device", "missing: name"]),
        ("size = 2", "size = 2.0", ["size is 2.0", "int"]),
        ("size = 2", "size = -2", ["size is -2", ">= 1", "level 1, size"]),
        ("bandwidth = 1e8", "bandwidth = nan", ["bandwidth is nan", "`float` > 0", "level 2"]),
        ("latency = 1e-5", "latency = inf", ["latency is inf"]),
        ("memory_bytes = 1000", "memory_bytes = 1" + "0" * 400, ["memory_bytes is a number of 1329 bits"]),
        ("memory_bytes = 1000", "memory_bytes = 1" + "0" * 5000, ["not valid TOML"]),
        ("shared_by = 2", 'shared_by = 2\nsource = { bandwith = "?" }', ["did you mean 'bandwidth'"]),
        ("shared_by = 2", "shared_by = 2\nsource = { bandwidth = 1 }", ["source of bandwidth is 1"]),
        ("[[level]]", "[links]\nmatrx = []\n[[level]]", ["links", "did you mean 'matrix'"]),
        ("memory_bandwidth = 1e9", "", ["missing: memory_bandwidth"]),
        ("memory_bytes = 1000", "memory_bytes = 'much'", ["memory_bytes is 'much'", "int"]),
        ("memory_bytes = 1000", "memory_bytes = true", ["memory_bytes is True"]),
        ("bandwidth = 1e8", "bandwidth = 0", ["bandwidth is 0", "`float` > 0"]),
        ("latency = 1e-6", "latency = -1.0", ["latency is -1.0"]),
        ("launch_overhead = 0", "launch_overhead = -1", ["launch_overhead is -1"]),
        ("matmul_efficiency = 0.5", "matmul_efficiency = 1.5", ["matmul_efficiency is 1.5"]),
        ("size = 2", "", ["size None"]),
        ('name = "net"', 'name = "net"\nsize = 4', ["outermost level 'net' has a size"]),
        ("devices = 4", "devices = 0", ["devices is 0"]),
        ("[[level]]", "[[level", ["not valid TOML"]),
    ],
)
def test_wrong_files_say_what_is_wrong(old: str, new: str, expected: list[str]) -> None:
    assert old in FILE
    with pytest.raises(UsageError) as caught:
        parse_cluster(FILE.replace(old, new, 1), where="two.toml")
    for text in expected:
        assert text in str(caught.value)


def test_other_wrong_files() -> None:
    head = FILE.split("[[level]]", maxsplit=1)[0]
    with pytest.raises(UsageError, match="at least one level"):
        parse_cluster("level = []\n" + head, where="x")
    with pytest.raises(UsageError, match="it must be a table"):
        parse_cluster("level = [1]\n" + head, where="x")
    with pytest.raises(UsageError, match="two or more whole groups"):
        cluster_of(4, 6)
    with pytest.raises(UsageError, match="two or more whole groups"):
        cluster_of(4, 4)


@pytest.mark.parametrize("name", ["h100-dgz", "no/such/h100_dgx.toml"])
def test_missing_clusters_list_the_catalog(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_cluster(name)
    assert "did you mean 'h100-dgx'" in str(caught.value)
    assert "cpu-gloo" in str(caught.value)


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not text"):
        load_cluster(path)


# -- meshes ----------------------------------------------------------------------------------------


@given(meshes)
def test_rank_and_coords_are_inverse_and_row_major(mesh: Mesh) -> None:
    coords = [mesh.coords(rank) for rank in range(mesh.world_size)]
    assert coords == sorted(set(coords))
    assert [mesh.rank(c) for c in coords] == list(range(mesh.world_size))


@given(meshes)
def test_groups_partition_the_ranks_along_one_coordinate(mesh: Mesh) -> None:
    for index, axis in enumerate(mesh.axes):
        groups = mesh.groups(axis.name)
        assert groups == mesh.groups(index)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            coords = [mesh.coords(rank) for rank in group]
            assert [c[index] for c in coords] == list(range(axis.size))
            assert len({c[:index] + c[index + 1 :] for c in coords}) == 1


@given(meshes)
def test_text_of_a_mesh_parses_back(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh == Mesh.from_any(str(mesh)) == Mesh.from_any(mesh)


def test_parse() -> None:
    mesh = Mesh.parse(" dp = 2, tp=4 ")
    assert (mesh.names, mesh.sizes, mesh.world_size) == (("dp", "tp"), (2, 4), 8)
    assert mesh.coords(5) == (1, 1)
    assert mesh.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (mesh.stride("dp"), mesh.stride("tp")) == (4, 1)


def test_one_device() -> None:
    mesh = Mesh.parse("dp=1")
    assert (mesh.world_size, mesh.coords(0), mesh.groups("dp")) == (1, (0,), ((0,),))
    assert mesh_candidates(load_cluster("h100-dgx"), 1) == [mesh]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("dp=2,dp=2", "'dp' appears twice"),
        ("dp=0", "size of axis 'dp' is 0"),
        ("dp=-2", "size of axis 'dp' is -2"),
        ("dp=two", "not an integer: 'two'"),
        ("dp=2.5", "not an integer: '2.5'"),
        ("dp=", "not an integer: ''"),
        ("dp", "'dp' is not an axis"),
        ("dp=2,", "'' is not an axis"),
        ("2x4", "'2x4' is not an axis"),
        ("=2", "'' is not a name"),
        ("d p=2", "'d p' is not a name"),
    ],
)
def test_wrong_meshes_say_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh.parse(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("world", "experts"), [(64, 8), (64, 160), (2048, 256), (24, 6), (8, 0), (4, 7)])
def test_axes_of_experts_divide_experts_and_fit_the_wiring(world: int, experts: int) -> None:
    machine = load_cluster("h100-dgx")
    found = expert_candidates(machine, world, experts)
    wanted = [n for n in divisors(world)[1:-1] if experts and experts % n == 0 and (n % 8 == 0 or 8 % n == 0)]
    assert [mesh.axes[-1].size for mesh in found] == wanted
    assert all(mesh.names == ("fsdp", "ep") and mesh.world_size == world for mesh in found)


def test_wrong_questions_to_a_mesh() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    for wrong in (-1, 4):
        with pytest.raises(UsageError, match="ranks are 0 to 3"):
            mesh.coords(wrong)
    for coords in ((0,), (0, 2), (-1, 0), (0, 0, 0)):
        with pytest.raises(UsageError, match="no coordinates"):
            mesh.rank(coords)
    with pytest.raises(UsageError, match="did you mean 'dp'"):
        mesh.groups("dpp")
    with pytest.raises(UsageError, match="no axis 2"):
        mesh.groups(2)
    with pytest.raises(UsageError, match="no axes"):
        Mesh(())
    with pytest.raises(UsageError, match="not an integer: True"):
        Axis("dp", True)


def test_meanings() -> None:
    said = {name: str(meaning_of(name)) for name in ("dp", "fsdp", "tp", "anything")}
    assert said == {
        "dp": "shards the batch, replicates parameters",
        "fsdp": "shards batch and parameters",
        "tp": "shards inside layers",
        "anything": "free",
    }
    meanings = [axis.meaning for axis in Mesh.parse("dp=1,fsdp=1,tp=1,x=1").axes]
    assert [m.splits_batch for m in meanings] == [True, True, False, False]
    assert [m.stores_sharded for m in meanings] == [False, True, False, False]
    assert [m.may_store_sharded for m in meanings] == [False, True, True, True]
    assert [m.allows(True) for m in meanings] == [True, True, False, True]
    assert [m.allows(False) for m in meanings] == [False, False, True, True]
    assert [m.is_free for m in meanings] == [False, False, False, True]


def test_mesh_must_fit_the_cluster() -> None:
    cluster = cluster_of(2, devices=4)
    assert Mesh.from_any("dp=4", cluster).world_size == 4
    with pytest.raises(UsageError, match="8 ranks do not fit on 4 devices"):
        Mesh.from_any("dp=8", cluster)
    with pytest.raises(UsageError, match="8 ranks do not fit on 4 devices"):
        mesh_candidates(cluster, 8)
    with pytest.raises(UsageError, match="world size is 0"):
        mesh_candidates(cluster, 0)


def test_device_mesh() -> None:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    def build(ranks: torch.Tensor, names: tuple[str, ...] | None) -> DeviceMesh:
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)

    ranks = torch.arange(4).reshape(2, 2)
    named = build(ranks, ("dp", "tp"))
    assert Mesh.from_any(named) == Mesh.parse("dp=2,tp=2") == parse_target(named)
    with pytest.raises(UsageError, match="mesh_dim_names"):
        Mesh.from_any(build(ranks, None))
    with pytest.raises(UsageError, match="orders its ranks differently"):
        Mesh.from_any(build(ranks.T, ("dp", "tp")))


def test_targets() -> None:
    assert parse_target("dp=2") == Mesh.parse("dp=2")
    assert parse_target("cpu-gloo") == load_cluster("cpu-gloo")
    for same in (Mesh.parse("dp=2"), load_cluster("cpu-gloo")):
        assert parse_target(same) is same
    with pytest.raises(UsageError, match="catalog"):
        parse_target("2x2")
    with pytest.raises(UsageError, match="target is empty"):
        parse_target(" ")
    with pytest.raises(UsageError, match="int is not a mesh"):
        parse_target(4)


# -- candidates ------------------------------------------------------------------------------------


def texts(cluster: Cluster, world_size: int) -> set[str]:
    found = [str(mesh) for mesh in mesh_candidates(cluster, world_size)]
    assert len(found) == len(set(found))
    return set(found)


def test_candidates_on_one_level_are_all_factorisations() -> None:
    expected = {"dp=4", "fsdp=4", "tp=4", "dp=2,fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2"}
    assert texts(load_cluster("cpu-gloo"), 4) == expected
    assert "tp=6" in texts(load_cluster("cpu-gloo"), 6)


def test_candidates_keep_tp_inside_the_innermost_level() -> None:
    found = texts(load_cluster("h100-dgx"), 16)
    assert {"dp=16", "dp=2,tp=8", "fsdp=2,tp=8", "dp=2,fsdp=8", "dp=4,fsdp=2,tp=2"} <= found
    assert not any("tp=16" in text and "fsdp" not in text for text in found)
    assert "tp=4" in texts(cluster_of(1, 4), 4)


def widest(cluster: Cluster, world_size: int, *limit: int) -> int:
    found = mesh_candidates(cluster, world_size, *limit)
    return max(mesh.sizes[-1] for mesh in found if "tp" in mesh.names)


def test_tp_spans_the_node_where_the_innermost_level_is_a_pair() -> None:
    frontier = load_cluster("mi250x-frontier")
    assert widest(frontier, 64) == 8
    assert widest(frontier, 64, 2) == 2
    assert widest(cluster_of(2, 8, 16, 64), 256) == 16
    # a level of more than 16 devices counts only where there is none smaller
    assert widest(cluster_of(64), 256) == 64
    with pytest.raises(UsageError, match="widest tp is 0"):
        mesh_candidates(frontier, 64, 0)


def test_candidates_are_aligned_with_the_levels() -> None:
    found = texts(cluster_of(8), 48)
    assert "dp=16,tp=3" not in found
    assert "dp=8,tp=6" not in found
    assert "dp=4,fsdp=3,tp=4" not in found
    assert {"dp=48", "dp=3,fsdp=4,tp=4", "dp=6,tp=8", "fsdp=12,tp=4"} <= found
    # a mesh smaller than a node is not bound by it
    assert texts(cluster_of(8), 6) == texts(load_cluster("cpu-gloo"), 6)


@given(st.integers(1, 64))
def test_candidates_cover_the_world(world_size: int) -> None:
    for cluster in (cluster_of(8), cluster_of(2, 8), cluster_of()):
        found = mesh_candidates(cluster, world_size)
        assert f"dp={world_size}" in {str(mesh) for mesh in found}
        assert all(mesh.world_size == world_size for mesh in found)
        assert all(mesh.names == tuple(n for n in ("dp", "fsdp", "tp") if n in mesh.names) for mesh in found)


@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize("world_size", [3072, 100_000])
@pytest.mark.parametrize("name", catalog_names())
def test_candidates_of_large_worlds(name: str, world_size: int) -> None:
    cluster = load_cluster(name)
    if cluster.devices is not None:  # as many times the groups as are needed
        groups = [replace(group, devices=world_size // len(cluster.groups)) for group in cluster.groups]
        cluster = Cluster.joined(name, groups, cluster.levels)
    found = mesh_candidates(cluster, world_size)
    assert len(found) == len(set(found)) > 9
    assert all(mesh.world_size == world_size for mesh in found)
    expected = {8, 5} if world_size == 100_000 else {2, 3, 8}
    held = {mesh.sizes[-1] for mesh in found if "tp" in mesh.names}
    assert held <= set(divisors(world_size))
    if name == "cpu-gloo":
        assert expected <= held
    if name == "h100-dgx":
        assert held == {2, 4, 8}


# -- groups ----------------------------------------------------------------------------------------

SLOW = Device("slow", 500, {"f32": 1e12, "bf16": 2e12}, 2e11, 0.9, 2e-6)
FAST = Device("fast", 400, {"f32": 2e12}, 4e11, 0.5, 1e-6)
GROUPS = """
name = "two kinds"
[[group]]
name = "slow"
nodes = 2
[group.device]
name = "s"
memory_bytes = 500
peak_flops = { f32 = 1e12 }
memory_bandwidth = 2e11
matmul_efficiency = 0.9
launch_overhead = 0
[[group.level]]
name = "node"
size = 4
latency = 1e-6
bandwidth = 1e9
[[group.level]]
name = "ib"
latency = 1e-5
bandwidth = 1e8
[[group]]
name = "fast"
devices = 8
[group.device]
name = "f"
memory_bytes = 400
peak_flops = { f32 = 2e12 }
memory_bandwidth = 4e11
matmul_efficiency = 0.5
launch_overhead = 1e-6
[[group.level]]
name = "node"
latency = 1e-6
bandwidth = 2e9
[[level]]
name = "ethernet"
latency = 1e-4
bandwidth = 1e7
"""


def test_the_bounding_device_is_no_better_than_any() -> None:
    found = bounding([SLOW, FAST])
    assert (found.memory_bytes, found.memory_bandwidth, found.launch_overhead) == (400, 2e11, 2e-6)
    # the fast one does bf16 at its rate of f32, 2e12
    assert found.peak_flops == {"f32": 1e12, "bf16": 2e12}
    # products: f32 min(0.9e12, 1e12) of 1e12; bf16 min(1.8e12, 1e12) of 2e12
    assert found.matmul_efficiency == pytest.approx(0.5)
    assert bounding([SLOW, SLOW]) == SLOW
    with pytest.raises(UsageError, match="no device"):
        bounding([])


def test_a_file_of_groups() -> None:
    cluster = parse_cluster(GROUPS, where="x")
    assert (cluster.devices, cluster.starts, cluster.group_sizes) == (16, (0, 8), (4, 8))
    assert [group.devices for group in cluster.groups] == [8, 8]
    assert cluster.device == bounding([group.device for group in cluster.groups])
    assert hash(cluster) == hash(parse_cluster(GROUPS, where="x"))
    assert cluster == parse_cluster(GROUPS, where="x")
    with pytest.raises(UsageError, match="17 ranks do not fit on 16"):
        cluster.check_world_size(17)


def test_groups_without_a_rank_do_not_hold_the_others_back() -> None:
    cluster = parse_cluster(GROUPS, where="x")
    first = cluster.used_by(8)
    assert (first.groups, first.device.name, first.name) == ((), "s", "two kinds")
    assert first.group_sizes == (4,)
    both = cluster.used_by(12)
    assert [group.devices for group in both.groups] == [8, 4]
    assert both.device.memory_bytes == 400
    assert cluster.used_by(16) is cluster
    homogeneous = load_cluster("h100-dgx")
    assert homogeneous.used_by(16) is homogeneous


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("nodes = 2", "", ["group 1", "either devices or nodes"]),
        ("nodes = 2", "nodes = 2\ndevices = 8", ["either devices or nodes"]),
        ("devices = 8", "nodes = 1", ["group 2", "nodes have no size"]),
        ("nodes = 2", "nodes = 0", ["devices is 0"]),
        ("nodes = 2", "nodez = 2", ["did you mean 'nodes'"]),
        ('name = "fast"', 'name = "slow"', ["told apart by their names"]),
        ('name = "two kinds"', 'name = "x"\ndevices = 15', ["the groups hold 16"]),
        ('name = "two kinds"', 'name = "x"\n[device]\nname = "d"', ["no device of its own"]),
        ('name = "ethernet"', 'name = "ethernet"\nsize = 16', ["outermost level 'ethernet' has a size"]),
        (
            '[[level]]\nname = "e',
            '[[level]]\nname = "r"\nsize = 4\nlatency = 0\nbandwidth = 1\n[[level]]\nname = "e',
            ["groups begin at devices 0, 8"],
        ),
    ],
)
def test_wrong_groups_say_what_is_wrong(old: str, new: str, expected: list[str]) -> None:
    assert old in GROUPS
    with pytest.raises(UsageError) as caught:
        parse_cluster(GROUPS.replace(old, new, 1), where="x")
    for text in expected:
        assert text in str(caught.value)


def test_other_wrong_groups() -> None:
    with pytest.raises(UsageError, match="it must be a table"):
        parse_cluster('name = "x"\ngroup = [1]', where="x")
    with pytest.raises(UsageError, match="no groups to join"):
        parse_cluster('name = "x"\ngroup = []', where="x")
    cluster = parse_cluster(GROUPS, where="x")
    with pytest.raises(UsageError, match="plain cluster"):
        Cluster.joined("x", cluster.groups[:1], cluster.levels)
    with pytest.raises(UsageError, match="holds no groups"):
        Cluster.joined("x", [cluster, cluster.groups[0]], cluster.levels)
    with pytest.raises(UsageError, match=r"Cluster\.joined"):
        replace(cluster, device=DEVICE)


def test_candidates_keep_inside_groups() -> None:
    cluster = parse_cluster(GROUPS, where="x")
    assert widest(cluster, 16) == 4  # the nodes of the first group; the second is one of 8
    uneven = Cluster.joined(
        "x", [cluster_of(4, devices=8), replace(cluster_of(4, devices=16), name="b")], NET
    )
    found = texts(uneven, 24)
    assert {"dp=3,fsdp=8", "dp=6,tp=4", "dp=24", "fsdp=24"} <= found
    # a group of 12 ranks would take one group of the cluster and half of the other
    assert not found & {"dp=2,fsdp=12", "dp=2,fsdp=3,tp=4"}


NET = (Level("net", None, 1e-4, 1e7),)


# -- measured links --------------------------------------------------------------------------------

LINKS = FILE + "[links]\nmatrix = [[0, 1, 2, 3], [1, 0, 5, 6], [2, 5, 0, 7], [3, 6, 7, 0.5e1]]\n"


def test_links_written_out_and_in_files(tmp_path: Path) -> None:
    inside = parse_cluster(LINKS.replace("0.5e1", "0"), where="x")
    assert inside.links is not None
    assert inside.links.bandwidth[2, 3] == 7
    (tmp_path / "m.csv").write_text("# bytes/s\n0,1,2,3\n1,0,5,6\n\n2,5,0,7\n3,6,7,0\n")
    (tmp_path / "a.csv").write_text("\n".join(",".join("01"[r != c] for c in range(4)) for r in range(4)))
    (tmp_path / "c.toml").write_text(FILE + "[links]\nmatrix = 'm.csv'\n")
    assert load_cluster(tmp_path / "c.toml") == inside
    assert hash(load_cluster(tmp_path / "c.toml")) == hash(inside)
    (tmp_path / "c.toml").write_text(FILE + "[links]\nmatrix = 'm.csv'\nlatency = 'a.csv'\n")
    both = load_cluster(tmp_path / "c.toml")
    assert both != inside
    assert both.links is not None and both.links.latency is not None
    assert both.links.latency[0, 1] == 1
    assert both.links.first(2).devices == 2
    with pytest.raises(ValueError, match="read-only"):
        both.links.bandwidth[0, 1] = 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[0, 1], [1]]", "rows of 1, 2 entries"),
        ("[]", "it is empty"),
        ("[[0, 1, 1], [1, 0, 1]]", "matrix of links is 2 x 3"),
        ("[[0, 1], [1, 0]]", "the links are those of 2 devices, the cluster has 4"),
        ("[[1, 1], [1, 0]]", "is 1 at device 0 itself"),
        ("[[0, 1], [0, 0]]", "is 0 from device 1 to 0"),
        ("[[0, -1], [1, 0]]", "is -1 from device 0 to 1"),
        ("[[0, nan], [1, 0]]", "is nan from device 0 to 1"),
        ("[[0, inf], [1, 0]]", "is inf from device 0 to 1"),
        ("[[0, 'a'], [1, 0]]", "matrix 1 2 is 'a'"),
        ("[[0, true], [1, 0]]", "matrix 1 2 is True"),
        ("[1, 2]", "matrix 1 is 1"),
        ("'no.csv'", "relative to no file"),
        ("'/no/such/file.csv'", "cannot read /no/such/file.csv"),
        ("3", "matrix is 3"),
    ],
)
def test_wrong_links_say_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(f"{FILE}[links]\nmatrix = {text}\n", where="x")
    assert expected in str(caught.value)


def test_a_wrong_matrix_file_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("0,1\n1,zero\n")
    with pytest.raises(UsageError, match="line 2"):
        parse_cluster(f"{FILE}[links]\nmatrix = 'm.csv'\n", where="x", folder=tmp_path)
    ones = Links([[0, 1], [1, 0]])
    with pytest.raises(UsageError, match="latency for 2"):
        Links([[0, 1, 1], [1, 0, 1], [1, 1, 0]], ones.bandwidth)


def test_an_order_of_ranks_is_a_printable_value() -> None:
    order = RankOrder((4, 5, 6, 0, 1, 9))
    assert str(order) == "4-6,0-1,9"
    assert RankOrder.identity(4) == RankOrder((0, 1, 2, 3))
    order.check(6, 10)
    for ranks, devices, text in ((5, 10, "not 5"), (6, 9, "no device 9")):
        with pytest.raises(UsageError, match=text):
            order.check(ranks, devices)
    for wrong in ((0, 0), (), (-1,), (True,), (0.0,)):
        with pytest.raises(UsageError):
            RankOrder(wrong)


def test_one_device_needs_no_level() -> None:
    one = Cluster("one", 1, DEVICE, ())
    assert [str(mesh) for mesh in mesh_candidates(one, 1)] == ["dp=1"]
    with pytest.raises(UsageError, match="at least one level"):
        Cluster("two", 2, DEVICE, ())


def test_no_torch_is_imported() -> None:
    code = "import sys, autoshard.cluster, autoshard.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
