"""Schedules for given times and memory: the best of all named ones and of many that are found greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from autoshard.errors import InfeasibleError, UsageError
from autoshard.schedules.list_scheduling import ROUNDING, ListScheduler, Rule
from autoshard.schedules.named import NAMED
from autoshard.schedules.placement import check_sizes, looped, v_shaped
from autoshard.schedules.schedule import Schedule
from autoshard.schedules.spec import ScheduleSpec
from autoshard.schedules.timeline import StageCosts, makespan, peak_bytes

PATIENCE = (0.0, 0.1, 0.5)

#: Every order that is not hopeless (weight gradients before input gradients are), split and whole.
RULES = tuple(
    Rule(order, late_forward, late_backward, split, patience)
    for (order, split), patience, late_forward, late_backward in product(
        (("IFW", True), ("FIW", True), ("IWF", True), ("FWI", True), ("IFW", False), ("FIW", False)),
        PATIENCE,
        (True, False),
        (True, False),
    )
)


@dataclass(frozen=True)
class SearchedSchedule:
    """The best of a search.

    seconds: its makespan. peak: bytes per rank. origin: the named schedule that it is, or the rule.
    bound: seconds that no schedule of its placement goes below. tried: how many were played.
    """

    schedule: Schedule
    seconds: float
    peak: tuple[float, ...]
    origin: str
    bound: float
    tried: int


def search_schedule(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The best found for F = I = W, no time for sends, and what the first rank of 1F1B holds.

    Raises UsageError for a size below 1.
    """
    check_sizes("searched", ranks, microbatches, chunks)
    costs = StageCosts.uniform(ranks, chunks)
    return search(ranks, chunks, microbatches, costs, float(min(ranks, microbatches))).schedule


def search(
    ranks: int,
    stages: int | Sequence[int],
    microbatches: int,
    costs: StageCosts | Callable[[tuple[int, ...]], StageCosts],
    cap: float | Sequence[float] | None = None,
    *,
    split: bool = True,
    rules: Sequence[Rule] = RULES,
) -> SearchedSchedule:
    """The schedule of least makespan under a memory cap: of all named schedules with these stages, of those
    that list scheduling finds with each rule, and of the best of both with their weight gradients moved.
    So it is never worse than the best named one.

    stages: chunks per rank, to try looped and V-shaped placements; or the rank of each stage.
    costs: of the stages; or what gives them for a placement, if bytes or times depend on it.
    cap: bytes per rank, base included; None: no limit. split: whether a backward may come in two parts.

    Of schedules that take equally long the first one wins: looped before V-shaped, then named before found.

    Raises InfeasibleError if no schedule of any placement fits, UsageError for wrong sizes.
    """
    check_sizes("searched", ranks, microbatches, stages if isinstance(stages, int) else 1)
    placements = _placements(ranks, stages)
    caps = _caps(ranks, cap)
    best: SearchedSchedule | None = None
    tried, least = 0, float("inf")
    for owner in placements:
        priced = costs(owner) if callable(costs) else costs
        needed = _needed(owner, priced)
        least = min(least, max(needed))
        if not _fits(needed, caps):
            continue
        bound = _bound(owner, ranks, microbatches, priced)
        scheduler = ListScheduler(owner, ranks, microbatches, priced, caps)
        for origin, schedule, seconds in _candidates(scheduler, caps, split, rules):
            tried += 1
            if best is None or seconds < best.seconds * (1 - 1e-12):
                peak = peak_bytes(schedule, priced)
                best = SearchedSchedule(
                    replace(schedule, name="searched"), seconds, peak, origin, bound, tried
                )
            if best.seconds <= bound * (1 + 1e-12):
                break  # no schedule of this placement is better
    if best is None:
        error = InfeasibleError(
            "no pipeline schedule fits in memory",
            where=f"{ranks} ranks, stages on ranks {', '.join(map(str, placements[0]))}",
            why=f"a rank holds {least:.0f} bytes at least, its base and one microbatch of each of its stages",
            hint="smaller microbatches, more ranks, or recomputation",
        )
        error.smallest_bytes = least
        raise error
    return replace(best, tried=tried)


