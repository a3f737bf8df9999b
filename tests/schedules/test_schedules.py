"""Pipeline schedules: complete, in order, as short and as small as their papers say, ordered as torch's."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_schedules import torch_schedule

from autoshard.errors import InfeasibleError, UsageError, VerificationError
from autoshard.program.program import PipelineStages
from autoshard.program.schedule_json import schedule_from_json, schedule_to_json
from autoshard.report import gantt
from autoshard.schedules import Action, Schedule
from autoshard.schedules.check import check, in_flight
from autoshard.schedules.named import NAMED
from autoshard.schedules.placement import looped, v_shaped
from autoshard.schedules.registry import (
    SCHEDULES,
    default_chunks,
    ideal_bubble,
    ideal_bubble_fraction,
    make,
    names,
)
from autoshard.schedules.searched import SearchedSchedule, search
from autoshard.schedules.spec import PipeSize, StepTimes
from autoshard.schedules.timeline import StageCosts, least_makespan, makespan, peak_bytes, simulate
from autoshard.search.solve.pipeline_model import Pipe
from benchmarks.schedules_table import rows

EVERY = sorted(SCHEDULES)
some = settings(max_examples=60, deadline=None, derandomize=True)
ranks_ = st.integers(1, 6)
microbatches_ = st.integers(1, 13)
chunks_ = st.integers(1, 3)
seeds = st.integers(0, 2**31)


def made(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    return make(name, ranks, microbatches, SCHEDULES[name].chunks or chunks)


def uneven(stages: int, ranks: int, seed: int) -> StageCosts:
    """Every stage and link its own times and bytes."""
    draw = random.Random(seed)

    def some_of(n: int, low: float, high: float) -> tuple[float, ...]:
        return tuple(draw.uniform(low, high) for _ in range(n))

    held = some_of(stages, 0.5, 2.0)
    return StageCosts(
        forward=some_of(stages, 0.5, 1.5),
        backward=some_of(stages, 1.0, 3.0),
        backward_input=some_of(stages, 0.5, 1.5),
        backward_weight=some_of(stages, 0.2, 1.5),
        send_forward=some_of(stages - 1, 0.0, 2.0),
        send_backward=some_of(stages - 1, 0.0, 2.0),
        held=held,
        held_weight=tuple(draw.uniform(0.0, h) for h in held),
        base=some_of(ranks, 0.0, 3.0),
        update=some_of(ranks, 0.0, 1.0),
    )


def slow_starts(schedule: Schedule, costs: StageCosts) -> list[list[float]]:
    """Start times by sweeping over all lists until nothing moves any more: the definition, not quick."""
    seconds = {
        "F": costs.forward,
        "B": costs.backward,
        "I": costs.backward_input,
        "W": costs.backward_weight,
    }
    at = [[0.0] * len(row) for row in schedule.actions]
    place = {("B" if a.kind == "I" else a.kind, a.stage, a.microbatch): (r, k)
             for r, row in enumerate(schedule.actions) for k, a in enumerate(row)}  # fmt: skip
    moved = True
    while moved:
        moved = False
        ends = [[t + seconds[a.kind][a.stage] for t, a in zip(ts, row, strict=True)]
                for ts, row in zip(at, schedule.actions, strict=True)]  # fmt: skip
        arrives: dict[tuple[str, int, int], float] = {}
        stream: dict[tuple[int, int], float] = {}
        for rank, row in enumerate(schedule.actions):
            for k, a in enumerate(row):
                to = a.stage + 1 if a.kind == "F" else a.stage - 1
                if a.kind == "W" or not 0 <= to < schedule.stages:
                    continue
                # what runs as one is done at once
                other, arrival = schedule.owner[to], ends[rank][k + (a in schedule.paired)]
                if other != rank:
                    wire = costs.send_forward[a.stage] if a.kind == "F" else costs.send_backward[to]
                    arrival = max(stream.get((rank, other), 0.0), arrival) + wire
                    stream[rank, other] = arrival
                arrives["F" if a.kind == "F" else "B", to, a.microbatch] = arrival
        for rank, row in enumerate(schedule.actions):
            for k, a in enumerate(row):
                earliest = ends[rank][k - 1] if k else 0.0
                for needs in (a, row[k + 1]) if a in schedule.paired else (a,):
                    kind = "B" if needs.kind == "I" else needs.kind
                    earliest = max(earliest, arrives.get((kind, needs.stage, needs.microbatch), 0.0))
                    if kind != "F":
                        r, j = place["B" if kind == "W" else "F", needs.stage, needs.microbatch]
                        earliest = max(earliest, ends[r][j])
                if earliest > at[rank][k] + 1e-12:
                    at[rank][k] = earliest
                    moved = True
    return at


# -- every schedule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@given(ranks=ranks_, microbatches=microbatches_, chunks=chunks_, seed=seeds)
@some
def test_runs_to_its_end(name: str, ranks: int, microbatches: int, chunks: int, seed: int) -> None:
    schedule = made(name, ranks, microbatches, chunks)
    check(schedule)
    assert schedule.name == name
    assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
    assert schedule.splits_backward == any(a.kind == "W" for row in schedule.actions for a in row)
    costs = uneven(schedule.stages, ranks, seed)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(makespan(schedule, costs))
    assert least_makespan(schedule, costs) <= timeline.makespan * (1 + 1e-12)
    assert [tuple(s.action for s in row) for row in timeline.spans] == list(schedule.actions)
    assert 0.0 <= timeline.bubble < 1.0
    assert len(timeline.sends) == 2 * microbatches * sum(
        a != b for a, b in zip(schedule.owner, schedule.owner[1:], strict=False)
    )


@pytest.mark.parametrize("name", EVERY)
@given(ranks=st.integers(1, 4), microbatches=st.integers(1, 6), chunks=chunks_, seed=seeds)
@settings(max_examples=20)
def test_times_by_definition(name: str, ranks: int, microbatches: int, chunks: int, seed: int) -> None:
    schedule = made(name, ranks, microbatches, chunks)
    costs = uneven(schedule.stages, ranks, seed)
    timeline = simulate(schedule, costs)
    for row, expected in zip(timeline.spans, slow_starts(schedule, costs), strict=True):
        assert [span.start for span in row] == pytest.approx(expected)
    lasts = [row[-1].end + update for row, update in zip(timeline.spans, costs.update, strict=True)]
    assert timeline.makespan == pytest.approx(max(lasts))


@pytest.mark.parametrize("name", EVERY)
@given(ranks=ranks_, microbatches=microbatches_, chunks=chunks_, seed=seeds)
@some
def test_memory(name: str, ranks: int, microbatches: int, chunks: int, seed: int) -> None:
    schedule = made(name, ranks, microbatches, chunks)
    chunks = schedule.stages // ranks
    counts = StageCosts.uniform(ranks, chunks, held=float(chunks))
    assert peak_bytes(schedule, counts) == pytest.approx(in_flight(schedule))
    costs = uneven(schedule.stages, ranks, seed)
    timeline = simulate(schedule, costs)
    for rank, curve in enumerate(timeline.curve):
        assert [t for t, _ in curve] == sorted(t for t, _ in curve)
        assert max(b for _, b in curve) == pytest.approx(timeline.peak[rank])
        assert curve[-1][1] == pytest.approx(costs.base[rank], abs=1e-9)


MOST: dict[str, Callable[[int, int, int, int], int]] = {
    # rank, ranks, microbatches, chunks -> (stage, microbatch) pairs held at most
    "gpipe": lambda r, p, m, v: m,
    "1f1b": lambda r, p, m, v: min(p - r, m),
    "breadth-first": lambda r, p, m, v: m * v,
    "zb-h1": lambda r, p, m, v: min(p, m),
    "zb-v": lambda r, p, m, v: 2 * min(p, m),
    "searched": lambda r, p, m, v: v * min(p, m),
}


@pytest.mark.parametrize("name", sorted(MOST))
@given(ranks=ranks_, microbatches=microbatches_, chunks=chunks_)
@some
def test_microbatches_in_flight(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    held = in_flight(made(name, ranks, microbatches, chunks))
    most = [MOST[name](r, ranks, microbatches, chunks) for r in range(ranks)]
    if name in ("gpipe", "1f1b", "breadth-first"):
        assert list(held) == most
    assert all(h <= n for h, n in zip(held, most, strict=True))
    if name == "zb-h1":
        # no rank above 1F1B's first one, and that is reached
        assert max(held) == in_flight(make("1f1b", ranks, microbatches))[0]
    if name == "zb-v":
        # stages are half as large as those of 1F1B
        assert max(held) == 2 * in_flight(make("1f1b", ranks, microbatches))[0]


@given(ranks=ranks_, groups=st.integers(1, 4), chunks=st.integers(2, 3))
@some
def test_interleaved_holds_what_megatron_does(ranks: int, groups: int, chunks: int) -> None:
    microbatches = ranks * groups
    held = in_flight(make("interleaved", ranks, microbatches, chunks))
    for rank, n in enumerate(held):
        assert n == min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, chunks * microbatches)


@given(ranks=ranks_, microbatches=microbatches_)
@some
def test_one_chunk_interleaved_is_1f1b(ranks: int, microbatches: int) -> None:
    assert make("interleaved", ranks, microbatches, 1).actions == make("1f1b", ranks, microbatches).actions
    assert make("breadth-first", ranks, microbatches, 1).actions == make("gpipe", ranks, microbatches).actions


# -- bubbles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(NAMED))
@given(
    ranks=ranks_,
    microbatches=microbatches_,
    chunks=chunks_,
    times=st.tuples(*[st.sampled_from((0.5, 1.0, 1.25, 2.0, 3.0))] * 3),
    equal=st.booleans(),
)
@settings(max_examples=150)
def test_bubble_is_that_of_the_formula(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    times: tuple[float, float, float],
    equal: bool,
) -> None:
    chunks = SCHEDULES[name].chunks or chunks
    f, i, w = (times[0],) * 3 if equal or name == "zb-v" else times
    kinds = {"forward": f, "backward_input": i, "backward_weight": w}
    size = PipeSize(ranks, microbatches, chunks)
    ideal = ideal_bubble(name, size, StepTimes(**kinds))
    share = ideal_bubble_fraction(name, size, StepTimes(**kinds))
    enough = {"interleaved": ranks, "breadth-first": ranks, "zb-h1": ranks, "zb-v": 2 * ranks - 1}
    assert (ideal is not None) == (microbatches >= enough.get(name, 1) or (chunks == 1 and name != "zb-h1"))
    assume(ideal is not None and share is not None)
    timeline = simulate(make(name, ranks, microbatches, chunks), StageCosts.uniform(ranks, chunks, **kinds))
    assert timeline.makespan - microbatches * (f + i + w) == pytest.approx(ideal)
    assert timeline.bubble == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", 2), ("interleaved", 4), ("breadth-first", 2)],
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_the_search_knows_how_long_equal_stages_wait(name: str, chunks: int, ranks: int) -> None:
    """Also with fewer microbatches than ranks, when a schedule cannot fill them."""
    costs = StageCosts.uniform(ranks, chunks)
    for microbatches in (*range(1, 2 * ranks + 2), 4 * ranks):
        step = makespan(make(name, ranks, microbatches, chunks), costs)
        waits = Pipe(ranks, name, chunks).filling(microbatches)
        assert 3 * (microbatches + waits) == pytest.approx(step), microbatches


def test_zb_h1_has_the_bubble_of_its_paper() -> None:
    """(p-1)(F+I-W), where a weight gradient is no longer than a forward or an input gradient."""
    for f, i, w in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.5, 1.0)):
        costs = StageCosts.uniform(6, forward=f, backward_input=i, backward_weight=w)
        assert makespan(make("zb-h1", 6, 12), costs) - 12 * (f + i + w) == pytest.approx(5 * (f + i - w))


@given(ranks=ranks_, more=st.integers(0, 9))
@some
def test_zb_v_has_no_bubble(ranks: int, more: int) -> None:
    timeline = simulate(make("zb-v", ranks, 2 * ranks + more, 2), StageCosts.uniform(ranks, 2))
    assert timeline.gaps == pytest.approx((0.0,) * ranks)


# -- the search ---------------------------------------------------------------------------------------------


@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    chunks=chunks_,
    seed=seeds,
    room=st.sampled_from((0.0, 0.3, 0.6, 1.0)),
    split=st.booleans(),
)
@some
def test_search_keeps_the_cap_and_beats_the_named(
    ranks: int, microbatches: int, chunks: int, seed: int, room: float, split: bool
) -> None:
    costs = uneven(ranks * chunks, ranks, seed)
    owners = (looped(ranks, chunks), v_shaped(ranks, chunks))
    least = min(max(needed(owner, costs)) for owner in owners)
    cap = least + room * sum(costs.held) * microbatches
    found = search(ranks, chunks, microbatches, costs, cap, split=split)
    check(found.schedule)
    assert max(peak_bytes(found.schedule, costs)) <= cap * (1 + 1e-9)
    assert found.seconds == pytest.approx(makespan(found.schedule, costs))
    assert found.seconds >= found.bound * (1 - 1e-9)
    assert found.schedule.owner in owners
    assert split or not found.schedule.splits_backward
    for baseline in named_that_fit(ranks, microbatches, chunks, costs, cap, split):
        assert found.seconds <= makespan(baseline, costs) * (1 + 1e-9)


def needed(owner: tuple[int, ...], costs: StageCosts) -> list[float]:
    """What every schedule of a placement holds: base and one microbatch of each stage."""
    return [
        b + sum(h for h, o in zip(costs.held, owner, strict=True) if o == r) for r, b in enumerate(costs.base)
    ]


def named_that_fit(
    ranks: int, microbatches: int, chunks: int, costs: StageCosts, cap: float, split: bool
) -> list[Schedule]:
    every = [n.make(ranks, microbatches, chunks) for n in NAMED.values() if n.chunks in (None, chunks)]
    fit = [s for s in every if max(peak_bytes(s, costs)) <= cap]
    return [s for s in fit if split or not s.splits_backward]


def test_search_finds_more_where_there_is_something_to_find() -> None:
    """Too few microbatches for ZB-V's pattern; sends that 1F1B's memory is too small to hide."""
    few = search(8, 2, 8, StageCosts.uniform(8, 2), 8.0)
    assert few.seconds == pytest.approx(few.bound)
    assert few.seconds < makespan(make("zb-v", 8, 8, 2), StageCosts.uniform(8, 2)) - 1.0
    sends = StageCosts.uniform(8, 2, send=0.1)
    moved = search(8, 2, 16, sends, 8.0)
    assert moved.origin.startswith("zb-v; refilled")
    assert moved.seconds < makespan(make("zb-v", 8, 16, 2), sends) - 0.5
    costs = StageCosts.uniform(4, send=0.3)
    assert search(4, 1, 8, costs).seconds < makespan(make("zb-h1", 4, 8), costs) - 0.5


def test_search_takes_a_placement_or_prices_by_placement() -> None:
    owner = (0, 1, 1, 0, 1)
    found = search(2, owner, 5, uneven(5, 2, 1))
    check(found.schedule)
    assert found.schedule.owner == owner
    asked = []

    def priced(owner: tuple[int, ...]) -> StageCosts:
        asked.append(owner)
        costs = StageCosts.uniform(3, 2)
        return costs if owner == looped(3, 2) else replace(costs, base=(100.0,) * 3)

    assert search(3, 2, 4, priced, 50.0).schedule.owner == looped(3, 2)
    assert asked == [looped(3, 2), v_shaped(3, 2)]


def test_search_says_what_the_least_needs() -> None:
    costs = uneven(6, 3, 5)
    with pytest.raises(InfeasibleError, match="no pipeline schedule fits") as caught:
        search(3, 2, 4, costs, 0.1)
    least = caught.value.smallest_bytes
    assert max(search(3, 2, 4, costs, least).peak) == pytest.approx(least)
    with pytest.raises(InfeasibleError):
        search(3, 2, 4, costs, 0.99 * least)


def test_search_is_repeatable() -> None:
    runs: list[SearchedSchedule] = [search(4, 2, 7, uneven(8, 4, 3), 20.0) for _ in range(2)]
    assert runs[0] == runs[1]


def test_search_refuses_wrong_sizes() -> None:
    with pytest.raises(UsageError, match="every rank needs a stage"):
        search(3, (0, 1, 1), 2, StageCosts.uniform(3))
    with pytest.raises(UsageError, match="2 memory caps for 3 ranks"):
        search(3, 1, 2, StageCosts.uniform(3), (1.0, 2.0))


# -- pairs --------------------------------------------------------------------------------------------------


@given(ranks=ranks_, microbatches=microbatches_, chunks=chunks_)
@some
def test_pairs_are_as_short_as_what_they_cost(ranks: int, microbatches: int, chunks: int) -> None:
    """With enough microbatches, every forward behind the first ones of a rank has a backward beside it, and a
    step is shorter by what pairs save on the rank that has most of them."""
    schedule = make("interleaved-overlap", ranks, microbatches, chunks)
    costs = StageCosts.uniform(ranks, chunks)
    pairs = [sum(len(turn) == 2 for turn in row) for row in schedule.turns]
    for rank, row in enumerate(schedule.turns):
        ahead = next((k for k, turn in enumerate(row) if turn[0].kind != "F" or len(turn) > 1), len(row))
        same = sum(f.microbatch == b.microbatch for f, b in pairwise(schedule.actions[rank])
                   if f.kind == "F" and b.kind == "B")  # fmt: skip
        assert pairs[rank] >= microbatches * chunks - ahead - same
    stages = range(schedule.stages)
    alone, both = makespan(schedule, costs), 2.5 / chunks
    faster = replace(costs, paired={(f, b): both for f in stages for b in stages})
    timeline = simulate(schedule, faster)
    assert timeline.makespan == makespan(schedule, faster) <= alone + 1e-9
    assert timeline.makespan >= least_makespan(schedule, faster) - 1e-9
    spent = [row[-1].end - row[0].start for row in timeline.spans]
    assert min(spent) >= 0
    for row, busy in zip(timeline.spans, timeline.busy, strict=True):
        assert sum(span.end - span.start for span in row) == pytest.approx(busy)
    if microbatches >= 2 * ranks:
        assert alone - timeline.makespan >= min(pairs) * 0.5 / chunks - 1e-9


def test_pairs_that_cannot_run_are_refused() -> None:
    schedule = make("interleaved-overlap", 2, 4, 1)
    assert [str(a) for a in schedule.turns[1][1]] == ["F1.1", "B1.0"]
    for paired, said in (
        ({Action("F", 0, 0)}, "F0.0 cannot run as one with F0.1"),
        ({Action("F", 0, 9)}, "F0.9 is paired, and nowhere"),
        ({Action("B", 1, 0)}, "B1.0 cannot run as one with F1.2"),
    ):
        with pytest.raises(VerificationError, match=said):
            check(replace(schedule, paired=frozenset(paired)))
    few = make("interleaved-overlap", 2, 2, 1)
    with pytest.raises(VerificationError, match=r"B0.0 waits for the backward of stage 1, microbatch 0"):
        check(replace(few, paired=few.paired | {Action("F", 0, 1)}))
    with pytest.raises(VerificationError, match=r"F1.0 cannot run as one with B1.0"):
        check(replace(make("1f1b", 2, 4), paired=frozenset({Action("F", 1, 0)})))


def test_turns_of_pairs_are_read_back() -> None:
    schedule = make("interleaved-overlap", 2, 4, 1)
    stages = PipelineStages(schedule, 0, {(0, 0): (0, 0, 1, 0), (1, 1): (1, 0)})
    text = schedule_to_json(stages)
    assert '"F2 B1 F1"' in text and "F1.1+B1.0" in text
    assert schedule_from_json(text) == stages
    for changed, said in (
        (text.replace('"1+1"', '"0+1"'), "other pairs"),
        (text.replace("F2 B1", "F2 C1"), "'C1' is no turn"),
        (text.replace('"0+0"', '"0-0"'), "not a schedule"),
    ):
        with pytest.raises(VerificationError, match=said):
            schedule_from_json(changed)


# -- what is wrong is seen ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@given(ranks=ranks_, microbatches=microbatches_, chunks=chunks_, seed=seeds)
@some
def test_changes_are_caught(name: str, ranks: int, microbatches: int, chunks: int, seed: int) -> None:
    schedule = made(name, ranks, microbatches, chunks)
    draw = random.Random(seed)
    rank = draw.randrange(ranks)
    row = schedule.actions[rank]
    k = draw.randrange(len(row))

    def broken(changed: tuple[Action, ...], match: str) -> None:
        rows_ = (*schedule.actions[:rank], changed, *schedule.actions[rank + 1 :])
        with pytest.raises(VerificationError, match=match):
            check(replace(schedule, actions=rows_))

    named = rf"schedule {name}, rank {rank}, "
    broken(row[:k] + row[k + 1 :], named)
    broken((*row[:k], row[k], *row[k:]), named + str(row[k]))
    far = (*row, row[k])
    broken(far, "is there twice")
    alike = [j for j, a in enumerate(row) if (a.kind, a.stage) == (row[k].kind, row[k].stage) and j != k]
    if alike and row[k].kind != "W":
        broken(swapped(row, k, draw.choice(alike)), named)
    follows = [j for j, a in enumerate(row) if (a.stage, a.microbatch) == (row[k].stage, row[k].microbatch)]
    for j, after in pairwise(follows):
        broken(swapped(row, j, after), named)
    if ranks > 1:
        other = (rank + 1) % ranks
        rows_ = list(schedule.actions)
        rows_[rank], rows_[other] = row[:k] + row[k + 1 :], (*schedule.actions[other], row[k])
        # where some backwards come in two parts, one of either kind is named
        kind = "[BI]" if row[k].kind in "BI" else row[k].kind
        with pytest.raises(VerificationError, match=rf"rank {other}, {row[k]}|{kind}"):
            check(replace(schedule, actions=tuple(rows_)))


def swapped(row: tuple[Action, ...], j: int, k: int) -> tuple[Action, ...]:
    changed = list(row)
    changed[j], changed[k] = row[k], row[j]
    return tuple(changed)


def test_ranks_that_wait_for_each_other() -> None:
    """Every list alone is in order, together they stop."""
    f, b = (lambda s, m: Action("F", s, m)), (lambda s, m: Action("B", s, m))
    stuck = Schedule(
        "stuck", 2, (0, 1), ((f(0, 0), b(0, 0), f(0, 1), b(0, 1)), (f(1, 0), f(1, 1), b(1, 0), b(1, 1)))
    )
    with pytest.raises(VerificationError, match=r"B0\.0 waits for the backward of stage 1, microbatch 0"):
        check(stuck)
    with pytest.raises(VerificationError, match=r"rank 0, B0\.0"):
        simulate(stuck, StageCosts.uniform(2))
    with pytest.raises(VerificationError, match="waits forever"):
        makespan(stuck, StageCosts.uniform(2))


@pytest.mark.parametrize(
    ("action", "what"),
    [
        (Action("F", 9, 0), "none of the 2 stages"),
        (Action("F", 0, 7), "none of the 3 microbatches"),
        (Action("F", 1, 0), "belongs on rank 1"),
        (Action("X", 0, 0), "no known kind"),  # type: ignore[arg-type]
    ],
)
def test_actions_that_belong_nowhere(action: Action, what: str) -> None:
    schedule = make("1f1b", 2, 3)
    first = (action, *schedule.actions[0][1:])
    with pytest.raises(VerificationError, match=what):
        check(replace(schedule, actions=(first, schedule.actions[1])))


def test_whole_and_split_backward_of_the_same() -> None:
    schedule = make("1f1b", 1, 1)
    both = (*schedule.actions[0], Action("W", 0, 0))
    with pytest.raises(VerificationError, match=r"B0\.0 is there beside W0\.0"):
        check(replace(schedule, actions=(both,)))


def test_costs_must_suit() -> None:
    schedule = make("1f1b", 3, 4)
    with pytest.raises(UsageError, match=r"costs\.forward has 4 numbers, not 3"):
        simulate(schedule, StageCosts.uniform(4))
    with pytest.raises(UsageError, match=r"costs\.base has 1 numbers, not 3"):
        peak_bytes(schedule, replace(StageCosts.uniform(3), base=(0.0,)))
    with pytest.raises(UsageError, match="below zero"):
        makespan(schedule, StageCosts.uniform(3, send=-1.0))
    with pytest.raises(UsageError, match="keeps more"):
        makespan(schedule, replace(StageCosts.uniform(3), held_weight=(2.0, 2.0, 2.0)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_least_makespan_is_that_of_equal_stages(name: str) -> None:
    schedule, costs = make(name, 5, 9), StageCosts.uniform(5)
    assert least_makespan(schedule, costs) == pytest.approx(makespan(schedule, costs))


# -- names --------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert names() == (
        "gpipe",
        "1f1b",
        "interleaved",
        "breadth-first",
        "zb-h1",
        "zb-v",
        "interleaved-overlap",
        "dualpipe-v",
        "searched",
        "seq1f1b",
    )
    assert [default_chunks(n) for n in names()] == [1, 1, 2, 2, 1, 2, 2, 2, 1, 1]
    assert str(make("zb-v", 2, 3, 2).actions[0][0]) == "F0.0"


@pytest.mark.parametrize(
    ("name", "sizes", "what"),
    [
        ("zbv", (2, 2, 2), "did you mean zb-v"),
        ("1F1B", (2, 2, 1), "did you mean 1f1b"),
        ("breadth_first", (2, 2, 1), "did you mean breadth-first"),
        ("qqq", (2, 2, 1), "there are gpipe, 1f1b"),
        ("gpipe", (2, 2, 2), "gpipe needs chunks=1, not 2"),
        ("zb-h1", (2, 2, 3), "zb-h1 needs chunks=1, not 3"),
        ("zb-v", (2, 2, 1), "zb-v needs chunks=2, not 1"),
        ("interleaved", (2, 2, 0), "cannot have 0 chunks"),
        ("searched", (2, 0, 1), "cannot have 0 microbatches"),
        ("1f1b", (-1, 2, 1), "cannot have -1 ranks"),
    ],
)
def test_what_cannot_be_made(name: str, sizes: tuple[int, int, int], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        make(name, *sizes)


# -- torch's own --------------------------------------------------------------------------------------------

SAME_AS_TORCH = [
    (ours, theirs, chunks)
    for ours, theirs, chunks in (
        ("gpipe", "gpipe", 1),
        ("1f1b", "1f1b", 1),
        ("interleaved", "interleaved", 2),
        ("interleaved", "interleaved", 3),
        ("breadth-first", "breadth-first", 2),
        ("breadth-first", "breadth-first", 3),
        ("zb-v", "zb-v", 2),
        ("zb-h1", "interleaved-zero-bubble", 1),
    )
]


@pytest.mark.parametrize(("ours", "theirs", "chunks"), SAME_AS_TORCH)
def test_same_order_as_torch(ours: str, theirs: str, chunks: int) -> None:
    """Wherever torch has a schedule at all: it wants enough microbatches, and some multiples of them."""
    compared = 0
    for ranks in range(1, 6):
        for microbatches in range(1, 14):
            try:
                expected = torch_schedule(theirs, ranks, microbatches, chunks)
            except UsageError:
                continue
            check(expected)
            found = make(ours, ranks, microbatches, chunks)
            assert (found.owner, found.actions) == (expected.owner, expected.actions)
            compared += 1
    assert compared >= 50


@pytest.mark.parametrize("microbatches", [4, 6, 8, 12])
def test_search_is_no_slower_than_torchs_interleaved_zero_bubble(microbatches: int) -> None:
    costs = StageCosts.uniform(4, 2)
    theirs = torch_schedule("interleaved-zero-bubble", 4, microbatches, 2)
    check(theirs)
    found = search(4, 2, microbatches, costs, max(peak_bytes(theirs, costs)))
    assert found.seconds <= makespan(theirs, costs) + 1e-9


def test_what_torch_does_not_have() -> None:
    with pytest.raises(UsageError, match="torch has no schedule 'zb-h1'"):
        torch_schedule("zb-h1", 2, 2)
    with pytest.raises(UsageError, match="takes chunks=1, not 2"):
        torch_schedule("1f1b", 2, 2, 2)
    with pytest.raises(UsageError, match="refuses 5 microbatches on 2 ranks"):
        torch_schedule("interleaved", 2, 5, 2)


# -- pictures -----------------------------------------------------------------------------------------------


def test_text() -> None:
    timeline = simulate(make("1f1b", 3, 4), replace(StageCosts.uniform(3), update=(1.0, 1.0, 1.0)))
    assert gantt.text(timeline, 40).plain.splitlines() == [
        "1f1b: 19.0 s, bubble 31.6 %, at most 3 B on a rank",
        "rank 0 │012····aa3bb·cc·dd=│  32 %",
        "rank 1 │·01··aa2bb3cc·dd=··│  32 %",
        "rank 2 │··0aa1bb2cc3dd=····│  32 %",
        "0-9 forward, a-j backward, = update, · idle (its share to the right)",
    ]
    timeline = simulate(make("zb-v", 2, 3, 2), StageCosts.uniform(2, 2))
    assert gantt.text(timeline, 40).plain.splitlines()[1:] == [
        "rank 0 │0120a+1b+a+2c+b+c+·│   5 %",
        "rank 1 │·0011a+2a+2b+bcc+++│   5 %",
        "0-9 forward, a-j input gradient, + weight gradient, · idle (its share to the right)",
    ]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [12, 37, 100])
def test_text_keeps_its_width(name: str, width: int) -> None:
    schedule = made(name, 3, 12, 2)
    shown = gantt.text(simulate(schedule, uneven(schedule.stages, 3, 1)), width).plain.splitlines()
    bars = [line for line in shown if "│" in line]
    assert len(bars) == 3
    assert len({len(line) for line in bars}) == 1
    assert len(bars[0]) <= max(width, len("rank 0 ││ 100 %") + 1)


@pytest.mark.parametrize("name", EVERY)
def test_svg(name: str) -> None:
    schedule = made(name, 3, 4, 2)
    costs = replace(uneven(schedule.stages, 3, 2), update=(0.5, 0.5, 0.5))
    root = ElementTree.fromstring(gantt.svg(simulate(schedule, costs)))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("microbatch" in t for t in titles) == sum(map(len, schedule.actions))
    assert sum(t.startswith("update") for t in titles) == 3
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.get("x", "0")) + float(box.get("width", "0")) <= float(root.get("width", "0"))


@pytest.mark.parametrize("name", EVERY)
def test_perfetto(name: str) -> None:
    schedule = made(name, 3, 4, 2)
    timeline = simulate(schedule, uneven(schedule.stages, 3, 2))
    events = json.loads(json.dumps(gantt.perfetto(timeline)))["traceEvents"]
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == sum(map(len, schedule.actions)) + 3  # and three updates
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys() and len(starts) == len(timeline.sends)
    for number, send in enumerate(timeline.sends):
        made_by, used_by = (enclosing(work, events_[number]) for events_ in (starts, ends))
        assert made_by["name"] == str(send.action)
        step = 1 if send.action.kind == "F" else -1
        assert used_by["args"] == {"stage": send.action.stage + step, "microbatch": send.action.microbatch}
        assert starts[number]["ts"] <= ends[number]["ts"]


def enclosing(work: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    """The work that an end of an arrow is bound to; nothing overlaps, to the nanosecond."""
    at = round(event["ts"] * 1e3)
    begins = [(w, round(w["ts"] * 1e3)) for w in work if w["tid"] == event["tid"]]
    found = [w for w, begin in begins if begin <= at < begin + round(w["dur"] * 1e3)]
    assert len(found) == 1
    return found[0]


# -- the table ----------------------------------------------------------------------------------------------


def test_table() -> None:
    found = rows(4, (4, 8))
    assert {row.name for row in found} == set(names())
    for row in found:
        assert row.ideal is None or row.bubble == pytest.approx(row.ideal)
        assert row.inside <= row.bubble + 1e-9
    zb_v = next(row for row in found if row.name == "zb-v" and row.microbatches == 8)
    assert zb_v.inside == pytest.approx(0.0) and max(zb_v.held) == 4.0
