"""Fully sharded data parallelism: one axis, `fsdp`, and nothing else to say.

python examples/fsdp.py      # starts torchrun for four processes by itself
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import autoshard


class Language(nn.Module):
    """A small transformer, unaware of any mesh."""

    def __init__(self, vocabulary: int = 256, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq + 1] -> mean cross-entropy of the next token."""
        x, y = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.blocks(self.embed(x), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main() -> None:
    from autoshard.runtime.corpus import load_corpus
    from autoshard.runtime.train import parameter_bytes

    torch.manual_seed(0)  # every rank makes the same weights
    text = load_corpus()
    model = autoshard.parallelize(Language(), "fsdp=4", example_inputs=text.windows(8, 33, step=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        loss = model(text.windows(8, 33, step=step))  # the whole batch on every rank: each takes its part
        loss.backward()
        autoshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")
    held, whole = parameter_bytes(model)
    sizes: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, held)
    if dist.get_rank() == 0:
        print(f"bytes of parameters: {whole} in the model, {sizes} on the ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        from autoshard.runtime.launch import torchrun

        sys.exit(torchrun([__file__], 4).returncode)
