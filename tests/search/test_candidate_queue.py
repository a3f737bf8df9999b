"""Estimates are made only as well as they have to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import analysed

from autoshard.cluster import Mesh, load_cluster
from autoshard.cost.recipe import ADAMW
from autoshard.errors import InfeasibleError
from autoshard.options import PlanOptions
from autoshard.planner.candidates import candidate_meshes
from autoshard.search.bound.candidate_queue import CandidateQueue
from autoshard.search.bound.estimate import Estimated
from autoshard.search.select.mesh_shapes import MeshShapes
from autoshard.search.select.refine import CandidateSolver
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.configuration import Configuration, Staged, shapes_of
from autoshard.search.solve.formulate import layer_calls
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.step_config import StepConfig

BATCH, DEVICES = 8, 8


@dataclass
class Looks:
    """Says more with every look. seconds: by configuration, one per look; None where it cannot fit."""

    seconds: Mapping[int, tuple[float | None, ...]]
    taken: list[int] = field(default_factory=list)
    interrupt: bool = False

    def estimated(self, number: int) -> Estimated:
        where = Configuration(Mesh.parse("dp=2"), number, 1)
        first, *rest = self.seconds[number]
        assert first is not None
        return Estimated(
            where, cast(StepConfig, None), first, 0.0, view=View(self, tuple(rest)) if rest else None
        )


@dataclass(frozen=True)
class View:
    looks: Looks
    rest: tuple[float | None, ...]

    def closer(self, seen: Estimated) -> Estimated | None:
        if self.looks.interrupt:
            self.looks.interrupt = False
            raise KeyboardInterrupt
        self.looks.taken.append(seen.configuration.batch)
        found, *rest = self.rest
        if found is None:
            return None
        return replace(seen, seconds=found, view=View(self.looks, tuple(rest)) if rest else None)

    def may_fit(self) -> bool:
        return True


LOOKS = st.lists(
    st.tuples(
        st.floats(1, 10), st.lists(st.floats(0, 10), max_size=2), st.sampled_from(["seen", "inf", "none"])
    ),
    min_size=1,
    max_size=8,
)


@given(LOOKS)
def test_the_first_is_the_one_that_a_look_at_all_would_find(
    drawn: list[tuple[float, list[float], str]],
) -> None:
    seconds: dict[int, tuple[float | None, ...]] = {}
    for number, (first, more, end) in enumerate(drawn):
        steps: list[float | None] = [first]
        for extra in more:
            assert steps[-1] is not None
            steps.append(steps[-1] + extra)
        seconds[number] = tuple(steps) if end == "seen" else (*steps, inf if end == "inf" else None)
    last = {number: each[-1] for number, each in seconds.items()}
    fits = sorted(s for s in last.values() if s is not None and isfinite(s))
    looks = Looks(seconds)
    found = list(CandidateQueue(looks.estimated(n) for n in seconds).nearest(len(seconds)))
    assert [e.seconds for e in found] == fits
    assert all(last[e.configuration.batch] == e.seconds and not e.rough for e in found)


def test_what_stays_behind_is_not_looked_at() -> None:
    looks = Looks({1: (1.0, 5.0), 2: (2.0, 3.0), 3: (4.0, 6.0)})
    nearest = CandidateQueue(looks.estimated(n) for n in looks.seconds)
    first = nearest.first()
    assert first is not None and first.configuration.batch == 2 and looks.taken == [1, 2]
    assert len(list(nearest)) == 3
    wanted = nearest.first(lambda e: e.configuration.batch == 3)
    assert wanted is not None and wanted.seconds == 6.0 and len(list(nearest)) == 3


def test_an_interrupted_look_loses_nothing() -> None:
    looks = Looks({1: (1.0, 5.0), 2: (2.0, None)}, interrupt=True)
    nearest = CandidateQueue(looks.estimated(n) for n in looks.seconds)
    with pytest.raises(KeyboardInterrupt):
        nearest.first()
    assert len(list(nearest)) == 2
    first = nearest.first()
    assert first is not None and first.seconds == 5.0 and len(list(nearest)) == 1


def _shapes(budget: int | None) -> tuple[MeshShapes, list[tuple[Staged, ...]], CandidateSolver]:
    model, cluster = analysed("gpt2").model, load_cluster("h100-dgx")
    setting = StepConfig(1, layer_calls(model.folded), overlap=cluster.device.overlap)
    poses = ProblemCache(model, cluster, setting, ADAMW, lambda _: None)
    ask = SearchRequest(batch=BATCH, budget=budget)
    meshes = candidate_meshes(cluster, DEVICES, 4, BATCH, PlanOptions())
    shapes = MeshShapes(poses, ask, setting, BATCH, lambda _: None)
    return shapes, shapes_of(meshes), CandidateSolver(poses, ask, setting, lambda _: None)


def _looks(estimated: Estimated) -> list[Estimated]:
    """From the roughest to the closest."""
    found = [estimated]
    while found[-1].rough and (closer := found[-1].closer()) is not None:
        found.append(closer)
    return found


def test_a_closer_look_never_finds_less() -> None:
    """So that what is not at the front can stay unseen."""
    shapes, groups, _ = _shapes(None)
    seen = [_looks(e) for group in groups for e in shapes.ranked(shapes.solved(group))]
    assert len(seen) > 20
    for looks in seen:
        seconds = [e.seconds for e in looks]
        assert seconds == sorted(seconds) and not looks[-1].rough and len(looks) == 3
        assert looks[0].seconds == looks[0].bound


def test_what_cannot_fit_cannot_be_solved() -> None:
    """Nor what seems to have no room, and less memory never makes anything faster."""
    shapes, groups, _ = _shapes(None)
    free = {e.configuration: _looks(e)[-1].seconds for g in groups for e in shapes.ranked(shapes.solved(g))}
    state = max(shapes.solved(g).state for g in groups)
    budget = int(0.5 * state)
    tight, groups, exact = _shapes(budget)
    out = 0
    for group in groups:
        for estimated in tight.ranked(tight.solved(group)):
            last = _looks(estimated)[-1]
            where, how = last.configuration, last.setting
            if last.rough or not last.may_fit():
                out += 1
                formulated = tight.problems.of(where.mesh, where.batch)
                with pytest.raises(InfeasibleError):
                    exact.tuned(formulated, how)
            elif isfinite(last.seconds) and where in free:
                assert last.seconds >= free[where] * (1 - 1e-9)
    assert out > 3
