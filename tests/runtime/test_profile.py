"""Measuring a machine. Run as a script, it is one rank of two pretended nodes of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.cluster import Cluster, Device, Level, Mesh, load_cluster, mesh_candidates
from autoshard.cluster.links import read_matrix
from autoshard.cluster.measured import CollectiveTimings
from autoshard.cluster.write import cluster_text, matrix_text, write_all
from autoshard.cost import AxisLink, link_of, seconds
from autoshard.cost.fit import FITTED, Timing, fit_link
from autoshard.errors import UsageError
from autoshard.runtime.launch import torchrun
from autoshard.runtime.profile import core_sharing as profile_sharing
from autoshard.runtime.profile import device as profile_device
from autoshard.runtime.profile import kernels as profile_kernels
from autoshard.runtime.profile import links as profile_links
from autoshard.runtime.profile import machine as profile
from autoshard.runtime.profile.core_sharing import share_of_core
from autoshard.runtime.profile.links import node_size, rising, sizes_to

DEVICE = Device('a "quoted" device', 1000, {"f32": 1.5e9, "bf16": 2e10}, 1e9, 0.75, 1.25e-6)
SIZES = (1024, 65536, 16 * 2**20)


def timings(latency: float, bandwidth: float, ranks: int, *factors: float) -> list[Timing]:
    """What the cost model says that collectives take, times the factors in turn."""
    link = AxisLink(latency, bandwidth, ranks)
    cases = [(kind, size) for kind in FITTED for size in SIZES]
    factors = factors or (1.0,)
    return [
        Timing(kind, size, ranks, seconds(kind, size, link) * factors[number % len(factors)])
        for number, (kind, size) in enumerate(cases)
    ]


# -- the fit ---------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e10), st.integers(2, 64))
def test_the_fit_gives_back_the_link_of_the_cost_model(latency: float, bandwidth: float, ranks: int) -> None:
    found = fit_link(timings(latency, bandwidth, ranks), where="test")
    assert found.latency == pytest.approx(latency, rel=1e-6)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.worst < 1e-6


def test_too_slow_counts_as_much_as_too_fast() -> None:
    # twice, half and just: the middle of the logarithms is where it was
    found = fit_link(
        [t for factor in (2.0, 0.5) for t in timings(1e-4, 1e9, 4, factor)],
        where="test",
    )
    assert found.latency == pytest.approx(1e-4, rel=1e-6)
    assert found.bandwidth == pytest.approx(1e9, rel=1e-6)
    assert found.worst == pytest.approx(1.0)


def test_times_that_no_link_has_are_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):  # long messages take no longer
        fit_link([Timing("all_reduce", size, 4, 1e-3) for size in (*SIZES, 2**30)], where="test")
    with pytest.raises(UsageError, match="do not fit"):  # short ones cost nothing of their own
        fit_link([Timing("all_reduce", size, 4, size * 1e-9) for size in SIZES], where="test")
    with pytest.raises(UsageError, match="one size"):
        fit_link([Timing("all_reduce", 1024, 4, 1e-3)] * 3, where="test")
    with pytest.raises(UsageError, match="broadcast cannot be fitted"):
        fit_link([Timing("broadcast", size, 4, 1e-3) for size in SIZES], where="test")
    for wrong in (Timing("all_reduce", 1, 4, 0.0), Timing("all_reduce", 1, 1, 1.0)):
        with pytest.raises(UsageError, match="cannot be"):
            fit_link([wrong, *timings(1e-4, 1e9, 4)], where="test")


# -- nodes and sizes -------------------------------------------------------------------------------


def test_nodes_from_hosts() -> None:
    assert node_size(["a"]) == node_size(["a", "b", "c"]) == 1
    assert node_size(["a", "a", "b", "b"]) == 2
    assert node_size(["a", "a", "a"]) == 3
    for wrong in (["a", "a", "b"], ["a", "b", "b"], ["a", "b", "a", "b"], ["a", "b", "a"], []):
        with pytest.raises(UsageError, match=r"same size|no ranks"):
            node_size(wrong)


def test_sizes_reach_the_largest() -> None:
    assert sizes_to(8192) == [1024, 8192]
    assert sizes_to(100_000) == [1024, 8192, 65536, 100_000]
    with pytest.raises(UsageError, match="at least 8192"):
        sizes_to(8191)


# -- files -----------------------------------------------------------------------------------------


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    levels = (Level("node", 2, 1e-6, 1.234e9, 2), Level("network \\ \x7f", None, 1.25e-5, 1e8))
    tables = (
        CollectiveTimings("send", 2, (1024, 65536), (1.5e-5, 1.234e-3)),
        CollectiveTimings("all_gather", 2, (1, 2), (1.0, 2.0)),
    )
    levels = (replace(levels[0], measured=tables), levels[1])
    kernels = replace(DEVICE.kernels, attention_start=1e-4, view=2e-6, hand=3e-5)
    cluster = Cluster("c\u00e9", 4, replace(DEVICE, kernels=kernels, alone=2.5), levels)
    path = tmp_path / "c.toml"
    path.write_text(cluster_text(cluster, "two\nlines", {"memory_bytes": "said"}, [{}, {"latency": "x"}]))
    assert load_cluster(path) == cluster
    grouped = Cluster.joined("g", [cluster, Cluster("d", 4, DEVICE, levels)], [Level("net", None, 1e-4, 1e7)])
    with pytest.raises(UsageError, match="groups cannot be written"):
        cluster_text(grouped, "", {}, [{}])


def test_matrices_keep_four_digits(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    matrix = np.array([[0.0, 1.23456e9], [9.87654e-6, 0.0]])
    path.write_text(matrix_text(matrix, "bytes/s"))
    assert read_matrix(path, where="x").tolist() == [[0.0, 1.235e9], [9.877e-6, 0.0]]


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.toml", tmp_path / "no folder" / "b.toml"
    with pytest.raises(UsageError, match="cannot write"):
        write_all({good: "a", bad: "b"})
    assert list(tmp_path.iterdir()) == []
    write_all({good: "a"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=8))
def test_numbers_that_rise_are_the_nearest_ones(values: list[float]) -> None:
    found, n = rising(values), len(values)
    assert all(a <= b for a, b in pairwise([*found, 9.0]))
    # the formula that has the largest of the smallest means around each (Barlow et al., theorem 1.4.4)
    nearest = [max(min(mean(values[a : b + 1]) for b in range(k, n)) for a in range(k + 1)) for k in range(n)]
    assert found == pytest.approx(nearest, abs=1e-9)


# -- the command -----------------------------------------------------------------------------------


def _make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and copies that take no time; their rates mean nothing."""
    monkeypatch.setattr(profile_device, "_SIDES", (32, 64))
    monkeypatch.setattr(profile_device, "_LAYERS", ((32, 32, 32),))
    monkeypatch.setattr(profile_device, "_COPIED", {"cpu": 2**16, "cuda": 2**16})
    monkeypatch.setattr(profile_device, "_WINDOW", {"cpu": 1e-4, "cuda": 1e-4})
    monkeypatch.setattr(profile_links, "_WINDOW", {"cpu": 2e-3, "cuda": 2e-3})
    monkeypatch.setattr(profile_links, "_SIDE", 8)
    monkeypatch.setattr(profile_links, "_BETWEEN", 1e-4)
    monkeypatch.setattr(profile_kernels, "_SIZES", {"small": 2**14, "large": 2**16})
    monkeypatch.setattr(profile_kernels, "_KEPT", 2**16)


