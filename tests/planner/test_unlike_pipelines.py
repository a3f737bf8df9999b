"""Pipelines over groups of unlike devices and wiring, and over measured links."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from pipelines import model_and_batch

import autoshard
from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cli.inspect import prices_of
from autoshard.cluster import Cluster, Links, Mesh, assign_ranks, load_cluster, order_seconds, usable_memory
from autoshard.cost.collective import link_of
from autoshard.cost.on_mesh import CostModels, cost_model
from autoshard.cost.stage_machines import (
    across_nodes,
    boundary_links,
    bounding_machine,
    full_mesh,
    inner_candidates,
    limits,
    pipelines_fit,
    stage_machines,
)
from autoshard.options import PlanOptions
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.candidates import candidate_meshes, given_mesh
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.search.plan.plan import Cut
from autoshard.search.plan.plan_json import plan_to_json
from autoshard.search.select.rank_speed import RankSpeeds
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.configuration import Staged, shapes_of
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.step_config import StepConfig
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step

HOLMES, MIXED = load_cluster("holmes-ib-roce"), load_cluster("a100-h100-mixed")
LAYERS = 36


@functools.cache
def _gpt() -> Analysis:
    """GPT-7.5B of the Holmes paper (arXiv 2312.03549), without its values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=4096,
        n_head=32,
        vocab_size=51200,
        n_positions=2048,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).bfloat16().train()
        ids = torch.zeros(64, 2048, dtype=torch.int64)
    return analyse(capture(model, (), {"input_ids": ids, "labels": ids}))


def _planned(
    cluster: Cluster, ranks: int, batch: int, *, staged: bool | None = None, mesh: str = ""
) -> Planned:
    """staged: whether meshes have a pipeline, None for both. mesh: the only one."""
    if mesh:
        meshes = [given_mesh(Mesh.parse(mesh), cluster, LAYERS, batch, PlanOptions(schedule="1f1b"))]
    else:
        meshes = candidate_meshes(cluster, ranks, LAYERS, batch, PlanOptions())
    chosen = [s for s in meshes if staged is None or (s.ranks > 1) == staged]
    memory = usable_memory(cluster.device)
    return plan_analysed(
        _gpt(),
        chosen,
        cluster,
        memory=memory,
        request=SearchRequest(batch=batch),
        fixed=bool(mesh),
        reasons=False,
    )


def _step(found: Planned) -> float:
    assert found.peak is not None and found.peak.step is not None
    return found.peak.step


# -- what every rank runs on -------------------------------------------------------------------------------


def test_ranks_of_one_kind_are_not_told_apart() -> None:
    cluster, inner = load_cluster("h100-dgx"), Mesh.parse("fsdp=8,tp=2")
    assert stage_machines(cluster, inner, 4) == boundary_links(cluster, 16, 4) == ()
    assert stage_machines(HOLMES, Mesh.parse("dp=8"), 8) == ()  # inside a node, groups are alike


def test_one_group_of_several_is_a_cluster_of_one_kind() -> None:
    """As many devices as the first of its groups has."""
    found = candidate_meshes(MIXED, 64, LAYERS, 256, PlanOptions())
    assert any(s.ranks > 1 for s in found)
    assert not any(s.devices or s.links for s in found)


