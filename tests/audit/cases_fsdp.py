"""Data parallelism with torch's FSDP2 and DistributedDataParallel, adapters, clipping, optimizers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import Case
from cases_tensor import HIDDEN, LABELS, TOKENS, WORDS, Net, one_device, rank_chunk
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

#: of the last tokens, which no loss is of
IGNORED = -100
UNEVEN = torch.where(torch.arange(6) < torch.tensor([[6], [5], [2], [1]]), LABELS, IGNORED)
LARGEST = 0.1


def sharded(model: Net) -> Net:
    """The model with FSDP around each layer and all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def averaged(parameters: Iterable[nn.Parameter]) -> None:
    """Reduce gradients by hand."""
    for p in parameters:
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)  # fault: gradients in another order


class Layer(nn.Module):
    """A layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)  # fault: gradients of ignored parameters
        return x + self.down(F.gelu(self.up(normed)))


class Called(nn.Module):
    """Two layers, and a scale that the model itself uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def called_of_one_device(model: Called) -> None:
    model(TOKENS, LABELS).backward()


def accumulated(model: Called, fault: str) -> None:
    """Two microbatches; gradients are reduced with the last."""
    sharded(model)
    tokens, labels = rank_chunk(TOKENS).chunk(2), rank_chunk(LABELS).chunk(2)
    for k in range(2):
        if fault != "reduction stays off":
            model.set_requires_gradient_sync(k == 1)
        else:
            model.set_requires_gradient_sync(False)  # fault: reduction stays off
        loss = model(tokens[k], labels[k])
        if fault != "microbatches are not divided":
            loss = loss / 2
        loss.backward()  # fault: microbatches are not divided, reduction stays off


def divided(model: Called, fault: str) -> None:
    """Gradients are summed over ranks and divided by the number of all tokens."""
    sharded(model)
    factor = 2.0 if fault == "wrong divide factor" else 1.0
    for module in (model, *model.layers):
        module.set_gradient_divide_factor(factor)
    loss = model(rank_chunk(TOKENS), rank_chunk(LABELS))
    (loss / dist.get_world_size()).backward()  # fault: wrong divide factor


def ignored(model: Called, fault: str) -> None:
    """Norms stay whole on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    norms = [p for layer in model.layers for p in layer.norm.parameters()]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=set(norms))
    fully_shard(model, mesh=mesh, ignored_params=set(norms))
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    if fault == "gradients in another order" and dist.get_rank():
        norms.reverse()
    if fault != "gradients of ignored parameters":
        averaged(norms)  # fault: gradients in another order


class Tied(nn.Module):
    """Its loss also uses a weight outside of the module that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layer = Layer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(tokens))


def tied_of_one_device(model: Tied) -> None:
    x = model(TOKENS)
    F.cross_entropy((x @ model.words.weight.T).flatten(0, 1), LABELS.flatten()).backward()


