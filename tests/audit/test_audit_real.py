"""`autoshard.audit` on whole programs: one as torchtitan builds its Llama, and plans of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import autoshard

WIDTH, HEADS, KV_HEADS, HEAD, WORDS, LENGTH, BATCH = 16, 4, 2, 4, 32, 8, 4
TOKENS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q), rotated(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(x.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding."""
    angles = torch.outer(torch.arange(x.shape[2]), 100.0 ** -torch.linspace(0, 1, HEAD // 2))
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Parts that are None are another stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(k): Block() for k in range(2)})
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def one_device(model: Llama) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model(TOKENS), LABELS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def stage_of(model: Llama, stage: int) -> Llama:
    """The first or the second half."""
    if stage == 0:
        model.norm = model.output = None
    else:
        model.tok_embeddings = None
    del model.layers[str(1 - stage)]
    return model


def with_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    whole, parts = Replicate(), Shard(1)
    if model.tok_embeddings is not None:
        style = RowwiseParallel(input_layouts=whole, output_layouts=parts)
        parallelize_module(model, mesh, {"tok_embeddings": style})
    if model.output is not None:
        head = ColwiseParallel(input_layouts=parts, output_layouts=whole)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "output": head})
    for layer in model.layers.values():
        gathered = PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,))
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=parts),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gathered,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=parts),
        }
        parallelize_module(layer, mesh, plan)


def clip(model: nn.Module, largest: float, pp: DeviceMesh) -> None:
    """By the norm over all stages."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = norm**2
    torch.distributed.all_reduce(norm, group=pp.get_group())
    nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm**0.5)


def rank_step(model: Llama) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
    stage = pp.get_local_rank()
    model = stage_of(model, stage)
    with_tensor_parallel(model, tp)
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp, reshard_after_forward=False)
    fully_shard(model, mesh=dp, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=pp.get_group())
    schedule = Schedule1F1B(part, 2, loss_fn=loss_of)
    tokens, labels = (x.chunk(2)[dp.get_local_rank()] for x in (TOKENS, LABELS))
    schedule.step(tokens) if stage == 0 else schedule.step(target=labels)
    clip(model, 0.5, pp)
    optimizer.step()


def test_a_program_like_torchtitans_equals_one_device() -> None:
    torch.manual_seed(0)
    with autoshard.audit(Llama(), "pp=2,dp=2,tp=2", step=one_device) as audit:
        audit.rank(rank_step)
    audit.check()
    assert audit.report().splitlines()[1].startswith("proved: ")


def test_plans_of_transformers_are_told_apart() -> None:
    plans = pytest.importorskip("benchmarks.audit_plans", reason="transformers without DistributedConfig")
    if missing := {"llama", "apertus"} - set(plans.kinds()):
        pytest.skip(f"transformers has no plan of {', '.join(sorted(missing))}")
    assert plans.row("llama") == plans.Row("llama", plans.PROVED)
    (finding,) = plans.audited(plans.build("apertus")).findings
    assert "mlp.act_fn.alpha_p" in finding.what
    assert "not reduced over tp" in finding.what
    fixed = {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    assert plans.audited(plans.build("apertus"), fixed).ok