@pytest.mark.parametrize("cluster", [HOLMES, MIXED])
@pytest.mark.parametrize("inner", ["fsdp=16", "dp=2,fsdp=2,tp=8", "fsdp=32"])
def test_every_rank_is_priced_in_its_group(cluster: Cluster, inner: str) -> None:
    mesh = Mesh.parse(inner)
    ranks = (cluster.devices or 0) // mesh.world_size
    machines, bound = stage_machines(cluster, mesh, ranks), bounding_machine(cluster, mesh, ranks)
    assert len(machines) == ranks
    for rank, machine in enumerate(machines):
        group = cluster.groups[2 * rank // ranks]
        assert machine.device == group.device
        assert machine.links == tuple(link_of(group, mesh, k) for k in range(len(mesh.axes)))
        for link, slowest in zip(machine.links, bound.links, strict=True):
            assert link.bandwidth >= slowest.bandwidth
    # the slower network is that of the second group on the one, of the first on the other
    assert (machines[0].links == bound.links) == (cluster is MIXED)


def test_only_one_boundary_is_over_ethernet() -> None:
    links = boundary_links(HOLMES, 8, 8)
    slow = [link.latency == 50e-6 for link in links]
    assert slow == [False, False, False, True, False, False, False, True]  # the last: back to the first


def test_a_rank_is_in_one_group_or_made_of_whole_ones() -> None:
    groups = [replace(HOLMES.groups[0], name=str(k), devices=16) for k in range(4)]
    four = Cluster.joined("four", groups, HOLMES.levels)
    assert all(pipelines_fit(four, 64 // ranks, ranks) for ranks in (1, 2, 4, 8))
    assert not pipelines_fit(four, 24, 2)
    assert inner_candidates(four, 24, 2) == []
    assert Mesh.parse("dp=2,fsdp=16") in inner_candidates(four, 32, 2)
    assert Mesh.parse("fsdp=4,tp=8") in inner_candidates(four, 32, 2)
    assert inner_candidates(HOLMES, 16, 4) == inner_candidates(HOLMES.groups[1], 16, 1)
    # two whole groups: over Ethernet within a rank, and from rank to rank
    assert stage_machines(four, Mesh.parse("fsdp=32"), 2) == ()
    assert {link.latency for link in boundary_links(four, 32, 2)} == {50e-6}


@pytest.mark.parametrize("inner, across", [("fsdp=8,tp=5", True), ("fsdp=5,tp=8", False), ("fsdp=8", False)])
def test_ranks_across_nodes_are_priced_as_their_program(inner: str, across: bool) -> None:
    """Of 40 devices, some lie across two nodes of 72."""
    cluster, mesh = load_cluster("b200-nvl72"), Mesh.parse(inner)
    ranks = 1000 // mesh.world_size
    whole = cost_model(cluster, full_mesh(mesh, ranks)).reshard.links
    assert CostModels(cluster, 1000).of(mesh).reshard.links == whole[1:]
    slower = across_nodes(cluster, mesh, ranks)
    assert slower == (whole[2:] if across else ())
    staged = [Staged(mesh, (Pipe(ranks),)), Staged(mesh, (Pipe(ranks),), across=slower)]
    assert len(shapes_of(staged)) == 1 + across


def test_no_device_is_faster_than_its_limit() -> None:
    inner = Mesh.parse("fsdp=64")
    machines, bound = stage_machines(MIXED, inner, 2), bounding_machine(MIXED, inner, 2)
    slow, fast = limits(bound, machines, inner)
    assert slow == 1.0
    assert fast >= 989 * 0.621 / (312 * 0.768)
    pace = RankSpeeds(_gpt().model, MIXED, StepConfig(1, layer_calls(_gpt().folded)))
    staged = pace.of(given_mesh(Mesh.parse("pp=2,fsdp=64"), MIXED, LAYERS, 64, PlanOptions()))
    one, other = staged.pipes[0].speeds
    assert one == pytest.approx(1.0)
    assert 1.64 < other < fast  # between the ratios of memory and of products


# -- plans -------------------------------------------------------------------------------------------------


def test_the_slow_network_joins_two_stages() -> None:
    """Holmes: data parallelism inside the clusters, a pipeline over the Ethernet between them."""
    found, alone = _planned(HOLMES, 64, 1536), _planned(HOLMES, 64, 1536, staged=False)
    assert found.plan.pipeline is not None and found.plan.pipeline.ranks == 2
    assert _step(found) < _step(alone)
    assert found.plan.optimality.dual_bound <= _step(found)
    # with less to compute than to send, it is worth twice as much
    assert _step(_planned(HOLMES, 64, 64)) < 0.6 * _step(_planned(HOLMES, 64, 64, staged=False))


def test_faster_stages_get_more_layers() -> None:
    """Holmes' self-adapting cuts: A100 and H100 stages are equally busy, and so have unlike layers."""
    found = _planned(MIXED, 128, 256, mesh="pp=2,fsdp=64")
    assert found.plan.pipeline is not None and found.staging is not None
    (cut,) = found.plan.pipeline.cuts
    layer = int(cut.label.rpartition(".")[2])
    assert 8 <= layer <= 13  # of 36
    forward, backward = found.staging.costs.forward, found.staging.costs.backward
    assert forward[0] + backward[0] == pytest.approx(forward[1] + backward[1], rel=0.06)
    assert found.staging.equal is not None and found.staging.equal > 1.3 * found.staging.seconds
    label = "transformer.h.17"
    halves = msgspec.structs.replace(found.plan.pipeline, cuts=(Cut(LAYERS // 2, "", label),))
    steps, busy = [], []
    for pipeline in (found.plan.pipeline, halves):
        program = compile_analysed(replace(found, plan=replace(found.plan, pipeline=pipeline)))
        step = estimate_step(program, MIXED)
        steps.append(step.seconds)
        busy.append([row.forward + row.backward for row in step.stages])
    assert steps[0] == pytest.approx(_step(found), rel=0.02)
    assert steps[0] < 0.8 * steps[1]
    assert busy[1][0] > 1.5 * busy[1][1]  # as many layers, on slower devices


# -- measured links ----------------------------------------------------------------------------------------


def _measured(bandwidth: np.ndarray) -> Cluster:
    np.fill_diagonal(bandwidth, 0.0)
    base = load_cluster("h100-dgx")
    return replace(base, name="measured", devices=len(bandwidth), links=Links(bandwidth))


def test_a_slow_pair_is_given_nothing_to_do() -> None:
    bandwidth = np.full((8, 8), 4e10)
    bandwidth[2, 3] = bandwidth[3, 2] = 1e8
    machine = _measured(bandwidth)
    model, batch = model_and_batch("llama-deep", 4)
    found = autoshard.plan(
        model, "pp=2,dp=2,tp=2", example_inputs=batch, cluster=machine, microbatches=4, schedule="1f1b"
    )
    assert sorted(found.plan.order) == list(range(8))
    place = {device: rank for rank, device in enumerate(found.plan.order)}
    whole = Mesh.parse("pp=2,dp=2,tp=2")
    apart = [a != b for a, b in zip(whole.coords(place[2]), whole.coords(place[3]), strict=True)]
    assert sum(apart) > 1  # no two ranks that talk to each other
    program = autoshard.compile(model, found).program
    laid = StagePrices(program, machine.laid(autoshard.cluster.RankOrder(found.plan.order)))
    plain = StagePrices(program, machine)
    assert laid.link((0, 1)).alone == 4e10
    assert laid.costs.forward <= plain.costs.forward
    assert estimate_step(program, laid.cluster).seconds < estimate_step(program, machine).seconds


def test_halves_that_are_far_apart_are_two_stages() -> None:
    """Even and odd nodes are joined by slow links alone: stages are made of one kind or the other."""
    node = np.arange(32) // 8
    near = np.where(node[:, None] == node, 4e11, np.where(node[:, None] % 2 == node % 2, 4e10, 2e8))
    machine = _measured(near)
    found = plan_analysed(
        _gpt(),
        candidate_meshes(machine, 32, LAYERS, 32, PlanOptions()),
        machine,
        memory=usable_memory(machine.device),
        request=SearchRequest(batch=32),
        reasons=False,
    )
    assert found.plan.pipeline is not None
    kinds = [[node[d] % 2 for d in half] for half in (found.plan.order[:16], found.plan.order[16:])]
    assert all(len(set(kind)) == 1 for kind in kinds)
    assert found.staging is not None
    assert _step(found) == pytest.approx(found.staging.seconds, rel=0.2)


def test_unlike_devices_do_not_change_places() -> None:
    rng = np.random.default_rng(0)
    bandwidth = rng.uniform(1e9, 1e11, (8, 8))
    np.fill_diagonal(bandwidth, 0.0)
    links, mesh = Links(bandwidth), Mesh.parse("pp=2,tp=4")
    traffic = {"pp": 1.0, "tp": 1.0}
    order = assign_ranks(mesh, links, traffic, kinds=(0, 0, 0, 0, 1, 1, 1, 1))
    assert set(order.devices[:4]) == {0, 1, 2, 3}
    assert order_seconds(mesh, links, order, traffic) < order_seconds(mesh, links, None, traffic)


def test_a_program_is_priced_in_the_order_of_its_plan(tmp_path: Path) -> None:
    catalog = Path(autoshard.__file__).parent / "cluster/catalog/h100-dgx.toml"
    rows = [",".join("0" if a == b else "4e10" for b in range(4)) for a in range(4)]
    (tmp_path / "m.csv").write_text("\n".join(rows))
    text = catalog.read_text().replace('name = "h100-dgx"', 'name = "four"\ndevices = 4', 1)
    (tmp_path / "four.toml").write_text(f'{text}\n[links]\nmatrix = "m.csv"\n')
    model, batch = model_and_batch("llama-deep", 4)
    found = autoshard.plan(model, "pp=2,dp=2", example_inputs=batch, cluster=tmp_path / "four.toml")
    plan = replace(found.plan, order=(2, 3, 1, 0))
    machine = prices_of(plan_to_json(plan), str(tmp_path / "four.toml"))
    assert machine.order is not None and machine.order.devices == (2, 3, 1, 0)
