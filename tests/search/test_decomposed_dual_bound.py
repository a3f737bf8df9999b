"""Bounds of configurations that were not solved, against their exact solutions."""

from __future__ import annotations

import numpy as np
import pytest
from planned import analysed

from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.recipe import ADAMW
from autoshard.cost.step_time import Exposure
from autoshard.errors import InfeasibleError, UsageError
from autoshard.options import PlanOptions
from autoshard.planner.candidates import candidate_meshes
from autoshard.search.bound import best_bound as proving
from autoshard.search.bound import dual_function as floor
from autoshard.search.bound.ranking import _Bounded
from autoshard.search.problem.problem import experts_of
from autoshard.search.select.mesh_shapes import MeshShapes
from autoshard.search.select.refine import CandidateSolver
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.configuration import shapes_of
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.step_config import StepConfig
from autoshard.solver.batched_elimination import SINGLE, least_of_each
from autoshard.solver.eliminate import Elimination
from autoshard.solver.elimination_order import Order, find_order

BATCH = 16


class Pair:
    """Two variables or more in a ring, as an elimination takes them."""

    def __init__(self, unary: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray]) -> None:
        self.unary = unary
        self.rows: list[dict[int, np.ndarray]] = [{} for _ in unary]
        for (u, v), table in edges.items():
            self.rows[u][v], self.rows[v][u] = table, table.T


@pytest.mark.parametrize("seed", range(20))
def test_many_networks_at_once_are_as_each_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, many = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    sizes = rng.integers(1, 4, count).tolist()
    ends = [(u, v) for u in range(count) for v in range(u + 1, count) if rng.random() < 0.6]
    unary = [rng.random((n, many)) for n in sizes]
    edges = {(u, v): rng.random((sizes[u], sizes[v], many)) for u, v in ends}
    for table in edges.values():
        table[rng.random(table.shape) < 0.1] = np.inf
    near = [
        {v for pair in ends for v in pair if k in pair and v != k and sizes[k] > 1 < sizes[v]}
        for k in range(count)
    ]
    order = find_order(sizes, near)
    found = least_of_each(
        [u.astype(SINGLE) for u in unary], {p: t.astype(SINGLE) for p, t in edges.items()}, order
    )
    for k in range(many):
        own = Pair([u[:, k] for u in unary], {p: t[:, :, k] for p, t in edges.items()})
        least = Elimination(own, find_order(sizes, [set(r) for r in own.rows])).solve()[0]
        assert found[k] <= least
        assert np.isinf(least) == np.isinf(found[k]) and (np.isinf(least) or found[k] > 0.9999 * least)


def _bounded(
    name: str, cluster_name: str, devices: int, share: float
) -> tuple[list[_Bounded], ProblemCache, CandidateSolver]:
    """All microbatches on all meshes, with a share of the memory that the fastest placements take."""
    model, cluster = analysed(name).model, load_cluster(cluster_name)
    setting = StepConfig(1, layer_calls(model.folded), overlap=cluster.device.overlap)
    poses = ProblemCache(model, cluster.used_by(devices), setting, ADAMW, lambda _: None)
    layers, experts = sum(layer_calls(model.folded).values()), experts_of(model)
    staged = candidate_meshes(cluster, devices, layers, BATCH, PlanOptions(), experts)
    groups = shapes_of(
        MeshShapes(poses, SearchRequest(batch=BATCH), setting, BATCH, lambda _: None).reachable(staged),
        experts,
    )

    def shapes(budget: int | None) -> MeshShapes:
        return MeshShapes(poses, SearchRequest(batch=BATCH, budget=budget), setting, BATCH, lambda _: None)

    solved = []
    for group in groups:
        try:
            solved.append((group, shapes(None).solved(group)))
        except UsageError:  # the batch does not divide over it
            continue
    most = max(setting.held(end.free.usage).total for _, shape in solved for end in shape.ends)
    budget = int(share * most)
    tight = shapes(budget)
    found = [e.proof for group, _ in solved for e in tight.ranked(tight.solved(group))]
    ask = SearchRequest(batch=BATCH, budget=budget)
    bounded = [proof for proof in found if isinstance(proof, _Bounded)]
    assert len(bounded) == len(found)
    return bounded, poses, CandidateSolver(poses, ask, setting, lambda _: None)


@pytest.mark.parametrize(
    ("name", "cluster", "devices", "share"),
    [
        ("gpt2", "h100-dgx", 16, 0.4),
        ("llama", "cpu-gloo", 8, 0.8),
        ("mixtral", "v100-dgx2", 16, 0.4),
    ],
)
def test_nothing_that_fits_is_faster_than_its_bound(
    name: str, cluster: str, devices: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded, poses, exact = _bounded(name, cluster, devices, share)
    looked = better = nearer = priced = 0
    for one in bounded[:: max(1, len(bounded) // 12)]:
        bound = max(one.bounds())
        assert bound >= one.bound
        better += bound > 1.001 * one.bound
        looks = list(one.of(poses.of(one.mesh, one.batch)))
        own, narrow = max(looks), len(looks) > 1  # of some even one network is too wide
        nearer += own > 1.001 * bound
        with monkeypatch.context() as patch:
            # as if the network were wide: a network after the other, price by price
            patch.setattr(floor, "_MOST", 1)
            wide = list(one.of(poses.of(one.mesh, one.batch)))
        assert len(wide) == 1 + narrow * min(3, len(one.bare.prices))
        priced += narrow
        assert max(wide) <= own * (1 + 1e-6)
        bound = max(bound, own)
        for number in range(len(one.uneven)):
            try:
                placed = exact.tuned(poses.of(one.mesh, one.batch), one.ways[number])
            except InfeasibleError:
                continue
            looked += 1
            assert bound <= placed.seconds * (1 + 1e-9), f"{one.mesh} {one.batch} {one.ways[number].pipe}"
    assert looked >= 6 and better >= 1 and nearer >= 1 and priced >= 1


def test_a_price_is_told_where_fewer_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = analysed("llama").model, load_cluster("cpu-gloo")
    setting = StepConfig(1, layer_calls(model.folded))
    poses = ProblemCache(model, cluster.used_by(4), setting, ADAMW, lambda _: None)
    formulated, looks = poses.of(Mesh.parse("dp=2,tp=2"), poses.captured), []

    def recorded(unary: list, edges: dict, order: Order) -> np.ndarray:
        looks.append((unary[0].shape[1], order.total))
        return least_of_each(unary, edges, order)

    def price() -> tuple[float, Exposure] | None:
        return proving.best_price(formulated, setting, (1e-9, 1e-8), (Exposure(0.5, 0.5, 0.5, 0.5),), 1e5)

    monkeypatch.setattr(floor, "least_of_each", recorded)
    best = price()
    (coarse, total), (fine, _) = looks
    assert best is not None and fine > coarse
    monkeypatch.setattr(floor, "_MOST", coarse * total)  # no room for the second look in one piece
    assert price() == best
    with monkeypatch.context() as patch:
        given = proving.joint_dual_values
        turns = iter((given, lambda *_, **__: None))
        patch.setattr(proving, "joint_dual_values", lambda *a, **k: next(turns)(*a, **k))
        rough = price()
    assert rough is not None and 1e-9 / 4 * (1 - 1e-9) <= rough[0] <= 1e-8 * 4 * (1 + 1e-9)
