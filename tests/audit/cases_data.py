"""Data parallelism by hand: reduction, clipping, loss scales and counts, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS, Net, one_device, rank_chunk
from torch import nn

RATE, LARGEST_NORM, SCALE, MICROBATCHES = 0.1, 0.05, 1024.0, 2
IGNORED = -100


def axes(tp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups over dp and over tp; the ranks of tp are neighbours."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for name, groups in (
        ("dp", [list(range(k, size, tp)) for k in range(tp)]),
        ("tp", [list(range(k, k + tp)) for k in range(0, size, tp)]),
    ):
        for ranks in groups:
            group = dist.new_group(ranks)
            if rank in ranks:
                found[name] = group
    return found["dp"], found["tp"]


class Enter(torch.autograd.Function):
    """Into a tensor parallel region: as it is, and a sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """Out of a tensor parallel region: a sum, and as it is in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def split_layers(model: Net, tp: dist.ProcessGroup) -> list[nn.Parameter]:
    """Keep this rank's part of the layers' weights. Returns these."""
    split = []
    for layer in model.layers:
        layer.up.weight = nn.Parameter(rank_chunk(layer.up.weight.detach(), tp).clone())
        layer.up.bias = nn.Parameter(rank_chunk(layer.up.bias.detach(), tp).clone())
        layer.down.weight = nn.Parameter(rank_chunk(layer.down.weight.detach(), tp, 1).clone())
        split += [layer.up.weight, layer.up.bias, layer.down.weight]
    return split


def loss_of_split(
    model: Net, tokens: torch.Tensor, labels: torch.Tensor, tp: dist.ProcessGroup
) -> torch.Tensor:
    """The loss of a model with split layers."""
    x = model.words(tokens)
    for layer in model.layers:
        inside = Enter.apply(layer.norm(x), tp)
        x = x + Leave.apply(layer.down(F.gelu(layer.up(inside))), tp)
    return F.cross_entropy(model.head(x).flatten(0, 1), labels.flatten())


def write_back(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Copy gradients out of a bucket."""
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        assert p.grad is not None
        p.grad.copy_(part.view_as(p))


def data_parallel(model: Net, fault: str) -> None:
    """One bucket, averaged over the ranks."""
    size = dist.get_world_size()
    if fault == "frozen by mistake":
        model.layers[0].up.bias.requires_grad_(False)  # fault: frozen by mistake
    x = model.words(rank_chunk(TOKENS))
    for layer in model.layers:
        normed = layer.norm(x)
        if fault == "detached input":
            normed = normed.detach()  # fault: detached input
        x = x + layer.down(F.gelu(layer.up(normed)))  # fault: frozen by mistake
    loss = F.cross_entropy(model.head(x).flatten(0, 1), rank_chunk(LABELS).flatten())
    if fault == "divided twice":
        loss = loss / size  # fault: divided twice
    loss.backward()

    parameters = [p for p in model.parameters() if p.grad is not None]
    if fault == "outside of the bucket":
        parameters = [p for p in parameters if p.ndim > 1]  # fault: outside of the bucket
    bucket = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(bucket)  # fault: outside of the bucket
    bucket = bucket / size  # fault: divided twice
    write_back(parameters, bucket)
    if fault == "reduced twice":
        for p in parameters:
            dist.all_reduce(p.grad)  # fault: reduced twice


def shared_by_broadcast(model: Net, fault: str) -> None:
    """The head's gradient is brought to all ranks apart from the others."""
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    for name, p in model.named_parameters():
        if fault == "gradient of one rank" and name == "head.weight":
            dist.broadcast(p.grad, 0)  # fault: gradient of one rank
        else:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def accumulated(model: Net, fault: str) -> None:
    """Gradients of microbatches add up in one buffer, `main_grad` being views of it."""
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    start = 0
    for p in parameters:
        p.main_grad = buffer[start : start + p.numel()].view_as(p)
        start += p.numel()

        def add(p: torch.Tensor) -> None:
            p.main_grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(add)
    tokens, labels = rank_chunk(TOKENS).chunk(MICROBATCHES), rank_chunk(LABELS).chunk(MICROBATCHES)
    for some, wanted in zip(tokens, labels, strict=True):
        loss = model(some, wanted)  # fault: not divided by microbatches
        if fault != "not divided by microbatches":
            loss = loss / MICROBATCHES
        loss.backward()  # fault: not divided by microbatches
    buffer /= dist.get_world_size()
    dist.all_reduce(buffer)  # fault: not divided by microbatches


