"""A plain training loop, the same for a model on one process and for one that runs a program."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.program.loss import loss_of
from autoshard.runtime.corpus import VOCABULARY, Corpus
from autoshard.runtime.microbatch import Batch
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.optim.clip import clip_grad_norm_
from autoshard.runtime.optim.host_optimizer import HostOptimizer


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    loss: of its full batch. grad_norm: before clipping, None if not clipped. seconds: of the
    full step.
    """

    step: int
    loss: float
    grad_norm: float | None
    seconds: float


def train(
    model: nn.Module,
    feed: Callable[[int], Batch],
    *,
    steps: int,
    lr: float,
    clip: float | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> list[StepReport]:
    """Train with AdamW; feed gives the batch of a step, of global shape, all its microbatches together.

    Where the program runs several microbatches a step, the batch is cut into so many equal parts along dim 0,
    with one clipping and one optimizer step at the end. Losses and gradients are those of the full batch,
    unless `compile` warned of what every microbatch computes by itself.
    Raises UsageError if the model returns no loss, or the batch has another size.
    """
    optimizer = _adamw(model, lr)
    reports = []
    for step in range(steps):
        start = time.perf_counter()
        loss = accumulate(model, feed(step))
        norm = None if clip is None else float(clip_grad_norm_(model, clip))
        optimizer.step()
        optimizer.zero_grad()
        report = StepReport(step, float(loss), norm, time.perf_counter() - start)
        reports.append(report)
        if on_step is not None:
            on_step(report)
    return reports


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW for what is trained, in the memory that the model's program says."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, ParallelModule) and model._autoshard.program.offload.optimizer:
        return HostOptimizer(trained, lambda params: torch.optim.AdamW(params, lr=lr))
    return torch.optim.AdamW(trained, lr=lr)


def accumulate(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Run forward and backward on every microbatch of a batch; the loss of the whole, a detached scalar.

    Its gradient is added to ``.grad`` of the parameters.
    """
    args, kwargs = batch
    if isinstance(model, ParallelModule) and (model.microbatches > 1 or model.is_pipeline):
        return model.train_step(args, **kwargs)
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    return loss.detach()


def feed_of(
    example: Batch, corpus: Corpus, vocabulary: int | None, seed: int = 0
) -> tuple[Callable[[int], Batch], str]:
    """(batches for a model, what they are).

    Text where the model takes ``input_ids`` and ``labels`` of the same shape [batch, seq] and knows at least
    256 tokens (``vocabulary``), else the example batch again and again.
    """
    args, kwargs = example
    ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
    if not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape == labels.shape):
        return (
            lambda step: example,
            "the example batch again and again (the model takes no input_ids and labels)",
        )
    if vocabulary is None or vocabulary < VOCABULARY or ids.dim() != 2:
        return lambda step: example, f"the example batch again and again (bytes need {VOCABULARY} tokens)"
    batch, seq = ids.shape

    def text(step: int) -> Batch:
        tokens = corpus.windows(batch, seq, step=step, seed=seed)
        return args, {**kwargs, "input_ids": tokens, "labels": tokens.clone()}

    return text, f"{corpus.name}, as bytes"


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model knows, None if it does not say."""
    config = getattr(model, "config", None)
    result = getattr(config, "vocab_size", None)
    if isinstance(result, int):
        return result
    text = getattr(config, "get_text_config", None)
    return getattr(text(), "vocab_size", None) if callable(text) else None


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """(bytes of parameters on this rank, bytes of the full model)."""
    held = full = 0
    for p in model.parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        held += local.numel() * local.element_size()
        full += p.numel() * p.element_size()
    return held, full
