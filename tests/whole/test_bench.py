"""The benchmarks' functions on tiny cases; no times are asserted."""

from __future__ import annotations

import inspect
import io
import json
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from typer.main import get_command

from autoshard.capture.capture import capture
from autoshard.cli.main import app
from autoshard.cluster import Mesh, load_cluster
from autoshard.cluster.load import parse_cluster
from autoshard.cost.recipe import MIXED
from autoshard.errors import UsageError, VerificationError
from autoshard.interop.unfilled import Unfilled
from autoshard.planner.analysis import analyse
from autoshard.planner.stage_link import pipe_link
from autoshard.search.bound.stage_imbalance import busiest, chain_of
from autoshard.search.plan.plan import Recompute
from autoshard.search.problem.rescale_batch import with_batch
from autoshard.search.select.choose import choose
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.configuration import Staged
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.validate.models import Architecture, on_meta
from benchmarks.__main__ import main
from benchmarks.agree import ALTERNATIVES, AgreeRow, Alternative, agree_case, rows_of
from benchmarks.agree_table import agreement_line, print_agreement, row_text
from benchmarks.cases import Case
from benchmarks.cuts import SC21, heads, interleaved_rows
from benchmarks.cuts_measured import CutMeasured, check_equal, equal_cuts
from benchmarks.cuts_table import print_cuts
from benchmarks.max_lengths import rows as longest_lengths
from benchmarks.max_lengths_table import print_lengths
from benchmarks.models import bench_batch, bench_llama
from benchmarks.overhead import overhead
from benchmarks.planning import PlanningRow, by_turns, compile_package, median_of, plan_case
from benchmarks.planning_table import goals_text, print_planning, scaling_lines
from benchmarks.published import Comparison, compare, machine, published_setting, settle
from benchmarks.published_programs import Programs, simulate
from benchmarks.published_rows import Skipped, read_rows, reason_to_skip
from benchmarks.published_table import print_comparisons, print_programs
from benchmarks.quality import Small, quality_of, recomputations
from benchmarks.quality_table import print_quality
from benchmarks.rings import Stack, row_of
from benchmarks.rings_table import print_rings
from benchmarks.same_plans import PlanFigures, PlanPair
from benchmarks.saving import print_saving
from benchmarks.sweep import SweepRow, case_of, closing_line, sweep, with_options
from benchmarks.sweep_configs import published
from benchmarks.sweep_options import unlike_text

TINY = Architecture("llama", 1, 64, 4, 2, 128, 96, 32)
CASE = Case("tiny", TINY, 2, 4, 16)


def shown(write: Any) -> str:
    out = io.StringIO()
    write(Console(file=out, width=200))
    return out.getvalue()


def row(**changed: Any) -> dict[str, Any]:
    """A published run, small enough to plan at once."""
    base: dict[str, Any] = {
        "id": "a-1",
        "study": "a",
        "kind": "run",
        "config_complete": True,
        "model": "GPT-tiny",
        "gpu": "A100-SXM4-80GB",
        "gpu_mem_gb": 80,
        "n_gpus": 4,
        "layers": 1,
        "hidden": 64,
        "heads": 4,
        "kv_heads": None,
        "ffn": 256,
        "vocab": 96,
        "seq": 16,
        "t": 2,
        "p": 1,
        "d": 2,
        "zero": 0,
        "mbs": 2,
        "gbs": 8,
        "recompute": "full",
        "precision": "fp16",
        "step_time_s": 1.5,
    }
    return {**base, **changed}


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "measured.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"config_complete": False}, "not complete"),
        ({"p": 4}, "number of GPUs"),
        ({"p": 2, "n_gpus": 8}, "more pipeline stages than layers"),
        ({"p": 2, "n_gpus": 8, "layers": 2, "v": 2}, "more pipeline stages than layers"),
        ({"p": 2, "n_gpus": 8, "layers": 2, "schedule": "ZB-2p"}, "ZB-2p"),
        ({"p": 2, "n_gpus": 8, "layers": 2, "schedule": "1F1B-I"}, "stages a rank has"),
        ({"cp": 2}, "context"),
        ({"ep": 8}, "experts"),
        ({"precision": "fp8"}, "fp8"),
        ({"gpu": "TPU"}, "TPU"),
        ({"d": 3}, "number of GPUs"),
        ({"gbs": 6}, "microbatches"),
        ({"recompute": "some"}, "'some'"),
        ({"step_time_s": None}, "step time"),
        ({"ffn": None}, "no ffn"),
        ({"oom": True}, "out of memory"),
    ],
)
def test_rows_are_skipped_with_a_reason(changed: dict[str, Any], word: str) -> None:
    assert not reason_to_skip(row())
    assert word in reason_to_skip(row(**changed))