def _placements(ranks: int, stages: int | Sequence[int]) -> list[tuple[int, ...]]:
    if not isinstance(stages, int):
        owner = tuple(stages)
        if set(owner) != set(range(ranks)):
            raise UsageError(
                "every rank needs a stage, and every stage one of the ranks",
                where=f"stages on ranks {', '.join(map(str, owner))}",
                why=f"the ranks are 0 to {ranks - 1}",
            )
        return [owner]
    return list(dict.fromkeys((looped(ranks, stages), v_shaped(ranks, stages))))


def _caps(ranks: int, cap: float | Sequence[float] | None) -> list[float]:
    if cap is None:
        return [float("inf")] * ranks
    if isinstance(cap, (int, float)):
        return [float(cap)] * ranks
    if len(cap) != ranks:
        raise UsageError(f"{len(cap)} memory caps for {ranks} ranks", where="schedule searched")
    return [float(c) for c in cap]


def _fits(bytes_: Sequence[float], caps: Sequence[float]) -> bool:
    return all(b <= c * (1 + ROUNDING) for b, c in zip(bytes_, caps, strict=True))


def _needed(owner: tuple[int, ...], costs: StageCosts) -> list[float]:
    """Bytes per rank of any schedule: the first microbatch is in all stages before its backward begins."""
    needed = list(costs.base)
    for stage, rank in enumerate(owner):
        needed[rank] += costs.held[stage]
    return needed


def _bound(owner: tuple[int, ...], ranks: int, microbatches: int, costs: StageCosts) -> float:
    """Seconds that no schedule goes below: a rank waits for the first microbatch, then has its work to do."""
    begin, busy = [float("inf")] * ranks, list(costs.update)
    arrives = 0.0
    for s, rank in enumerate(owner):
        begin[rank] = min(begin[rank], arrives)
        backward = min(costs.backward[s], costs.backward_input[s] + costs.backward_weight[s])
        busy[rank] += microbatches * (costs.forward[s] + backward)
        arrives += costs.forward[s]
        if s + 1 < len(owner) and owner[s + 1] != rank:
            arrives += costs.send_forward[s]
    return max(b + w for b, w in zip(begin, busy, strict=True))


def _candidates(
    scheduler: ListScheduler, caps: Sequence[float], split: bool, rules: Sequence[Rule]
) -> Iterator[tuple[str, Schedule, float]]:
    """What fits: where it is from, the schedule, its makespan in seconds."""
    owner, ranks, costs = scheduler.owner, scheduler.ranks, scheduler.costs
    chunks, rest = divmod(len(owner), ranks)
    refillable: list[tuple[str, Schedule]] = []
    for name, named in NAMED.items():
        if rest or named.chunks not in (None, chunks):
            continue
        schedule = named.make(ranks, scheduler.microbatches, chunks)
        fits = schedule.owner == owner and _fits(peak_bytes(schedule, costs), caps)
        if fits and (split or not schedule.splits_backward):
            yield name, schedule, makespan(schedule, costs)
            if schedule.splits_backward:
                refillable.append((name, schedule))
    best: tuple[float, str, Schedule] | None = None
    for rule in rules:
        if split or not rule.split:
            schedule, seconds = scheduler.run(rule)
            yield str(rule), schedule, seconds
            if rule.split and (best is None or seconds < best[0]):
                best = seconds, str(rule), schedule
    refillable += [best[1:]] if best else []
    for (origin, schedule), patience in product(refillable, PATIENCE):
        repeated, seconds = scheduler.refilled(schedule, patience)
        yield f"{origin}; refilled, patience {patience:g}", repeated, seconds


SEARCHED = ScheduleSpec(
    "searched",
    search_schedule,
)
