"""Cluster files, meshes and what their errors say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
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
    Mesh,
    catalog_names,
    load_cluster,
    meaning_of,
    mesh_candidates,
    parse_cluster,
    parse_target,
    usable_memory,
)
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
        "a100-selene",
        "b200-nvl72",
        "cpu-gloo",
        "h100-dgx",
        "h200-dgx",
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
    for part in (table["device"], *table["level"]):
        figures = set(part) - {"name", "source"}
        assert figures == set(part["source"])
        assert all(len(text) > 10 for text in part["source"].values())


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
        ("memory_bandwidth = 1e9", "", ["missing: memory_bandwidth"]),
        ("memory_bytes = 1000", "memory_bytes = 'much'", ["memory_bytes is 'much'", "int"]),
        ("memory_bytes = 1000", "memory_bytes = true", ["memory_bytes is True"]),
        ("bandwidth = 1e8", "bandwidth = 0", ["bandwidth is 0", "above 0"]),
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
    with pytest.raises(UsageError, match="not a table"):
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
        ("pp=2", "pipeline stages, and this meaning is not built yet"),
        ("dp=2,cp=2", "use tp=N, or a free axis such as seq=N"),
        ("ep=8", "experts=N"),
    ],
)
def test_wrong_meshes_say_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        Mesh.parse(text)
    assert expected in str(caught.value)


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
    with pytest.raises(UsageError, match="not built yet"):
        Mesh.from_any(build(ranks, ("pp", "tp")))


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
    assert all(
        mesh.sizes[-1] <= 2
        for mesh in mesh_candidates(load_cluster("mi250x-frontier"), 16)
        if "tp" in mesh.names
    )
    assert "tp=4" in texts(cluster_of(1, 4), 4)


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


def test_no_torch_is_imported() -> None:
    code = "import sys, autoshard.cluster, autoshard.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
