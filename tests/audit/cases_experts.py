"""Mixtures of experts by hand: all-to-all, router weights, the router's auxiliary loss, gradient scales."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_data import Enter, Leave, axes
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS, rank_chunk
from torch import nn
from torch.utils.checkpoint import checkpoint

EXPERTS, CHOSEN, BALANCE = 4, 2, 0.1


class Expert(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """A layer of experts between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)


def routed(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the chosen experts, zero for others; and how many tokens chose each."""
    weights, chosen = probabilities.topk(CHOSEN)
    weights = weights / weights.sum(-1, keepdim=True)
    gates = torch.zeros_like(probabilities).scatter(1, chosen, weights)
    return gates, torch.bincount(chosen.flatten(), minlength=EXPERTS)


def balance_loss(probabilities: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Large where probable experts get many tokens."""
    share = (counts / counts.sum()).to(probabilities.dtype)  # fault: balance by local counts
    aligned = probabilities.mean(0) @ share  # fault: balance by local counts, balance loss of every rank
    return BALANCE * EXPERTS * aligned


def one_device(model: Mixture) -> None:
    x = model.words(TOKENS).flatten(0, 1)
    probabilities = model.router(x).softmax(-1)
    gates, counts = routed(probabilities)
    mixed = sum(gates[:, k : k + 1] * expert(x) for k, expert in enumerate(model.experts))
    loss = F.cross_entropy(model.head(x + mixed), LABELS.flatten())
    (loss + balance_loss(probabilities, counts)).backward()


class Exchange(torch.autograd.Function):
    """All-to-all over the first dim."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


def expert_parallel(model: Mixture, fault: str) -> None:
    """Every rank has tokens of its own; tokens go to the ranks of their experts. Meshes are dp, ep."""
    dp, ep = axes(2)
    size, ways = dist.get_world_size(), dist.get_world_size(ep)
    here = EXPERTS // ways
    experts = list(model.experts)[dist.get_rank(ep) * here :][:here]
    x = model.words(rank_chunk(TOKENS)).flatten(0, 1)
    probabilities = model.router(x).softmax(-1)
    gates, counts = routed(probabilities)
    if fault != "balance by local counts":
        dist.all_reduce(counts)
    balance = balance_loss(probabilities, counts)  # fault: balance by local counts
    sent = (gates > 0).T[:, :, None] * x
    received = Exchange.apply(sent, ep)
    if fault == "wrong order of received tokens":
        by_expert = received.view(here, ways * len(x), HIDDEN)  # fault: wrong order of received tokens
    else:
        by_expert = received.view(ways, here, len(x), HIDDEN).transpose(0, 1).flatten(1, 2)
    done = torch.stack([expert(tokens) for expert, tokens in zip(experts, by_expert, strict=True)])
    if fault == "wrong order of received tokens":
        back = done.view(EXPERTS, len(x), HIDDEN)  # fault: wrong order of received tokens
    else:
        back = done.view(here, ways, len(x), HIDDEN).transpose(0, 1).flatten(0, 1)
    returned = Exchange.apply(back, ep)
    mixed = torch.einsum("te,eth->th", gates, returned)
    loss = F.cross_entropy(model.head(x + mixed), rank_chunk(LABELS).flatten())
    (loss + balance).backward()
    for p in (*model.words.parameters(), *model.router.parameters(), *model.head.parameters()):
        dist.all_reduce(p.grad)
        p.grad /= size
    for expert in experts:
        for p in expert.parameters():
            dist.all_reduce(p.grad, group=dp)  # fault: experts not divided
            if fault == "experts not divided":
                p.grad /= dist.get_world_size(dp)  # fault: experts not divided
            else:
                p.grad /= size


def replicated_tokens(model: Mixture, fault: str) -> None:
    """All ranks have all tokens, and add up what their experts make of them."""
    everyone, ways, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x = model.words(TOKENS).flatten(0, 1)
    inside = Enter.apply(x, everyone)
    probabilities = model.router(inside).softmax(-1)
    gates, counts = routed(probabilities)
    mine = range(rank * EXPERTS // ways, (rank + 1) * EXPERTS // ways)
    local = gates[:, mine.start : mine.stop]
    if fault == "weights of this rank's experts":
        total = local.sum(-1, keepdim=True).clamp(min=1e-9)
        local = local / total  # fault: weights of this rank's experts
    mixed = sum(local[:, k : k + 1] * model.experts[e](inside) for k, e in enumerate(mine))
    x = x + Leave.apply(mixed, everyone)
    loss = F.cross_entropy(model.head(x), LABELS.flatten())
    balance = balance_loss(probabilities, counts)  # fault: balance loss of every rank
    if fault != "balance loss of every rank":
        balance = balance / ways
    (loss + balance).backward()
    dist.all_reduce(model.router.weight.grad)


class Biased(Mixture):
    """Experts are balanced by a bias on their choice, which follows counts of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = (probabilities + self.bias).topk(CHOSEN)[1]
        self.tokens += torch.bincount(chosen.flatten(), minlength=EXPERTS)  # fault: counted in recomputation
        gates = torch.zeros_like(probabilities).scatter(1, chosen, probabilities.gather(1, chosen))
        return sum(gates[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))

    def follow(self) -> None:
        offset = self.tokens.mean() - self.tokens  # fault: bias by local counts
        self.bias += 0.01 * offset.sign()  # fault: bias by local counts


def balanced(model: Biased) -> None:
    x = model.words(TOKENS).flatten(0, 1)
    F.cross_entropy(model.head(x + model.mixed(x)), LABELS.flatten()).backward()
    model.follow()


def balanced_ranks(model: Biased, fault: str) -> None:
    """Data parallel; the mixture is recomputed in backward."""
    x = model.words(rank_chunk(TOKENS)).flatten(0, 1)
    before = model.tokens.clone()
    mixed = checkpoint(model.mixed, x, use_reentrant=False)
    once = model.tokens.clone()
    F.cross_entropy(model.head(x + mixed), rank_chunk(LABELS).flatten()).backward()
    if fault != "counted in recomputation":
        model.tokens.copy_(once)
    if fault != "bias by local counts":
        dist.all_reduce(model.tokens.sub_(before))
        model.tokens.add_(before)
    model.follow()
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


class GatherTokens(torch.autograd.Function):
    """Tokens of all ranks; backward adds up over the ranks, or takes this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sums: bool) -> torch.Tensor:
        ctx.sums = sums
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.sums:
            gradient = gradient.clone()
            dist.all_reduce(gradient)  # fault: balance loss doubled in backward
        return rank_chunk(gradient), None


class ScatterTokens(torch.autograd.Function):
    """Adds up over the ranks and keeps this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(rank_chunk(x))
        dist.reduce_scatter(out, [part.contiguous() for part in x.chunk(dist.get_world_size())])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


def split_sequence(model: Mixture, fault: str) -> None:
    """Sequence parallel: the router sees this rank's tokens, the balance loss those of all ranks."""
    ways, rank = dist.get_world_size(), dist.get_rank()
    tokens, labels = rank_chunk(TOKENS.flatten()), rank_chunk(LABELS.flatten())
    x = model.words(tokens)
    probabilities = model.router(x).softmax(-1)  # fault: router not reduced
    gates, counts = routed(probabilities)
    dist.all_reduce(counts)
    doubled = fault == "balance loss doubled in backward"
    everywhere = GatherTokens.apply(probabilities, doubled)  # fault: balance loss doubled in backward
    balance = balance_loss(everywhere, counts)
    all_x, all_gates = GatherTokens.apply(x, True), GatherTokens.apply(gates, True)
    mine = range(rank * EXPERTS // ways, (rank + 1) * EXPERTS // ways)
    mixed = sum(all_gates[:, e : e + 1] * model.experts[e](all_x) for e in mine)
    x = x + ScatterTokens.apply(mixed)
    loss = F.cross_entropy(model.head(x), labels, reduction="sum") / TOKENS.numel()
    (loss + balance).backward()
    shared = [model.words.weight, model.head.weight]
    if fault != "router not reduced":
        shared.append(model.router.weight)
    for p in shared:
        dist.all_reduce(p.grad)  # fault: router not reduced


class Divide(torch.autograd.Function):
    """This rank's part of a dim of what all have; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return rank_chunk(x, dim=dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return joined(gradient, ctx.dim), None


class Join(torch.autograd.Function):
    """The parts of all ranks along a dim; backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return joined(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rank_chunk(gradient, dim=ctx.dim).contiguous(), None


def joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def divided_capacity(model: Mixture, fault: str) -> None:
    """All ranks have all tokens; each runs all experts on its part of the places that an expert has."""
    x = model.words(TOKENS).flatten(0, 1)
    probabilities = model.router(x).softmax(-1)
    gates, counts = routed(probabilities)
    places = ((gates > 0).T[:, :, None] * x).flatten(0, 1)
    if fault:
        places = Divide.apply(places, 1)  # fault: divided along the hidden dim
        here = places.reshape(EXPERTS, -1, HIDDEN)  # fault: divided along the hidden dim
    else:
        here = Divide.apply(places.view(EXPERTS, -1, HIDDEN), 1)
    done = [expert(tokens) for expert, tokens in zip(model.experts, here, strict=True)]
    returned = Join.apply(torch.stack(done), 1)
    mixed = torch.einsum("te,eth->th", gates, returned)
    loss = F.cross_entropy(model.head(x + mixed), LABELS.flatten())
    (loss + balance_loss(probabilities, counts)).backward()
    for p in model.experts.parameters():
        dist.all_reduce(p.grad)  # fault: divided along the hidden dim


CASES = [
    Case("divided along the hidden dim", "DeepSpeed #8195", "tp=2", Mixture, one_device, divided_capacity),
    Case(
        "experts not divided",
        "Megatron-LM #5956",
        "dp=2,ep=2",
        Mixture,
        one_device,
        expert_parallel,
        word="2 times",
    ),
    Case("wrong order of received tokens", "", "dp=2,ep=2", Mixture, one_device, expert_parallel),
    Case("balance by local counts", "", "dp=2,ep=2", Mixture, one_device, expert_parallel),
    Case("weights of this rank's experts", "", "ep=2", Mixture, one_device, replicated_tokens),
    Case("balance loss of every rank", "", "tp=2", Mixture, one_device, replicated_tokens),
    Case("bias by local counts", "", "dp=2", Biased, balanced, balanced_ranks, kind="buffer", word="bias"),
    Case("counted in recomputation", "", "dp=2", Biased, balanced, balanced_ranks, "buffer", "2 times"),
    Case(
        "balance loss doubled in backward", "Megatron-LM #7452", "tp=2", Mixture, one_device, split_sequence
    ),
    Case(
        "router not reduced",
        "Megatron-LM #599",
        "tp=2",
        Mixture,
        one_device,
        split_sequence,
        word="not reduced over tp",
    ),
]
