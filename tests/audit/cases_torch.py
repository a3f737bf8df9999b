"""Tensor parallelism with torch's DTensors and parallel styles, and collectives inside of a loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from case import Case
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS, Net, one_device, part, rank_chunk
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

HEADS = 2


def ranks(axis: str = "tp") -> DeviceMesh:
    """All ranks in one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def own_parts(model: Net) -> None:
    """Keep this rank's part of the layers."""
    for layer in model.layers:
        layer.up.weight, layer.up.bias = part(layer.up.weight, 0), part(layer.up.bias, 0)
        layer.down.weight = part(layer.down.weight, 1)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def boundaries(model: Net, fault: str) -> None:
    """Layers of local weights between DTensors."""
    mesh = ranks()
    own_parts(model)
    x = DTensor.from_local(model.words(TOKENS), mesh, [Replicate()])
    for layer in model.layers:
        if fault == "to_local without grad_placements":
            normed = layer.norm(x.to_local())
        else:
            normed = layer.norm(x.to_local())
            normed = DTensor.from_local(normed, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        partial = layer.down(F.gelu(layer.up(normed)))  # fault: to_local without grad_placements
        layout = [Replicate() if fault == "partial sums called replicated" else Partial()]
        added = DTensor.from_local(partial, mesh, layout).redistribute(placements=[Replicate()])
        x = x + added  # fault: partial sums called replicated
    loss_of(model.head(x.to_local()), LABELS).backward()


class Pooled(nn.Module):
    """A sentence's words, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)


def pooled_of_one_device(model: Pooled) -> None:
    pooled = torch.tanh(model.mix(model.words(TOKENS))).mean(1)
    F.cross_entropy(model.head(pooled), LABELS[:, 0]).backward()


def pooled(model: Pooled, fault: str) -> None:
    """Every rank has some words of each sentence."""
    mesh = ranks()
    x = DTensor.from_local(model.words(TOKENS), mesh, [Replicate()])
    x = x.redistribute(placements=[Shard(1)])
    grad = [Partial()]
    weight = DTensor.from_local(model.mix.weight, mesh, [Replicate()]).to_local(grad_placements=grad)
    bias = DTensor.from_local(model.mix.bias, mesh, [Replicate()]).to_local(grad_placements=grad)
    x = torch.tanh(F.linear(x.to_local(), weight, bias))
    if fault == "no redistribute before a mean":
        x = x.mean(1)  # fault: no redistribute before a mean
    else:
        x = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local().mean(1)
    F.cross_entropy(model.head(x), LABELS[:, 0]).backward()  # fault: no redistribute before a mean


class Attention(nn.Module):
    """Queries, keys and values of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.words(tokens)).chunk(3, -1)  # fault: fused weight cut in order
        q, k, v = (x.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for x in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v)  # fault: fused weight cut in order
        x = x.transpose(1, 2).flatten(2)
        return self.head(self.out(x))


def attention_of_one_device(model: Attention) -> None:
    loss_of(model(TOKENS), LABELS).backward()