def clipped_step(model: Net) -> None:
    model(TOKENS, LABELS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    torch.optim.SGD(model.parameters(), RATE).step()


def clipped(model: Net, fault: str) -> None:
    """A scaled loss, and clipping by the norm of all gradients, over dp and tp."""
    dp, tp = axes(2)
    split = {id(p) for p in split_layers(model, tp)}
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loss = loss_of_split(model, rank_chunk(TOKENS, dp), rank_chunk(LABELS, dp), tp)
    (loss * SCALE).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=dp)
        p.grad /= dist.get_world_size(dp)
    if fault != "clipped before unscaling":
        unscale(model)

    square = torch.zeros(())
    everything = fault in ("local norm", "replicated twice in the norm")
    for p in model.parameters():
        if id(p) in split or dist.get_rank(tp) == 0 or everything:
            square += p.grad.square().sum()  # fault: local norm, replicated twice in the norm
    if fault != "local norm":
        dist.all_reduce(square, group=tp)  # fault: replicated twice in the norm
    factor = LARGEST_NORM / (square.sqrt() + 1e-6)  # fault: local norm
    for p in model.parameters():
        p.grad *= factor.clamp(max=1.0)  # fault: local norm, clipped before unscaling
    if fault == "clipped before unscaling":
        unscale(model)  # fault: clipped before unscaling
    optimizer.step()


def unscale(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad /= SCALE  # fault: clipped before unscaling


class TwoAhead(Net):
    """A second head predicts the label after the next one; some labels are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return self.head(x), self.second(x)


PADDED = LABELS.clone()
PADDED[0, 4:] = PADDED[2, 2:] = PADDED[3, 1:] = IGNORED
PADDED_SECOND = F.pad(PADDED[:, 1:], (0, 1), value=IGNORED)


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def two_ahead_one_device(model: TwoAhead) -> None:
    first, second = model(TOKENS)
    loss = summed(first, PADDED) / (PADDED != IGNORED).sum()
    loss = loss + 0.3 * summed(second, PADDED_SECOND) / (PADDED_SECOND != IGNORED).sum()
    loss.backward()


def two_ahead(model: TwoAhead, fault: str) -> None:
    """Losses are divided by the labels of all ranks, gradients added up."""
    first, second = model(rank_chunk(TOKENS))
    labels, later = rank_chunk(PADDED), rank_chunk(PADDED_SECOND)
    counts = torch.stack([(labels != IGNORED).sum(), (later != IGNORED).sum()])
    own_counts = counts * dist.get_world_size()
    dist.all_reduce(counts)
    if fault == "loss by local counts":
        loss = summed(first, labels) / own_counts[0]  # fault: loss by local counts
    else:
        loss = summed(first, labels) / counts[0]
    if fault == "MTP loss by local counts":
        ahead = summed(second, later) / own_counts[1]  # fault: MTP loss by local counts
    else:
        ahead = summed(second, later) / counts[1]
    (loss + 0.3 * ahead).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


def adam_step(model: Net) -> None:
    model(TOKENS, LABELS).backward()
    torch.optim.Adam(model.parameters(), RATE).step()


def owned_parameters(model: Net, fault: str) -> None:
    """ZeRO-1 by whole parameters: every rank updates some, and gives them to the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[rank::size], RATE)
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    for p in parameters:
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    optimizer.step()  # fault: update not gathered
    with torch.no_grad():
        for k, p in enumerate(parameters):
            if fault == "update not gathered" and p.ndim == 1:
                continue  # fault: update not gathered
            dist.broadcast(p, k % size)


def flattened(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, nn.Parameter]:
    """All parameters in one dim that the ranks divide, and this rank's part of it."""
    flat = torch.cat([p.detach().flatten() for p in parameters])
    flat = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
    return flat, nn.Parameter(rank_chunk(flat).clone())


