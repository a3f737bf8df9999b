"""Plan a 175B-parameter model for 64 GPUs on a laptop: no GPU, no process group, no memory for weights.

python examples/plan_offline.py
"""

from __future__ import annotations

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils.logging import set_verbosity_error

import autoshard
from autoshard.ir.units import bytes_text, seconds_text
from autoshard.report.summary import summarise


def model_of(layers: int) -> GPT2LMHeadModel:
    """GPT-3's shape, on the meta device."""
    config = GPT2Config(
        vocab_size=51200,
        n_embd=12288,
        n_layer=layers,
        n_head=96,
        n_positions=2048,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config).to(torch.bfloat16)


def main(layers: int = 96, mesh: str = "fsdp=8,tp=8") -> None:
    set_verbosity_error()
    start = time.perf_counter()
    tokens = torch.zeros(8, 2048, dtype=torch.long, device="meta")
    planned = autoshard.plan(
        model_of(layers),
        mesh,
        example_inputs={"input_ids": tokens, "labels": tokens},
        cluster="h100-dgx",
        progress=lambda text: print(f"{time.perf_counter() - start:6.1f} s  {text}"),
    )
    summary = summarise(planned.plan, planned.analysis)
    print(f"{time.perf_counter() - start:6.1f} s  done\n")
    print(f"{summary.parameter_count / 1e9:.1f}B parameters on {summary.mesh}: {summary.ranks} ranks")
    print(f"step {seconds_text(summary.seconds)}, gap to the best plan for these prices {summary.gap:.2%}")
    print(
        f"a rank holds {bytes_text(summary.parameter_bytes)} of parameters, "
        f"{bytes_text(summary.optimizer_bytes)} of optimizer state\n"
    )
    for row in summary.parameters:
        print(f"{row.count:4} x {row.what:42} {row.choice}")
        if row.margin > 1e-6:
            print(f"{'':49} not {row.alternative}: +{seconds_text(row.margin)}")
    for warning in summary.warnings:
        print("warning:", warning)


if __name__ == "__main__":
    main()
