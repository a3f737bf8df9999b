"""Pipelines whose ranks share processors: whoever computes while others wait is faster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import pipeline

from autoshard.cluster import load_cluster
from autoshard.cluster.load import parse_cluster
from autoshard.cluster.write import cluster_text
from autoshard.errors import UsageError, VerificationError
from autoshard.schedules import Action, Schedule
from autoshard.schedules.registry import default_chunks, make
from autoshard.schedules.sharing import Sharing
from autoshard.schedules.timeline import StageCosts, least_makespan, makespan, simulate
from autoshard.simulate.step import estimate_step

CPU = load_cluster("cpu-gloo")
NAMES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v")
ranks_, microbatches_, seeds = st.integers(1, 4), st.integers(1, 6), st.integers(0, 1000)


def made(name: str, ranks: int, microbatches: int, seed: int) -> tuple[Schedule, StageCosts]:
    """A schedule, and unequal costs of its stages."""
    schedule = make(name, ranks, microbatches, chunks=default_chunks(name))
    rng = random.Random(seed)

    def some(count: int, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(scale * (0.1 + rng.random()) for _ in range(count))

    n = schedule.stages
    costs = StageCosts(
        *(some(n) for _ in range(4)),
        *(some(n - 1, 0.1) for _ in range(2)),
        held=(1.0,) * n,
        held_weight=(0.5,) * n,
        base=(0.0,) * ranks,
        update=some(ranks),
    )
    return schedule, costs


@pytest.mark.parametrize("name", NAMES)
@given(ranks=ranks_, microbatches=microbatches_, seed=seeds)
@settings(max_examples=15, deadline=None)
def test_where_nothing_is_to_be_gained_nothing_changes(
    name: str, ranks: int, microbatches: int, seed: int
) -> None:
    schedule, costs = made(name, ranks, microbatches, seed)
    plain = simulate(schedule, costs)
    together = Sharing(1.0, (0,) * ranks)  # no faster alone
    apart = Sharing(3.0, tuple(range(ranks)))  # nobody to share with
    for sharing in (together, apart):
        found = simulate(schedule, replace(costs, sharing=sharing))
        assert found.makespan == pytest.approx(plain.makespan)
        for own, other in zip(found.spans, plain.spans, strict=True):
            assert [s.action for s in own] == [s.action for s in other]
            assert [s.start for s in own] == pytest.approx([s.start for s in other])
            assert [s.end for s in own] == pytest.approx([s.end for s in other])
        assert sorted(s.end for s in found.sends) == pytest.approx(sorted(s.end for s in plain.sends))


@pytest.mark.parametrize("name", NAMES)
@given(ranks=ranks_, microbatches=microbatches_, seed=seeds, alone=st.floats(1.0, 4.0))
@settings(max_examples=15, deadline=None)
def test_work_is_done_no_faster_than_processors_can(
    name: str, ranks: int, microbatches: int, seed: int, alone: float
) -> None:
    schedule, costs = made(name, ranks, microbatches, seed)
    shared = replace(costs, sharing=Sharing(alone, (0,) * ranks))
    found = simulate(schedule, shared)
    assert found.makespan == pytest.approx(makespan(schedule, shared))
    assert found.busy == pytest.approx(simulate(schedule, costs).busy)
    assert found.makespan >= sum(found.busy) / ranks * (1 - 1e-9)
    assert found.makespan >= max(found.busy) / alone * (1 - 1e-9)
    assert found.makespan >= least_makespan(schedule, shared) * (1 - 1e-9)


def test_two_ranks_by_hand() -> None:
    """One microbatch: only one of the two computes at a time, at twice the speed of both."""
    schedule = make("gpipe", 2, 1)
    costs = StageCosts.uniform(2, forward=3.0, backward_input=1.0, backward_weight=1.0)
    assert makespan(schedule, costs) == pytest.approx(10.0)
    assert makespan(schedule, replace(costs, sharing=Sharing(2.0, (0, 0)))) == pytest.approx(5.0)
    # a core and a half for each at most
    assert makespan(schedule, replace(costs, sharing=Sharing(1.5, (0, 0)))) == pytest.approx(10 / 1.5)
    # two microbatches: none waits for a core that is idle
    twice = make("gpipe", 2, 2)
    assert makespan(twice, replace(costs, sharing=Sharing(2.0, (0, 0)))) == pytest.approx(20 / 2)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    rows = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    schedule = Schedule("wrong", 1, (0, 1), rows)
    costs = replace(StageCosts.uniform(2), sharing=Sharing(2.0, (0, 0)))
    with pytest.raises(VerificationError, match=r"B0\.0 waits forever"):
        makespan(schedule, costs)


def test_a_step_on_shared_cores() -> None:
    program = pipeline("llama-deep", 2, "dp=2", "1f1b", 4)
    plain = estimate_step(program, CPU)
    shared = estimate_step(program, replace(CPU, device=replace(CPU.device, alone=2.0)))
    assert shared.spent.total == pytest.approx(shared.seconds)
    assert shared.spent.compute == pytest.approx(plain.spent.compute)
    assert shared.spent.bubble < plain.spent.bubble
    # half of a message at either end
    half = plain.costs.send_forward[0] / 2
    assert half > 0
    for own, other in zip(shared.costs.forward, plain.costs.forward, strict=True):
        assert own == pytest.approx(other + half)
    # two nodes of two processes: each stage has one for itself
    inner = replace(CPU.levels[0], name="node", size=2)
    nodes = replace(CPU, devices=4, levels=(inner, CPU.levels[0]), device=replace(CPU.device, alone=2.0))
    alike = replace(nodes, device=CPU.device)
    own, other = (estimate_step(program, cluster) for cluster in (nodes, alike))
    assert own.spent.bubble == pytest.approx(other.spent.bubble, rel=0.2)
    assert own.timeline.spans[0][0].end == pytest.approx(other.timeline.spans[0][0].end + half, rel=0.2)


def test_a_cluster_says_how_fast_one_is_alone() -> None:
    found = replace(CPU, device=replace(CPU.device, alone=1.75))
    text = cluster_text(found, "", {}, [{} for _ in CPU.levels])
    assert parse_cluster(text, where="a test").device.alone == 1.75
    with pytest.raises(UsageError, match=r"alone is 0\.5"):
        parse_cluster(text.replace("alone = 1.75", "alone = 0.5"), where="a test")
