"""Other ways to run a plan, which the planner takes where their programs are faster: slices of sequences."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import api
from autoshard.planner.planned import Planned


@functools.cache
def planned(batch: int = 2, seq: int = 8192, **how: object) -> Planned:
    """A deep model of long sequences on four stages."""
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
        "pp=4,dp=1",
        example_inputs={"input_ids": ids, "labels": ids},
        cluster="a100-selene",
        global_batch=batch,
        **how,
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
