"""Programs of tests/audit written for spmd_types: annotated, with its collectives in place of theirs.

A mark `# fault:` is on the lines where a fault is, or where its wrong value is first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import cases_tensor  # type: ignore[import-not-found]
import cases_vocabulary as vocabulary  # type: ignore[import-not-found]
import spmd_types as spmd  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases_experts import EXPERTS, balance_loss, routed  # type: ignore[import-not-found]
from cases_sequence import LAST_LABELS, LAST_TOKENS, dropout_mask  # type: ignore[import-not-found]
from cases_tensor import HIDDEN, LABELS, TOKENS
from cases_torch import loss_of  # type: ignore[import-not-found]
from spmd_types import I, P, R, S, V
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

MASK = dropout_mask((*LAST_LABELS.shape, HIDDEN), 5)


@spmd.no_typecheck
def rank_chunk(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's part, which has no type yet."""
    return cases_tensor.rank_chunk(x, dim=dim).clone()


def inputs(kind: Any, *tensors: torch.Tensor) -> Any:
    """Of a type."""
    with spmd.no_typecheck():
        copies = [x.clone() for x in tensors]
    return spmd.assert_type(copies, kind)


def reduced(parameters: Sequence[nn.Parameter], some: Sequence[nn.Parameter] | None = None) -> None:
    """Sum the gradients over ranks; of some only, where that is the fault."""
    spmd.assert_type([p.grad for p in parameters], P)
    for p in parameters if some is None else some:
        dist.all_reduce(p.grad)
    spmd.assert_type([p.grad for p in parameters], R)  # fault: norms not reduced, router not reduced


def split_layers(model: Any, layers: Iterable[Any], rest: Any) -> None:
    """Keep this rank's part of the layers. What is not split is I or R."""
    for layer in layers:
        layer.up.weight, layer.up.bias = (nn.Parameter(rank_chunk(p.data)) for p in layer.up.parameters())
        layer.down.weight = nn.Parameter(rank_chunk(layer.down.weight.data, dim=1))
        spmd.assert_type([layer.up.weight, layer.up.bias, layer.down.weight], V)
    spmd.assert_type([p for p in model.parameters() if not spmd.has_local_type(p)], rest)


class FromRanks(cases_tensor.FromRanks):
    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor) -> Any:
        return spmd.rules.all_reduce(x, dist.group.WORLD, src=V, dst=I)


def layers(model: Any, mesh: DeviceMesh, fault: str, hook: bool = False) -> None:
    tp = mesh.get_group()
    split_layers(model, model.layers, I)
    tokens, labels = inputs(I, TOKENS, LABELS)
    x = model.words(tokens)
    for layer in model.layers:
        normed = layer.norm(x)
        if fault != "no sum of input gradients":
            normed = spmd.invariant_to_replicate(normed, tp)
        parts = layer.down(F.gelu(layer.up(normed)))  # fault: no sum of input gradients
        if hook:
            x = x + FromRanks.apply(parts, fault)
            continue
        way = R if fault == "sum in both directions" else I
        summed = spmd.all_reduce(parts, tp, dst=way)  # fault: sum in both directions
        x = x + summed  # fault: sum in both directions
    loss_of(model.head(x), labels).backward()


