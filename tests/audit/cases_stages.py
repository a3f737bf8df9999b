"""Pipelines: torch's schedules, and stages that pass messages by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICROBATCHES = 2


class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS)


class Tied(nn.Module):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def deep_of_one_device(model: Deep) -> None:
    x = model.words(TOKENS)
    for layer in model.layers:
        x = layer(x)
    loss_of(model.head(x), LABELS).backward()


def tied_of_one_device(model: Tied) -> None:
    x = model.words(TOKENS)
    for layer in model.layers:
        x = layer(x)
    loss_of(x @ model.words.weight.T, LABELS).backward()


class Stage(nn.Module):
    """What one rank has of a model."""

    def __init__(self, model: Deep | Tied, rank: int) -> None:
        super().__init__()
        self.layer = model.layers[rank]
        self.first, self.tied = rank == 0, isinstance(model, Tied)
        if self.first or self.tied:
            self.words = model.words
        if not self.first and isinstance(model, Deep):
            self.head = model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.words(x)  # fault: tied weights of two stages
            return self.layer(x)
        x = self.layer(x)
        if self.tied:
            return x @ self.words.weight.T  # fault: tied weights of two stages
        return self.head(x)


def scheduled(model: Deep | Tied, fault: str) -> None:
    """One step of a schedule of torch."""
    rank = dist.get_rank()
    part = Stage(model, rank)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if fault == "sum over a microbatch":
            total = F.cross_entropy(  # fault: sum over a microbatch
                scores.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            return total / TOKENS.shape[1]  # fault: sum over a microbatch
        value = loss_of(scores, labels)  # fault: microbatches are not scaled
        return value / MICROBATCHES if fault == "scaled twice" else value  # fault: scaled twice

    scale = fault != "microbatches are not scaled"
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=scale)
    if rank == 0:
        schedule.step(TOKENS)  # fault: microbatches are not scaled, scaled twice
    else:
        schedule.step(target=LABELS)  # fault: microbatches are not scaled, scaled twice
    if isinstance(model, Tied) and fault != "tied weights of two stages":
        dist.all_reduce(model.words.weight.grad)


def two_steps(model: Deep, fault: str) -> None:
    """Two steps of a schedule, whose gradients are added up."""
    rank = dist.get_rank()
    stage = PipelineStage(Stage(model, rank), rank, 2, torch.device("cpu"))
    scale = fault == "scaled at every step"
    parts = 2 if scale else 2 * MICROBATCHES
    schedule = ScheduleGPipe(
        stage, MICROBATCHES, loss_fn=lambda scores, labels: loss_of(scores, labels) / parts, scale_grads=scale
    )
    for tokens, labels in zip(TOKENS.chunk(2), LABELS.chunk(2), strict=True):
        if rank == 0:
            schedule.step(tokens)  # fault: scaled at every step
        else:
            schedule.step(target=labels)  # fault: scaled at every step


def by_hand(model: Deep, fault: str) -> None:
    """All forwards, then all backwards, with messages."""
    tokens, labels = TOKENS.chunk(MICROBATCHES), LABELS.chunk(MICROBATCHES)
    shape = (*tokens[0].shape, HIDDEN)
    if dist.get_rank() == 0:
        outputs = [model.layers[0](model.words(t)) for t in tokens]
        for out in outputs:
            dist.send(out.detach(), 1)
        for k, out in enumerate(outputs):
            gradient = torch.empty(shape)
            dist.recv(gradient, 1)
            if fault == "gradient of another microbatch":
                outputs[1 - k].backward(gradient)  # fault: gradient of another microbatch
            elif fault == "only the last microbatch goes back":
                if k == MICROBATCHES - 1:
                    out.backward(gradient)  # fault: only the last microbatch goes back
            else:
                out.backward(gradient)
        return
    inputs = []
    for _ in tokens:
        x = torch.empty(shape)
        dist.recv(x, 0)
        inputs.append(x.requires_grad_())
    for k, x in enumerate(inputs):
        mine = labels[1 - k] if fault == "labels of another microbatch" else labels[k]
        y = model.layers[1](x)
        loss = loss_of(model.head(y), mine)  # fault: labels of another microbatch
        (loss / MICROBATCHES).backward()
        sent = x.grad
        assert sent is not None
        if fault == "gradient sent before it is divided":
            sent = sent * MICROBATCHES  # fault: gradient sent before it is divided
        dist.send(sent, 0)  # fault: gradient sent before it is divided


CASES = [
    Case(
        "microbatches are not scaled",
        "pytorch/torchtitan#2972",
        "pp=2",
        Deep,
        deep_of_one_device,
        scheduled,
        word="2 times",
    ),
    Case("scaled twice", "", "pp=2", Deep, deep_of_one_device, scheduled, word="0.5 times"),
    Case("sum over a microbatch", "", "pp=2", Deep, deep_of_one_device, scheduled, word="2 times"),
    Case(
        "scaled at every step",
        "pytorch/torchtitan#1733",
        "pp=2",
        Deep,
        deep_of_one_device,
        two_steps,
    ),
    Case(
        "tied weights of two stages",
        "",
        "pp=2",
        Tied,
        tied_of_one_device,
        scheduled,
        word="not reduced over pp",
    ),
    Case("gradient of another microbatch", "", "pp=2", Deep, deep_of_one_device, by_hand),
    Case("only the last microbatch goes back", "", "pp=2", Deep, deep_of_one_device, by_hand),
    Case("labels of another microbatch", "", "pp=2", Deep, deep_of_one_device, by_hand),
    Case("gradient sent before it is divided", "", "pp=2", Deep, deep_of_one_device, by_hand, word="2 times"),
]
