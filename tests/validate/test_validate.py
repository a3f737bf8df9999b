"""Measured runs: what is read of a row, how it is rebuilt, and how its prediction is scored."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rebuilt_once import captured_once  # noqa: F401 (a fixture)
from typer.testing import CliRunner

from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.cluster import load_cluster
from autoshard.cost.recipe import MIXED
from autoshard.errors import UsageError
from autoshard.ir import refs_of
from autoshard.ir.placement import P, R, Shard
from autoshard.ir.views import VIEWS
from autoshard.planner.analysis import analyse
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step
from autoshard.simulate.work import CollectiveWork
from autoshard.validate.architecture import architecture_of, parameters
from autoshard.validate.captured import Captures
from autoshard.validate.counted import counted, fits, unit_of
from autoshard.validate.frameworks import Framework, behaviour_of, framework_of, frameworks
from autoshard.validate.machine import machine_of
from autoshard.validate.models import Architecture, model_of, on_meta
from autoshard.validate.ranking import Ranking, alternatives_of, ranking
from autoshard.validate.rebuild import Rebuilt, mesh_of, padded_vocab, rebuilt, storable
from autoshard.validate.rows import Run, Unsupported, read_rows
from autoshard.validate.score import Scored, by_study, scored, summary
from autoshard.validate.stages import stage_sizes
from autoshard.verify.lockstep import verify


def row(**changed: Any) -> dict[str, Any]:
    """A complete run of a small GPT on one node."""
    base: dict[str, Any] = {
        "id": "a-1",
        "kind": "run",
        "study": "a",
        "framework": "Megatron-LM",
        "year": 2021,
        "gpu": "A100-SXM4-80GB",
        "gpu_mem_gb": 80,
        "peak_tflops": 312,
        "n_gpus": 8,
        "gpus_per_node": 8,
        "intra_bw_GBps_per_gpu": 300,
        "inter_bw_GBps_per_node": 200,
        "network": "8x200Gb/s HDR IB per node",
        "model": "GPT-tiny",
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "ffn": 256,
        "vocab": 1000,
        "seq": 32,
        "t": 2,
        "p": 2,
        "d": 2,
        "mbs": 2,
        "gbs": 16,
        "schedule": "1F1B",
        "zero": 0,
        "recompute": "full",
        "precision": "bf16",
        "step_time_s": 0.01,
    }
    return {**base, **changed}


MIXTURE: dict[str, Any] = {"experts": 8, "topk": 2, "moe_ffn": 32}
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SHARED: dict[str, Any] = {**MIXTURE, "shared_expert_ffn": 64, "first_dense_layers": 1}


def read(tmp_path: Path, *rows: dict[str, Any], studies: tuple[str, ...] = ()) -> list[Run | Unsupported]:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(list(rows)))
    return read_rows(path, studies)


def run_of(tmp_path: Path, **changed: Any) -> Run:
    (found,) = read(tmp_path, row(**changed))
    assert isinstance(found, Run), found
    return found


def rebuilt_of(run: Run) -> Rebuilt:
    (found,) = rebuilt([run])
    assert isinstance(found, Rebuilt), found
    return found


# -- rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "component"}, "its kind is component"),
        ({"layers": None, "vocab": None}, "no layers, vocab"),
        ({"config_complete": False, "missing": ["the network"]}, "not complete: the network"),
        ({"cp": 2}, "t=2 x p=2 x d=2 x cp=2 is not n_gpus=8"),
        ({"cp": 2, "n_gpus": 16, "fsdp_shard": 3}, "fsdp_shard=3 does not divide d=2 x cp=2"),
        ({"offload": {"optimizer": "cpu"}}, "its optimizer runs on the host"),
        ({"experts": 8, "topk": 2}, "no moe_ffn"),
        ({**MIXTURE, "ep": 4}, "ep=4 does not divide d=2"),
        ({**MIXTURE, "experts": 9, "ep": 2}, "ep=2 does not divide its 9 experts"),
        ({**MIXTURE, "etp": 4}, "over etp=4 ranks"),
        ({"hybrid": {"pattern": "M*"}}, "state spaces"),
        ({"lora": {"rank": 8}}, "trains adapters"),
        ({"inferred": ["MLA of DeepSeek-V2"]}, "no key mla"),
        ({"mtp_layers": 1}, "mtp_layers=1"),
        ({"precision": "NVFP4"}, "products in NVFP4"),
        ({"n_gpus": 16}, "t=2 x p=2 x d=2 is not n_gpus=16"),
        ({"gbs": 6}, "gbs=6 is not a multiple of mbs=2 x d=2"),
        ({"t": 8, "p": 1, "d": 1}, "cannot be divided over t=8"),
        ({"zero": 3, "fsdp_shard": 3}, "fsdp_shard=3 does not divide d=2"),
        ({"recompute": "some"}, "recomputation 'some' is not known"),
        ({"p": 8, "d": 1, "n_gpus": 16}, "more pipeline stages (p=8, v=1) than layers"),
        ({"step_time_s": None}, "nothing was measured"),
    ],
)
def test_rows_that_cannot_be_rebuilt_say_why(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    (found,) = read(tmp_path, row(**changed))
    assert isinstance(found, Unsupported)
    assert (found.id, found.study) == ("a-1", "a")
    assert reason in found.reason


@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", "4"), ("layers", 4.5), ("t", True), ("sp", 1), ("step_time_s", -1), ("gbs", 0), ("model", 7)],
)
def test_values_of_wrong_types_name_row_and_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, row(**{key: value}))
    assert key in error.value.what
    assert error.value.where == f"row a-1, {key}"


def test_unknown_keys_are_no_error_and_unknown_studies_are(tmp_path: Path) -> None:
    (found,) = read(tmp_path, row(weather="rain", study="b"), studies=("b",))
    assert isinstance(found, Run)
    with pytest.raises(UsageError, match="no rows of study 'c'"):
        read(tmp_path, row(), studies=("c",))


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]"])
def test_files_that_are_no_rows_are_usage_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_rows(path)


def test_degrees_follow_from_each_other(tmp_path: Path) -> None:
    run = run_of(tmp_path, d=None, mbs=None, n_microbatches=4)
    assert (run.data, run.micro, run.microbatches) == (2, 2, 4)
    assert run_of(tmp_path, n_gpus=None).gpus == 8


def test_seconds_come_from_whatever_was_measured(tmp_path: Path) -> None:
    def seconds(**told: Any) -> float | None:
        return run_of(tmp_path, step_time_s=None, **told).seconds

    assert seconds(step_time_s_derived=0.25) == 0.25
    assert seconds(tokens_per_s_per_gpu=128) == pytest.approx(16 * 32 / (128 * 8))
    assert seconds(samples_per_s_per_gpu=4) == pytest.approx(16 / (4 * 8))
    # Narayanan et al., SC'21, equation 3, on 8 GPUs at 1 TFLOP/s each
    b, s, layers, h, v = 16, 32, 4, 64, 1000
    counted = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert seconds(tflops_per_gpu=1, tflops_kind="hardware") == pytest.approx(counted / 8e12)
    model = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert seconds(tflops_per_gpu=1, tflops_kind="model") == pytest.approx(model / 8e12)


# -- architecture, machine, framework ------------------------------------------------------------------


def test_parameters_tell_a_gated_model_whatever_its_name(tmp_path: Path) -> None:
    big = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000, "seq": 2048, "t": 2}
    named = run_of(tmp_path, **big, ffn=11008, model="GPT-like", params_b=6.74)
    known = architecture_of(named, named.vocab)
    assert known.shape.kind == "llama"
    assert "params_b" in known.note
    assert parameters(named, "llama") == pytest.approx(6.738e9, rel=1e-3)
    assert (
        architecture_of(run_of(tmp_path, **big, ffn=16384, model="Llama", params_b=6.7), 32000).shape.kind
        == "gpt2"
    )
    assert architecture_of(run_of(tmp_path, model="Mistral-7B"), 1000).note == ""
    unnamed = architecture_of(run_of(tmp_path, model="Our model", kv_heads=2), 1000)
    assert unnamed.shape.kind == "llama"
    assert "kv_heads" in unnamed.note


def test_a_gpt_with_few_heads_of_keys_is_refused_by_name(tmp_path: Path) -> None:
    (found,) = rebuilt([run_of(tmp_path, model="GPT-x", kv_heads=2)])
    assert isinstance(found, Unsupported)
    assert "4 heads and 2 heads of keys" in found.reason


def test_figures_of_the_row_override_the_catalog(tmp_path: Path) -> None:
    changed = {
        "gpu_mem_gb": 40,
        "intra_bw_GBps_per_gpu": 100,
        "network": "4x100Gb/s",
        "inter_bw_GBps_per_node": 50,
    }
    cluster = machine_of(run_of(tmp_path, gpu="A100", **changed)).cluster
    assert cluster.device.memory_bytes == 40 * 2**30
    inside, outside = cluster.levels
    assert (inside.size, inside.bandwidth) == (8, 100e9)
    # four cards of 100 Gb/s, two GPUs to each
    assert (outside.bandwidth, outside.shared_by) == (12.5e9, 2)
    assert cluster.device.peak_flops["bf16"] == load_cluster("a100-selene").device.peak_flops["bf16"]


def test_the_peak_of_an_fp8_row_is_that_of_fp8(tmp_path: Path) -> None:
    plain = load_cluster("h100-dgx").device
    run = run_of(tmp_path, gpu="H100-SXM5-80GB", peak_tflops=1979, precision="fp8")
    device = machine_of(run).cluster.device
    assert device.peak_flops == plain.peak_flops
    assert behaviour_of(run, framework_of(run), device.peak_flops).product_dtype == "f8"
    made = rebuilt_of(run_of(tmp_path, gpu="H100-SXM5-80GB", precision="fp8"))
    assert estimate_step(made.program, made.cluster, behaviour=made.behaviour).seconds > 0
    assert made.notes == ()
    old = rebuilt_of(run_of(tmp_path, gpu="A100-SXM4-80GB", precision="fp8"))
    assert old.behaviour.product_dtype == ""
    assert "no rate for f8" in old.notes[0]


def test_a_gpu_that_nobody_knows_takes_after_the_nearest(tmp_path: Path) -> None:
    machine = machine_of(run_of(tmp_path, gpu="Z1", peak_tflops=500, gpu_mem_gb=64))
    assert machine.cluster.device.peak_flops["bf16"] == pytest.approx(500e12)
    assert machine.cluster.device.memory_bytes == 64 * 2**30
    assert "Z1 is not in the catalog" in machine.notes[0]
    slow = machine_of(run_of(tmp_path, network="4x100Gb/s Omni-Path", inter_bw_GBps_per_node=50)).cluster
    fast = machine_of(run_of(tmp_path, network="4x100Gb/s", inter_bw_GBps_per_node=50)).cluster
    assert slow.levels[-1].shared_by == fast.levels[-1].shared_by == 2
    assert slow.levels[-1].bandwidth == pytest.approx(0.22 * fast.levels[-1].bandwidth)
    (found,) = rebuilt([run_of(tmp_path, gpu="Z1", peak_tflops=None)])
    assert isinstance(found, Unsupported)
    assert "no GPU of the catalog is called 'Z1'" in found.reason


def test_frameworks_are_told_by_name_and_year(tmp_path: Path) -> None:
    def name(framework: str, year: int | None) -> str:
        return framework_of(run_of(tmp_path, framework=framework, year=year)).name

    assert name("Megatron-LM", 2021) == "Megatron-LM before distributed optimizers"
    assert name("Megatron-LM", 2024) == "Megatron-Core with Transformer Engine"
    assert name("Megatron-LM", None) == "Megatron-Core with Transformer Engine"
    assert name("NeMo/Megatron (MLPerf)", 2023) == "NeMo with Transformer Engine"
    assert name("Megatron-DeepSpeed", 2022) == "Megatron-DeepSpeed"
    assert name("llm-foundry FSDP", 2023) == "llm-foundry"
    assert name("FSDP", 2024) == "FSDP without compile"
    assert name("NeMo AutoModel (PyTorch FSDP2)", 2025) == "NeMo Automodel"
    assert name("Megatron-Bridge 26.06 NeMo Container", 2026) == "Megatron-Bridge"
    eager = run_of(tmp_path, framework="torchtitan", notes="eager")
    assert (framework_of(eager).name, name("torchtitan", 2025)) == (
        "torchtitan without compile",
        "torchtitan",
    )
    wide = run_of(tmp_path, framework="llm-foundry FSDP", precision="amp_bf16/DEFAULT")
    assert framework_of(wide).behaviour.gradient_dtype == "f32"
    summed = run_of(tmp_path, framework="Megatron-DeepSpeed", precision="bf16 (fp32 grad accumulation)")
    # in bf16 as they are made, in fp32 as they are summed
    found = behaviour_of(summed, framework_of(summed), ())
    assert found.recipe == replace(MIXED, gradient=6)
    assert (found.sum_bytes, framework_of(summed).behaviour.sum_bytes) == (18, 6)
    assert framework_of(run_of(tmp_path, framework="paper and pencil")).assumed
    assert [f.assumed for f in frameworks()] == [False] * (len(frameworks()) - 1) + [True]


def test_an_entry_may_be_for_a_network_and_for_many_gpus(tmp_path: Path) -> None:
    def told(gpus: int, network: str) -> Framework:
        changed = {"n_gpus": gpus, "d": gpus // 4, "gbs": gpus, "network": network}
        return framework_of(run_of(tmp_path, framework="Megatron-DeepSpeed", year=2022, **changed))

    plain, blocking = told(160, "4x100Gb/s Omni-Path"), told(320, "4x100Gb/s Omni-Path")
    assert plain == told(320, "8x200Gb/s HDR IB")
    assert blocking.behaviour.blocking_launches and not plain.behaviour.blocking_launches
    # all else is as in the entry that it is like
    named = {"name": plain.behaviour.name, "recipe": plain.behaviour.recipe}
    assert replace(blocking.behaviour, blocking_launches=False, **named) == plain.behaviour
    assert (blocking.wide_sum, blocking.vocab_multiple) == (plain.wide_sum, plain.vocab_multiple)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"schedule": "DualPipe"}, "no pipeline schedule 'DualPipe'"),
        ({"schedule": "Interleaved 1F1B"}, "v says one stage per rank"),
        ({"schedule": "GPipe", "v": 2}, "gpipe needs chunks=1"),
        ({"model": "Llama", "hidden": 60}, "heads of 15 elements"),
    ],
)
def test_runs_that_no_program_stands_for_say_why(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    (found,) = rebuilt([run_of(tmp_path, **changed)])
    assert isinstance(found, Unsupported)
    assert reason in found.reason


def test_a_divided_vocabulary_is_padded() -> None:
    assert padded_vocab(50257, 8, 128) == 51200
    assert padded_vocab(50257, 1, 128) == 50257
    assert padded_vocab(50257, 8, 0) == 50257


def test_only_so_many_ranks_can_hold_some_of_a_dim() -> None:
    assert storable(64, 8) == 8
    assert storable(12288, 448) == 224
    assert storable(3, 4) == 2


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (22, 8, [2, 3, 3, 3, 3, 3, 3, 2]),
        (6, 8, [0, 1, 1, 1, 1, 1, 1, 0]),
        (7, 4, [2, 2, 2, 1]),
    ],
)
def test_stages_have_equally_many_layers(layers: int, stages: int, sizes: list[int]) -> None:
    assert stage_sizes(layers, stages) == sizes


# -- programs ------------------------------------------------------------------------------------------


def test_schedules_are_those_of_the_row(tmp_path: Path) -> None:
    def schedule(told: str, v: int = 1) -> tuple[str, int]:
        made = rebuilt_of(run_of(tmp_path, schedule=told, v=v)).program.stages.schedule
        return made.name, made.stages

    assert schedule("1F1B") == ("1f1b", 2)
    assert schedule("1F1B", v=2) == schedule("interleaved_1F1B", v=2) == ("interleaved", 4)
    assert (schedule("ZB-1p"), schedule("ZB-2p")) == (("zb-h1", 2), ("zb-h2", 2))
    assert schedule("ZB-H2") == ("zb-h2", 2)
    assert schedule("ZBV") == ("zb-v", 4)
    first, second = rebuilt_of(run_of(tmp_path, schedule="ZB-2p", layers=3)).notes
    assert "ZB-2p is the schedule of the paper" in first
    assert second == "3 layers in stages of 1 to 2"


def test_tensor_ranks_do_what_megatron_does(tmp_path: Path) -> None:
    program = rebuilt_of(run_of(tmp_path)).program
    assert program.mesh == "dp=2,tp=2"
    assert program.microbatches == 4
    values = program.lowered.values
    tensor = {p.target: values[p.name].layout[1] for p in program.signature.ports}
    assert tensor["transformer.wte.weight"] == Shard(0)
    assert tensor["transformer.h.0.attn.c_attn.weight"] == Shard(1, outer=3)
    assert tensor["transformer.h.0.attn.c_proj.weight"] == Shard(0)
    assert tensor["transformer.h.0.mlp.c_fc.weight"] == Shard(1)
    assert tensor["transformer.h.0.mlp.c_proj.weight"] == Shard(0)
    assert tensor["transformer.h.0.ln_1.weight"] == R
    # two all-reduces in a layer's forward, after its row parallel products
    assert reductions(program, "h_fwd") == ["all_reduce", "all_reduce"]


def test_sequence_parallel_ranks_gather_and_scatter(tmp_path: Path) -> None:
    program = rebuilt_of(run_of(tmp_path, sp=True)).program
    assert sorted(reductions(program, "h_fwd")) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    layouts = program.lowered.segments["h_fwd"].layouts
    norms = [name for name in layouts if name.startswith("native_layer_norm_0") and "_a" not in name]
    assert norms
    assert all(layouts[name][1] == Shard(1) for name in norms)


def reductions(program: Any, segment: str) -> list[str]:
    nodes = program.lowered.segments[segment].graph.nodes
    found = [node.op.split(".")[1] for node in nodes if node.op.startswith("comm.")]
    return [op for op in found if op != "slice"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_stage_of_zero_says_what_is_divided(tmp_path: Path, zero: int) -> None:
    changed = {"t": 1, "p": 1, "d": 8, "gbs": 64, "zero": zero, "recompute": "none", "framework": "x"}
    made = rebuilt_of(run_of(tmp_path, **changed))
    program = made.program
    assert program.mesh == ("fsdp=8" if zero else "dp=8")
    weight = next(p for p in program.signature.ports if p.target.endswith("mlp.c_fc.weight"))
    assert isinstance(program.lowered.values[weight.name].layout[0], Shard) == bool(zero)
    within = [op for name in program.lowered.segments for op in reductions(program, name)]
    last = [part for part in program.lowered.parts if part.phase == "reduce"]
    late = [node.op.split(".")[1] for part in last for node in program.lowered.of(part)]
    scattered = [op for op in within if "reduce_scatter" in op]
    # ZeRO-1 reduces once a step, 2 and 3 in every microbatch; 3 gathers again for backward
    assert bool(scattered) == (zero in (2, 3))
    assert any("reduce_scatter" in op for op in late) == (zero == 1)
    gathers = "h_bwd" in program.lowered.segments and any(
        "gather" in op for op in reductions(program, "h_bwd")
    )
    assert gathers == (zero == 3)


def test_only_factors_of_narrow_products_are_gathered_narrow(tmp_path: Path) -> None:
    changed = {"t": 2, "p": 1, "d": 4, "zero": 3, "sp": True, "recompute": "none", "model": "Llama-tiny"}
    run = run_of(tmp_path, **changed, gpu="H100", precision="fp8", peak_tflops=None, framework="torchtitan")
    made = rebuilt_of(run)
    assert made.behaviour.narrow_gathers
    rowwise = run_of(tmp_path, **changed, gpu="H100", precision="fp8", framework="torchtitan float8 rowwise")
    assert not framework_of(rowwise).behaviour.narrow_gathers

    def sent(narrow_gathers: bool) -> dict[str, float]:
        how = replace(made.behaviour, narrow_gathers=narrow_gathers)
        sheets = StagePrices(made.program, made.cluster, behaviour=how).sheets
        works = [t.work for name in made.program.lowered.segments for t in sheets.of(name).tasks]
        messages = [w for w in works if isinstance(w, CollectiveWork)]
        return {k: sum(w.nbytes for w in messages if w.kind == k) for k in sorted({w.kind for w in messages})}

    sheets = StagePrices(made.program, made.cluster, behaviour=made.behaviour).sheets
    saved, kinds = 0.0, set()
    for segment in made.program.lowered.segments.values():
        nodes, values = segment.graph.nodes, segment.placed()
        narrow = sheets.narrow(nodes)
        alias = {o: ref for n in nodes if n.op in VIEWS for ref in list(refs_of(n))[:1] for o in n.outs}
        users: dict[str, set[str]] = {}
        for node in nodes:
            for ref in refs_of(node) if node.op not in VIEWS else ():
                while ref in alias:
                    users.setdefault(ref, set()).add(node.op)
                    ref = alias[ref]
                users.setdefault(ref, set()).add(node.op)
        for node in nodes:
            for name in node.outs if node.op.startswith("comm.all_gather") else ():
                kinds.add(users[name] == {"aten.mm.default"})
                assert (name in narrow) == (users[name] == {"aten.mm.default"})
                saved += sheets.ops.nbytes(values[name]) / 2 if name in narrow else 0.0
    assert kinds == {True, False}  # of tables and weights of norms, too
    wide, less = sent(False), sent(True)
    assert wide["all_gather"] - less["all_gather"] == pytest.approx(saved)
    assert wide["all_gather"] > 1.5 * less["all_gather"]
    assert {**wide, "all_gather": 0.0} == {**less, "all_gather": 0.0}


def test_reductions_over_two_axes_wait_for_both(tmp_path: Path) -> None:
    """The gain of a norm is a partial sum over data and, with sequence parallelism, tensor ranks."""
    program = rebuilt_of(run_of(tmp_path, sp=True)).program
    assert not [op for op in reductions(program, "h_bwd") if op.startswith("all_reduce")]
    last = [node for p in program.lowered.parts if p.phase == "reduce" for node in program.lowered.of(p)]
    values, made = program.lowered.values, {}
    for node in last:
        made.update(dict.fromkeys(node.outs, str(node.args[1])))
    gain = next(r for r in program.signature.results if r.target == "transformer.h.0.ln_1.weight")
    assert made[gain.value] == "tp"
    before = next(n for n in last if gain.value in n.outs)
    source = next(ref.name for ref in before.args[0] if made.get(ref.name) == "dp")
    assert values[source].layout == (R, P)


def test_batches_are_scaled_as_they_would_be_captured() -> None:
    shape = Architecture("llama", 2, 64, 4, 2, 128, 96, 32)
    scaled = Captures(partial(on_meta, shape, seq=32, dtype=torch.bfloat16)).at(6)
    model, inputs = on_meta(shape, 6, 32)
    own = analyse(capture(model, (), inputs))
    for name, graph in own.folded.segments.items():
        other = scaled.model.folded.segments[name]
        assert [(n.op, n.args, n.kwargs, n.types) for n in graph.nodes] == [
            (n.op, n.args, n.kwargs, n.types) for n in other.nodes
        ]
    assert own.digits == scaled.model.digits


@pytest.mark.parametrize(
    "changed",
    [
        {"sp": True},
        {"sp": True, "zero": 1, "recompute": "selective", "model": "Llama", "kv_heads": 2, "ffn": 96},
        {"zero": 3, "fsdp_shard": 2, "p": 1, "d": 4, "gbs": 32, "recompute": "none"},
        {"p": 4, "t": 1, "v": 2, "schedule": "interleaved-1F1B", "layers": 6},
        {**MIXTURE, "t": 1, "p": 1, "d": 8, "ep": 4, "zero": 1, "ffn": None, "head_dim": 8, "kv_heads": 2},
        {**SHARED, "t": 1, "d": 4, "ep": 2, "zero": 3, "mla": LATENT, "recompute": "full"},
        {
            "model": "Llama",
            "ffn": 96,
            "kv_heads": 2,
            "t": 1,
            "p": 1,
            "cp": 4,
            "zero": 3,
            "tiling": {"loss": ""},
        },
    ],
    ids=[
        *("sequence parallel", "ZeRO-1", "ZeRO-3 in groups", "interleaved with short ends"),
        *("experts", "latent attention and shared experts", "context"),
    ],
)
def test_rebuilt_programs_compute_what_the_model_does(tmp_path: Path, changed: dict[str, Any]) -> None:
    run = run_of(tmp_path, **{"vocab": 256, "precision": "fp32", **changed})
    program = rebuilt_of(run).program
    torch.manual_seed(0)
    model = model_of(architecture_of(run, padded_vocab(run.vocab, run.tensor, 128)).shape)
    tokens = torch.randint(0, run.vocab, (run.batch, run.seq))
    found = verify(program, model, (), {"input_ids": tokens, "labels": tokens}, steps=2)
    assert found.ok, found.worst()


@pytest.mark.parametrize("zero", [0, 1])
def test_experts_are_divided_over_their_ranks(tmp_path: Path, zero: int) -> None:
    """What ZeRO divides of them is so over ranks with the same experts; other parameters over all."""
    run = run_of(tmp_path, **{**MIXTURE, "t": 1, "p": 1, "d": 8, "ep": 4, "zero": zero, "ffn": None})
    program = rebuilt_of(run).program
    assert program.mesh == ("fsdp=2,ep=4" if zero else "dp=2,ep=4")
    layouts = {p.target: program.lowered.values[p.name].layout for p in program.signature.ports}
    assert layouts["model.layers.0.mlp.experts.down_proj"][1] == Shard(0)
    assert isinstance(layouts["model.layers.0.mlp.experts.down_proj"][0], Shard) is bool(zero)
    query = layouts["model.layers.0.self_attn.q_proj.weight"]
    assert all(isinstance(p, Shard) for p in query) is bool(zero)


def test_the_host_waits_for_the_numbers_of_tokens(tmp_path: Path) -> None:
    """And issues more for an exchange of a row per choice, which also sends more."""
    few = {**MIXTURE, "t": 1, "p": 1, "d": 8, "ep": 4, "ffn": None, "framework": "Megatron-Bridge"}
    seconds = [
        estimate_step(made.program, made.cluster, behaviour=made.behaviour).seconds
        for made in (
            rebuilt_of(run_of(tmp_path, **few, dispatcher=name, cuda_graphs=graphs))
            for name, graphs in (("alltoall", ""), ("deepep", ""), ("deepep", "full_iteration"))
        )
    ]
    assert seconds[0] > seconds[1] > seconds[2]


def test_exchanges_beside_another_microbatch_cost_less(tmp_path: Path) -> None:
    wide = {**MIXTURE, "t": 1, "p": 1, "d": 8, "ep": 4, "ffn": None, "seq": 2048, "hidden": 256}
    alone, beside = (
        rebuilt_of(run_of(tmp_path, **wide, cuda_graphs="full_iteration", overlap={"ep_a2a": told}))
        for told in (False, True)
    )
    steps = [estimate_step(r.program, r.cluster, behaviour=r.behaviour).seconds for r in (alone, beside)]
    assert steps[0] > steps[1]


# -- scores --------------------------------------------------------------------------------------------


def score(name: str, measured: float | None, predicted: float, **more: Any) -> Scored:
    told = {"measured_gib": None, "predicted_gib": 1.0, "oom": False, "predicted_oom": False, **more}
    return Scored(name, "a", measured, predicted, **told)


def test_errors_are_of_the_measured_step() -> None:
    runs = [
        score("x", 1.0, 1.1),
        score("y", 2.0, 1.0),
        score("z", 4.0, 4.0, measured_gib=2.0, predicted_gib=1.5),
    ]
    found = by_study(runs)["a"]
    assert found.rows == 3
    assert found.mean_abs_pct_error == pytest.approx((10 + 50 + 0) / 3)
    assert found.worst_abs_pct_error == pytest.approx(50)
    assert found.memory_mean_abs_pct_error == pytest.approx(25)
    # 1.1, 1.0, 4.0 for 1, 2, 4: ranks 2 1 3, so 1 - 6 * 2 / (3 * 8)
    assert found.rank_correlation == pytest.approx(0.5)


def test_runs_out_of_memory_count_as_right_or_wrong() -> None:
    lost = [
        score("x", None, 1.0, oom=True, predicted_oom=True, measured_gib=80.0),
        score("y", None, 1.0, oom=True),
    ]
    found = summary(lost)
    assert (found.rows, found.oom_predicted, found.oom_missed) == (0, 1, 1)
    assert found.mean_abs_pct_error is None
    assert found.memory_mean_abs_pct_error is None


def test_a_run_that_did_not_fit_has_no_step(tmp_path: Path) -> None:
    made = rebuilt_of(run_of(tmp_path, oom=True))
    found = scored(made, 1.0, 100 * 2**30)
    assert found.measured_s is None
    assert found.predicted_oom
    assert not scored(made, 1.0, 2**30).predicted_oom


def test_memory_is_in_the_unit_of_the_measurement(tmp_path: Path) -> None:
    peak = 40 * 2.0**30
    assert counted(peak, "max allocated GiB") / unit_of("max allocated GiB") == pytest.approx(40)
    assert counted(peak, "max GB over stages") / unit_of("max GB over stages") == pytest.approx(
        42.95, rel=1e-3
    )
    assert counted(peak, "max reserved GiB") > peak
    # every kind of parallelism has communicators of its own
    assert counted(peak, "GB nvidia-smi", 3) > counted(peak, "GB nvidia-smi", 1) > counted(peak, "reserved")
    assert fits(70 * 2.0**30, 80 * 2.0**30, 3) and not fits(74 * 2.0**30, 80 * 2.0**30, 3)


def test_a_full_device_has_no_free_blocks() -> None:
    memory = 80 * 2.0**30
    for kind in ("max reserved GiB", "GB nvidia-smi"):
        assert counted(40 * 2.0**30, kind, 2, memory) == counted(40 * 2.0**30, kind, 2)
        full = counted(70 * 2.0**30, kind, 2, memory)
        assert 70 * 2.0**30 < full <= memory < counted(70 * 2.0**30, kind, 2)
    # what does not fit is told as it is
    assert counted(90 * 2.0**30, "GB nvidia-smi", 2, memory) > memory


def test_a_plan_is_picked_among_those_for_the_same_work(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path, id="x", t=2, p=2, d=2),
        run_of(tmp_path, id="y", t=1, p=2, d=4),
        run_of(tmp_path, id="z", t=2, p=2, d=2, gbs=32),
    ]
    groups = [alternatives_of(run) for run in runs]
    assert groups[0] == groups[1] != groups[2]
    wrong = ranking([score("x", 1.0, 1.3), score("y", 1.2, 1.1), score("z", 9.0, 9.0)], groups)
    assert (wrong.groups, wrong.picked) == (1, 0)
    assert wrong.mean_regret_pct == wrong.worst_regret_pct == pytest.approx(20)
    close = ranking([score("x", 1.0, 1.3), score("y", 1.02, 1.1), score("z", 9.0, 9.0)], groups)
    assert (close.groups, close.picked) == (1, 1)
    assert ranking([score("x", 1.0, 1.3)], groups[:1]) == Ranking(0, 0, None, None)


# -- command -------------------------------------------------------------------------------------------


def test_json_has_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(), row(id="a-2", cp=2), row(id="b-1", study="b", mem_gib=1.0)]))
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["schema"] == 2
    assert set(told["overall"]) >= {
        *("rows", "mean_abs_pct_error", "worst_abs_pct_error", "memory_mean_abs_pct_error"),
        *("oom_predicted", "oom_missed"),
    }
    assert set(told["ranking"]) == {"groups", "picked", "mean_regret_pct", "worst_regret_pct"}
    assert set(told["studies"]) == {"a", "b"}
    assert "rank_correlation" in told["studies"]["a"]
    first, second = told["rows"]
    assert (first["id"], first["measured_s"], first["measured_gib"]) == ("a-1", 0.01, None)
    assert first["pct_error"] == pytest.approx(100 * (first["predicted_s"] / 0.01 - 1))
    assert second["predicted_gib"] > 0
    assert [u["id"] for u in told["unsupported"]] == ["a-2"]


def test_the_table_shows_runs_studies_and_what_was_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(framework="paper"), row(id="a-2", layers=None)]))
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert result.exit_code == 0, result.output
    assert "a-1" in result.stdout
    assert "paper is not known" in result.stdout
    assert "no layers: a-2" in result.stdout


def test_usage_errors_end_as_they_do_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(layers="four")]))
    assert CliRunner().invoke(app, ["validate", str(path)]).exit_code == 2
    assert CliRunner().invoke(app, ["validate", str(path), "--study", "z"]).exit_code == 2


def test_a_published_run_end_to_end(tmp_path: Path) -> None:
    """Sizes of a run of Korthikanti et al., MLSys 2023, table 5, with fewer layers."""
    changed = {"layers": 4, "hidden": 6144, "heads": 64, "ffn": 24576, "vocab": 51200, "seq": 2048}
    where = {
        "t": 8,
        "p": 1,
        "d": 1,
        "mbs": 4,
        "gbs": 4,
        "schedule": "none",
        "precision": "fp16",
        "year": 2022,
    }
    run = run_of(tmp_path, **changed, **where)
    assert str(mesh_of(run)) == "tp=8"
    made = rebuilt_of(run)
    assert made.notes == ()
    step = estimate_step(made.program, made.cluster, behaviour=made.behaviour)
    # four forwards' worth of the model's products, at no more than the peak of eight devices
    layer = 4 * 2048 * (24 * 6144**2 + 4 * 2048 * 6144)
    assert step.seconds > 4 * 4 * layer / (8 * 312e12)
    assert step.fullest.peak < 80 * 2**30
