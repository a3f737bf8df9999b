"""Vocabulary parallelism by hand: embedding, head and loss over tp; an embedding that two stages share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_data import Enter, Leave
from cases_tensor import HIDDEN, Block, rank_chunk
from torch import nn

ROWS = 15  # not a multiple of tp
WORDS = torch.randint(ROWS, (4, 6), generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(ROWS, (4, 6), generator=torch.Generator().manual_seed(4))
WORDS[0, 0] = LABELS[1, 1] = ROWS - 1


class BiasBlock(Block):
    """A layer whose last linear has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)


class WordNet(nn.Module):
    """A layer between an embedding and a head, of a number of words that tp does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, HIDDEN)
        self.layer = BiasBlock()
        self.head = nn.Linear(HIDDEN, ROWS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = x + self.layer.down(F.gelu(self.layer.up(self.layer.norm(x))))
        return self.head(x)


def one_device(model: WordNet) -> None:
    F.cross_entropy(model(WORDS).flatten(0, 1), LABELS.flatten()).backward()


def first_row(fault: str) -> tuple[int, int]:
    """Of this rank, and how many it has: as many as all others, the last ones being padding."""
    if fault == "last words on no rank":
        rows = ROWS // dist.get_world_size()  # fault: last words on no rank
    else:
        rows = -(-ROWS // dist.get_world_size())
    return dist.get_rank() * rows, rows


def some_rows(weight: torch.Tensor, start: int, rows: int) -> nn.Parameter:
    """Rows of a weight, with zeros where it has none."""
    some = weight.detach()[start : start + rows]  # fault: last words on no rank
    return nn.Parameter(F.pad(some, (0, 0, 0, rows - len(some))))  # fault: last words on no rank


class WordsOfRank(nn.Module):
    """An embedding of which every rank has some rows."""

    def __init__(self, whole: nn.Embedding, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.start, self.rows = first_row(fault)
        self.weight = some_rows(whole.weight, self.start, self.rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outside = (tokens < self.start) | (tokens >= self.start + self.rows)
        row = (tokens - self.start).clamp(0, self.rows - 1)
        x = F.embedding(row, self.weight)  # fault: words of other ranks not masked
        if self.fault != "words of other ranks not masked":
            x = x.masked_fill(outside[..., None], 0.0)
        return Leave.apply(x, dist.group.WORLD)


class RowParallel(nn.Module):
    """A linear whose input is split over the ranks."""

    def __init__(self, whole: nn.Linear, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(rank_chunk(whole.weight.detach(), dim=1).clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "bias on every rank":
            partial = F.linear(x, self.weight, self.bias)  # fault: bias on every rank
            return Leave.apply(partial, dist.group.WORLD)
        return Leave.apply(F.linear(x, self.weight), dist.group.WORLD) + self.bias


class SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose words are split over the ranks; the mean over tokens."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, start: int, fault: str) -> torch.Tensor:
        largest = logits.amax(-1)  # fault: largest logit not reduced
        if fault != "largest logit not reduced":
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]  # fault: largest logit not reduced
        powers = shifted.exp()
        total = powers.sum(-1)  # fault: sum of powers not reduced
        if fault != "sum of powers not reduced":
            dist.all_reduce(total)
        ctx.fault = fault
        ctx.save_for_backward(powers / total[:, None], labels - start)
        outside = (labels < start) | (labels >= start + logits.shape[1])
        wanted = shifted.gather(1, (labels - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        wanted = wanted.masked_fill(outside, 0.0)
        dist.all_reduce(wanted)
        return (total.log() - wanted).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, rows = ctx.saved_tensors
        rank_rows = probabilities.shape[1]
        inside = ((rows >= 0) & (rows < rank_rows)).to(probabilities.dtype)
        if ctx.fault == "labels of other ranks not masked":
            inside = torch.ones_like(inside)  # fault: labels of other ranks not masked
        result = probabilities.clone()
        at = rows.clamp(0, rank_rows - 1)[:, None]
        result.scatter_add_(1, at, -inside[:, None])  # fault: labels of other ranks not masked
        return result * gradient / len(rows), None, None, None


class HeadOfRank(nn.Module):
    """A head of which every rank has some words."""

    def __init__(self, whole: nn.Linear, fault: str) -> None:
        super().__init__()
        self.start, self.rows = first_row(fault)
        self.weight = some_rows(whole.weight, self.start, self.rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(self.start, self.start + self.rows) >= ROWS
        return F.linear(x, self.weight).masked_fill(padding, -torch.inf)


def split_words(model: WordNet, fault: str) -> None:
    """Embedding, layer, head and loss over tp."""
    everyone = dist.group.WORLD
    words, head = WordsOfRank(model.words, fault), HeadOfRank(model.head, fault)
    layer = model.layer
    layer.up.weight = nn.Parameter(rank_chunk(layer.up.weight.detach()).clone())
    layer.up.bias = nn.Parameter(rank_chunk(layer.up.bias.detach()).clone())
    layer.down = RowParallel(layer.down, fault)
    x = words(WORDS)
    x = x + layer.down(F.gelu(layer.up(Enter.apply(layer.norm(x), everyone))))
    if fault != "no sum before the head":
        x = Enter.apply(x, everyone)
    logits = head(x).flatten(0, 1)  # fault: no sum before the head
    SplitCrossEntropy.apply(logits, LABELS.flatten(), head.start, fault).backward()


class TiedNet(nn.Module):
    """Two layers; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, HIDDEN)
        self.layers = nn.ModuleList(BiasBlock() for _ in range(2))


