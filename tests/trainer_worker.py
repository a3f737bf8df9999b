"""Started by `ranks`: one script with transformers' Trainer, on one process or several; prints what it logs.

Arguments: a mesh, "" for one process with the Trainer of transformers; a folder; folders that other meshes
wrote, from which it goes on, too.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from leaving import leave
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autoshard

ROWS, LENGTH = 8, 16
KEYS = ("loss", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate")


def built() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))


def dataset() -> list[dict[str, torch.Tensor]]:
    """Rows with padded labels, so that batches have unlike numbers of them."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(48):
        ids = torch.randint(0, 96, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def accuracy(found: Any) -> dict[str, float]:
    guesses, labels = found.predictions.argmax(-1)[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float((guesses == labels).mean())}


def trained(mesh: str, folder: Path, steps: int, resume: str | None = None) -> transformers.Trainer:
    model, rows, kind = built(), dataset(), transformers.Trainer
    if mesh:
        from autoshard.interop.trainer import Trainer as kind  # type: ignore[assignment]

        example = {k: torch.stack([row[k] for row in rows[:ROWS]]) for k in rows[0]}
        model = autoshard.parallelize(model, mesh, example_inputs=example)
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=1,
        max_grad_norm=0.5,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        report_to=[],
    )
    trainer = kind(
        model=model, args=args, train_dataset=rows, eval_dataset=rows[:13], compute_metrics=accuracy
    )
    if resume is None:
        random.seed(7)  # other than Trainer's own
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def refused(mesh: str, folder: Path) -> None:
    """The Trainer of transformers itself, by name of what to use."""
    example = {k: torch.stack([row[k] for row in dataset()[:ROWS]]) for k in ("input_ids", "labels")}
    model = autoshard.parallelize(built(), mesh, example_inputs=example)
    args = TrainingArguments(str(folder / "no"), max_steps=1, use_cpu=True, ddp_backend="gloo", report_to=[])
    try:
        transformers.Trainer(model=model, args=args, train_dataset=dataset()).train()
    except autoshard.UsageError as error:
        assert "autoshard.interop.trainer" in error.hint, error
        assert "trainer_worker.py" in error.where, error
    else:
        raise AssertionError("Trainer trained in DistributedDataParallel")


def logged(trainer: transformers.Trainer) -> list[dict[str, float]]:
    rows = ({k: row[k] for k in KEYS if k in row} for row in trainer.state.log_history)
    return [row for row in rows if row]


def resumed(mesh: str, folder: Path, other: Path) -> list[Any]:
    return [*logged(trained(mesh, folder, 6, str(other / "checkpoint-4"))), random.random()]


def main() -> None:
    torch.set_num_threads(1)
    mesh, folder = sys.argv[1], Path(sys.argv[2])
    if mesh:
        dist.init_process_group("gloo")
    trainer = trained(mesh, folder, 4)
    if mesh:
        refused(mesh, folder)
    found: dict[str, Any] = {"log": logged(trainer), "best": trainer.evaluate()["eval_loss"]}
    trainer.save_model(str(folder / "final"))
    weights = LlamaForCausalLM.from_pretrained(folder / "final").state_dict()
    found["weights"] = {name: float(x.double().norm()) for name, x in weights.items()}
    found["resumed"] = resumed(mesh, folder, folder)
    found["others"] = [resumed(mesh, folder, Path(other)) for other in sys.argv[3:]]
    if not mesh or dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
