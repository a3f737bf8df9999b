"""A small GPT-2 whose ranks work on parts of the sequence between its products: LayerNorms, not RMSNorms."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from sequence_llama import prompt_cluster
from torch import nn

from autoshard.api import compile_analysed, plan
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.search.plan.plan import Recompute

#: the products of its MLPs as Megatron-LM divides them
PINS = ("transformer.h.*.mlp.c_fc.weight=tp:S(1)", "transformer.h.*.mlp.c_proj.weight=tp:S(0)")


def make(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """The model and a batch. bias: whether its LayerNorms have one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_head=4,
            n_embd=128,
            n_positions=64,
            vocab_size=96,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        # weights of one and biases of zero would hide both
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias, 0.0, 0.3)
        if not bias:
            norm.bias = None
    ids = torch.randint(0, 96, (4, 64))
    return model.to(dtype), {"input_ids": ids, "labels": ids}


@functools.cache
def planned(bias: bool = True, dtype: torch.dtype = torch.float32) -> Planned:
    model, inputs = make(bias, dtype)
    cluster = prompt_cluster(1e9 if dtype == torch.float32 else 5e8)
    return plan(model, "tp=4", example_inputs=inputs, cluster=cluster, pins=PINS)


@functools.cache
def program(
    bias: bool = True, again: str = "", kernels: bool = True, dtype: torch.dtype = torch.float32
) -> Program:
    """With activations of 8 bits. again: what the layers compute again in backward."""
    found = planned(bias, dtype)
    if again:
        chosen = {"h_fwd": Recompute(again, 2)}  # type: ignore[arg-type]
        found = replace(found, plan=replace(found.plan, recompute=chosen))
    return compile_analysed(found, allow="int8-activations", kernels=kernels)
