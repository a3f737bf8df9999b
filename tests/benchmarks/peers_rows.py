"""Everyday training scripts: each takes a tool and gives what is compared with one plain process.

"losses", "weights", and "same": what must be equal exactly. Scripts say nothing of how a tool does something.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.peers_models import build, dataset, of_varying_lengths, padded, stacked
from benchmarks.peers_tools import Change, Make, Tool, full

Found = dict[str, Any]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """eps is above the rounding of gradients that are zero, as those of biases of keys."""
    return torch.optim.AdamW(trainable(model), lr=1e-3, eps=1e-6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.1, momentum=0.9)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return transformers.Adafactor(trainable(model), lr=1e-3, relative_step=False, scale_parameter=False)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    """Of few iterations: on one process, rows in another order move its losses by 8e-6."""
    return torch.optim.LBFGS(model.parameters(), max_iter=3)


class Script:
    """A model, its optimizer, and batches."""

    def __init__(
        self,
        tool: Tool,
        kind: str = "Llama",
        make: Make = adamw,
        change: Change = lambda model: model,
        data: list[Any] | None = None,
        collate: Any = stacked,
        folder: Path | None = None,
    ) -> None:
        """folder: of the weights, in the place of random ones."""
        rows = dataset(kind) if data is None else data
        self.tool, self.losses, example = tool, list[float](), collate(rows[:8])
        self.model: Any
        if folder is None:
            self.model, self.optimizer = tool.start(tool.model(kind, change), make, example)
        else:
            self.model, self.optimizer = tool.load(folder, make, example)
        self.batches = list(tool.loader(rows, collate))

    def loss(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def step(self, batch: Any) -> None:
        loss = self.loss(batch)
        self.tool.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(self.tool.mean(loss))

    def train(self, batches: list[Any] | None = None) -> Script:
        for batch in self.batches if batches is None else batches:
            self.step(batch)
        return self

    def evaluate(self, model: Any = None) -> None:
        model = self.model if model is None else model
        model.eval()
        with torch.no_grad():
            self.losses += [self.tool.mean(model(**batch).loss) for batch in self.batches]
        model.train()

    def found(self, **more: Any) -> Found:
        return {"losses": self.losses, "weights": self.tool.weights(self.model), **more}


def training(tool: Tool, **given: Any) -> Found:
    return Script(tool, **given).train().found()


def accumulation(tool: Tool) -> Found:
    tool.begin(accumulation=2)
    script = Script(tool)
    for number, batch in enumerate(script.batches[:4]):
        last = number % 2 == 1
        with tool.accumulate(script.model, 2, last):
            loss = script.loss(batch)
            tool.backward(loss, 2)
            if last:
                script.optimizer.step()
                script.optimizer.zero_grad()
        script.losses.append(tool.mean(loss))
    return script.found()


def clipped(tool: Tool) -> Found:
    script = Script(tool)
    for batch in script.batches:
        loss = script.loss(batch)
        tool.backward(loss)
        norm = tool.clip(script.model, 0.5)
        script.optimizer.step()
        script.optimizer.zero_grad()
        script.losses += [tool.mean(loss), float(full(norm))]
    return script.found()


def counted(tool: Tool) -> Found:
    """The loss is the mean over the labels of the global batch."""
    script = Script(tool, data=of_varying_lengths(), collate=padded)
    script.loss = partial(tool.token_loss, script.model)  # type: ignore[method-assign]
    return script.train().found()


def evaluated(tool: Tool) -> Found:
    script = Script(tool)
    script.train(script.batches[:2])
    script.model.eval()
    rights = 0
    with torch.no_grad():
        for batch in script.batches:
            out = script.model(**batch)
            script.losses.append(tool.mean(out.loss))
            rights += int((out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum())
    return script.found(same=tool.total(rights))


def generated(tool: Tool) -> Found:
    script = Script(tool).train()
    ids = stacked(dataset("Llama")[:8])["input_ids"][:, :6]
    script.model.eval()
    with torch.no_grad():
        return script.found(same=tool.generate(script.model, ids, max_new_tokens=6, do_sample=False))


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(model, lora)


def lora(tool: Tool) -> Found:
    script = Script(tool, change=adapted).train()
    with script.model.disable_adapter():
        script.evaluate()
    script.evaluate()
    return script.found()


def opened(tool: Tool, script: Script, read: Callable[[Any], nn.Module]) -> Found:
    """What a plain process reads from a folder that the script saved."""
    folder = tool.folder / type(script.model).__name__
    tool.save_pretrained(script.model, folder)
    dist.barrier()
    plain = read(folder)
    with torch.no_grad():
        loss = float(plain(**stacked(dataset("Llama")[:8])).loss)
    return {"losses": [*script.losses, loss], "weights": Tool(folder).weights(plain)}


def lora_saved(tool: Tool) -> Found:
    script = Script(tool, change=adapted).train()
    return opened(tool, script, lambda folder: PeftModel.from_pretrained(build("Llama"), folder))


def saved(tool: Tool) -> Found:
    return opened(tool, Script(tool).train(), transformers.LlamaForCausalLM.from_pretrained)


def loaded(tool: Tool) -> Found:
    folder = tool.folder / "to load"
    if dist.get_rank() == 0:
        build("Llama").save_pretrained(folder)
    dist.barrier()
    script = Script(tool, folder=folder)
    script.model.train()
    return script.train().found()


def checkpoint(tool: Tool) -> Found:
    script = Script(tool)
    script.train(script.batches[:2])
    tool.save(script.model, script.optimizer)
    return script.train(script.batches[2:4]).found()


def resumed(tool: Tool) -> Found:
    script = Script(tool)
    tool.resume(script.model, script.optimizer)
    return script.train(script.batches[2:4]).found()


def of_lbfgs(tool: Tool) -> Found:
    script = Script(tool, make=lbfgs)

    def closure() -> torch.Tensor:
        script.optimizer.zero_grad()
        loss = script.loss(script.batches[0])
        tool.backward(loss)
        script.losses.append(tool.mean(loss))
        return torch.tensor(script.losses[-1])

    for _ in range(3):
        script.optimizer.step(closure)
    return script.found()


def frozen(tool: Tool) -> Found:
    script = Script(tool)
    first = [p for name, p in script.model.named_parameters() if "layers.0." in name]
    for number, batch in enumerate(script.batches):
        for p in first:
            p.requires_grad_(number not in (2, 3))
        script.step(batch)
    return script.found()


def normed(model: Any) -> Any:
    for layer in model.model.layers:
        weight_norm(layer.mlp.down_proj)
    return model


def averaged(tool: Tool) -> Found:
    script = Script(tool)
    ema = AveragedModel(script.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in script.batches:
        script.step(batch)
        ema.update_parameters(script.model)
    script.evaluate(ema)
    return {"losses": script.losses, "weights": tool.weights(ema.module)}


def mixed(tool: Tool) -> Found:
    tool.begin(precision="bf16")
    script = Script(tool, make=sgd)

    def loss(batch: Any) -> Any:
        with tool.autocast():
            return script.model(**batch).loss

    script.loss = loss  # type: ignore[method-assign]
    return script.train().found()


def scaled(tool: Tool) -> Found:
    script, scaler = Script(tool), torch.amp.GradScaler("cpu", growth_interval=2)
    for batch in script.batches:
        loss = script.loss(batch)
        tool.backward(scaler.scale(loss))
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
        script.losses.append(tool.mean(loss))
    return script.found(same=scaler.get_scale())


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def dropped(tool: Tool) -> Found:
    """Losses with dropout, and after training without."""
    script = Script(tool, kind="GPT2 with dropout", data=dataset("GPT2"))
    torch.manual_seed(3 + tool.dp_rank)
    script.train().evaluate()
    return script.found()


def with_trainer(tool: Tool, change: Change = lambda model: model) -> Found:
    """Unlike numbers of labels, gradients of two batches, clipped; evaluated at the end."""
    rows = dataset("Llama", 48)
    for number, row in enumerate(rows):
        row["labels"][: number % 7] = -100
    args = {
        "output_dir": str(tool.folder / "trainer"), "max_steps": 3, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "adam_epsilon": 1e-6, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True, "report_to": [],
    }  # fmt: skip
    trainer = tool.trainer(rows, args, change)
    trainer.train()
    trainer.evaluate()
    keys = ("loss", "grad_norm", "eval_loss")
    losses = [float(row[k]) for row in trainer.state.log_history for k in keys if k in row]
    return {"losses": losses, "weights": tool.weights(trainer.model)}


#: what the table says -> the script
SCRIPTS: dict[str, Callable[[Tool], Found]] = {
    "Llama, AdamW": training,
    "GPT-2, tied weights": partial(training, kind="GPT2"),
    "T5": partial(training, kind="T5"),
    "Mixtral": partial(training, kind="Mixtral"),
    "ViT": partial(training, kind="ViT"),
    "Mamba-2": partial(training, kind="Mamba2"),
    "SGD with momentum": partial(training, make=sgd),
    "Adafactor of transformers": partial(training, make=adafactor),
    "Muon": partial(training, make=muon),
    "LBFGS": of_lbfgs,
    "gradient accumulation": accumulation,
    "clip_grad_norm_": clipped,
    "uneven last batch": lambda tool: training(tool, data=dataset("Llama", 37)),
    "padded batches": lambda tool: training(tool, data=of_varying_lengths(), collate=padded),
    "padded batches, labels counted": counted,
    "evaluation in no_grad": evaluated,
    "generate": generated,
    "LoRA, disable_adapter": lora,
    "LoRA, save_pretrained": lora_saved,
    "weights from safetensors": loaded,
    "save_pretrained": saved,
    "checkpoint of 4 ranks": checkpoint,
    "resumed on 2 ranks": resumed,
    "freezing and unfreezing": frozen,
    "weight_norm": partial(training, change=normed),
    "EMA by AveragedModel": averaged,
    "bf16 autocast": mixed,
    "GradScaler": scaled,
    "gradient checkpointing": partial(training, change=checkpointed),
    "dropout": dropped,
    "Trainer of transformers": with_trainer,
    "Trainer, LoRA": partial(with_trainer, change=adapted),
}
