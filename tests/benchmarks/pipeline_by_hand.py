"""The pipelines that people write with torch.distributed.pipelining, of the same stages as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from benchmarks.pipelines import MICROBATCHES, layers_of

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


class LlamaStage(nn.Module):
    """Some layers of a Llama, under the names that they have in the model.

    The first stage takes tokens [sequences, tokens], the others hidden states; the last gives logits. Every
    stage makes the tables of the rotary positions for itself, in every call, as the emitted programs do.
    """

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(k): model.model.layers[k] for k in layers_of(stage, stages)})
        self.model.rotary_emb = model.model.rotary_emb
        if self.first:
            self.model.embed_tokens = model.model.embed_tokens
        if self.last:
            self.model.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: Any = self.model
        if self.first:
            x = inner.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        tables = inner.rotary_emb(x, position_ids=positions)
        for layer in inner.layers.values():
            # no mask: attention is causal by itself
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=tables)
        return self.lm_head(inner.norm(x)) if self.last else x


def torch_pipeline(
    model: Any, schedule: str, chunks: int, batch: dict[str, torch.Tensor]
) -> tuple[Callable[[], list[torch.Tensor]], dict[str, nn.Parameter]]:
    """(a step, which returns the losses that this rank makes; parameters of this rank by name)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stages = world * chunks
    own = [LlamaStage(model, stage, stages) for stage in range(rank, stages, world)]
    device = torch.device("cpu")
    wrapped = [
        PipelineStage(module, rank + world * k, stages, device, group=dist.group.WORLD)
        for k, module in enumerate(own)
    ]

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model.loss_function(logits, labels, vocab_size=model.config.vocab_size)
        return found

    cls = _SCHEDULES[schedule]
    runs = cls(wrapped if chunks > 1 else wrapped[0], MICROBATCHES, loss_fn=loss_of)
    first = (batch["input_ids"],) if own[0].first else ()
    target = batch["labels"] if own[-1].last else None

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        # whole outputs would cost torch a copy of the logits, which nobody needs
        runs.step(*first, target=target, losses=losses, return_outputs=False)
        return losses

    parameters = {name: p for module in own for name, p in module.named_parameters()}
    return step, parameters