def attention(model: Attention, fault: str) -> None:
    if fault != "fused weight cut in order":
        ways = dist.get_world_size()
        order = torch.arange(3 * HIDDEN).view(3, ways, -1).transpose(0, 1).flatten()
        model.qkv.weight = nn.Parameter(model.qkv.weight.detach()[order])
        model.qkv.bias = nn.Parameter(model.qkv.bias.detach()[order])
    parallelize_module(model, ranks(), {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    loss_of(model(TOKENS), LABELS).backward()


def sequence(model: Net, fault: str) -> None:
    """Norms and residuals of parts of a sequence."""
    mesh = ranks()
    layout = Replicate() if fault == "part of a sequence called replicated" else Shard(1)
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=layout),
        "down": RowwiseParallel(output_layouts=layout),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    x = DTensor.from_local(model.words(TOKENS), mesh, [Replicate()])
    x = x.redistribute(placements=[Shard(1)]).to_local()
    for layer in model.layers:
        normed = layer.norm(x)
        x = x + layer.down(F.gelu(layer.up(normed)))  # fault: part of a sequence called replicated
    whole = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()
    loss_of(model.head(whole), LABELS).backward()


def norms_by_hand(model: Net, fault: str) -> None:
    """Norms of parts of a sequence, with plain weights."""
    mesh = ranks()
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    x = DTensor.from_local(model.words(TOKENS), mesh, [Replicate()])
    x = x.redistribute(placements=[Shard(1)]).to_local()
    for layer in model.layers:
        normed = layer.norm(x)  # fault: norms of a part are not reduced
        x = x + layer.down(F.gelu(layer.up(normed)))
    whole = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()
    loss_of(model.head(whole), LABELS).backward()
    if fault != "norms of a part are not reduced":
        for layer in model.layers:
            for p in layer.norm.parameters():
                dist.all_reduce(p.grad)


def functional_sum(model: Net, fault: str) -> None:
    """Layers whose parts are added up by functional collectives."""
    own_parts(model)
    mesh = ranks()
    x = model.words(TOKENS)
    for layer in model.layers:
        normed = DTensor.from_local(layer.norm(x), mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        partial = layer.down(F.gelu(layer.up(normed)))  # fault: sum of detached parts
        if fault == "sum of detached parts":
            added = partial.detach().clone()
            dist.all_reduce(added)  # fault: sum of detached parts
        elif fault == "functional sum adds up gradients":
            added = functional.all_reduce(partial, "sum", mesh)  # fault: functional sum adds up gradients
        else:
            added = DTensor.from_local(partial, mesh, [Partial()]).redistribute(placements=[Replicate()])
            added = added.to_local()
        x = x + added
    loss_of(model.head(x), LABELS).backward()


def functional_gather(model: Net, fault: str) -> None:
    """A sequence in parts that is gathered before the head."""
    mesh = ranks()
    ways, rank = dist.get_world_size(), dist.get_rank()
    x = model.words(TOKENS.chunk(ways, 1)[rank])
    for layer in model.layers:
        x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
    if fault == "gathered without gradient":
        parts = [torch.empty_like(x) for _ in range(ways)]
        dist.all_gather(parts, x.detach())  # fault: gathered without gradient
        whole = torch.cat(parts, 1)  # fault: gathered without gradient
    elif fault == "gathered gradients are added up":
        whole = functional.all_gather_tensor_autograd(x, 1, mesh)  # fault: gathered gradients are added up
    else:
        whole = DTensor.from_local(x, mesh, [Shard(1)]).full_tensor()
    loss_of(model.head(whole), LABELS).backward()
    for name, p in model.named_parameters():
        if not name.startswith("head") and p.grad is not None:
            dist.all_reduce(p.grad)


class Pair(nn.Module):
    """Two towers whose outputs are matched over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.left = nn.Linear(HIDDEN, HIDDEN)
        self.right = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = torch.tanh(self.words(tokens)).mean(1)
        return F.normalize(self.left(pooled), dim=-1), F.normalize(self.right(pooled**2), dim=-1)


def pair_of_one_device(model: Pair) -> None:
    left, right = model(TOKENS)
    F.cross_entropy(5 * left @ right.T, torch.arange(len(TOKENS))).backward()


def pair(model: Pair, fault: str) -> None:
    """Every rank matches its left side with all right sides."""
    left, right = model(rank_chunk(TOKENS))
    if fault == "features of other ranks without gradient":
        every = [torch.empty_like(right) for _ in range(dist.get_world_size())]
        dist.all_gather(every, right.detach())
        every[dist.get_rank()] = right
    else:
        every = list(differentiable.all_gather(right))
    scores = 5 * left @ torch.cat(every).T  # fault: features of other ranks without gradient
    labels = torch.arange(len(left)) + dist.get_rank() * len(left)
    F.cross_entropy(scores, labels).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def summed_loss(model: Net, fault: str) -> None:
    """The loss of all tokens, of which every rank has some."""
    loss = model(rank_chunk(TOKENS), rank_chunk(LABELS)) / dist.get_world_size()
    if fault == "gradient of a summed loss":
        loss = differentiable.all_reduce(loss)  # fault: gradient of a summed loss
    else:
        shown = loss.detach().clone()
        dist.all_reduce(shown)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


class Scored(nn.Module):
    """Words and their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(tokens))).flatten(0, 1)


def entropy_of(scores: torch.Tensor) -> torch.Tensor:
    """The mean, of log-probabilities."""
    return -(scores.exp() * scores).sum(-1).mean()


def scored_of_one_device(model: Scored) -> None:
    logits = model(TOKENS)
    (F.cross_entropy(logits, LABELS.flatten()) - 0.1 * entropy_of(logits.log_softmax(-1))).backward()


def scored(model: Scored, fault: str) -> None:
    """Logits divided over words. Inside of the context every log_softmax has the gradient of the loss's."""
    layout = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, ranks(), {"head": layout})
    logits = model(TOKENS)
    if not fault:
        full = logits.redistribute(placements=[Replicate()])
        (-0.1 * entropy_of(full.log_softmax(-1))).backward(retain_graph=True)
    with loss_parallel():
        loss = F.cross_entropy(logits, LABELS.flatten())
        if fault:
            entropy = entropy_of(logits.log_softmax(-1))  # fault: another use of scores in loss_parallel
            loss = loss - 0.1 * entropy.redistribute(placements=[Replicate()])
        loss.backward()


CASES = [
    Case(
        "another use of scores in loss_parallel",
        "pytorch/pytorch#190746",
        "tp=2",
        Scored,
        scored_of_one_device,
        scored,
    ),
    Case(
        "to_local without grad_placements",
        "pytorch/torchtitan#1805",
        "tp=2",
        Net,
        one_device,
        boundaries,
        word="not reduced over tp",
    ),
    Case("partial sums called replicated", "", "tp=2", Net, one_device, boundaries),
    Case("no redistribute before a mean", "", "tp=2", Pooled, pooled_of_one_device, pooled),
    Case("fused weight cut in order", "", "tp=2", Attention, attention_of_one_device, attention),
    Case("part of a sequence called replicated", "", "tp=2", Net, one_device, sequence),
    Case(
        "norms of a part are not reduced",
        "",
        "tp=2",
        Net,
        one_device,
        norms_by_hand,
        word="not reduced over tp",
    ),
    Case("sum of detached parts", "", "tp=2", Net, one_device, functional_sum, word="is missing"),
    Case(
        "functional sum adds up gradients",
        "",
        "tp=2",
        Net,
        one_device,
        functional_sum,
        word="adds up over tp",
    ),
    Case("gathered without gradient", "", "sp=2", Net, one_device, functional_gather, word="is missing"),
    Case(
        "gathered gradients are added up",
        "pytorch/pytorch#58005",
        "sp=2",
        Net,
        one_device,
        functional_gather,
        word="2 times",
    ),
    Case(
        "features of other ranks without gradient",
        "mlfoundations/open_clip#616",
        "dp=2",
        Pair,
        pair_of_one_device,
        pair,
    ),
    Case(
        "gradient of a summed loss",
        "pytorch/pytorch#121587",
        "dp=2",
        Net,
        one_device,
        summed_loss,
        word="2 times",
    ),
]