def through(layer: Block, x: torch.Tensor) -> torch.Tensor:
    return x + layer.down(F.gelu(layer.up(layer.norm(x))))


def tied_one_device(model: TiedNet) -> None:
    x = model.words(WORDS)
    for layer in model.layers:
        x = through(layer, x)
    F.cross_entropy(F.linear(x, model.words.weight).flatten(0, 1), LABELS.flatten()).backward()


MICROBATCHES = 2


class ScaleGradient(torch.autograd.Function):
    """As it is; backward divides by the number of microbatches."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / MICROBATCHES  # fault: scaled at every stage


def two_stages(model: TiedNet, fault: str) -> None:
    """A pipeline of two stages, each with a copy of the shared embedding."""
    if dist.get_rank() == 0:
        first_stage(model, fault)
        shared = model.words.weight
    else:
        shared = last_stage(model)
    if fault != "shared embedding not reduced":
        dist.all_reduce(shared.grad)


def first_stage(model: TiedNet, fault: str) -> None:
    outputs = []
    for tokens in WORDS.chunk(MICROBATCHES):
        x = model.words(tokens)  # fault: shared embedding not reduced
        x = through(model.layers[0], x)
        if fault == "scaled at every stage":
            x = ScaleGradient.apply(x)  # fault: scaled at every stage
        dist.send(x.detach(), 1)
        outputs.append(x)
    for x in outputs:
        gradient = torch.empty_like(x)
        dist.recv(gradient, 1)
        x.backward(gradient)


def last_stage(model: TiedNet) -> nn.Parameter:
    head = nn.Linear(HIDDEN, ROWS, bias=False)
    head.weight = nn.Parameter(model.words.weight.detach().clone())
    for labels in LABELS.chunk(MICROBATCHES):
        x = torch.empty(*labels.shape, HIDDEN)
        dist.recv(x, 0)
        x.requires_grad_()
        logits = head(through(model.layers[1], x))  # fault: shared embedding not reduced
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        ScaleGradient.apply(loss).backward()
        dist.send(x.grad, 0)
    return head.weight


CASES = [
    Case(
        "last words on no rank",
        "Megatron-LM #1754",
        "tp=2",
        WordNet,
        one_device,
        split_words,
        kind="state",
        word="rows 14 to 14 of 15",
    ),
    Case("words of other ranks not masked", "", "tp=2", WordNet, one_device, split_words),
    Case("bias on every rank", "", "tp=2", WordNet, one_device, split_words),
    Case("largest logit not reduced", "", "tp=2", WordNet, one_device, split_words),
    Case("sum of powers not reduced", "", "tp=2", WordNet, one_device, split_words),
    Case("labels of other ranks not masked", "", "tp=2", WordNet, one_device, split_words),
    Case("no sum before the head", "", "tp=2", WordNet, one_device, split_words, word="not reduced over tp"),
    Case(
        "shared embedding not reduced",
        "",
        "pp=2",
        TiedNet,
        tied_one_device,
        two_stages,
        word="not reduced over pp",
    ),
    Case(
        "scaled at every stage",
        "DeepSpeed #8154",
        "pp=2",
        TiedNet,
        tied_one_device,
        two_stages,
        word="0.5 times",
    ),
]
