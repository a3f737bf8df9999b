"""Started by `ranks`: TRL's SFTTrainer, on one process or several; writes what it logs.

Arguments: a mesh, "" for one process with TRL's own; a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from calls_worker import batch, build
from datasets import Dataset
from leaving import leave
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import autoshard
from autoshard.interop.trainer import ParallelTrainer

KEYS = ("loss", "grad_norm", "mean_token_accuracy", "num_tokens", "entropy")


class Finetuning(ParallelTrainer, SFTTrainer):
    pass


def rows() -> Dataset:
    """Of unlike lengths, which are padded."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 17, (32,), generator=generator).tolist()
    ids = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_list([{"input_ids": x} for x in ids])


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2")


def main() -> None:
    mesh, folder = sys.argv[1], Path(sys.argv[2])
    args = SFTConfig(
        str(folder / "out"),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        logging_steps=1,
        learning_rate=1e-2,
        max_length=32,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        seed=1,
    )
    model = build("Llama")
    if mesh:
        model = autoshard.parallelize(model, mesh, example_inputs=batch(8, 16))
    kind = Finetuning if mesh else SFTTrainer
    trainer = kind(model=model, args=args, train_dataset=rows(), processing_class=tokenizer())
    trainer.train()
    log = [{k: row[k] for k in KEYS} for row in trainer.state.log_history if "loss" in row]
    if not mesh or dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(log))
    if mesh:
        leave()


if __name__ == "__main__":
    main()
