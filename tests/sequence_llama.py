"""A small Llama whose plan has ranks work on parts of the sequence between its products."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from slow_links import slow_cluster
from torch import nn

from autoshard.api import plan
from autoshard.cluster import Cluster
from autoshard.planner.planned import Planned

#: products as Megatron-LM divides them
PINS = (
    *(f"model.layers.*.self_attn.{k}_proj.weight=tp:S(0)" for k in "qkv"),
    "model.layers.*.self_attn.o_proj.weight=tp:S(1)",
    *(f"model.layers.*.mlp.{k}_proj.weight=tp:S(0)" for k in ("gate", "up")),
    "model.layers.*.mlp.down_proj.weight=tp:S(1)",
)


def make(width: int = 128, layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch that it can learn by heart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            hidden_size=width,
            intermediate_size=2 * width,
            vocab_size=96,
            use_cache=False,
        )
    )
    ids = torch.randint(0, 96, (4, 64))
    return model, {"input_ids": ids, "labels": ids}


def prompt_cluster(bandwidth: float = 1e9) -> Cluster:
    """Slow links that answer at once: two messages cost no more than one of their size."""
    cluster = slow_cluster(bandwidth)
    return replace(cluster, levels=tuple(replace(level, latency=1e-6) for level in cluster.levels))


def halved(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Planned:
    """The model turned into bfloat16, and its plan on four ranks."""
    return plan(model.bfloat16(), "tp=4", example_inputs=inputs, cluster=prompt_cluster(5e8), pins=PINS)


@functools.cache
def planned(mesh: str = "tp=4", width: int = 128) -> Planned:
    model, inputs = make(width)
    return plan(model, mesh, example_inputs=inputs, cluster=prompt_cluster(), pins=PINS)
