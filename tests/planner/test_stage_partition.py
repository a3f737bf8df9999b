"""Pipelines that are planned: cuts, schedules, memory, what is refused; the programs equal eager."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from pipelines import model_and_batch
from torch import nn

import autoshard
from autoshard import InfeasibleError, UsageError
from autoshard.cluster import load_cluster
from autoshard.interop.targets import build
from autoshard.options import PlanOptions
from autoshard.planner import memory_fit as fitting
from autoshard.planner.candidates import candidate_meshes
from autoshard.planner.stage_partition import scheduled_seconds
from autoshard.program.holders import holders_of
from autoshard.schedules.registry import make
from autoshard.schedules.timeline import least_makespan, makespan
from autoshard.search.plan.plan import Cut
from autoshard.search.plan.plan_json import plan_from_json, plan_to_json
from autoshard.search.select.refine import CandidateSolver
from autoshard.search.solve.configuration import Staged, data_ways
from autoshard.verify.lockstep import verify


def small(name: str = "llama-deep", microbatches: int = 4) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return model_and_batch(name, microbatches)


@pytest.mark.parametrize("name", ["llama-deep", "gpt2-deep", "t5-deep", "vit-deep"])
def test_a_planned_pipeline_equals_eager(name: str) -> None:
    model, batch = small(name)
    planned = autoshard.plan(
        model, "pp=2,dp=2", example_inputs=batch, cluster="h100-dgx", microbatches=4, schedule="1f1b"
    )
    assert planned.plan.pipeline is not None
    assert planned.plan.pipeline.stages == 2
    program = autoshard.compile(model, planned).program
    assert program.full_mesh == "pp=2,dp=2"
    found = verify(program, model, (), batch, steps=2)
    assert found.ok, found.worst()


def test_no_stage_ends_between_a_norm_in_tiles_and_the_products_that_read_it() -> None:
    """In bf16 the tiles of backward make the norm anew, which gradients of q, k and v take from there."""
    model, batch = small()
    model = model.to(torch.bfloat16)
    planned = autoshard.plan(
        model, "pp=2,fsdp=2", example_inputs=batch, microbatches=4, tile_rows=4, recompute=False
    )
    program = autoshard.compile(model, planned).program
    assert verify(program, model, (), batch, steps=1).ok
    pipeline = planned.plan.pipeline
    assert pipeline is not None
    inside = Cut(pipeline.cuts[0].call, "view_r0", pipeline.cuts[0].label)
    cut = replace(planned.plan, pipeline=msgspec.structs.replace(pipeline, cuts=(inside,)))
    with pytest.raises(UsageError, match="cannot be made in any stage that has the parameter"):
        autoshard.compile(model, replace(planned, plan=cut))


def test_pipelines_are_compared_by_the_step_that_is_reported() -> None:
    model, batch = small()
    staging = autoshard.plan(model, "pp=2,dp=2", example_inputs=batch, microbatches=4).staging
    assert staging is not None
    pipeline = staging.pipeline
    schedule = make(pipeline.schedule, pipeline.ranks, 4, pipeline.chunks)
    assert staging.seconds == makespan(schedule, staging.costs)
    assert staging.seconds >= least_makespan(schedule, staging.costs) * (1 - 1e-12)
    assert staging.seconds == min(s for s in staging.tried.values() if s is not None)
    assert staging.equal is not None
    assert staging.equal >= staging.seconds


def test_a_stored_plan_compiles_to_the_same_program() -> None:
    model, batch = small()
    planned = autoshard.plan(model, "pp=2,tp=2", example_inputs=batch, microbatches=4)
    stored = plan_from_json(plan_to_json(planned.plan))
    assert stored == planned.plan
    again = autoshard.compile(
        model, stored, example_inputs={k: x[: stored.batch] for k, x in batch.items()}, cluster="cpu-gloo"
    )
    assert again.program.lowered.main == autoshard.compile(model, planned).program.lowered.main


def test_values_that_all_ranks_have_cross_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 4.1 of the SC'21 paper: the bytes between stages are divided by the tensor ranks."""
    monkeypatch.setattr(fitting, "saving_of", lambda *_: lambda nbytes, axis: nbytes)
    model, batch = small()
    planned = autoshard.plan(model, "pp=2,tp=2", example_inputs=batch, microbatches=2, schedule="1f1b")
    whole = [c for c in planned.plan.pipeline.cuts] if planned.plan.pipeline else []
    inside = msgspec.structs.replace(whole[0], value="", call=2)
    assert planned.plan.pipeline is not None
    plan = replace(planned.plan, pipeline=msgspec.structs.replace(planned.plan.pipeline, cuts=(inside,)))
    nodes = {k: replace(s) for k, s in plan.nodes.items()}
    program = autoshard.compile(model, replace(planned, plan=replace(plan, nodes=nodes))).program
    crossing = [p for n, p in program.lowered.values.items() if n.endswith("_part")]
    split = [str(placed.layout[0]) for placed in crossing]
    found = verify(program, model, (), batch, steps=1)
    assert found.ok, found.worst()
    # what crosses is either split by the plan already, or cut before it is sent
    sent = {v for part in program.lowered.parts for v in _sent(program, part)}
    assert sent
    for value in sent:
        layout = program.lowered.values[value].layout
        shape = program.lowered.values[value].type.shape
        assert not shape or str(layout[0]) != "R", (value, split)