def tied(model: Tied, fault: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for module in (model.words, model.layer, model):
        fully_shard(module, mesh=mesh)
    x = model(rank_chunk(TOKENS))
    weight = model.words.weight
    assert isinstance(weight, DTensor)
    if fault == "gathered weight outside of its module":
        whole = weight.full_tensor()  # fault: gathered weight outside of its module
    else:
        whole = weight.full_tensor(grad_placements=[Partial("avg")])
    scores = x @ whole.T  # fault: gathered weight outside of its module
    F.cross_entropy(scores.flatten(0, 1), rank_chunk(LABELS).flatten()).backward()


def wrapped(model: Net, fault: str) -> None:
    """Gradients of two microbatches, reduced by DistributedDataParallel."""
    wrapper = DistributedDataParallel(model)
    tokens, labels = rank_chunk(TOKENS).chunk(2), rank_chunk(LABELS).chunk(2)
    with wrapper.no_sync():
        (wrapper(tokens[0], labels[0]) / 2).backward()
        if fault == "no_sync around all":
            (wrapper(tokens[1], labels[1]) / 2).backward()  # fault: no_sync around all
            return
    if fault == "module inside of the wrapper":
        loss = wrapper.module(tokens[1], labels[1])  # fault: module inside of the wrapper
    else:
        loss = wrapper(tokens[1], labels[1])
    (loss / 2).backward()  # fault: module inside of the wrapper


def uneven_of_one_device(model: Net) -> None:
    model(TOKENS, UNEVEN).backward()


def uneven(model: Net, fault: str) -> None:
    """Ranks have different numbers of labels."""
    wrapper = DistributedDataParallel(model)
    labels = rank_chunk(UNEVEN)
    loss = wrapper(rank_chunk(TOKENS), labels)
    if fault != "mean of each rank":
        count = (labels != IGNORED).sum()
        total = count.clone()
        dist.all_reduce(total)
        loss = loss * count / total * dist.get_world_size()
    loss.backward()  # fault: mean of each rank


class Logits(Net):
    """Gives scores, not a loss."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
        return self.head(x)


def logits_of_one_device(model: Logits) -> None:
    F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten()).backward()


def summed(model: Logits, fault: str) -> None:
    """A sum over the tokens of a rank, divided by the number of all of them; averaged by the wrapper."""
    wrapper = DistributedDataParallel(model)
    scores = wrapper(rank_chunk(TOKENS)).flatten(0, 1)
    labels = rank_chunk(LABELS).flatten()
    loss = F.cross_entropy(scores, labels, reduction="sum")
    if fault == "sum that is averaged":
        loss = loss / LABELS.numel()  # fault: sum that is averaged
    else:
        loss = loss / LABELS.numel() * dist.get_world_size()
    loss.backward()  # fault: sum that is averaged


class Routed(nn.Module):
    """Words of some sentences go through one more matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        parts = [x[~seconds], x[seconds]]
        if len(parts[0]):
            parts[0] = torch.tanh(self.first(parts[0]))
        if len(parts[1]):
            parts[1] = torch.tanh(self.second(parts[1]))
        scores = self.head(torch.cat(parts))
        order = torch.cat([labels[~seconds], labels[seconds]])
        return F.cross_entropy(scores.flatten(0, 1), order.flatten())


#: of sentences, whether they go through the second matrix
HALF = torch.tensor([False, False, True, True])
ONE = torch.tensor([False, False, False, True])


def half_of_one_device(model: Routed) -> None:
    model(TOKENS, LABELS, HALF).backward()


def half(model: Routed, fault: str) -> None:
    """Rank 0 has the sentences of the first matrix, rank 1 those of the second."""
    model(rank_chunk(TOKENS), rank_chunk(LABELS), rank_chunk(HALF)).backward()
    reduced_if_any(model, fault)


def one_of_one_device(model: Routed) -> None:
    model(TOKENS, LABELS, ONE).backward()


def one(model: Routed, fault: str) -> None:
    """Rank 1 has sentences of both matrices, rank 0 of the first."""
    model(rank_chunk(TOKENS), rank_chunk(LABELS), rank_chunk(ONE)).backward()
    reduced_if_any(model, fault)


def reduced_if_any(model: Routed, fault: str) -> None:
    for p in model.parameters():
        if p.grad is None and fault:
            continue  # fault: gradients of two weights are added, one rank reduces more
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)  # fault: gradients of two weights are added, one rank reduces more
        p.grad /= dist.get_world_size()


class Adapted(nn.Module):
    """A frozen matrix with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN).requires_grad_(False)
        self.base = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(HIDDEN, 4, bias=False)
        self.lora_b = nn.Linear(4, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        low = self.lora_a(x)  # fault: adapters of one rank, adapters beside sharded weights
        x = torch.tanh(self.base(x) + self.lora_b(low))  # fault: adapters beside sharded weights
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def adapted_of_one_device(model: Adapted) -> None:
    model(TOKENS, LABELS).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def adapted(model: Adapted, fault: str) -> None:
    """Adapters in FSDP's shards, or whole beside them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    adapters = [*model.lora_a.parameters(), *model.lora_b.parameters()]
    beside = fault == "adapters beside sharded weights"
    fully_shard(model, mesh=mesh, ignored_params=set(adapters) if beside else None)
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    trained = [p for name, p in model.named_parameters() if "lora" in name]
    if fault == "adapters of one rank" and dist.get_rank():
        trained = [*model.head.parameters()]  # fault: adapters of one rank
    torch.optim.SGD(trained, lr=0.1).step()  # fault: adapters of one rank