def test_a_row_becomes_a_mesh_a_microbatch_and_a_policy(tmp_path: Path) -> None:
    rows = [
        row(),
        row(id="a-2", zero=3, d=4, t=1, fsdp_shard=2, recompute="selective (op-level SAC)"),
        row(id="a-3", recompute="selective(core attention)", cp=2, n_gpus=8),
        row(id="a-4", recompute="selective(core attention)", study="b"),
        {"id": "a-5", "study": "a", "kind": "component"},
    ]
    found, skipped = read_rows(written(tmp_path, rows))
    assert [(r.id, r.mesh, r.micro, r.batch, r.recompute) for r in found] == [
        ("a-1", "dp=2,tp=2", 4, 8, "full"),
        ("a-2", "dp=2,fsdp=2", 8, 8, "selective"),
        ("a-4", "dp=2,tp=2", 4, 8, "none"),
    ]
    assert [s.id for s in skipped] == ["a-3"]
    assert [r.id for r in read_rows(tmp_path / "measured.json", "b")[0]] == ["a-4"]
    with pytest.raises(UsageError, match="known: a, b"):
        read_rows(tmp_path / "measured.json", "c")


def test_a_row_with_stages_becomes_a_pipeline(tmp_path: Path) -> None:
    staged = row(p=2, n_gpus=8, layers=4)
    rows = [row(), staged, {**staged, "id": "a-2", "v": 2, "schedule": "interleaved-1F1B"}]
    found, skipped = read_rows(written(tmp_path, rows))
    assert not skipped
    assert [r.pipe for r in found] == [Pipe(), Pipe(2, "1f1b", 1), Pipe(2, "interleaved", 2)]
    assert [r.name for r in found] == [
        "dp=2,tp=2",
        "pp=2 1f1b,dp=2,tp=2",
        "pp=2 interleaved x 2,dp=2,tp=2",
    ]
    assert [(r.devices, r.micro) for r in found] == [(4, 4), (8, 4), (8, 4)]


def test_unreadable_measurements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path / "absent.json")
    (tmp_path / "numbers.json").write_text("[3]")
    with pytest.raises(UsageError, match="not a list"):
        read_rows(tmp_path / "numbers.json")


def test_a_policy_holds_for_all_layers() -> None:
    bare = published_setting({"l": 3}, 2, "none", 0.8)
    assert bare.recompute == {} and bare.overlap == 0.8 and bare.microbatches == 2
    assert published_setting({"l": 3}, 2, "full", 0.8).recompute == {"l": Recompute("full", 3)}


def test_published_plans_against_ours(tmp_path: Path) -> None:
    pair = row(n_gpus=2, t=1, d=2, mbs=1, gbs=4)
    one = {**pair, "id": "a-2", "t": 2, "d": 1, "recompute": "none"}
    rows = [pair, one, {**pair, "id": "a-3", "gpu_mem_gb": 1e-4}]
    found, _ = read_rows(written(tmp_path, rows))
    results = list(compare(found))
    assert not [r for r in results if isinstance(r, Skipped)]
    by_id = {r.row.id: r for r in results if isinstance(r, Comparison)}
    assert by_id["a-1"].fits and not by_id["a-1"].slower
    assert by_id["a-1"].ratio is not None and 0 < by_id["a-1"].ratio <= 1
    assert by_id["a-2"].fits and by_id["a-2"].published_s > 0
    # a device of 100 kB holds neither
    assert not by_id["a-3"].fits and by_id["a-3"].ours_s is None and by_id["a-3"].why
    text = shown(lambda console: print_comparisons(console, list(by_id.values()), [Skipped("x", "s", "y")]))
    assert "full *" in text and "skipped 1: y (s 1)" in text


