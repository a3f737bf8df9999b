"""The caching allocator by hand, the allocations of a program against its peak, what a device holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from pipelines import pipeline
from planned import program as one_stage
from sliced import program_of as sliced

from autoshard.cluster import Cluster, load_cluster
from autoshard.ir.boundaries import ends_of
from autoshard.program.program import Program
from autoshard.runtime.executor import Values
from autoshard.schedules.registry import make
from autoshard.schedules.timeline import in_flight_bytes
from autoshard.simulate.allocations import allocations, reserved, shortened
from autoshard.simulate.caching_allocator import CachingAllocator, Event, Reserved
from autoshard.simulate.device_memory import communicator_bytes, device_memory
from autoshard.simulate.peaks import Peaks
from autoshard.simulate.stage_costs import StagePrices

MIB = 2**20


def ran(*events: tuple[str, float | None], **how: float) -> tuple[float, float]:
    """(most allocated, most reserved) in MiB; sizes are in MiB."""
    found = allocator(*events, **how)
    return found.allocated / MIB, found.reserved / MIB


def allocator(*events: tuple[str, float | None], expandable: float = 0, limit: float = 1e9) -> Reserved:
    made = CachingAllocator(expandable=bool(expandable), limit=limit * MIB)
    return made.run((name, None if size is None else size * MIB) for name, size in events)


# -- the allocator, by hand -------------------------------------------------------------------------------


def test_small_blocks_share_segments_of_two_mib() -> None:
    assert ran(("a", 1 / MIB)) == (512 / MIB, 2)  # one byte takes 512
    assert ran(("a", 1), ("b", 1)) == (2, 2)
    assert ran(("a", 1), ("b", 1), ("c", 1 / MIB)) == (2 + 512 / MIB, 4)
    assert ran(("nothing", 0)) == (0, 0)


def test_middle_blocks_are_cut_from_segments_of_twenty_mib() -> None:
    assert ran(("a", 3), ("b", 9), ("c", 7)) == (20, 20)  # 1 MiB is left of them, which is not split off
    assert ran(("a", 3), ("b", 9), ("c", 9)) == (21, 40)


def test_large_blocks_are_rounded_to_two_mib() -> None:
    assert ran(("a", 11)) == (12, 12)  # what is left is no more than 1 MiB: part of the block
    assert ran(("a", 10), ("b", 10)) == (20, 20)


def test_the_best_fit_is_taken_and_neighbours_merge() -> None:
    start = (("a", 30), ("b", 12), ("c", 50), ("a", None), ("b", None))
    assert ran(*start, ("d", 11)) == (92, 92)  # of 30 and 12, in 12
    assert ran(*start, ("d", 11), ("e", 29)) == (92, 92)
    parts = (("a", 30), ("a", None), ("b", 10), ("c", 10), ("d", 10), ("b", None), ("d", None))
    assert ran(*parts, ("e", 20)) == (30, 50)  # 10 and 10 are apart
    assert ran(*parts, ("c", None), ("e", 30)) == (30, 30)


def test_segments_that_grow_leave_no_holes() -> None:
    events = (("a", 100), ("b", 100), ("a", None), ("b", None), ("c", 150))
    assert ran(*events) == (200, 350)
    assert ran(*events, expandable=1) == (200, 200)
    assert ran(("a", 30), expandable=1) == (30, 40)  # pages of 20 MiB
    assert ran(("a", 30), ("b", 30), ("c", 30), expandable=1) == (90, 100)


def test_cached_segments_are_given_back_before_memory_runs_out() -> None:
    events = (("a", 100), ("a", None), ("b", 150))
    assert allocator(*events) == Reserved(150 * MIB, 250 * MIB, 0, True)
    assert allocator(*events, limit=200) == Reserved(150 * MIB, 150 * MIB, 1, True)
    assert not allocator(*events, limit=149).fits
    # a segment that is in use in part is not given back
    held = (("a", 100), ("a", None), ("x", 10), ("b", 150))
    assert not allocator(*held, limit=200).fits
    assert allocator(*held, limit=200, expandable=1).fits


# -- the events of a program ------------------------------------------------------------------------------


def peaks_of(program: Program, cluster: str | Cluster = "h100-dgx") -> Peaks:
    machine = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return Peaks(StagePrices(program, machine))


def most(events: Iterable[Event]) -> float:
    """The most bytes that live at once; all that ends has begun."""
    live: dict[object, float] = {}
    level = peak = 0.0
    for name, size in events:
        if size is None:
            level -= live.pop(name)
        else:
            assert name not in live
            live[name] = size
            level += size
            peak = max(peak, level)
    return peak


@pytest.mark.parametrize(
    "program",
    [
        lambda: one_stage("llama-deep", "dp=1"),
        lambda: one_stage("gpt2", "dp=2,tp=2"),
        lambda: one_stage("mixtral", "fsdp=4"),
        lambda: pipeline("llama-deep", 2, "dp=2", "1f1b", 8),
        lambda: pipeline("llama-deep", 2, "fsdp=2", "gpipe", 4),
        lambda: pipeline("gpt2", 2, "tp=2", "zb-h1", 6),
        lambda: sliced("llama", 2, "dp=1", 4, 3),
        lambda: sliced("gpt2", 2, "tp=2", 3, 2, (3, 3, 2)),
    ],
)
def test_what_lives_adds_up_to_the_peak(program: object) -> None:
    assert callable(program)
    peaks = peaks_of(program())
    for rank, (_, peak) in enumerate(peaks.all):
        assert most(allocations(peaks, rank)) == pytest.approx(peak, rel=1e-9)


@pytest.mark.parametrize(("name", "parts"), [("llama", (2, 1, 1)), ("gpt2", (1, 1, 2)), ("llama-deep", ())])
def test_slices_hold_what_later_parts_use(name: str, parts: tuple[int, ...]) -> None:
    """Counted as a rank counts: a value of a microbatch goes when the last part that uses it has run."""
    program = sliced(name, 2, "dp=1", len(parts) or 4, 3, parts)
    peaks = peaks_of(program)
    prices, lowered = peaks.prices, program.lowered
    for rank, row in enumerate(prices.schedule.actions):
        storage = peaks.transients.storages_of(rank)
        mine = [p for p in lowered.parts if p.stage == rank and p.phase in ("forward", "backward")]
        uses = Counter(v for p in mine for v in ends_of(lowered, p).uses)
        envs: dict[int, Values] = {}
        levels = in_flight_bytes(prices.schedule, row, prices.held)
        for action, level in zip(row, levels, strict=True):
            env = envs.setdefault(action.microbatch, Values(uses))
            for part in peaks.transients.parts_of(action):
                ends = ends_of(lowered, part)
                env.update((v, storage[v]) for v in (*ends.uses, *ends.makes) if v in uses)
                for value in ends.uses:
                    env.used(value)
            held = {s for key, each in envs.items() for s in ((key, v) for v in each.values())}
            assert level == pytest.approx(sum(size for _, (_, size) in held), rel=1e-12, abs=1e-6)
        assert level == pytest.approx(0.0, abs=1e-6)


def test_equal_cycles_are_run_a_few_times() -> None:
    long, short = (make("1f1b", 4, m).actions[1] for m in (64, 12))
    assert len(shortened(long)) <= len(short)
    for row in (make(name, 4, 32).actions[2] for name in ("1f1b", "zb-h1", "gpipe")):
        found = shortened(row)
        # every microbatch that is left goes forward, then back
        done = [(a.kind, a.microbatch) for a in found]
        for kind in {a.kind for a in row}:
            assert [m for k, m in done if k == kind] == list(range(len([k for k, _ in done if k == kind])))
    assert shortened(make("gpipe", 2, 16).actions[0]) == list(make("gpipe", 2, 16).actions[0])
    program = [pipeline("llama-deep", 2, "dp=2", "1f1b", m) for m in (8, 16)]
    eight, sixteen = (reserved(allocations(peaks_of(p), 0)) for p in program)
    assert eight == sixteen


# -- a device ---------------------------------------------------------------------------------------------


def test_a_device_holds_more_than_tensors() -> None:
    program = one_stage("llama-deep", "dp=2,tp=2")
    found = device_memory(peaks_of(program))
    assert found is not None and found.verdict == "fits" and found.missing == 0
    assert found.total == found.reserved + found.context + found.communicators
    assert found.reserved >= found.allocated >= peaks_of(program).all[0][1]
    assert device_memory(peaks_of(program, "cpu-gloo")) is None  # another allocator
    machine = load_cluster("h100-dgx")
    small = replace(machine, device=replace(machine.device, memory_bytes=found.headroom + found.reserved - 1))
    less = device_memory(peaks_of(program, small))
    assert less is not None and less.verdict != "fits"
    tiny = replace(machine, device=replace(machine.device, memory_bytes=found.headroom + MIB))
    least = device_memory(peaks_of(program, tiny))
    assert least is not None and least.verdict == "over" and not least.fits and least.missing > 0


def test_communicators_of_a_node_and_beyond() -> None:
    node = load_cluster("h100-dgx")
    pairs = replace(node, levels=(replace(node.levels[0], size=2), *node.levels[1:]))
    program = one_stage("llama-deep", "dp=2,tp=2")
    inside, beyond = (communicator_bytes(peaks_of(program, machine)) for machine in (node, pairs))
    assert 2**27 < inside < beyond < 2**31
    assert communicator_bytes(peaks_of(one_stage("llama-deep", "dp=1"))) == 0