class SplitCrossEntropy(vocabulary.SplitCrossEntropy):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any, fault: str) -> torch.Tensor:
        start = dist.get_rank(group) * logits.shape[1]
        return vocabulary.SplitCrossEntropy.forward(ctx, logits, labels, start, fault)

    @staticmethod
    def spmd_typecheck(loss: torch.Tensor, *, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> None:
        spmd.assert_type(logits, {group: S(1)})
        spmd.rules.ignore(labels)
        spmd.assert_type(loss, {group: I})


def split_words(model: Any, mesh: DeviceMesh, fault: str) -> None:
    tp = mesh.get_group()
    start, rows = vocabulary.first_row("")
    with spmd.no_typecheck():
        for module in (model.words, model.head):
            module.weight = vocabulary.some_rows(module.weight, start, rows)
    spmd.assert_type([model.words.weight, model.head.weight], V)
    split_layers(model, [model.layer], I)
    tokens, labels = inputs(I, vocabulary.WORDS, vocabulary.LABELS)
    outside = (tokens < start) | (tokens >= start + rows)
    x = model.words((tokens - start).clamp(0, rows - 1)).masked_fill(outside[..., None], 0.0)
    x = spmd.all_reduce(x, tp, dst=I)
    inner = F.gelu(model.layer.up(spmd.invariant_to_replicate(model.layer.norm(x), tp)))
    down, bias = model.layer.down.weight, model.layer.down.bias
    if fault == "bias on every rank":
        x = x + spmd.all_reduce(F.linear(inner, down, bias), tp, dst=I)  # fault: bias on every rank
    else:
        x = x + spmd.all_reduce(F.linear(inner, down), tp, dst=I) + bias
    if fault != "no sum before the head":
        x = spmd.invariant_to_replicate(x, tp)
    padding = torch.arange(start, start + rows) >= vocabulary.ROWS
    logits = model.head(x).masked_fill(padding, -torch.inf).flatten(0, 1)  # fault: no sum before the head
    SplitCrossEntropy.apply(logits, labels.flatten(), tp, fault).backward()


def sequence_parallel(model: Any, mesh: DeviceMesh, fault: str) -> None:
    tp = mesh.get_group()
    spmd.assert_type(model.head.weight, I)
    split_layers(model, model.layers, R)
    (tokens,), (labels, mask) = inputs(V, rank_chunk(LAST_TOKENS)), inputs(I, LAST_LABELS, MASK)
    x = model.words(tokens)
    for layer in model.layers:
        way = I if fault == "slice behind split linear" else R
        whole = spmd.all_gather(layer.norm(x), tp, src=S(0), dst=way)  # fault: slice behind split linear
        inner = layer.down(F.gelu(layer.up(whole)))  # fault: slice behind split linear
        x = x + spmd.reduce_scatter(inner, tp, dst=S(0))
    way = R if fault == "sum behind replicated head" else I
    whole = spmd.all_gather(x, tp, src=S(0), dst=way)  # fault: sum behind replicated head
    logits = model.head(whole * mask)  # fault: sum behind replicated head
    loss_of(logits, labels).backward()
    norms = [p for layer in model.layers for p in layer.norm.parameters()]
    reduced([model.words.weight, *norms], [model.words.weight] if fault == "norms not reduced" else None)


def data_parallel(model: Any, mesh: DeviceMesh, fault: str) -> None:
    dp = mesh.get_group()
    everything = spmd.assert_type(list(model.parameters()), R)
    tokens, labels = inputs(V, rank_chunk(TOKENS), rank_chunk(LABELS))
    loss = model(tokens, labels)
    if fault == "gradient of a summed loss":
        spmd.all_reduce(loss, dp, dst=R).backward()  # fault: gradient of a summed loss
    else:
        spmd.reinterpret(loss, dp, src=V, dst=P).backward()
    spmd.assert_type([p.grad for p in everything], P)
    parameters = [p for p in everything if p.ndim > 1 or fault != "outside of the bucket"]
    bucket = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(bucket)  # fault: outside of the bucket
    written(parameters, bucket / dist.get_world_size())
    if fault == "reduced twice":
        for p in parameters:
            dist.all_reduce(p.grad)  # fault: reduced twice
    spmd.assert_type([p.grad for p in everything], R)  # fault: outside of the bucket


def written(parameters: Sequence[nn.Parameter], flat: torch.Tensor) -> None:
    """Copy gradients out of a bucket."""
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        spmd.mutate_type(p.grad, src=P, dst=R).copy_(part.view_as(p))


def flat_buffer(model: Any, mesh: DeviceMesh, fault: str) -> None:
    data_parallel(model, mesh, "")
    dp, parameters = mesh.get_group(), list(model.parameters())
    with torch.no_grad():
        flat = torch.cat([p.flatten() for p in parameters])
        step = 0.1 * torch.cat([p.grad.flatten() for p in parameters])
        shard = spmd.convert(flat - step, dp, src=R, dst=S(0)).clone()
        if fault:
            cases_tensor.rank_chunk(flat).copy_(shard)  # fault: shard not gathered
        else:
            dist.all_gather_into_tensor(flat, shard)
        for p, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.copy_(values.view_as(p))  # fault: shard not gathered


def split_sequence(model: Any, mesh: DeviceMesh, fault: str) -> None:
    tp = mesh.get_group()
    mine = range(EXPERTS // 2) if dist.get_rank() == 0 else range(EXPERTS // 2, EXPERTS)
    shared = spmd.assert_type([model.words.weight, model.head.weight, model.router.weight], R)
    spmd.assert_type([p for e in mine for p in model.experts[e].parameters()], V)
    tokens, labels = (x.flatten() for x in inputs(V, rank_chunk(TOKENS), rank_chunk(LABELS)))
    x = model.words(tokens)
    likely = model.router(x).softmax(-1)
    gates, counts = routed(likely)
    counts = spmd.all_reduce(counts, tp, dst=R)
    way = R if fault == "balance loss doubled in backward" else I
    likely = spmd.all_gather(likely, tp, src=S(0), dst=way)  # fault: balance loss doubled in backward
    balance = balance_loss(likely, counts)
    all_x, all_gates = (spmd.all_gather(part, tp, src=S(0), dst=R) for part in (x, gates))
    mixed = sum(all_gates[:, e : e + 1] * model.experts[e](all_x) for e in mine)
    x = x + spmd.reduce_scatter(mixed, tp, dst=S(0))
    loss = F.cross_entropy(model.head(x), labels, reduction="sum") / TOKENS.numel()
    loss = spmd.reinterpret(loss, tp, src=V, dst=P)
    ways: Any = {"src": I, "dst": P, "expert_mode": True}
    loss = loss + spmd.convert(balance, tp, **ways)  # fault: balance loss doubled in backward
    loss.backward()
    reduced(shared, shared[:2] if fault == "router not reduced" else None)


def boundaries(model: Any, mesh: DeviceMesh, fault: str) -> None:
    tp = mesh.get_group()
    split_layers(model, model.layers, I)
    tokens, labels = inputs(I, TOKENS, LABELS)
    x: Any = DTensor.from_local(model.words(tokens), mesh, [Replicate()])
    for layer in model.layers:
        normed = layer.norm(x.to_local())
        if fault != "to_local without grad_placements":
            normed = DTensor.from_local(normed, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        parts = layer.down(F.gelu(layer.up(normed)))  # fault: to_local without grad_placements
        parts = spmd.reinterpret(parts, tp, src=V, dst=P)
        way = Replicate() if fault == "partial sums called replicated" else Partial()
        added = DTensor.from_local(parts, mesh, [way])  # fault: partial sums called replicated
        x = x + added.redistribute(placements=[Replicate()])
    loss_of(model.head(x.to_local()), labels).backward()


#: what runs, what else was written for it, and its faults
PROGRAMS: list[tuple[Any, tuple[Any, ...], str]] = [
    (layers, (split_layers,), "sum in both directions; no sum of input gradients"),
    (partial(layers, hook=True), (split_layers, FromRanks), "sum in both directions"),
    (split_words, (SplitCrossEntropy, split_layers), "bias on every rank; no sum before the head"),
    (split_words, (SplitCrossEntropy, split_layers), "largest logit not reduced; sum of powers not reduced"),
    (sequence_parallel, (split_layers, reduced), "norms not reduced; slice behind split linear"),
    (sequence_parallel, (split_layers, reduced), "sum behind replicated head"),
    (data_parallel, (written,), "outside of the bucket; reduced twice; gradient of a summed loss"),
    (flat_buffer, (data_parallel, written), "shard not gathered"),
    (split_sequence, (reduced,), "balance loss doubled in backward; router not reduced"),
    (boundaries, (split_layers,), "to_local without grad_placements; partial sums called replicated"),
]
