"""Collectives and messages that do not meet: orders, sizes, reductions, roots, groups unlike on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_data import axes, loss_of_split, split_layers
from cases_tensor import HIDDEN, LABELS, TOKENS, Net, one_device, rank_chunk
from torch import nn

IGNORED = -100


def two_axes(model: Net, fault: str) -> None:
    """Data and tensor parallel, with an overflow flag that all ranks share."""
    dp, tp = axes(2)
    split_layers(model, tp)
    loss_of_split(model, rank_chunk(TOKENS, dp), rank_chunk(LABELS, dp), tp).backward()
    over = tp if fault == "reduced over another group" else dp
    for p in model.parameters():
        dist.all_reduce(p.grad, group=over)  # fault: reduced over another group
        p.grad /= dist.get_world_size(over)
    overflow = torch.stack([p.grad.isinf().any() for p in model.parameters()]).any().double()
    groups = [tp, dp]
    if fault == "another order of groups" and dist.get_rank() in (1, 2):
        groups = [dp, tp]  # fault: another order of groups
    for group in groups:
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)  # fault: another order of groups


def reported(model: Net, fault: str) -> None:
    """Data parallel, with figures of the step that ranks share at its end."""
    labels = rank_chunk(LABELS).clone()
    loss = model(rank_chunk(TOKENS), labels)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)

    figure = loss.detach().clone()
    if fault == "reported by one rank":
        if dist.get_rank() == 0:
            dist.all_reduce(figure)  # fault: reported by one rank
        return
    dist.all_reduce(figure)

    losses = torch.stack([loss.detach()] * 4)
    if fault == "figures of different lengths":
        losses = losses[dist.get_rank() :]  # fault: figures of different lengths
    if fault == "skipped without labels" and dist.get_rank() == 1:
        return  # fault: skipped without labels
    dist.all_reduce(losses)  # fault: figures of different lengths, skipped without labels

    largest = loss.detach().clone()
    if fault == "maximum and sum" and dist.get_rank() == 1:
        dist.all_reduce(largest)  # fault: maximum and sum
    else:
        dist.all_reduce(largest, dist.ReduceOp.MAX)  # fault: maximum and sum

    seed = torch.tensor([float(dist.get_rank())])
    root = dist.get_rank() if fault == "every rank its own root" else 0  # fault: every rank its own root
    dist.broadcast(seed, root)  # fault: every rank its own root

    sizes = [3, 3 if fault == "gather of other sizes" else 2]  # fault: gather of other sizes
    parts = [torch.empty(size) for size in sizes]
    dist.all_gather(parts, torch.ones([3, 2][dist.get_rank()]))  # fault: gather of other sizes


def through(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + layer.down(F.gelu(layer.up(layer.norm(x))))


def pipeline(model: Net, fault: str) -> None:
    """Two stages, and a figure that both give each other at the end."""
    if dist.get_rank() == 0:
        x = through(model.layers[0], model.words(TOKENS))
        dist.send(x.detach(), 1)
        gradient = torch.empty_like(x)
        dist.recv(gradient, 1)
        x.backward(gradient)
    else:
        shape = (*TOKENS.shape, HIDDEN)
        if fault == "a buffer of another shape":
            shape = (TOKENS.shape[0] // 2, *shape[1:])  # fault: a buffer of another shape
        x = torch.empty(shape)
        dist.recv(x, 0)  # fault: a buffer of another shape
        x.requires_grad_()
        logits = model.head(through(model.layers[1], x)).flatten(0, 1)
        F.cross_entropy(logits, LABELS.flatten()).backward()
        dist.send(x.grad, 0)
    other, mine = 1 - dist.get_rank(), torch.ones(2)
    theirs = torch.empty(2)
    if fault == "both receive first":
        dist.recv(theirs, other)  # fault: both receive first
        dist.send(mine, other)
    else:
        request = dist.isend(mine, other)
        dist.recv(theirs, other)
        request.wait()
    if fault == "a message that nobody receives" and dist.get_rank() == 0:
        dist.send(mine, other)  # fault: a message that nobody receives


class Rows(nn.Module):
    """A linear that some rows go through on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)


ROWS = torch.randint(100, (8, HIDDEN), generator=torch.Generator().manual_seed(8)).double() / 100
SPLITS = ((3, 1), (2, 2))


def rows_one_device(model: Rows) -> None:
    model.linear(ROWS).square().mean().backward()


def exchanged_rows(model: Rows, fault: str) -> None:
    """Ranks give each other unequal numbers of rows."""
    rank = dist.get_rank()
    sent = list(SPLITS[rank])
    received = [split[rank] for split in SPLITS]
    if fault == "splits of the sender on both sides":
        received = sent  # fault: splits of the sender on both sides
    x = torch.empty(sum(received), HIDDEN)
    rows = rank_chunk(ROWS).clone()
    dist.all_to_all_single(x, rows, received, sent)  # fault: splits of the sender on both sides
    (model.linear(x).square().sum() / ROWS.numel()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


CASES = [
    Case(
        "another order of groups", "", "dp=2,tp=2", Net, one_device, two_axes, kind="deadlock", word="forever"
    ),
    Case(
        "reduced over another group", "", "dp=2,tp=2", Net, one_device, two_axes, word="not reduced over dp"
    ),
    Case("reported by one rank", "", "dp=2", Net, one_device, reported, kind="deadlock", word="ended"),
    Case(
        "figures of different lengths",
        "",
        "dp=2",
        Net,
        one_device,
        reported,
        kind="collective",
        word="different sizes",
    ),
    Case("skipped without labels", "", "dp=2", Net, one_device, reported, kind="deadlock", word="ended"),
    Case(
        "maximum and sum",
        "",
        "dp=2",
        Net,
        one_device,
        reported,
        kind="collective",
        word="reduce in different ways",
    ),
    Case(
        "every rank its own root",
        "",
        "dp=2",
        Net,
        one_device,
        reported,
        kind="collective",
        word="different source ranks",
    ),
    Case(
        "gather of other sizes", "", "dp=2", Net, one_device, reported, kind="collective", word="other sizes"
    ),
    Case(
        "a message that nobody receives",
        "",
        "pp=2",
        Net,
        one_device,
        pipeline,
        kind="collective",
        word="never receives",
    ),
    Case(
        "a buffer of another shape",
        "",
        "pp=2",
        Net,
        one_device,
        pipeline,
        kind="collective",
        word="its receiver takes",
    ),
    Case("both receive first", "", "pp=2", Net, one_device, pipeline, kind="deadlock", word="forever"),
    Case(
        "splits of the sender on both sides",
        "",
        "dp=2",
        Rows,
        rows_one_device,
        exchanged_rows,
        kind="collective",
        word="elements",
    ),
]
