"""Where pipelines are cut: equal to brute force, and better than equally many layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solve import stage_cuts as cuts
from autoshard.search.solve.stage_cuts import CutRequest, Line, best_cuts, places_of, step_seconds

TIMES = st.floats(0.0, 10.0, allow_nan=False).map(lambda x: round(x, 2))


@st.composite
def lines(draw: st.DrawFn) -> Line:
    n = draw(st.integers(1, 11))
    column = st.lists(TIMES, min_size=n, max_size=n)
    forward, backward, held, state, send = (np.array(draw(column)) for _ in range(5))
    blocked = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    params = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n).map(np.array))
    return Line(forward, backward, held, state, np.where(blocked, np.inf, send), params)


def brute_force(lines: Sequence[Line], ask: CutRequest) -> float | None:
    """The least step over all cuts that fit. lines: of every stage."""
    n = len(lines[0])
    best: float | None = None
    for ends in combinations(range(n - 1), ask.stages - 1):
        edges = [0, *(e + 1 for e in ends), n]
        times, fits = [], True
        for stage, (a, b) in enumerate(pairwise(edges)):
            line = lines[stage]
            sent = float(line.send[b - 1]) if b < n else 0.0
            times.append(float((line.forward + line.backward)[a:b].sum()) + sent)
            flight = ask.in_flight[stage] if ask.in_flight else 1
            held = float(line.state[a:b].sum()) + flight * float(line.held[a:b].sum())
            room = ask.room(stage)
            fits &= room is None or held <= room / ask.chunks + 1e-9
            fits &= line.params is None or bool(line.params[a:b].any())
        if fits and np.isfinite(sum(times)):
            seconds = step_seconds(times, ask)
            best = seconds if best is None else min(best, seconds)
    return best


@given(lines(), st.integers(1, 5), st.integers(1, 2), st.integers(1, 12), st.none() | st.floats(1.0, 60.0))
def test_the_programme_equals_brute_force(
    line: Line, ranks: int, chunks: int, microbatches: int, budget: float | None
) -> None:
    stages = ranks * chunks
    flight = tuple(min(microbatches, stages - k) for k in range(stages))
    ask = CutRequest(stages, microbatches, chunks, flight, budget)
    wanted = brute_force([line] * stages, ask)
    found = best_cuts(line, ask)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.seconds == pytest.approx(wanted, abs=1e-9)
        assert len(found.ends) == stages - 1


@given(
    lines(),
    st.lists(st.sampled_from([0.4, 1.0, 2.5]), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 1.0, 7.0]), min_size=5, max_size=5),
    st.integers(1, 2),
    st.integers(1, 12),
    st.none() | st.lists(st.floats(1.0, 60.0), min_size=5, max_size=5),
)
def test_unlike_ranks_are_cut_as_brute_force_does(
    line: Line,
    slower: list[float],
    links: list[float],
    chunks: int,
    microbatches: int,
    rooms: list[float] | None,
) -> None:
    """Ranks of several speeds and memories behind several links; ops of odd places take all as long."""
    ranks = len(slower)
    stages = ranks * chunks
    odd = np.arange(len(line)) % 2 == 1
    kinds = [
        replace(
            line,
            forward=np.where(odd, line.forward, line.forward * slow),
            backward=line.backward * slow,
            send=line.send + link,
        )
        for slow, link in zip(slower, links, strict=False)
    ]
    flight = tuple(min(microbatches, stages - k) for k in range(stages))
    budgets = () if rooms is None else tuple(rooms[:ranks]) * chunks
    ask = CutRequest(stages, microbatches, chunks, flight, None if rooms is None else max(budgets), budgets)
    of = [kinds[stage % ranks] for stage in range(stages)]
    wanted, found = brute_force(of, ask), best_cuts(of, ask)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.seconds == pytest.approx(wanted, abs=1e-9)


def test_a_rank_twice_as_fast_takes_twice_as_many_layers() -> None:
    work, zero = np.array([1.0] * 12), np.zeros(12)
    slow = Line(work, zero, zero, zero, zero)
    fast = replace(slow, forward=work / 2)
    found = best_cuts([slow, fast], CutRequest(2, 8))
    assert found is not None
    assert found.ends == (3,)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    """Twelve layers and a head of three layers' weight on four stages."""
    work = np.array([1.0] * 12 + [3.0])
    zero = np.zeros(13)
    found = best_cuts(Line(work, zero, zero, zero, zero), CutRequest(4, 8))
    assert found is not None
    assert found.slowest == 4.0
    assert found.ends[-1] >= 10
    equal = [3.0, 3.0, 3.0, 6.0]
    assert found.seconds < step_seconds(equal, CutRequest(4, 8))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=12), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=40),
)
def test_places_are_the_ends_of_calls_and_where_least_crosses(
    rows: list[list[float]], order: list[int]
) -> None:
    """Of places alike in every call, each call has its own before any has a second one."""
    calls = [rows[k % len(rows)] for k in order]
    keys = [
        (number != len(row) - 1, crossing, row[:number].count(crossing), call, number)
        for call, row in enumerate(calls)
        for number, crossing in enumerate(row)
    ]
    for most in (10, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuts, "_PLACES", most)
            assert places_of(calls) == sorted((call, number) for *_, call, number in sorted(keys)[:most])
