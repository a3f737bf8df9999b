"""Started by `benchmarks.steps` on 4 processes: steps of Muon on sharded matrices, torch's and ours by turns.

Argument: the file that the first rank writes its figures to, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoshard
from benchmarks.ranks import worst_of

ROUNDS, LAYERS, HIDDEN = 3, 4, 192
SHAPES = ((HIDDEN, HIDDEN),) * 4 + ((4 * HIDDEN, HIDDEN),) * 2 + ((HIDDEN, 4 * HIDDEN),)
PLACEMENTS = {"fsdp=4": (Shard(0),), "fsdp=2,tp=2": (Shard(0), Shard(1)), "dp=4": (Replicate(),)}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    autoshard.init_process_group()
    rows: list[dict[str, object]] = []
    for name, placements in PLACEMENTS.items():
        sizes = (4,) if len(placements) == 1 else (2, 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp")[: len(sizes)])
        seconds: dict[str, list[float]] = {"torch": [], "ours": []}
        weights: dict[str, list[torch.Tensor]] = {}
        for turn in range(ROUNDS + 1):
            for side, kind in (("torch", torch.optim.Muon), ("ours", autoshard.Muon)):
                torch.manual_seed(0)
                full = [torch.randn(shape) for _ in range(LAYERS) for shape in SHAPES]
                params = [nn.Parameter(distribute_tensor(x, mesh, placements)) for x in full]
                for p in params:
                    p.grad = p.detach().clone()
                optimizer = kind(params, lr=0.02)
                dist.barrier()
                start = time.perf_counter()
                optimizer.step()
                if turn:
                    seconds[side].append(worst_of(time.perf_counter() - start))
                weights[side] = [gathered(p) for p in params]
        pairs = zip(weights["torch"], weights["ours"], strict=True)
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        medians = {side: median(each) for side, each in seconds.items()}
        rows.append({"mesh": name, **medians, "difference": difference})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def gathered(p: torch.Tensor) -> torch.Tensor:
    assert isinstance(p, DTensor)
    with torch.no_grad():
        return p.full_tensor()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