def _sent(program: autoshard.program.program.Program, part: object) -> set[str]:
    from autoshard.ir.boundaries import wires_of

    ports = {p.name for p in program.signature.ports}
    wires = wires_of(program.lowered, ports)
    return {w.value for w in wires if (w.source, w.phase) == (part.stage, part.phase)}  # type: ignore[attr-defined]


def test_little_memory_leads_to_a_pipeline_or_less_per_rank() -> None:
    """The planner searches pipelines beside the other axes, and says what it took."""
    built = build("hf:" + str(_config()), batch=32, seq=64)
    machine = load_cluster("a100-selene")
    planned = autoshard.plan(
        built.model, machine, example_inputs=built.inputs, devices=16, global_batch=32, memory=40 * 2**20
    )
    assert planned.solution is not None
    names = {planned.solution.configuration.name, *(r.name for r in planned.solution.rejected)}
    assert any("pp=" in name for name in names)


def _config() -> str:
    import json
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "llama.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "vocab_size": 1024,
                "max_position_embeddings": 64,
            }
        )
    )
    return str(path)


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    """The head counts as work: equally many layers per stage are slower, and nothing but cost says so."""
    planned = autoshard.plan(
        _heavy_head(),
        "pp=4",
        example_inputs=_tokens(),
        cluster="a100-selene",
        global_batch=16,
        schedule="1f1b",
        microbatches=8,
    )
    staging = planned.staging
    assert staging is not None and staging.equal is not None
    assert staging.equal > 1.1 * staging.seconds


def _heavy_head() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=16,
                hidden_size=1024,
                intermediate_size=2816,
                vocab_size=65536,
                max_position_embeddings=1024,
            )
        )


