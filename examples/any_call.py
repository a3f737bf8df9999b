"""One parallel model, called with other batch sizes, lengths, modes and arguments.

python examples/any_call.py      # starts torchrun for four processes by itself
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, **sizes)
    model = autoshard.parallelize(LlamaForCausalLM(config), "dp=2,tp=2")  # planned at the first call
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows, length in ((8, 32), (8, 48), (8, 20), (3, 32), (8, 64)):
        loss = model(**batch(rows, length)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{rows} x {length}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        given = batch(4, 16)
        logits = model(given["input_ids"]).logits
        right = (logits.argmax(-1) == given["labels"]).float().mean()
        text = model.generate(given["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
    if dist.get_rank() == 0:
        print(f"accuracy {float(right):.2f}, generated {list(text.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        from autoshard.runtime.launch import torchrun

        sys.exit(torchrun([__file__], 4).returncode)