def test_published_pipelines_are_priced_as_the_search_prices_them(tmp_path: Path) -> None:
    """The one mesh, pipeline and microbatch of a row, searched: the same step, its sends among it.

    The last stage has the loss, so that two stages of two layers cannot be alike.
    """
    given = row(p=2, n_gpus=4, t=1, d=2, mbs=1, gbs=8, layers=2, recompute="none")
    (published,), _ = read_rows(written(tmp_path, [given]))
    (result,) = compare([published])
    assert isinstance(result, Comparison) and result.fits and not result.slower
    cluster = machine(published)
    model, inputs = on_meta(published.model, 4, published.seq)
    analysis = analyse(capture(model, (), inputs))
    theirs, fits = settle(with_batch(analysis.model, published.micro), published, cluster, None)
    mesh = Mesh.parse(published.mesh)
    link = pipe_link(cluster, mesh, 2)
    alone = Staged(mesh, (published.pipe,), (published.micro,), link)
    ours = choose(analysis.model, [alone], cluster, SearchRequest(batch=published.batch, recipe=MIXED))
    assert fits and theirs.configuration.pipe.hop > 0
    assert theirs.configuration.pipe.hop == pytest.approx(ours.placements.setting.pipe.hop)
    assert theirs.placements.seconds == pytest.approx(ours.placements.seconds, rel=1e-6)
    busy = busiest(chain_of(theirs.formulated, theirs.placements), published.pipe)
    assert busy > 1
    assert result.published_s == pytest.approx(theirs.placements.seconds * busy, rel=1e-6)


def test_published_plans_as_programs(tmp_path: Path) -> None:
    """With a pipeline and without; a device of 40 kB holds no plan of ours."""
    flat = row(n_gpus=2, t=2, d=1, mbs=1, gbs=4, layers=2, recompute="none")
    staged = {**flat, "id": "a-2", "t": 1, "p": 2}
    found, _ = read_rows(written(tmp_path, [flat, staged, {**flat, "id": "a-3", "gpu_mem_gb": 4e-5}]))
    results = list(simulate(found, lambda _: None))
    both = {r.row.id: r for r in results if isinstance(r, Programs)}
    (alone,) = (r for r in results if isinstance(r, Skipped))
    assert sorted(both) == ["a-1", "a-2"] and alone.id == "a-3" and "we find no plan" in alone.why
    assert both["a-1"].fits and both["a-1"].ours_s == both["a-2"].ours_s > 0
    # every program that there could be was looked at
    assert all(not p.slower and 0 < p.ratio <= 1 + 1e-9 for p in both.values())
    slow = replace(both["a-1"], ours_s=2 * both["a-1"].published_s)
    assert slow.slower and not replace(slow, fits=False).slower
    text = shown(lambda console: print_programs(console, [slow, both["a-2"]], [alone]))
    assert "2.000 SLOWER" in text and "1 of 2 at most 1" in text and "skipped 1" in text


def test_simulated_cuts_and_interleaving() -> None:
    """Little to compute and much to send: only what holds whatever the times are."""
    model = replace(TINY, layers=4)
    (plain, several) = heads(model, ranks=2, seq=32)
    assert (plain.schedule, plain.chunks) == ("1f1b", 1) and (several.chunks, len(several.cuts)) == (2, 3)
    for found in (plain, several):
        assert found.planned_s > 0 and found.equal_s is not None and found.gain is not None
    gpt = replace(model, kind="gpt2", kv_heads=4)
    run = replace(SC21[0], model=gpt, seq=32, devices=2, mesh="dp=1", batch=8, micro=2)
    (both,) = interleaved_rows([replace(run, pipe=Pipe(2, "interleaved", 2))])
    assert both.microbatches == 4 and both.plain_s > 0
    assert both.formula == pytest.approx(5 / 4.5 - 1)
    assert both.gain == pytest.approx(both.plain_s / both.interleaved_s - 1)
    measured = CutMeasured(1.0, 1.1, 1.1, 0.5, 0.7, 1.4, 1e-7, 2, plain)
    text = shown(lambda console: print_cuts(console, [plain], measured, [both]))
    assert "interleaved x 2" in text and "1.40" in text and "+11.1 %" in text and "2 cores" in text


def test_equal_layers_end_behind_layers() -> None:
    assert [cut.call for cut in equal_cuts(8, 4)] == [2, 4, 6]
    check_equal(1e-7)
    with pytest.raises(VerificationError, match="differ"):
        check_equal(float("nan"))