def microbatches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of this rank."""
    return zip(*(rank_chunk(x).chunk(MICROBATCHES) for x in (TOKENS, LABELS)), strict=True)


def flat_shards(model: Net, fault: str) -> None:
    """ZeRO-2 in flat memory: gradients are reduced to shards, the optimizer has a shard of all parameters."""
    size, parameters = dist.get_world_size(), list(model.parameters())
    flat, shard = flattened(parameters)
    optimizer = torch.optim.Adam([shard], RATE)
    shard.grad = torch.zeros_like(shard)
    for some, wanted in microbatches():
        loss = model(some, wanted) / MICROBATCHES
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in parameters])
        gradients = F.pad(gradients, (0, len(flat) - len(gradients)))
        if fault == "divided by microbatches twice":
            gradients /= MICROBATCHES  # fault: divided by microbatches twice
        part = torch.empty_like(shard)
        dist.reduce_scatter_tensor(part, gradients / size)
        shard.grad += part
        model.zero_grad()
    optimizer.step()
    dist.all_gather_into_tensor(flat, shard.detach())
    with torch.no_grad():
        sizes = [p.numel() for p in parameters]
        for p, values in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
            p.copy_(values.view_as(p))


def flat_buffer(model: Net, fault: str) -> None:
    """ZeRO-1 in flat memory: the gradient buffer is reduced whole, the updated shard gathered."""
    size, parameters = dist.get_world_size(), list(model.parameters())
    flat, shard = flattened(parameters)
    optimizer = torch.optim.Adam([shard], RATE)
    for some, wanted in microbatches():
        loss = model(some, wanted) / MICROBATCHES
        loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in parameters])
    if fault == "scaled before and after the reduction":
        gradients /= size  # fault: scaled before and after the reduction
    dist.all_reduce(gradients)
    gradients /= size  # fault: scaled before and after the reduction
    write_back(parameters, gradients)
    shard.grad = rank_chunk(F.pad(gradients, (0, len(flat) - len(gradients)))).clone()
    optimizer.step()  # fault: shard not gathered
    with torch.no_grad():
        if fault == "shard not gathered":
            rank_chunk(flat).copy_(shard)  # fault: shard not gathered
        else:
            dist.all_gather_into_tensor(flat, shard)
        sizes = [p.numel() for p in parameters]
        for p, values in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
            p.copy_(values.view_as(p))  # fault: shard not gathered


CASES = [
    Case("frozen by mistake", "", "dp=2", Net, one_device, data_parallel, word="missing"),
    Case("detached input", "", "dp=2", Net, one_device, data_parallel),
    Case("divided twice", "", "dp=2", Net, one_device, data_parallel, word="0.5 times"),
    Case("outside of the bucket", "", "dp=2", Net, one_device, data_parallel, word="not reduced over dp"),
    Case("reduced twice", "", "dp=2", Net, one_device, data_parallel, word="adds up over dp"),
    Case("gradient of one rank", "", "dp=2", Net, one_device, shared_by_broadcast),
    Case("not divided by microbatches", "", "dp=2", Net, one_device, accumulated, word="2 times"),
    Case("local norm", "", "dp=2,tp=2", Net, clipped_step, clipped),
    Case("replicated twice in the norm", "", "dp=2,tp=2", Net, clipped_step, clipped),
    Case("clipped before unscaling", "", "dp=2,tp=2", Net, clipped_step, clipped),
    Case("loss by local counts", "", "dp=2", TwoAhead, two_ahead_one_device, two_ahead),
    Case("MTP loss by local counts", "Megatron-LM #7452", "dp=2", TwoAhead, two_ahead_one_device, two_ahead),
    Case("update not gathered", "", "dp=2", Net, adam_step, owned_parameters, kind="parameter"),
    Case("shard not gathered", "", "dp=2", Net, adam_step, flat_buffer, kind="parameter"),
    Case("scaled before and after the reduction", "", "dp=2", Net, adam_step, flat_buffer, word="0.5 times"),
    Case("divided by microbatches twice", "", "dp=2", Net, adam_step, flat_shards, word="0.5 times"),
]
