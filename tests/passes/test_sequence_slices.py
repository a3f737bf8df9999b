"""Microbatches divided along their sequence: the schedule, and programs that are equal to eager."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from families import family
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipelines import PIECE, cuts_of
from ranks import HERE, run_ranks
from sampling import examples
from sliced import SEQ, analysed, model_and_batch, planned, program_of, source
from stage_run import StageRun
from typer.testing import CliRunner

import autoshard
from autoshard.api import compile_analysed
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Node, Origin, Ref
from autoshard.ir.boundaries import check_parts, ends_of
from autoshard.ir.lowered import StagePart
from autoshard.ir.placement import Shard
from autoshard.ir.slices import Slices
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.program.schedule_json import schedule_from_json, schedule_to_json
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.schedules.check import check, in_flight
from autoshard.schedules.one_f_one_b import one_f_one_b
from autoshard.schedules.registry import ideal_bubble_fraction, make
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.seq1f1b import seq1f1b
from autoshard.schedules.spec import PipeSize, StepTimes
from autoshard.schedules.timeline import StageCosts, simulate
from autoshard.search.plan.plan import Cut, Pipeline, Recompute
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest
from autoshard.simulate.slices import in_slices, of_equal_work, pairs_of
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step
from autoshard.verify.lockstep import verify
from autoshard.verify.static import verify_static

some = settings(max_examples=60, deadline=None, derandomize=True)
sizes = {"ranks": st.integers(1, 6), "microbatches": st.integers(1, 5), "slices": st.integers(1, 5)}

# -- the schedule ------------------------------------------------------------------------------------------


@some
@given(**sizes)
def test_schedule_runs_and_holds_few_slices(ranks: int, microbatches: int, slices: int) -> None:
    schedule = seq1f1b(ranks, microbatches, 1, slices)
    check(schedule)
    units = microbatches * slices
    assert in_flight(schedule) == tuple(min(ranks - r + slices - 1, units) for r in range(ranks))
    if slices == 1:
        assert schedule.actions == one_f_one_b(ranks, microbatches).actions


@some
@given(**sizes)
def test_bubble_is_that_of_the_formula(ranks: int, microbatches: int, slices: int) -> None:
    schedule = seq1f1b(ranks, microbatches, 1, slices)
    costs = StageCosts.uniform(ranks, slices=slices, forward=1.0, backward_input=1.3, backward_weight=0.9)
    found = simulate(schedule, costs).bubble
    assert found == pytest.approx((ranks - 1) / (slices * microbatches + ranks - 1))
    size = PipeSize(ranks, microbatches, slices=slices)
    assert found == pytest.approx(ideal_bubble_fraction("seq1f1b", size, StepTimes(1.0, 1.3, 0.9)))


@some
@given(**sizes, seed=st.integers(0, 2**31))
def test_simulation_waits_for_what_an_action_needs(
    ranks: int, microbatches: int, slices: int, seed: int
) -> None:
    """Start times by their definition, every slice of every stage with its own costs."""
    schedule = seq1f1b(ranks, microbatches, 1, slices)
    draw = random.Random(seed)
    units, hops = ranks * slices, (ranks - 1) * slices
    times = [tuple(draw.uniform(0.5, 2.0) for _ in range(units)) for _ in range(2)]
    wires = [tuple(draw.uniform(0.0, 1.0) for _ in range(hops)) for _ in range(2)]
    nothing = (0.0,) * units
    costs = StageCosts(
        times[0], times[1], times[1], nothing, *wires, nothing, nothing, (0.0,) * ranks, (0.0,) * ranks
    )
    rows = simulate(schedule, costs).spans
    ends = {s.action: s.end for row in rows for s in row}
    for rank, row in enumerate(rows):
        for k, span in enumerate(row):
            a = span.action
            needs = [row[k - 1].end] if k else [0.0]
            if a.kind == "B":
                needs.append(ends[Action("F", a.stage, a.microbatch, slices - 1)])
            step = -1 if a.kind == "F" else 1
            if 0 <= a.stage + step < ranks:
                sent = [s for s in rows[rank + step] if s.action.kind == a.kind]
                arrival = 0.0
                for s in sent:
                    hop = min(a.stage, a.stage + step) * slices + s.action.slice
                    wire = wires[0 if a.kind == "F" else 1][hop]
                    arrival = max(arrival, s.end) + wire
                    if (s.action.microbatch, s.action.slice) == (a.microbatch, a.slice):
                        break
                needs.append(arrival)
            assert span.start == pytest.approx(max(needs))


def test_actions_out_of_order_are_found() -> None:
    schedule = seq1f1b(2, 2, 1, 3)
    assert str(schedule.actions[0][1]) == "F0.0/1"

    def changed(rank: int, a: int, b: int) -> Schedule:
        rows = [list(row) for row in schedule.actions]
        rows[rank][a], rows[rank][b] = rows[rank][b], rows[rank][a]
        return replace(schedule, actions=tuple(map(tuple, rows)))

    with pytest.raises(VerificationError, match=r"F0.0/1 comes before F0.0"):
        check(changed(0, 0, 1))
    last = [str(a) for a in schedule.actions[1]]
    with pytest.raises(VerificationError, match=r"B1.0/1 comes before B1.0/2"):
        check(changed(1, last.index("B1.0/2"), last.index("B1.0/1")))
    # backward needs all slices of its microbatch
    with pytest.raises(VerificationError, match=r"waits for F1\.0/2"):
        check(changed(1, last.index("F1.0/2"), last.index("B1.0/2")))
    with pytest.raises(VerificationError, match="none of the 2 slices"):
        check(replace(schedule, slices=2))
    rows = (schedule.actions[0][:-1], schedule.actions[1])
    with pytest.raises(VerificationError, match="is missing"):
        check(replace(schedule, actions=rows))


def test_other_schedules_take_no_slices() -> None:
    with pytest.raises(UsageError, match="1f1b does not divide sequences"):
        make("1f1b", 2, 4, slices=2)
    with pytest.raises(UsageError, match="cannot have 0 slices"):
        make("seq1f1b", 2, 4, slices=0)
    assert make("seq1f1b", 2, 4, slices=3).slices == 3


def test_costs_of_slices_add_up() -> None:
    whole = StageCosts.uniform(3, forward=2.0, held=6.0, send=0.5)
    attention = (1.0, 0.5, 0.0)
    cut = in_slices(whole, attention, attention, 0.1, Slices.equal(4))
    again = cut.per_microbatch(4)
    assert again.forward == pytest.approx(whole.forward) and again.held == pytest.approx(whole.held)
    assert again.backward == pytest.approx(whole.backward)
    assert again.send_forward == pytest.approx((0.8, 0.8))  # three messages more
    first, *_, last = cut.forward[:4]
    assert last - first == pytest.approx(1.0 * 6 / 16) and len(set(cut.forward[8:])) == 1


@some
@given(
    slices=st.integers(1, 6),
    units=st.sampled_from([8, 16, 32]),
    attention=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**31),
)
def test_slices_of_equal_work(slices: int, units: int, attention: float, seed: int) -> None:
    """No other parts have a shorter longest slice; later ones are shorter, as they see more keys."""
    found = of_equal_work(slices, units, attention)
    assert len(found) == slices and found.units == units and min(found.counts) > 0

    def longest(counts: tuple[int, ...]) -> float:
        seen = pairs_of(Slices(counts))
        return max((1 - attention) * n / units + attention * k for n, k in zip(counts, seen, strict=True))

    draw = random.Random(seed)
    edges = [0, *sorted(draw.sample(range(1, units), slices - 1)), units]
    assert longest(found.counts) <= longest(tuple(b - a for a, b in pairwise(edges))) + 1e-12
    if attention > 0.5 and slices > 1:
        assert found.counts[0] > found.counts[-1]


def test_costs_of_unequal_slices_add_up() -> None:
    whole = StageCosts.uniform(2, forward=2.0, held=6.0, send=0.5)
    attention, slices = (1.0, 0.5), Slices((4, 3, 1))
    cut = in_slices(whole, attention, attention, 0.1, slices)
    again = cut.per_microbatch(3)
    assert again.forward == pytest.approx(whole.forward) and again.held == pytest.approx(whole.held)
    assert cut.held[:3] == pytest.approx((3.0, 2.25, 0.75))
    assert cut.forward[:3] == pytest.approx((0.5 + 16 / 64, 0.375 + 33 / 64, 0.125 + 15 / 64))


# -- programs ------------------------------------------------------------------------------------------------

SIZES = [(2, 2), (2, 3), (4, 2), (4, 3)]


def _check(program: Program, name: str, microbatches: int) -> None:
    model, batch = model_and_batch(name, microbatches)
    found = verify(program, model, (), batch, steps=2)
    assert found.ok, found.worst()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("slices", "microbatches"), SIZES)
@pytest.mark.parametrize("name", ["gpt2-deep", "llama-deep"])
def test_lockstep_equals_eager(name: str, slices: int, microbatches: int, ranks: int) -> None:
    _check(program_of(name, ranks, "dp=1", slices, microbatches), name, microbatches)


@pytest.mark.parametrize(
    ("name", "mesh", "slices"),
    [
        ("gpt2-deep", "dp=2", 2),
        ("gpt2-deep", "tp=2", 4),
        ("gpt2-deep", "fsdp=2", 4),
        ("llama-deep", "dp=2", 4),
        ("llama-deep", "tp=2", 2),
        ("llama-deep", "dp=2,tp=2", 4),
        ("llama-deep", "fsdp=2,tp=2", 2),
        # tied weights, and vocabularies and heads that do not divide
        ("gpt2-odd", "dp=2,tp=2", 2),
        ("llama-odd", "dp=2,tp=2", 4),
        ("mixtral", "tp=2", 2),
        ("mixtral", "ep=2", 2),
        # a mask that takes padding away from the causal one
        ("llama-deep+padding", "dp=2", 4),
        ("gpt2-deep+padding", "tp=2", 2),
    ],
)
def test_beside_other_axes(name: str, mesh: str, slices: int) -> None:
    _check(program_of(name, 2, mesh, slices, 2), name, 2)


#: parts of 32 positions of each slice
PARTS = [(5, 2, 1), (1, 3, 4), (9, 5, 2)]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2-deep", "dp=1"),
        ("llama-deep", "dp=2,tp=2"),
        ("gpt2-odd", "tp=2"),
        ("llama-odd", "fsdp=2"),
        ("mixtral", "ep=2"),
        ("llama-deep+padding", "dp=2"),
        ("gpt2-deep+padding", "tp=2"),
    ],
)
def test_slices_of_unequal_lengths(name: str, mesh: str) -> None:
    """In lockstep equal to eager, and proved."""
    for parts in PARTS:
        program = program_of(name, 2, mesh, 3, 2, parts=parts)
        assert program.stages is not None and program.stages.slices.counts == parts
        report = verify_static(program)
        assert report.ok, report.findings
        _check(program, name, 2)


@pytest.mark.parametrize("parts", [(), (3, 1)])
def test_logits_along_the_sequence_are_joined_along_the_vocabulary(parts: tuple[int, ...]) -> None:
    """What the caller takes is gathered nowhere: ranks hold unlike places of each slice."""
    pins = SearchRequest(pins=(Pin.parse("lm_head=tp:S(1)"),))
    on = [Mesh.parse("tp=2")], load_cluster("cpu-gloo")
    found = plan_analysed(analysed("llama-deep"), *on, request=pins, reasons=False)
    cuts = cuts_of(found.analysis.folded, 2)
    plan = replace(found.plan, pipeline=Pipeline(2, 0, "seq1f1b", 1, cuts, 2, parts), microbatches=2)
    program = compile_analysed(replace(found, plan=plan, source=source("llama-deep")))
    logits = next(r.value for r in program.signature.results if r.kind == "output" and r.target == "1")
    assert program.lowered.values[logits].layout == (Shard(2),)
    _check(program, "llama-deep", 2)
    assert verify_static(program).ok


def test_unequal_slices_are_read_back(tmp_path: Path) -> None:
    program = program_of("llama-deep", 2, "tp=2", 3, 2, parts=(5, 2, 1))
    save_program(program, tmp_path / "program")
    assert load_program(tmp_path / "program").stages == program.stages
    prices = StagePrices(program, load_cluster("cpu-gloo"))
    assert prices.slice_shares == (5 / 8, 2 / 8, 1 / 8)
    held = prices.kept[0].held
    assert prices.costs.held[:3] == pytest.approx([held * s for s in prices.slice_shares], 0.01)
    wrong = replace(program, stages=replace(program.stages, parts=(2, 5, 1)))  # type: ignore[type-var]
    assert not verify_static(wrong).ok


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_every_stage_of_zero(keep: bool, late: bool) -> None:
    found = planned("gpt2-deep", "fsdp=2")
    params = {k: replace(p, keep=keep and p.stored != p.use, late=late) for k, p in found.plan.params.items()}
    _check(program_of("gpt2-deep", 2, "fsdp=2", 2, 2, params=params), "gpt2-deep", 2)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(("name", "mesh"), [("llama-deep", "dp=1"), ("gpt2-deep", "tp=2")])
def test_beside_recomputation(name: str, mesh: str, policy: str) -> None:
    calls = [c for c in planned(name, mesh).analysis.folded.calls if not c.backward and c.label]
    again = {calls[0].segment: Recompute(policy, len(calls) - 1)}  # type: ignore[arg-type]
    _check(program_of(name, 2, mesh, 2, 2, recompute=again), name, 2)


@settings(max_examples=examples(8, 3), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_cut_of_any_plan(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["gpt2-deep", "llama-deep", "gpt2-odd", "llama-odd", "mixtral"]))
    mesh = data.draw(st.sampled_from(["dp=2", "tp=2", "fsdp=2", "dp=2,tp=2", "fsdp=2,tp=2", "x=2"]))
    found = planned(name, mesh)
    folded = found.analysis.folded
    calls = [c for c in folded.calls if not c.backward]
    places = [Cut(k, n.name) for k, c in enumerate(calls) for n in folded.segments[c.segment].nodes]
    count = data.draw(st.integers(1, 3))
    at = data.draw(st.lists(st.integers(0, len(places) - 2), min_size=count, max_size=count, unique=True))
    slices, microbatches = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.integers(1, 2))
    changes: dict[str, Any] = {}
    policy = data.draw(st.sampled_from(["none", "full", "selective"]))
    if policy != "none":
        layers = Counter(c.segment for c in calls if c.label)
        changes["recompute"] = {s: Recompute(policy, n) for s, n in layers.items()}  # type: ignore[arg-type]
    pipeline = Pipeline(count + 1, 0, "seq1f1b", 1, tuple(places[k] for k in sorted(at)), slices)
    plan = replace(found.plan, pipeline=pipeline, microbatches=microbatches, **changes)
    try:
        program = compile_analysed(replace(found, plan=plan))
    except UsageError as error:
        # forward does not make what only backward wanted, and now makes for itself
        assume(not (policy != "none" and "does not make" in str(error)))
        raise
    _check(program, name, microbatches)


def test_a_rank_keeps_what_its_costs_say() -> None:
    found = planned("llama-deep", "dp=1")
    cuts = cuts_of(found.analysis.folded, 2)
    plan = replace(found.plan, pipeline=Pipeline(2, 0, "seq1f1b", 1, cuts, 4), microbatches=1)
    program = compile_analysed(replace(found, plan=plan))
    prices = StagePrices(program, load_cluster("cpu-gloo"))
    model, batch = model_and_batch("llama-deep", 1)
    run = StageRun(program, prices, model, batch)
    run.all()
    assert run.forward == {s: pytest.approx(prices.kept[s].held) for s in (0, 1)}
    assert sum(prices.costs.held[:4]) == pytest.approx(prices.kept[0].held)


def test_parts_of_a_program() -> None:
    program = program_of("llama-deep", 2, "dp=1", 4, 2)
    lowered = program.lowered
    for stage in (0, 1):
        order = [
            (p.phase, p.slice)
            for p in lowered.parts
            if p.stage == stage and p.phase not in ("count", "reduce")
        ]
        assert order == [("forward", c) for c in range(4)] + [("backward", c) for c in (3, 2, 1, 0)]
    seen = {n.types[1].shape[2] for s in lowered.segments.values() for n in s.graph.nodes
            if n.op == "autoshard.sdpa_rows_backward.default" and n.types[1]}  # fmt: skip
    assert seen == {SEQ // 2, 3 * SEQ // 4, SEQ}
    # what passes from stage to stage has the size of a slice
    first = next(p for p in lowered.parts if p.stage == 1 and p.slice == 2 and p.phase == "forward")
    sent = set(ends_of(lowered, first).uses) & {o for i in lowered.main for o in i.outs}
    crossing = [v for v in sent if v.endswith("_s2")]
    assert crossing and all(lowered.values[v].type.numel < PIECE * SEQ * 32 for v in crossing)


def test_programs_are_read_back(tmp_path: Path) -> None:
    program = program_of("gpt2-deep", 2, "tp=2", 2, 2)
    save_program(program, tmp_path / "program")
    again = load_program(tmp_path / "program")
    assert program_text(again) == program_text(program) and again.stages == program.stages
    assert again.stages is not None and again.stages.schedule.slices == 2
    text = schedule_to_json(again.stages)
    assert schedule_from_json(text) == again.stages
    with pytest.raises(VerificationError):
        schedule_from_json(text.replace('"slices": 2', '"slices": 3'))


def test_a_slice_must_not_use_what_comes_later() -> None:
    lowered = program_of("llama-deep", 2, "dp=1", 2, 2).lowered

    def exchanged(part: StagePart) -> StagePart:
        return replace(part, slice=1 - part.slice) if part.phase == "forward" else part

    with pytest.raises(VerificationError, match="before its stage makes it"):
        check_parts(replace(lowered, parts=tuple(map(exchanged, lowered.parts))))


def test_only_gradients_are_made_by_several_slices() -> None:
    program = program_of("llama-deep", 2, "dp=2", 2, 2)
    lowered = program.lowered
    made: dict[str, set[int]] = {}
    for part in lowered.parts:
        for value in ends_of(lowered, part).makes if part.phase == "backward" else ():
            made.setdefault(value, set()).add(part.slice)
    shared = {value for value, slices in made.items() if len(slices) > 1}
    reduced = {v for p in lowered.parts if p.phase == "reduce" for v in ends_of(lowered, p).uses}
    assert shared == reduced
    # whoever used one of them would see a part of it
    back = next(p for p in lowered.parts if p.phase == "backward" and p.slice == 0 and p.stage == 1)
    value = min(shared & set(ends_of(lowered, back).makes))
    use = Node(
        "aten.neg.default", (Ref(value),), (), ("wrong",), (lowered.values[value].type,), Origin(), True
    )
    main = (*lowered.main[: back.stop], use, *lowered.main[back.stop :])
    parts = [
        replace(p, start=p.start + (p.start >= back.stop), stop=p.stop + (p.stop >= back.stop))
        for p in lowered.parts
    ]
    with pytest.raises(VerificationError, match="to which several slices add"):
        check_parts(replace(lowered, main=main, parts=tuple(parts)))


def test_the_simulated_step_counts_every_slice() -> None:
    cluster = load_cluster("h100-dgx")
    whole = estimate_step(program_of("llama-deep", 2, "dp=1", 1, 2), cluster)
    cut = estimate_step(program_of("llama-deep", 2, "dp=1", 4, 2), cluster)
    assert cut.model_flop == pytest.approx(whole.model_flop)
    spans = [s for row in cut.timeline.spans for s in row if (s.action.kind, s.action.stage) == ("F", 1)]
    assert [s.action.slice for s in spans] == [0, 1, 2, 3] * 2
    assert sum(s.end - s.start for s in spans[:4]) == pytest.approx(cut.stages[1].forward)
    # a stage with one slice more than it has ranks before it holds two microbatches at the most
    assert [row.in_flight for row in cut.stages] == [2, 1]


# -- what cannot be divided ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "t5-deep", "vit-deep"])
def test_attention_to_later_positions_is_refused(name: str) -> None:
    model, inputs = family(name).make()
    with pytest.raises(UsageError) as refused:
        autoshard.plan(model, "pp=2", example_inputs=inputs, schedule="seq1f1b", slices=2, microbatches=2)
    text = str(refused.value)
    if name == "vit-deep":
        assert "no input of the model has a sequence" in text
    else:
        assert "cannot be divided into slices" in text and ".py:" in text


def test_wrong_numbers_of_slices() -> None:
    model, batch = model_and_batch("llama-deep", 2)
    with pytest.raises(UsageError, match="32 positions has no 5 equal slices"):
        autoshard.plan(model, "pp=2", example_inputs=batch, schedule="seq1f1b", slices=5, microbatches=2)
    with pytest.raises(UsageError, match="1f1b does not divide sequences"):
        autoshard.plan(model, "pp=2", example_inputs=batch, schedule="1f1b", slices=2)
    with pytest.raises(UsageError, match="no schedule"):
        autoshard.plan(model, "pp=2", example_inputs=batch, slices=2)
    with pytest.raises(UsageError, match="no pipeline"):
        autoshard.plan(model, "dp=2", example_inputs=batch, schedule="seq1f1b", slices=2)


# -- with the planner, and on gloo ---------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "tile_rows"), [("pp=2,tp=2", None), ("pp=2,fsdp=2", 3)])
def test_a_planned_program_equals_eager(mesh: str, tile_rows: int | None) -> None:
    model, batch = model_and_batch("llama-deep", 2)
    options = {"schedule": "seq1f1b", "slices": 4, "microbatches": 2, "tile_rows": tile_rows}
    found = autoshard.plan(model, mesh, example_inputs=batch, **options)  # type: ignore[arg-type]
    assert found.plan.pipeline is not None and found.plan.pipeline.slices == 4
    assert found.staging is not None and found.staging.seconds > 0
    _check(autoshard.compile(model, found).program, "llama-deep", 2)


def test_training_on_gloo_equals_eager(tmp_path: Path) -> None:
    cases = []
    for name, ranks, mesh, slices, microbatches in (
        ("llama-deep", 4, "dp=1", 4, 3),
        ("gpt2-deep", 2, "dp=2", 2, 3),
        ("gpt2-deep", 2, "tp=2", 4, 2),
        ("llama-deep", 2, "fsdp=2", 2, 2),
    ):
        path = tmp_path / f"{name}-{mesh}-{slices}"
        save_program(program_of(name, ranks, mesh, slices, microbatches), path)
        cases.append({"family": name, "program": str(path), "microbatches": str(microbatches)})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_ranks([str(HERE / "slices_worker.py"), str(tmp_path / "cases.json"), str(tmp_path / "results.json")])
    rows = json.loads((tmp_path / "results.json").read_text())
    wrong = [row for row in rows if not row["error"] < 1e-4]
    assert len(rows) == len(cases) and not wrong, wrong


def test_the_command_line_compiles_slices(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    config |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "llama.json").write_text(json.dumps(config))
    words = ["compile", f"hf:{tmp_path / 'llama.json'}", "--mesh", "pp=2", "--batch", "4", "--seq", "16"]
    words += ["--microbatches", "2", "--slices", "4", "-o", str(tmp_path / "program")]
    refused = CliRunner().invoke(app, [*words, "--schedule", "1f1b"])
    assert refused.exit_code == 2 and "does not divide sequences" in refused.output
    made = CliRunner().invoke(app, [*words, "--schedule", "seq1f1b"])
    assert made.exit_code == 0, made.output
    program = load_program(tmp_path / "program")
    assert program.stages is not None and program.stages.schedule.slices == 4
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "program"), "--timeline"])
    assert shown.exit_code == 0 and "seq1f1b" in shown.output
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "program"), "--steps", "1"])
    assert verified.exit_code == 0, verified.output