def test_a_slower_plan_of_ours_is_named(tmp_path: Path) -> None:
    published = read_rows(written(tmp_path, [row()]))[0][0]
    slow = Comparison(published, 1.0, True, 1.01, "dp=4", 1)
    assert slow.slower and not replace(slow, fits=False).slower and not replace(slow, ours_s=1.0).slower
    assert replace(slow, ours_s=None).slower  # ours must fit where the published one does
    assert "slower than published: a-1 dp=2,tp=2, ours dp=4" in shown(
        lambda console: print_comparisons(console, [slow], [])
    )


def test_planning_a_case() -> None:
    found = plan_case(CASE)
    assert found.step_s > 0 and 0 < found.mfu < 1 and found.peak_gib > 0 and found.microbatches >= 1
    assert found.baseline and found.baseline_ratio >= 1 - 1e-9
    given = plan_case(replace(CASE, mesh="tp=2"))
    assert given.mesh == "tp=2" and not given.baseline


def test_what_is_timed_has_its_bytecode() -> None:
    """Also in folders that are links."""
    compile_package()
    for function in (plan_case, capture):
        assert Path(cache_from_source(inspect.getfile(function))).is_file()


def test_planning_tables() -> None:
    runs = iter([3.0, 1.0, 2.0])
    made = PlanningRow(0.0, 0.5, 4.0, 0.7, "dp=4", 1, 0.1, 0.5, 0.0, "", 0.0, "it does not fit")
    row_ = median_of(CASE, lambda _: replace(made, process_s=next(runs)))
    assert row_.process_s == 2.0 and row_.search_s == 4.0
    case = replace(CASE, goal_s=1.5, goal_gib=1.0)
    assert goals_text(case, row_) == "1.5 s missed, 1 GiB met"
    text = shown(lambda console: print_planning(console, lambda _: row_, (case,)))
    assert "it does not fit" in text and "1.5 s missed" in text and "0.5 + 4.0" in text
    slow = (replace(row_, search_s=20.0, process_s=10.0), replace(row_, search_s=10.0, process_s=10.0))
    rows = [(row_, replace(row_, search_s=s)) for s in (2.0, 1.0)]
    (line,) = scaling_lines("depth", (CASE, CASE), [*rows, slow], 1.3)
    assert "once captured 2.00 x" in line and "missed once captured, met as a whole" in line
    assert "medians of 3 by turns" in line


def test_pairs_are_run_by_turns() -> None:
    order: list[str] = []
    large, small = replace(CASE, name="large", runs=2), replace(CASE, name="small")
    by_turns((large, small), lambda case: order.append(case.name))  # type: ignore[func-returns-value,arg-type]
    assert order == ["large", "small", "large", "small"]


def test_quality_of_a_tiny_case() -> None:
    small = Small("tiny", TINY, 16, 2, 2, "cpu-gloo", (0.8,))
    (found,) = quality_of(small)
    assert found.tried > 0 and found.ratio is not None
    assert found.ratio >= 1 - 1e-9 and found.bound_holds  # nothing beats trying everything
    assert "tiny" in shown(lambda console: print_quality(console, [found]))


def test_all_recomputations_are_tried() -> None:
    found = list(recomputations({"a": 2, "b": 1}))
    assert len(found) == 5 * 3 and {} in found
    assert {"a": Recompute("full", 2), "b": Recompute("selective", 1)} in found


def test_models_on_meta() -> None:
    model, inputs = on_meta(Architecture("gpt2", 1, 64, 4, 4, 128, 96, 32), 2, 16)
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    assert all(p.is_meta for p in model.parameters()) and tuple(inputs["input_ids"].shape) == (2, 16)
    with pytest.raises(UsageError, match="positions"):
        on_meta(TINY, 2, 64)
    with pytest.raises(UsageError, match="heads"):
        on_meta(replace(TINY, kind="gpt2"), 2, 16)


def test_weights_are_only_left_unfilled_on_meta() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    there, here = torch.empty(64, device="meta"), torch.zeros(64)
    with Unfilled():
        with Counting():
            assert torch.nn.init.normal_(there) is there
            assert torch.nn.init.normal_(tensor=there) is there
        assert Counting.count == 0
        assert torch.nn.init.normal_(here) is here and here.std() > 0.1
        assert torch.nn.Linear(4, 4).weight.std() > 0.01


