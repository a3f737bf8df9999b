"""What frameworks keep for backward, against the accounting of papers and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rebuilt_once import captured_once  # noqa: F401 (a fixture)

from autoshard.schedules.check import check, in_flight
from autoshard.schedules.timeline import StageCosts, peak_bytes, simulate, step_seconds
from autoshard.schedules.zb_h2 import zb_h2
from autoshard.simulate.stage_costs import StagePrices
from autoshard.simulate.step import estimate_step
from autoshard.validate.rebuild import Rebuilt, rebuilt
from autoshard.validate.rows import read_rows

SEQ, BATCH, HIDDEN, HEADS, FFN = 32, 2, 64, 4, 256
BASE: dict[str, Any] = {
    "id": "a-1",
    "study": "a",
    "framework": "Megatron-LM",
    "year": 2022,
    "gpu": "A100-SXM4-80GB",
    "n_gpus": 1,
    "gpus_per_node": 8,
    "model": "GPT-tiny",
    "layers": 2,
    "hidden": HIDDEN,
    "heads": HEADS,
    "ffn": FFN,
    "vocab": 1024,
    "seq": SEQ,
    "mbs": BATCH,
    "gbs": BATCH,
    "precision": "bf16",
    "step_time_s": 0.01,
}


def made(tmp_path: Path, **changed: Any) -> Rebuilt:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{**BASE, **changed}]))
    (found,) = rebuilt([r for r in read_rows(path) if hasattr(r, "gpus")])
    assert isinstance(found, Rebuilt), found
    return found


def held(run: Rebuilt) -> float:
    """Bytes that the one stage keeps of a microbatch."""
    return StagePrices(run.program, run.cluster, behaviour=run.behaviour).kept[0].held


def per_layer(tmp_path: Path, **changed: Any) -> float:
    """Bytes that a layer keeps."""
    return (held(made(tmp_path, layers=4, **changed)) - held(made(tmp_path, layers=2, **changed))) / 2


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "factor"),
    [
        (1, False, "none", 34 + 5 * HEADS * SEQ / HIDDEN),
        (2, False, "none", 10 + 24 / 2 + 5 * HEADS * SEQ / HIDDEN / 2),
        (2, True, "none", (34 + 5 * HEADS * SEQ / HIDDEN) / 2),
        (1, False, "selective", 34),
        (2, True, "selective", 34 / 2),
        (1, False, "full", 2),
    ],
)
def test_a_layer_keeps_what_the_paper_says(
    tmp_path: Path, tensor: int, sequence: bool, recompute: str, factor: float
) -> None:
    # Korthikanti et al., 2022, table 2; beside it, four bytes per token for two statistics of each of two
    # norms, and four per head for the sums of the softmax
    found = per_layer(tmp_path, n_gpus=tensor, t=tensor, sp=sequence, recompute=recompute)
    small = 0 if recompute == "full" else BATCH * SEQ * (4 * 4 + 4 * HEADS)
    exact = SEQ * BATCH * HIDDEN * factor
    assert exact <= found <= exact + small


LLAMA = {"model": "Llama-tiny", "kv_heads": 2, "framework": "torchtitan FSDP+compile", "year": 2025}


def test_op_level_checkpoints_keep_every_second_product(tmp_path: Path) -> None:
    # the input, queries, values, attention and the gate of a layer, but neither keys, nor what attention and
    # feed-forward layer end with, nor the other half of the gate
    found = per_layer(tmp_path, recompute="selective (op-level SAC)", **LLAMA)
    tokens = BATCH * SEQ
    kept = tokens * 2 * (HIDDEN + HIDDEN + HIDDEN // 2 + HIDDEN + FFN)
    assert kept <= found <= kept + tokens * 4 * HEADS


def test_kernels_keep_fewer_bytes_than_the_program_reads(tmp_path: Path) -> None:
    eager = per_layer(tmp_path, **{**LLAMA, "framework": "FSDP"})
    compiled = per_layer(tmp_path, **LLAMA)
    fused = per_layer(tmp_path, **{**LLAMA, "framework": "Megatron-LM", "year": 2025})
    assert compiled < fused < eager
    # Transformer Engine: both inputs and both outputs of norms, queries, keys, values and what they become,
    # the two halves of the gate and their product; keys and values are not repeated for every query
    kept = BATCH * SEQ * 2 * (4 * HIDDEN + HIDDEN + HIDDEN + HIDDEN + 3 * FFN)
    assert kept <= fused <= kept + BATCH * SEQ * 4 * HEADS


def test_products_that_run_again_take_time(tmp_path: Path) -> None:
    steps = [
        estimate_step(run.program, run.cluster, behaviour=run.behaviour).spent.compute
        for run in (
            made(tmp_path, recompute=r, **LLAMA) for r in ("none", "selective (op-level SAC)", "full")
        )
    ]
    assert steps[0] < steps[1]
    assert steps[0] < steps[2]


def test_what_is_sharded_lies_in_what_is_whole(tmp_path: Path) -> None:
    run = made(tmp_path, n_gpus=2, d=2, gbs=4 * BATCH, zero=1, **{**LLAMA, "framework": "Megatron-DeepSpeed"})
    state = StagePrices(run.program, run.cluster, behaviour=run.behaviour).states[0]
    elements = sum(
        StagePrices(run.program, run.cluster, behaviour=run.behaviour).size(p.name) / 2
        for p in run.program.signature.ports
        if p.kind == "param"
    )
    # two bytes of a whole parameter, two of its gradient, the optimizer of this rank's half
    assert state.parameters == pytest.approx(2 * 2 * elements, rel=0.02)
    assert state.gradients == pytest.approx(2 * 2 * elements, rel=0.02)
    assert state.optimizer == pytest.approx(12 * elements)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 24), (4, 2)])
def test_zb_h2_is_a_schedule_without_bubbles(ranks: int, microbatches: int) -> None:
    schedule = zb_h2(ranks, microbatches)
    check(schedule)
    most = min(2 * ranks - 1, microbatches)
    assert in_flight(schedule) == (most,) * ranks or microbatches < 2 * ranks - 1
    costs = StageCosts.uniform(ranks)
    assert max(peak_bytes(schedule, costs)) <= most
    if microbatches >= 2 * ranks - 1:
        assert simulate(schedule, costs).gaps == pytest.approx((0.0,) * ranks)
        # only a step that waits for all ranks takes longer than what one of them computes
        assert step_seconds(schedule, costs, apart=True) == pytest.approx(3.0 * microbatches)
        assert step_seconds(schedule, costs) == pytest.approx(3.0 * microbatches + ranks - 1)


def test_zb_2p_holds_what_its_limit_allows() -> None:
    schedule = zb_h2(4, 12, more=1)
    check(schedule)
    assert max(in_flight(schedule)) == 2 * 4
    assert in_flight(schedule)[-1] == 2 * 4 - 1  # the last rank's gradients come at once