def test_processes_share_the_cores_that_they_are_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, quota = torch.device("cpu"), tmp_path / "cpu.max"
    threads = torch.get_num_threads()
    monkeypatch.setattr(profile_sharing, "_QUOTA", quota)  # there is no such file
    monkeypatch.setattr(profile_sharing.os, "sched_getaffinity", lambda _: set(range(2 * threads)))
    assert share_of_core(cpu, 8) == 4
    assert share_of_core(cpu, 1) == 1  # a core of its own, and one to spare
    assert share_of_core(torch.device("cuda"), 8) == 1
    quota.write_text("max 100000\n")
    assert share_of_core(cpu, 8) == 4
    quota.write_text(f"{50_000 * threads} 100000\n")
    assert share_of_core(cpu, 8) == 16


def test_one_device_without_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _make_small(monkeypatch)
    path = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["profile", "-o", str(path), "--repeats", "2"])
    assert done.exit_code == 0, done.output
    assert "no links were" in done.stdout
    cluster = load_cluster(path)
    assert (cluster.name, cluster.devices, cluster.levels) == ("mine", 1, ())
    assert [str(mesh) for mesh in mesh_candidates(cluster, 1)] == ["dp=1"]
    assert {"f32", "bf16"} <= set(cluster.device.peak_flops)
    assert 0 < cluster.device.matmul_efficiency <= 1
    source = tomllib.loads(path.read_text())["device"]["source"]
    assert set(source) == set(tomllib.loads(path.read_text())["device"]) - {"name", "source"}
    assert "no links were measured" in tomllib.loads(path.read_text())["description"]

    before = path.read_text()
    again = CliRunner().invoke(app, ["profile", "-o", str(path)])
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert path.read_text() == before
    done = CliRunner().invoke(app, ["profile", "-o", str(path), "--overwrite", "--json", "--repeats", "1"])
    document = json.loads(done.stdout)
    assert (document["command"], document["devices"], document["levels"]) == ("profile", 1, [])


