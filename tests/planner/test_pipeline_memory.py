"""What ranks of a pipeline hold: as the search counts it, as cuts do, and as it is simulated."""

from __future__ import annotations

import pytest
from pipelines import model_and_batch

import autoshard
from autoshard.capture.capture import capture
from autoshard.cluster import load_cluster
from autoshard.passes.stages.stage_assignment import places_apart
from autoshard.passes.stages.stage_boundaries import stage_ends
from autoshard.planner.analysis import analyse
from autoshard.planner.memory_fit import MemoryFitter
from autoshard.planner.planned import Planned
from autoshard.planner.stage_partition import StagePartition
from autoshard.schedules.check import in_flight
from autoshard.schedules.registry import make, tried
from autoshard.schedules.timeline import peak_bytes
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.stage_costs import StagePrices
from autoshard.validate.models import Architecture, on_meta

SIZES = [(2, 2), (2, 3), (2, 8), (4, 2), (4, 4), (4, 5), (4, 6), (4, 7), (4, 8), (4, 10), (8, 12), (8, 20)]


@pytest.mark.parametrize(("name", "chunks"), [(n, c) for n, cs in tried().items() for c in cs])
def test_microbatches_in_flight_are_those_of_the_schedule(name: str, chunks: int) -> None:
    for ranks, microbatches in SIZES:
        schedule = make(name, ranks, microbatches, chunks)
        pipe = Pipe(ranks, name, chunks)
        assert pipe.in_flight(microbatches) == max(in_flight(schedule)) / chunks, (ranks, microbatches)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_gradients_that_wait_are_those_of_the_schedule(name: str) -> None:
    (chunks,) = tried()[name]
    for ranks, microbatches in SIZES:
        most = (0, 0)
        for row in make(name, ranks, microbatches, chunks).actions:
            waiting = flying = 0
            for action in row:
                waiting += {"I": 1, "W": -1}.get(action.kind, 0)
                flying += {"F": 1, "I": -1, "B": -1}.get(action.kind, 0)
                most = max(most, (waiting, flying))
        found = Pipe(ranks, name, chunks).waiting(microbatches)
        assert found == (most[0] / chunks, most[1] / chunks), (ranks, microbatches)
    assert Pipe(4, "1f1b").waiting(8) == (0.0, 4.0)


def plan(name: str, mesh: str, schedule: str, microbatches: int = 4) -> Planned:
    model, batch = model_and_batch(name, microbatches)
    return autoshard.plan(
        model,
        mesh,
        example_inputs=batch,
        cluster="h100-dgx",
        microbatches=microbatches,
        schedule=schedule,
    )


@pytest.mark.parametrize("name", ["gpt2-deep", "llama-deep"])
@pytest.mark.parametrize("mesh", ["pp=2,fsdp=2", "pp=2,tp=2", "pp=2,dp=2"])
def test_state_of_stages_before_they_are_programs(name: str, mesh: str) -> None:
    """Tied weights (GPT-2) are on both ranks; gathered copies and late gradients count as they are used."""
    planned = plan(name, mesh, "1f1b")
    assert planned.staging is not None
    model, _ = model_and_batch(name, 4)
    program = autoshard.compile(model, planned).program
    prices = StagePrices(program, load_cluster("h100-dgx"), behaviour=Behaviour())
    assert planned.staging.costs.base == pytest.approx([s.total for s in prices.states], rel=1e-3)


def cutting_of(planned: Planned) -> StagePartition:
    assert planned.solution is not None
    cluster = load_cluster("h100-dgx")
    fitter = MemoryFitter(planned.analysis, cluster, SearchRequest(), fixed=True, progress=lambda _: None)
    return fitter.cutting(planned.solution)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_activations_are_counted_as_stages_hold_them(schedule: str) -> None:
    """The search counts equal stages, of which the fullest rank holds somewhat more."""
    planned = plan("llama-deep", "pp=2,dp=2", schedule, 8)
    assert planned.solution is not None and planned.staging is not None
    placed = planned.solution.placements
    counted = placed.setting.held(placed.usage).activations
    costs = planned.staging.costs
    peaks = peak_bytes(make(schedule, 2, 8), costs)
    held = max(peak - base for peak, base in zip(peaks, costs.base, strict=True))
    assert counted == pytest.approx(held, rel=0.25)


def test_what_waits_is_counted() -> None:
    """Flash attention keeps little, so that most of what is held waits for gradients of parameters."""
    shape = Architecture("gpt2", 3, 64, 4, 4, 256, 96, 32)
    model, inputs = on_meta(shape, 4, 32)
    kept = analyse(capture(model, (), inputs)).model.kept
    waiting = {place for key, place, _ in kept.bytes if key.kind == "waiting"}
    late = {place for key, place, _ in kept.bytes if key.late}
    early = {place for key, place, _ in kept.bytes if key.late is False}
    assert waiting and late and early and not late & early


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,fsdp=2"])
def test_no_two_cuts_end_up_at_one_place(mesh: str) -> None:
    """A cut slides over collectives: behind every place that is offered there is a stage of its own."""
    planned = plan("gpt2-deep", mesh, "1f1b")
    cutting = cutting_of(planned)
    cuts = [cutting.slots.cut_behind(slot) for slot in cutting.slots.places]
    assert planned.solution is not None
    whole = places_apart(cutting.uncut, planned.solution.formulated.model.folded.joint).uncut.whole
    ends = stage_ends(whole, cuts, cutting.options.mesh)
    assert len(set(ends)) == len(cuts) > 8
