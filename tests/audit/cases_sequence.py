"""Sequence and context parallelism by hand: gathers and their backward, positions, counts, masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS, Net, part, rank_chunk
from torch import nn

IGNORED = -100
LAST_TOKENS = TOKENS.t()  # the sequence comes first
LAST_LABELS = LABELS.t()


def dropout_mask(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Zero for one value of five, and what keeps the mean elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, shape, generator=generator).gt(0) * 1.25


def one_device(model: Net) -> None:
    x = model.words(LAST_TOKENS)
    for layer in model.layers:
        x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
    x = x * dropout_mask(tuple(x.shape), 5)
    F.cross_entropy(model.head(x).flatten(0, 1), LAST_LABELS.flatten()).backward()


class Gather(torch.autograd.Function):
    """The sequence of all ranks; backward is a sum that is scattered, or this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sums: bool) -> torch.Tensor:
        ctx.sums = sums
        out = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.sums:
            out = torch.empty_like(rank_chunk(gradient))
            dist.reduce_scatter_tensor(out, gradient.contiguous())  # fault: sum behind replicated head
            return out, None
        return rank_chunk(gradient).clone(), None  # fault: slice behind split linear, slice behind keys


class Scatter(torch.autograd.Function):
    """Forward a sum that is scattered over the sequence; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rank_chunk(x))
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        out = gradient.new_empty(gradient.shape[0] * dist.get_world_size(), *gradient.shape[1:])
        dist.all_gather_into_tensor(out, gradient.contiguous())
        return out


def sequence_parallel(model: Net, fault: str) -> None:
    """Norms and residuals have a part of the sequence, linears all of it and a part of the weights."""
    for layer in model.layers:
        layer.up.weight, layer.up.bias = part(layer.up.weight, 0), part(layer.up.bias, 0)
        layer.down.weight = part(layer.down.weight, 1)
    x = model.words(rank_chunk(LAST_TOKENS))
    for layer in model.layers:
        normed = layer.norm(x)  # fault: norms not reduced
        whole = Gather.apply(normed, fault != "slice behind split linear")  # fault: slice behind split linear
        x = x + Scatter.apply(layer.down(F.gelu(layer.up(whole))))
    whole = Gather.apply(x, fault == "sum behind replicated head")  # fault: sum behind replicated head
    seed = 5
    if fault == "dropout of another seed on each rank":
        seed += dist.get_rank()  # fault: dropout of another seed on each rank
    whole = whole * dropout_mask(tuple(whole.shape), seed)  # fault: dropout of another seed on each rank
    F.cross_entropy(model.head(whole).flatten(0, 1), LAST_LABELS.flatten()).backward()
    shared = [model.words.weight]
    if fault != "norms not reduced":
        shared += [p for layer in model.layers for p in layer.norm.parameters()]
    for p in shared:
        dist.all_reduce(p.grad)  # fault: norms not reduced


def split_dropout(model: Net, fault: str) -> None:
    """As above, with dropout before the sequence is gathered: every rank takes its part of the mask."""
    x = model.words(rank_chunk(LAST_TOKENS))
    for layer in model.layers:
        x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
    if fault == "dropout of one seed on parts":
        mask = dropout_mask(tuple(x.shape), 5)  # fault: dropout of one seed on parts
    else:
        mask = rank_chunk(dropout_mask((*LAST_TOKENS.shape, HIDDEN), 5))
    x = x * mask  # fault: dropout of one seed on parts
    loss = F.cross_entropy(model.head(x).flatten(0, 1), rank_chunk(LAST_LABELS).flatten(), reduction="sum")
    (loss / LAST_LABELS.numel()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


LENGTH = 8
LONG_TOKENS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(6))
LONG_LABELS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(7))
LONG_LABELS[0, 6:] = LONG_LABELS[1, 3:5] = LONG_LABELS[1, 7] = IGNORED


class Attention(nn.Module):
    """Causal attention of one head between learned positions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.places = nn.Embedding(LENGTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.inputs = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.outputs = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, later: torch.Tensor
) -> torch.Tensor:
    scores = queries @ keys.transpose(-1, -2) / HIDDEN**0.5
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ values  # fault: mask not permuted


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def attention_one_device(model: Attention) -> None:
    places = torch.arange(LENGTH)
    x = model.words(LONG_TOKENS) + model.places(places)
    queries, keys, values = model.inputs(model.norm(x)).chunk(3, -1)
    x = x + model.outputs(attend(queries, keys, values, places[None] > places[:, None]))
    (summed(model.head(x), LONG_LABELS) / (LONG_LABELS != IGNORED).sum()).backward()


def places_of(rank: int, size: int) -> torch.Tensor:
    """Of a rank's tokens: one chunk from the front and one from the back, for an equal share of the mask."""
    chunks = torch.arange(LENGTH).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def context_parallel(model: Attention, fault: str) -> None:
    """Every rank has queries of some tokens, and gathers keys and values."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = places_of(rank, size)
    every = torch.cat([places_of(k, size) for k in range(size)])
    tokens, labels = LONG_TOKENS[:, mine], LONG_LABELS[:, mine]
    positions = mine
    if fault == "positions not permuted":
        positions = rank_chunk(torch.arange(LENGTH))  # fault: positions not permuted
    x = model.words(tokens) + model.places(positions)  # fault: positions not permuted
    queries, keys, values = model.inputs(model.norm(x)).chunk(3, -1)
    sums = fault != "slice behind keys"
    keys = Gather.apply(keys.transpose(0, 1), sums).transpose(0, 1)  # fault: slice behind keys
    values = Gather.apply(values.transpose(0, 1), sums).transpose(0, 1)  # fault: slice behind keys
    later = every[None] > mine[:, None]
    if fault == "mask not permuted":
        places = torch.arange(LENGTH)
        later = places[None] > rank_chunk(places)[:, None]  # fault: mask not permuted
    mixed = attend(queries, keys, values, later)  # fault: mask not permuted
    x = x + model.outputs(mixed)
    count = (labels != IGNORED).sum()
    if fault == "loss by tokens of this rank":
        loss = summed(model.head(x), labels) / count / size  # fault: loss by tokens of this rank
    else:
        dist.all_reduce(count)
        loss = summed(model.head(x), labels) / count
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # fault: averaged over cp too
        if fault == "averaged over cp too":
            p.grad /= size  # fault: averaged over cp too


CASES = [
    Case(
        "norms not reduced",
        "Megatron-LM #1446",
        "tp=2",
        Net,
        one_device,
        sequence_parallel,
        word="not reduced over tp",
    ),
    Case("slice behind split linear", "", "tp=2", Net, one_device, sequence_parallel),
    Case("sum behind replicated head", "", "tp=2", Net, one_device, sequence_parallel, word="over tp"),
    Case("dropout of another seed on each rank", "", "tp=2", Net, one_device, sequence_parallel),
    Case("dropout of one seed on parts", "", "tp=2", Net, one_device, split_dropout),
    Case("positions not permuted", "", "cp=2", Attention, attention_one_device, context_parallel),
    Case("mask not permuted", "", "cp=2", Attention, attention_one_device, context_parallel),
    Case("slice behind keys", "", "cp=2", Attention, attention_one_device, context_parallel),
    Case(
        "loss by tokens of this rank",
        "Megatron-LM #673",
        "cp=2",
        Attention,
        attention_one_device,
        context_parallel,
    ),
    Case(
        "averaged over cp too",
        "Megatron-LM #906",
        "cp=2",
        Attention,
        attention_one_device,
        context_parallel,
        word="0.5 times",
    ),
]