@pytest.mark.gpu
def test_a_gpu() -> None:
    measured = profile_device.measure_device(torch.device("cuda", 0), 1, 3, lambda text: None)
    device, kernels = measured.device, measured.device.kernels
    assert device.peak_flops["bf16"] > 2 * device.peak_flops["f32"]
    assert 0 < device.launch_overhead < kernels.dispatch < 1e-3
    assert 0.05 < kernels.attention_backward < 1 and 0.05 < kernels.attention < 1
    assert 0.3 < kernels.traffic <= 1 and 0 < kernels.depth < 1024 and kernels.multiprocessors > 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-o", "x.csv"], "not a .toml file"),
        (["-o", "no folder/x.toml"], "no folder"),
        (["-o", "x.toml", "--largest", "1KiB"], "largest message is 1024 bytes"),
        (["-o", "x.toml", "--largest", "much"], "is not a size"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "measure_device", refuse)
    done = CliRunner().invoke(app, ["profile", *arguments])
    assert done.exit_code == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_if_measuring_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(profile, "measure_device", fail)
    done = CliRunner().invoke(app, ["profile", "-o", str(tmp_path / "x.toml")])
    assert isinstance(done.exception, RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "four.toml"
    done = torchrun([__file__, str(path)], 4, stdout=subprocess.PIPE)
    assert done.returncode == 0
    cluster = load_cluster(path)
    assert (cluster.devices, [level.name for level in cluster.levels]) == (4, ["node", "network"])
    timed = [{(table.kind, table.ranks) for table in level.measured} for level in cluster.levels]
    assert timed == [{(kind, 2) for kind in (*FITTED, "send")}] * 2
    assert cluster.device.kernels.hand > 0 and cluster.device.kernels.view >= 0
    assert 1 <= cluster.device.alone <= 2
    assert cluster.group_sizes == (2,)
    assert 1 <= cluster.levels[1].shared_by <= 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["four.csv", "four.latency.csv", "four.toml"]
    assert cluster.links is not None and cluster.links.latency is not None
    assert cluster.links.devices == 4
    link = link_of(cluster, Mesh.parse("dp=2,tp=2"), 1)
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert link.bandwidth == min(cluster.links.bandwidth[pair] for pair in pairs)
    table = tomllib.loads(path.read_text())
    for part in (table["device"], *table["level"]):
        assert set(part["source"]) == set(part) - {"name", "source"}
    document = json.loads(done.stdout)
    assert [level["size"] for level in document["levels"]] == [2, None]


def _rank(path: str) -> None:
    """One rank: the command itself, on small products, its host named after half of its rank."""
    import os

    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        patch.setattr(profile.socket, "gethostname", lambda: f"node{int(os.environ['RANK']) // 2}")
        app(["profile", "-o", path, "--matrix", "--json", "--repeats", "5", "--largest", "4MiB"])


if __name__ == "__main__":
    _rank(sys.argv[1])