def test_rings_of_tiny_layers() -> None:
    """Rings are made where what they hide is long, and none where nothing runs beside messages."""
    stack = Stack("tiny", Architecture("llama", 2, 512, 4, 4, 1024, 96, 128), 2, 128)
    base = load_cluster("h100-dgx")
    # computing and messages take about as long, and a product as long in chunks as whole
    kernels = replace(base.device.kernels, depth=0.0, multiprocessors=0)
    peaks = {"f32": 1e11, "bf16": 1e11}
    device = replace(base.device, launch_overhead=0.0, overlap=1.0, peak_flops=peaks, kernels=kernels)
    levels = tuple(replace(level, latency=0.0, bandwidth=1e8) for level in base.levels)
    slow = replace(base, device=device, levels=levels)
    found = row_of(stack, slow, "tp=4")
    assert found.apart.rings == 0 and found.ringed.rings > 0
    assert found.ringed.seconds < found.apart.seconds
    assert found.ringed.exposed < found.apart.exposed
    # three hops in place of one message, for the same bytes
    assert found.ringed.messages == found.apart.messages + 2 * found.ringed.rings
    assert found.ringed.nbytes == pytest.approx(found.apart.nbytes)
    still = replace(slow, device=replace(device, overlap=0.0))
    alone = row_of(stack, still, "tp=4")
    assert alone.ringed == alone.apart and not alone.ringed.rings
    text = shown(lambda console: print_rings(console, [found, alone]))
    assert "tiny" in text and f"{found.apart.messages}, {found.ringed.messages}" in text and "0.0%" in text


def test_seconds_of_saving_are_those_of_a_large_model() -> None:
    seconds = {
        "save": 4.0,
        "dcp.async_save": 1.0,
        "async_save": 0.5,
        "step": 1.0,
        "step while writing": 2.0,
    }
    text = shown(lambda console: print_saving(console, {"bytes": 5e8, "device": "cpu", "seconds": seconds}))
    # 10.5 GB on each rank
    assert "84.0" in text and "21.0" in text and "10.5" in text


def test_unknown_benchmarks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown benchmark nothing"):
        main(["nothing"])
    with pytest.raises(SystemExit, match="cannot read"):
        main(["published", str(tmp_path / "absent.json")])


def test_cases_of_a_sweep_are_drawn_by_their_numbers() -> None:
    assert case_of(0, 3) == case_of(0, 3) != case_of(1, 3)
    drawn = [case_of(0, k) for k in range(300)]
    assert len({c.name for c in drawn}) > 40 and len({c.cluster for c in drawn}) > 7
    assert {1, 7} <= {c.batch for c in drawn} and {12, 1000} <= {c.gpus for c in drawn}
    assert all(c.length <= c.config.get("max_position_embeddings", c.length) for c in drawn)


def test_options_of_a_sweep_are_those_of_the_command() -> None:
    plain = [case_of(0, k) for k in range(300)]
    drawn = [with_options(0, case) for case in plain]
    assert drawn[7] == with_options(0, plain[7]) and {len(c.options) == 0 for c in drawn} == {True, False}
    words = {word for c in drawn for word in c.options if word.startswith("--")}
    flags = {flag for p in get_command(app).commands["plan"].params for flag in (*p.opts, *p.secondary_opts)}
    assert len(words) > 10 and words <= flags
    unlike = next(c for c in drawn if "+" in c.cluster)
    cluster = parse_cluster(unlike_text(unlike.cluster), where="a test")
    assert len(cluster.groups) == 2 and str(unlike).count(unlike.cluster) == 1


