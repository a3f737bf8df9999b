"""Two small language models on four processes, compiled for dp=2,tp=2, beside the same models on one.

    python examples/demo.py

For a Llama and a GPT-2: capture, plan, compile to out/demo/, verify every rank, train under torchrun (gloo,
no GPU needed) on the sources of Python's own library, and train the unmodified model on one process with
the same weights, data and optimizer.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

import autoshard
from autoshard.api import with_options
from autoshard.interop.targets import build
from autoshard.ir.units import bytes_text
from autoshard.runtime.corpus import load_corpus
from autoshard.runtime.launch import torchrun
from autoshard.runtime.train import feed_of, train, vocabulary_of
from autoshard.simulate.estimate import Estimator
from autoshard.verify.lockstep import verify

OUT = Path("out/demo")
MESH, RANKS, CLUSTER = "dp=2,tp=2", 4, "cpu-gloo"
BATCH, SEQ, STEPS, SEED, LR, CLIP = 8, 64, 25, 0, 1e-3, 1.0

console = Console(highlight=False)


@dataclass(frozen=True)
class Example:
    name: str
    config: PreTrainedConfig


EXAMPLES = (
    Example(
        "llama",
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=512,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        ),
    ),
    Example(
        "gpt2",
        GPT2Config(
            architectures=["GPT2LMHeadModel"],
            vocab_size=512,
            n_embd=128,
            n_layer=4,
            n_head=4,
            n_positions=256,
            bos_token_id=None,
            eos_token_id=None,
            # eager PyTorch draws its dropout otherwise, and the losses are to be compared
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
    ),
)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    begin = time.perf_counter()
    for example in EXAMPLES:
        console.rule(f"[bold]{example.name}", align="left")
        run(example)
    console.rule()
    console.print(f"done in {time.perf_counter() - begin:.0f} s")


def run(example: Example) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    config = OUT / f"{example.name}.json"
    example.config.to_json_file(config)
    target, folder = f"hf:{config}", OUT / example.name
    compile_program(target, folder)
    check(target, folder)
    parallel = train_parallel(folder)
    eager = train_eager(target)
    show_losses(parallel["losses"], eager)
    show_program(folder, parallel)


def step(text: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/]  {text}")


def compile_program(target: str, folder: Path) -> None:
    step("capture and plan: the model is on meta, nothing is allocated")
    built = build(target, batch=BATCH, seq=SEQ)
    planned = autoshard.plan(built.model, MESH, example_inputs=built.inputs, cluster=CLUSTER, target=target)
    optimality = planned.plan.optimality
    step(
        f"planned: {optimality.variables} decisions, {optimality.states} choices, "
        f"gap to the best {optimality.gap:.1%}"
    )
    program = with_options(autoshard.compile(built.model, planned).program, batch=str(BATCH), seq=str(SEQ))
    autoshard.Compiled(program).save(folder, overwrite=True)
    step(f"compiled to {folder}")


def check(target: str, folder: Path) -> None:
    from autoshard.program.store import load_program

    built = build(target, batch=BATCH, seq=SEQ, device="cpu", seed=SEED)
    outcome = verify(load_program(folder), built.model, (), built.inputs, seed=SEED)
    worst = outcome.worst()
    step(
        f"{'verified' if outcome.ok else 'NOT VERIFIED'}: {RANKS} ranks against eager, "
        f"{len(outcome.checks)} tensors, worst error {worst.error:.1e}"
    )
    if not outcome.ok:
        sys.exit(5)


def train_parallel(folder: Path) -> dict[str, Any]:
    step(f"training {STEPS} steps on {RANKS} processes (torchrun, gloo)")
    options = [f"--steps={STEPS}", f"--lr={LR}", f"--clip={CLIP}", f"--seed={SEED}", "--json"]
    done = torchrun(["-m", "autoshard", "run", str(folder), *options], RANKS, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def train_eager(target: str) -> list[float]:
    step(f"training {STEPS} steps on one process, eager")
    built = build(target, batch=BATCH, seq=SEQ, device="cpu", seed=SEED)
    feed, _ = feed_of(((), built.inputs), load_corpus(), vocabulary_of(built.model), SEED)
    return [r.loss for r in train(built.model, feed, steps=STEPS, lr=LR, clip=CLIP)]


def show_losses(parallel: list[float], eager: list[float]) -> None:
    table = Table("step", f"loss on {RANKS} processes", "loss on one, eager", "difference", box=None)
    for column in table.columns:
        column.justify = "right"
    for number, (a, b) in enumerate(zip(parallel, eager, strict=True), 1):
        table.add_row(str(number), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(table)


def show_program(folder: Path, report: dict[str, Any]) -> None:
    from autoshard.cluster import load_cluster
    from autoshard.program.store import load_program

    estimator = Estimator(load_program(folder), load_cluster(CLUSTER))
    held, whole = report["parameter_bytes_rank"], report["parameter_bytes_model"]
    console.print(f"parameters on a rank: {bytes_text(held)} of {bytes_text(whole)} ({held / whole:.0%})")
    table = Table("collective", "axis", "a step", "sent by a rank in a step", box=None)
    for row in estimator.traffic():
        table.add_row(row.kind, row.axis, f"{row.count} x", bytes_text(row.wire))
    console.print(table)
    console.print(f"what each rank runs, with reasons: {folder / 'program.py'}")
    console.print(f"  with times and local shapes:     autoshard inspect {folder} --rank 0")
    console.print(f"  after each pass:                 {folder / 'dumps'}")


if __name__ == "__main__":
    main()
