"""Started by torchrun: rows of experts in groups on four processes, beside the same function written out."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "passes"))

import torch
import torch.distributed as dist
from leaving import leave
from slow_links import without_latency
from test_group_rows import ALLOW, HASHES, _Grouped, _model
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard


def main() -> None:
    model, inputs = _model()
    wanted, _ = _model()
    tokens = torch.arange(inputs["labels"].numel()).chunk(4)
    wanted.layers = nn.ModuleList(_Grouped(layer, tokens, HASHES) for layer in wanted.layers)
    model = autoshard.parallelize(
        model, "ep=4", example_inputs=inputs, cluster=without_latency(), allow=ALLOW
    )
    found, loss = model(**inputs).loss, wanted(**inputs).loss
    found.backward()
    loss.backward()
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=0)
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in wanted.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), grads[name], rtol=1e-7, atol=1e-10)
    if dist.get_rank() == 0:
        print("rows in groups are equal", flush=True)


if __name__ == "__main__":
    main()
    leave()