def test_plans_are_set_beside_those_by_hand() -> None:
    """A tiny model: search and simulation need not agree, but each says what it found."""
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = {**dict(published())["Llama-2 7B"], **tiny, "num_key_value_heads": 4, "vocab_size": 64}
    case = replace(agree_case(3, 0), config=config, cluster="cpu-gloo", gpus=2, batch=4, length=16)
    assert agree_case(3, 0) == agree_case(3, 0) != agree_case(3, 1)
    (row,) = rows_of([case])
    assert row.step > 0 and row.simulated > 0 and 0 < len(row.simulated_of) <= ALTERNATIVES
    assert row.mesh.split()[0] not in {str(a) for a in row.simulated_of}
    assert row.best is not None and row.best[1] == pytest.approx(
        1 - min(s for s in row.simulated_of.values() if s) / row.simulated
    )
    other = Alternative("fsdp=4", (("microbatches", 2),))
    fast = replace(row, step=1.0, simulated=1.2, simulated_of={other: 1.1, Alternative("dp=4"): None})
    assert fast.apart and fast.beaten and "fsdp=4 --microbatches 2 +8.3%" in row_text(fast)
    refused = AgreeRow(case, reason="why")
    assert agreement_line([fast, replace(fast, simulated=1.05), refused]) == (
        "2 plans (1 refused) against 4 by hand: search and simulation differ by more than 10% in 1, "
        "one by hand is more than 2% faster in 1"
    )
    assert "8.3%" in shown(lambda console: print_agreement(console, [fast, refused]))


def test_what_came_of_a_sweep_is_counted(tmp_path: Path) -> None:
    case = case_of(0, 0)
    rows = [SweepRow(case, 1.0, 0.5, code, "why") for code in (0, 0, 4, 2, 4)]
    assert closing_line(rows) == (
        "2 plans, 3 refused (exit 2: 1, exit 4: 2), 0 over the limit, 0 crashed",
        True,
    )
    bad = [SweepRow(case, 1.0, 0.5, code, "why") for code in (1, -9, None)]
    assert closing_line(bad) == ("0 plans, 0 refused, 1 over the limit, 2 crashed", False)
    (late,) = sweep([case], 0.1)
    assert late.kind == "late" and "OVER THE LIMIT" in str(late) and late.peak_gib > 0


def test_a_sweep_reads_what_the_command_says() -> None:
    case = replace(case_of(0, 0), config={"model_type": "llama"}, cluster="holmes-ib-roce", gpus=1000)
    (row,) = sweep([case], 120)
    assert row.kind == "refused" and row.code == 2 and row.text == "1000 ranks do not fit on 64 devices"


def test_plans_of_two_checkouts_are_compared() -> None:
    plan = PlanFigures("dp=2", 1, 1.0, 1.1, 100.0)
    for other, kind in (
        (plan, "same"),
        (replace(plan, simulated=1.2), "worse"),
        (replace(plan, simulated=1.0), "better"),
        (replace(plan, memory=120.0), "worse"),
        (replace(plan, mesh="tp=2", simulated=1.0), "better"),
        (PlanFigures(reason="exit 4"), "worse"),
    ):
        pair = PlanPair(case_of(0, 0), plan, other)
        assert pair.kind == kind and kind in str(pair)
    assert PlanPair(case_of(0, 0), PlanFigures(reason="exit 4"), plan).kind == "better"


def test_longest_lengths_are_near_and_in_order() -> None:
    rows = list(longest_lengths())
    by_name = {row.recipe.name: row for row in rows}
    assert len(by_name) == len(rows) == 24
    assert {row.bound for row in rows} == {"GPU", "host", "index"}
    # more ranks, and features that save memory, make longer sequences
    llama = [by_name[f"h100-sp{n}-llama-8b"].predicted for n in (1, 8, 16, 32)]
    assert llama == sorted(llama)
    features = ("no-mlp-no-act-offload", "yes-mlp", "yes-act-offload")
    more = [by_name[f"h100-sp8-llama-8b-{name}"].predicted for name in features]
    assert more == sorted(more) and more[-1] < by_name["h100-sp8-llama-8b"].predicted
    near = [row for row in rows if not row.recipe.host_full]
    assert all(0.9 < row.ratio < 1.35 for row in near)
    out = io.StringIO()
    print_lengths(Console(file=out, width=150), rows)
    assert "rank correlation 0.99" in out.getvalue()


def test_a_step_without_its_ops_gives_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    def counted(step: Any) -> float:
        ran.clear()
        with Count():
            step()
        return float(sum("mm" in name for name in ran))

    monkeypatch.setattr("benchmarks.overhead._seconds", counted)
    found = overhead(bench_batch(2, 8, 64), lambda: bench_llama(1, 32, 64), rounds=1)
    assert found.step > 10 and found.outside == 0
