"""``python -m benchmarks.audit_examples EXAMPLES``: the distributed programs of pytorch/examples, audited.

EXAMPLES is a checkout. Models, optimizers and trainers are those of the checkout, at small sizes; the plans
and loops, which stand in scripts that need GPUs, are written as they are there. Each has one device's step
beside it, on the rows of all ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from python_files import module_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import autoshard
from benchmarks.gpu import table

Step = Callable[[Any], None]


@dataclass(frozen=True)
class Example:
    """A program. script: in the checkout's ``distributed``. mesh: of ranks. file: that
    has the model, in the same folder."""

    script: str
    mesh: str
    model: Callable[[ModuleType | None], nn.Module]
    step: Step
    rank_step: Step
    file: str = ""

    def audit(self, checkout: Path) -> Iterator[str]:
        """Its row of the table."""
        torch.manual_seed(0)
        path = checkout / "distributed" / self.file
        module = module_of(path, f"example_{path.parent.name}") if self.file else None
        model = self.model(module)
        with sdpa_kernel(SDPBackend.MATH), autoshard.audit(model, self.mesh, step=self.step) as session:
            report = session.rank(self.rank_step)
        yield from (f"`{self.script}`", f"`{self.mesh}`")
        if not report.ok:
            yield f"{report.findings[0].what} ({report.findings[0].lines[:1]})"
        else:
            assert report.proof is not None
            yield report.proof.why or "proved"


def rows_of_rank(x: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return x.chunk(ranks)[rank]


def tokens(rows: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(0))


class Toy(nn.Module):
    """As in ``tensor_parallelism`` and ``ddp``."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.relu, self.out_proj = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.relu(self.in_proj(x)))


POINTS = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))


def toy_step(model: nn.Module, points: torch.Tensor = POINTS) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
    model(points.double()).sum().backward()
    optimizer.step()


def tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    toy_step(parallelize_module(model, mesh, plan))


def sequence_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "in_proj": ColwiseParallel(input_layouts=Shard(0)),
        "out_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    toy_step(
        parallelize_module(model, mesh, plan), rows_of_rank(POINTS, dist.get_world_size(), dist.get_rank())
    )


def ddp_step(model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    points, targets = (rows_of_rank(x, ranks, rank).double() for x in (POINTS, TARGETS))
    F.mse_loss(model(points), targets).backward()
    optimizer.step()


def ddp_rank(model: nn.Module) -> None:
    ddp_step(DistributedDataParallel(model), dist.get_rank(), dist.get_world_size())


def llama_model(module: ModuleType | None) -> nn.Module:
    assert module is not None
    return module.Transformer.from_model_args(
        module.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=16)
    )


def llama_step(model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
    """Ranks' sums are averaged by FSDP; the mean over ranks of a sum is what one device has to take."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    (model(rows_of_rank(tokens(4, 16, 64), ranks, rank)).sum() / (2 // ranks)).backward()
    optimizer.step()


def llama_ranks(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        model,
        mesh["tp"],
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), Replicate()), desired_input_layouts=(Replicate(), Replicate())
            ),
            "attention.wq": ColwiseParallel(use_local_output=False),
            "attention.wk": ColwiseParallel(use_local_output=False),
            "attention.wv": ColwiseParallel(use_local_output=False),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], plan)
    with implicit_replication():  # the mask that attention makes on a CPU is no DTensor
        llama_step(fully_shard(model, mesh=mesh["dp"]), mesh["dp"].get_local_rank(), 2)


def small_model(module: ModuleType | None) -> nn.Module:
    assert module is not None
    return module.Transformer(
        module.ModelArgs(n_layers=4, n_heads=4, vocab_size=64, max_seq_len=16, dropout_p=0)
    )


def small_step(model: Any, rank: int = 0, ranks: int = 1) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if ranks > 1:
        model.unshard()
    (model(rows_of_rank(tokens(4, 16, 64), ranks, rank)).sum() / (2 // ranks)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()


def small_ranks(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for k, layer in enumerate(model.layers):
        layer.set_modules_to_forward_prefetch(list(model.layers)[k + 1 : k + 3])
        layer.set_modules_to_backward_prefetch(list(model.layers)[max(k - 2, 0) : k])
    small_step(model, dist.get_rank(), 2)


def gpt_model(module: ModuleType | None) -> nn.Module:
    assert module is not None
    config = module.GPTConfig(
        model_type=None, n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return module.GPT(config)


def gpt_step(model: Any, rank: int = 0, ranks: int = 1) -> None:
    module = sys.modules["example_mingpt"]
    optimizer = module.create_optimizer(model, module.OptimizerConfig())
    parallel = model if ranks == 1 else DistributedDataParallel(model)
    words = rows_of_rank(tokens(4, 17, 64), ranks, rank)
    _, loss = parallel(words[:, :-1], words[:, 1:].contiguous())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
    optimizer.step()


EXAMPLES = (
    Example("tensor_parallelism/tensor_parallel_example", "tp=2", lambda _: Toy(), toy_step, tensor_parallel),
    Example(
        "tensor_parallelism/sequence_parallel_example",
        "tp=2",
        lambda _: Toy(),
        toy_step,
        sequence_parallel,
    ),
    Example(
        "tensor_parallelism/fsdp_tp_example",
        "dp=2,tp=2",
        llama_model,
        llama_step,
        llama_ranks,
        "tensor_parallelism/llama2_model.py",
    ),
    Example("FSDP2/example", "fsdp=2", small_model, small_step, small_ranks, "FSDP2/model.py"),
    Example("ddp/example", "dp=2", lambda _: Toy(), ddp_step, ddp_rank),
    Example(
        "minGPT-ddp/mingpt/trainer",
        "dp=2",
        gpt_model,
        gpt_step,
        lambda m: gpt_step(m, dist.get_rank(), 2),
        "minGPT-ddp/mingpt/model.py",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.audit_examples", description=__doc__)
    parser.add_argument("checkout", type=Path, metavar="EXAMPLES")
    checkout = parser.parse_args().checkout
    print("\n".join(table(["program", "ranks", "outcome"], [list(e.audit(checkout)) for e in EXAMPLES])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
