"""Started by torchrun: steps of a long sequence over all ranks, beside Ulysses as people write it with torch.

torch's own ``context_parallel`` has no CPU kernels. Arguments: where to write the rows as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoshard
from benchmarks.step_worker import PLAIN, Rounds, Step, stepper

LENGTHS, VOCAB = (2048, 4096), 1024


def model_of() -> nn.Module:
    """A Llama of 2 layers of 256 with 8 heads and 2 key-value heads, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=704, vocab_size=VOCAB, **heads
    )
    config.use_cache = False
    return LlamaForCausalLM(config)


def batch_of(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


class _Exchange(torch.autograd.Function):
    """Heads for tokens: [b, h, s / n, d] -> [b, h / n, s, d]; or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.back, n = back, dist.get_world_size()
        parts = x.chunk(n, 2 if back else 1)
        sent = torch.stack([p.contiguous() for p in parts])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return torch.cat(got.unbind(), 1 if back else 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(grad.contiguous(), not ctx.back), None


def _attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, **given: Any
) -> tuple[torch.Tensor, None]:
    """Attention of some heads over all tokens; key-value heads are repeated to divide by the ranks."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q, k, v = (_Exchange.apply(x, False) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scaling"])
    return _Exchange.apply(out, True).transpose(1, 2).contiguous(), None


def ulysses(length: int) -> Step:
    """This rank's tokens, with their positions, and the labels behind them."""
    from transformers import AttentionInterface

    AttentionInterface.register("ulysses", _attention)
    model = model_of()
    model.set_attn_implementation("ulysses")  # type: ignore[operator]
    rank, world, batch = dist.get_rank(), dist.get_world_size(), batch_of(length)
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    whole = {
        "input_ids": batch["input_ids"],
        "position_ids": torch.arange(length)[None],
        "shift_labels": shifted,
    }
    local = {name: x.chunk(world, 1)[rank].contiguous() for name, x in whole.items()}
    # each rank's sum over the mean number of labels of a rank: gradients are averaged
    local["labels"], counted = local["input_ids"], torch.tensor((length - 1) / world)
    return stepper(DistributedDataParallel(model), {**local, "num_items_in_batch": counted}, PLAIN)


def ours(length: int) -> Step:
    batch = batch_of(length)
    mesh = f"cp={dist.get_world_size()}"
    model = autoshard.parallelize(model_of(), mesh, example_inputs=batch, cluster="cpu-gloo")
    return stepper(model, batch, PLAIN)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for length in LENGTHS:
        found = Rounds.of({"ours": ours(length), "Ulysses by hand": ulysses(length)})
        rows.append(found.row(f"1 x {length}", "ours", "Ulysses by hand"))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
