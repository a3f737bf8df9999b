"""How unlike the stages of a pipeline are at best, and what that does to a step."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import analysed

from autoshard.cluster import Mesh, load_cluster
from autoshard.search.bound.stage_imbalance import busiest, chain_of, imbalance
from autoshard.search.solve import stage_cuts as cuts
from autoshard.search.solve.formulate import ShardingProblem, formulate, layer_calls
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.step_config import StepConfig

SECONDS = st.floats(0.01, 10.0)


def _posed(name: str) -> ShardingProblem:
    model = analysed(name).model
    setting = StepConfig(1, layer_calls(model.folded))
    return formulate(model, Mesh.parse("dp=2,tp=2"), load_cluster("h100-dgx"), setting)


@given(st.lists(SECONDS, min_size=1, max_size=8), st.integers(1, 5))
def test_the_busiest_stage_is_that_of_the_best_cuts(chain: list[float], stages: int) -> None:
    best = min(
        max(sum(chain[a:b]) for a, b in pairwise((0, *ends, len(chain))))
        for count in range(min(stages, len(chain)))
        for ends in combinations(range(1, len(chain)), count)
    )
    found = imbalance(chain, stages) * sum(chain) / stages
    assert best * (1 - 1e-6) <= found <= best + max(chain) / 500


def test_layers_that_no_stage_can_divide() -> None:
    """Eight layers over four stages are alike, over three not; a head makes the last stage longer."""
    layers = [1.0] * 8
    assert imbalance(layers, 4) == 1.0
    assert imbalance(layers, 3) == pytest.approx(3 / (8 / 3), rel=1e-3)
    assert imbalance([*layers, 0.5], 4) == pytest.approx(2.5 / (8.5 / 4), rel=1e-3)
    assert imbalance([], 4) == imbalance([0.0, 0.0], 4) == 1.0


def test_chunks_share_what_one_of_them_is_longer() -> None:
    chain = [*[1.0] * 8, 0.5]
    whole, halves = busiest(chain, Pipe(4, "1f1b")), busiest(chain, Pipe(2, "interleaved", 2))
    assert 1.0 < halves < whole == pytest.approx(2.5 / (8.5 / 4), rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_parts_of_a_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All its seconds, in as many parts as may be cut apart; with few places, at the ends of calls."""
    formulated = _posed(name)
    work = sum(
        seconds
        for key, seconds in formulated.free.usage.seconds.items()
        if key.kind == "work" and not key.backward
    )
    every = chain_of(formulated, formulated.free)
    assert sum(every) == pytest.approx(work)
    calls = [c for c in formulated.model.folded.calls if not c.backward]
    monkeypatch.setattr(cuts, "_PLACES", len(calls))
    few = chain_of(formulated, formulated.free)
    assert sum(few) == pytest.approx(work)
    assert len(few) == len(calls) + 1 < len(every)
    assert few[-1] == 0.0