def clipped_of_one_device(model: Called) -> None:
    model(TOKENS, LABELS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def clipped(model: Called, fault: str) -> None:
    """Clip what FSDP has reduced."""
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    if fault == "norm of a shard":
        gradients = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([g.norm() for g in gradients]).norm()  # fault: norm of a shard
        for g in gradients:
            g.mul_(LARGEST / norm)  # fault: norm of a shard
    else:
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
    optimizer.step()


def stepped_of_one_device(model: Called) -> None:
    model(TOKENS, LABELS).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def stepped(model: Called, fault: str) -> None:
    """One step of an optimizer."""
    if fault == "optimizer before fully_shard":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # fault: optimizer before fully_shard
        sharded(model)
    else:
        sharded(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rank_chunk(TOKENS), rank_chunk(LABELS)).backward()
    if fault != "step on one rank" or not dist.get_rank():
        optimizer.step()  # fault: step on one rank, optimizer before fully_shard


def cleared_late(model: Called, fault: str) -> None:
    """Gradients are set to zero, in the wrong place or the right one."""
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens, labels = rank_chunk(TOKENS).chunk(2), rank_chunk(LABELS).chunk(2)
    for k in range(2):
        loss = wrapper(tokens[k], labels[k]) / 2
        loss.backward()  # fault: gradients cleared between microbatches
        if fault == "gradients cleared between microbatches" and not k:
            optimizer.zero_grad()  # fault: gradients cleared between microbatches
    optimizer.step()


CASES = [
    Case("reduction stays off", "", "dp=2", Called, called_of_one_device, accumulated, word="is missing"),
    Case(
        "microbatches are not divided", "", "dp=2", Called, called_of_one_device, accumulated, word="2 times"
    ),
    Case("wrong divide factor", "", "dp=2", Called, called_of_one_device, divided, word="0.5 times"),
    Case(
        "gradients of ignored parameters",
        "pytorch/pytorch#98281",
        "dp=2",
        Called,
        called_of_one_device,
        ignored,
        word="not reduced over dp",
    ),
    Case("gathered weight outside of its module", "", "dp=2", Tied, tied_of_one_device, tied),
    Case("no_sync around all", "", "dp=2", Net, one_device, wrapped, word="not reduced over dp"),
    Case("module inside of the wrapper", "", "dp=2", Net, one_device, wrapped, word="not reduced over dp"),
    Case(
        "mean of each rank",
        "huggingface/transformers#34242",
        "dp=2",
        Net,
        uneven_of_one_device,
        uneven,
    ),
    Case("sum that is averaged", "", "dp=2", Logits, logits_of_one_device, summed, word="0.5 times"),
    Case(
        "gradients in another order",
        "",
        "dp=2",
        Called,
        called_of_one_device,
        ignored,
    ),
    Case("gradients of two weights are added", "", "dp=2", Routed, half_of_one_device, half),
    Case("one rank reduces more", "", "dp=2", Routed, one_of_one_device, one, kind="collective"),
    Case(
        "adapters of one rank",
        "axolotl-ai-cloud/axolotl#3977",
        "dp=2",
        Adapted,
        adapted_of_one_device,
        adapted,
        kind="parameter",
        word="not changed by the step",
    ),
    Case(
        "adapters beside sharded weights",
        "huggingface/transformers#48792",
        "dp=2",
        Adapted,
        adapted_of_one_device,
        adapted,
        word="not reduced over dp",
    ),
    Case("norm of a shard", "", "dp=2", Called, clipped_of_one_device, clipped, word="differently on ranks"),
    Case(
        "optimizer before fully_shard",
        "huggingface/accelerate#3394",
        "dp=2",
        Called,
        stepped_of_one_device,
        stepped,
        kind="parameter",
        word="not changed by the step",
    ),
    Case(
        "step on one rank",
        "",
        "dp=2",
        Called,
        stepped_of_one_device,
        stepped,
        kind="parameter",
        word="not changed by the step",
    ),
    Case("gradients cleared between microbatches", "", "dp=2", Called, stepped_of_one_device, cleared_late),
]