def _tokens() -> dict[str, torch.Tensor]:
    ids = torch.zeros(16, 1024, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_what_cannot_be_is_refused() -> None:
    model, batch = small()
    with pytest.raises(UsageError, match="pp is not the first axis"):
        autoshard.plan(model, "dp=2,pp=2", example_inputs=batch)
    with pytest.raises(UsageError, match="did you mean"):
        autoshard.plan(model, "pp=2", example_inputs=batch, schedule="1f1")
    with pytest.raises(UsageError, match="do not divide into 3 microbatches"):
        autoshard.plan(model, "pp=2,dp=2", example_inputs=batch, microbatches=3)
    with pytest.raises(UsageError, match="chunks is 0"):
        autoshard.plan(model, "pp=2", example_inputs=batch, chunks=0)
    with pytest.raises(UsageError, match="schedule 1f1b was asked for, and the mesh has no pipeline"):
        autoshard.plan(model, "dp=2", example_inputs=batch, schedule="1f1b")


def test_what_some_meshes_cannot_have_leaves_the_others() -> None:
    machine = load_cluster("h100-dgx")

    def found(batch: int, **options: Any) -> list[Staged]:
        return candidate_meshes(machine, 8, 4, batch, PlanOptions(global_batch=batch, **options))

    staged = found(12, microbatches=3)
    assert {s.batches for s in staged} == {(4,)} and {s.ranks for s in staged} == {1, 2, 4}
    assert all(4 % data_ways(s.mesh) == 0 for s in staged if s.ranks > 1)
    assert any(4 % data_ways(s.mesh) for s in staged)
    # more stages than there are layers
    assert {s.ranks for s in found(16, chunks=2)} == {1, 2}
    with pytest.raises(UsageError, match="12 sequences do not divide into 5 microbatches"):
        found(12, microbatches=5)
    with pytest.raises(UsageError, match="8 ranks have no pipeline for the schedule 1f1b"):
        found(1, schedule="1f1b")


def test_a_microbatch_may_divide_less_than_the_batch() -> None:
    """Over the ranks that one sequence does not divide over, something else is divided."""
    model, batch = small()
    planned = autoshard.plan(
        model, load_cluster("h100-dgx"), example_inputs=batch, devices=4, global_batch=8, microbatches=8
    )
    assert (planned.plan.microbatches, planned.plan.batch) == (8, 1)


def test_the_fullest_rank_has_most_of_the_collectives_of_parameters() -> None:
    """With one microbatch all cuts compute alike: what is gathered and reduced decides between them."""
    model, batch = small()
    planned = autoshard.plan(model, "pp=2,fsdp=2", example_inputs=batch, cluster="h100-dgx", microbatches=1)
    staging = planned.staging
    assert staging is not None and planned.solution is not None
    _, bare = scheduled_seconds(planned.solution.placements, staging.schedule.name)
    held = staging.costs.base
    assert bare > 0 and staging.bare == pytest.approx(bare * max(held) / (sum(held) / 2))
    assert max(held) < 0.8 * sum(held)


def test_a_gradient_of_two_parameters_is_cut_like_any_other() -> None:
    """With attention beside the feed-forward, both output biases have one gradient, which is then copied."""
    pytest.importorskip("transformers")
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=16,
    )
    model = GPTNeoXForCausalLM(config).train()
    ids = torch.randint(0, 64, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    planned = autoshard.plan(model, "pp=2,dp=2", example_inputs=batch, microbatches=2)
    assert planned.staging is not None
    program = autoshard.compile(model, planned).program
    found = verify(program, model, (), batch, steps=1)
    assert found.ok, found.worst()


class _Tail(nn.Module):
    """Parameters at the front, and most of the work behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.relu(self.a(x)))
        for _ in range(6):
            y = torch.tanh(y @ y.transpose(-1, -2) @ y)
        return y.pow(2).mean()


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_every_rank_gets_parameters(mesh: str) -> None:
    """An optimizer would get an empty list on a rank that has only the work behind them."""
    model, x = _Tail(), torch.randn(8, 16, 16)
    planned = autoshard.plan(model, mesh, example_inputs=x, microbatches=4, cluster="cpu-gloo")
    program = autoshard.compile(model, planned).program
    assert program.stages is not None
    holders, owner = holders_of(program), program.stages.schedule.owner
    params = [p.name for p in program.signature.ports if p.kind == "param"]
    assert {owner[stage] for name in params for stage in holders[name]} == {0, 1}
    with pytest.raises(InfeasibleError, match="cannot be cut into pp=8 stages with parameters in each"):
        autoshard.plan(model, "pp=8", example_inputs=x, microbatches=4, cluster="cpu-gloo")


def test_a_cut_puts_off_what_its_program_puts_off() -> None:
    """Tiles make gradients of weights with those that other stages wait for."""
    model, batch = small("llama-deep")
    planned = autoshard.plan(
        model,
        "pp=2",
        example_inputs=batch,
        cluster="cpu-gloo",
        schedule="zb-h1",
        microbatches=4,
        tile_rows=5,
    )
    assert planned.staging is not None and planned.peaks is not None
    cut, program = planned.staging.costs, planned.peaks().prices.costs
    assert cut.backward_weight[-1] == pytest.approx(program.backward_weight[-1], rel=0.2)
    assert cut.backward_input[-1] == pytest.approx(program.backward_input[-1], rel=0.05)


def test_a_schedule_that_does_not_fit_gives_way_to_the_leanest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates choose the schedule of a mesh before it is known what fits."""
    tuned = CandidateSolver.tuned

    def fails_late(self: CandidateSolver, formulated: Any, setting: Any, *given: Any, **options: Any) -> Any:
        if setting.pipe.splits_backward:
            raise InfeasibleError("gradients that are put off take too much")
        return tuned(self, formulated, setting, *given, **options)

    monkeypatch.setattr(CandidateSolver, "tuned", fails_late)
    model, batch = small("llama-deep")
    planned = autoshard.plan(
        model, "pp=4", example_inputs=batch, cluster="cpu-gloo", microbatches=4, memory=3 << 20
    )
    assert planned.plan.pipeline is not None and not planned.plan.warnings
