"""Other ways to run a plan, which the planner takes where their programs are faster: slices of sequences,
activations in host memory."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import api
from autoshard.options import PlanOptions
from autoshard.planner.alternatives import Alternative, Alternatives
from autoshard.planner.planned import Planned

#: by price, never, always
OFFLOADS = ("", "none", "activations")


@functools.cache
def planned(batch: int = 2, seq: int = 8192, mesh: str = "pp=4,dp=1", **how: object) -> Planned:
    """A deep model of long sequences, on four stages unless said otherwise."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=16384,
        use_cache=False,
    )
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).bfloat16(), torch.zeros(1, seq, dtype=torch.int64)
    return api.plan(
        model,
        mesh,
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch=batch,
        **{"cluster": "a100-selene", **how},
    )


def test_few_long_sequences_are_divided_into_slices() -> None:
    """Two microbatches leave four stages empty most of the time."""
    found, plain = planned(), planned(schedule="1f1b")
    pipeline = found.plan.pipeline
    assert pipeline is not None and pipeline.schedule == "seq1f1b" and pipeline.slices in (4, 8)
    assert found.is_faster(plain)
    # as if it had been asked for
    asked = planned(schedule="seq1f1b", slices=pipeline.slices)
    assert asked.plan.pipeline == pipeline and asked.step == found.step


def test_what_is_asked_for_stays() -> None:
    assert planned(schedule="interleaved").plan.pipeline.schedule == "interleaved"  # type: ignore[union-attr]


def test_many_short_sequences_stay_in_one_piece() -> None:
    pipeline = planned(batch=64, seq=512).plan.pipeline
    assert pipeline is not None and pipeline.slices == 1


def test_activations_wait_on_the_host_where_that_spares_recomputing() -> None:
    """Long sequences compute for long: what they keep is copied meanwhile."""
    found, plain, asked = (planned(1, 65536, "tp=2", memory=8 * 2**30, offload=o) for o in OFFLOADS)
    assert plain.plan.recompute and not plain.plan.offload
    assert found.plan.offload == "activations" and found.is_faster(plain) and found.step == asked.step


def test_tiles_where_most_layers_would_be_recomputed_in_full() -> None:
    """What does not wait for backward, as the insides of MLPs, cannot be in host memory: with tiles it is
    little, and all else can."""
    found, whole, device = (
        planned(1, 65536, "tp=2", memory=7 * 2**30, **how)
        for how in ({}, {"tile_rows": 0}, {"offload": "none"})
    )
    assert device.plan.recompute["layers_fwd"].policy == "full" and not device.plan.tile_rows
    assert not whole.plan.tile_rows and whole.plan.recompute and whole.is_faster(device)
    assert found.plan.tile_rows and not found.plan.recompute and found.step < 0.97 * whole.step
    assert any("logits are not returned" in warning for warning in found.plan.warnings)


def test_more_memory_is_hardly_slower_with_activations_on_the_host() -> None:
    """However much the search is given, between too little and what waits for copies."""
    steps = [planned(1, 65536, "tp=2", memory=gib * 2**30).step for gib in (8, 10, 12, 14)]
    assert steps == pytest.approx([steps[-1]] * 4, rel=0.03)


def test_nothing_is_copied_where_nothing_is_recomputed() -> None:
    found = planned(1, 4096, "tp=2")
    assert not found.plan.recompute and not found.plan.offload


def test_stages_are_cut_for_what_they_are_measured_to_hold() -> None:
    """What fits less memory fits more: costs of stages may say that others would fit, too."""
    for gib in (2.0, 2.3, 2.5):
        found = planned(1, 16384, memory=int(gib * 2**30), schedule="1f1b", offload="none")
        assert found.peak is not None and found.peak.bytes <= gib * 2**30


def test_the_memory_of_a_cpu_is_its_own_host() -> None:
    found = planned(1, 4096, "tp=2", memory=2 * 2**30, cluster="cpu-gloo")
    assert found.plan.recompute and not found.plan.offload


def test_slices_need_no_more_in_host_memory_than_was_asked_for() -> None:
    """They hold less than the plan that does, which only the planner wanted there."""
    plain, tried = planned(schedule="1f1b"), list[str]()
    options = PlanOptions(offload="activations")
    ways = Alternatives(plain, options, False, lambda _: [], lambda *_: None, lambda: math.inf)

    def better(each: Alternative) -> None:
        tried.append(each.options.offload)

    ways._try_slices(better, lambda: plain, "")
    assert tried[:2] == ["", "activations"]
