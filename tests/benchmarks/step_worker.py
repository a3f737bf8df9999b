"""Started by torchrun: step times of alternatives on the same model, in alternating rounds.

Arguments: where to write the results as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.runtime.transport.transport_choice import VARIABLE
from benchmarks.by_hand import by_ddp, by_fsdp2, by_tensor_parallel
from benchmarks.models import bench_batch, bench_llama

ROUNDS, STEPS = 9, 4
#: every optional pass switched off
OFF: dict[str, Any] = {"bucket": False, "overlap": False, "kernels": False}
Step = Callable[[], float]
#: an optimizer of parameters
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: the same on both sides, and the quickest that those by hand have
PLAIN: Make = partial(torch.optim.AdamW, lr=1e-3)
FUSED: Make = partial(torch.optim.AdamW, lr=1e-3, fused=True)
OWN: Make = partial(autoshard.AdamW, lr=1e-3)


def stepper(model: nn.Module, batch: dict[str, torch.Tensor], make: Make = PLAIN) -> Step:
    """One AdamW training step as a function that returns the loss."""
    optimizer = make(model.parameters())

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def timed(step: Step) -> float:
    """Seconds of a step, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def local_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the batch, as a DistributedSampler would give it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {k: v.chunk(world)[rank] for k, v in batch.items()}


def ours(mesh: str, make: Make = PLAIN, **passes: Any) -> Step:
    """The program of a mesh."""
    batch = bench_batch()
    where: dict[str, Any] = {"mesh": mesh, "cluster": "cpu-gloo"}
    return stepper(autoshard.parallelize(bench_llama(), example_inputs=batch, **where, **passes), batch, make)


def _chosen() -> str:
    """The planner's mesh for as many processes."""
    plan = autoshard.plan(
        bench_llama(), "cpu-gloo", example_inputs=bench_batch(), devices=dist.get_world_size()
    ).plan
    return plan.mesh if plan.pipeline is None else f"pp={plan.pipeline.ranks},{plan.mesh}"


def by_hand(name: str, make: Make = PLAIN, compiled: bool = False) -> Step:
    """Training as people write it with torch. compiled: by torch.compile, with its defaults."""
    batch, world = bench_batch(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=(name,))
    model = {"fsdp": by_fsdp2, "tp": by_tensor_parallel, "dp": by_ddp}[name](bench_llama(), mesh)
    if compiled:
        model.compile()
    return stepper(model, batch if name == "tp" else local_batch(batch), make)


@dataclass(frozen=True)
class Rounds:
    """Of alternating rounds: the loss of each side's first step, and seconds of a step in every round."""

    losses: Mapping[str, float]
    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def of(cls, sides: Mapping[str, Step]) -> Rounds:
        losses = [{name: step() for name, step in sides.items()} for _ in range(2)]
        times = [{name: timed(step) for name, step in sides.items()} for _ in range(ROUNDS)]
        return cls(losses[0], {name: [row[name] for row in times] for name in sides})

    def row(self, case: str, first: str, *others: str) -> dict[str, Any]:
        """Medians; ratio: of the first to the fastest of the others in the same round."""
        ours, theirs = self.seconds[first], [self.seconds[name] for name in others]
        return {
            "case": case,
            "ours_s": statistics.median(ours),
            "other_s": {name: statistics.median(self.seconds[name]) for name in others},
            "ratio": statistics.median(a / min(rest) for a, *rest in zip(ours, *theirs, strict=True)),
            "first_losses": [self.losses[name] for name in (first, *others)],
        }


def with_and_without(mesh: str) -> Iterator[dict[str, Any]]:
    """All passes against none, each over shared memory and over gloo: four programs in the same rounds."""
    sides = {"all passes": ours(mesh), "without passes": ours(mesh, **OFF)}
    # a program keeps the transport that it starts with
    with patch.dict(os.environ, {VARIABLE: "0"}):
        sides |= {"all passes, gloo": ours(mesh), "without, over gloo": ours(mesh, **OFF)}
    found = Rounds.of(sides)
    for one, other in (
        ("all passes", "without passes"),
        ("all passes", "without, over gloo"),
        ("all passes, gloo", "without, over gloo"),
    ):
        yield found.row(f"{mesh}, {one}", one, other)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    hands = {"fsdp": "FSDP2 fully_shard", "tp": "parallelize_module", "dp": "DDP"}
    steps = {name: by_hand(name) for name in hands}
    quick: list[dict[str, Any]] = []
    for name, called in hands.items():
        mesh = f"{name}={world}"
        sides = {"torch's": ours(mesh), "own": ours(mesh, OWN), called: steps[name]}
        fastest = called
        # on the CPU torch's fused step refuses DTensors
        if name == "dp":
            fastest = f"{called}, fused"
            sides[fastest] = by_hand(name, FUSED)
        found = Rounds.of(sides)
        rows.append(found.row(mesh, "torch's", called))
        quick.append(found.row(f"{mesh}, autoshard.AdamW", "own", fastest))
    rows += quick
    for name, called in hands.items():
        fast = f"{called}, compiled"
        sides = {"inductor": ours(f"{name}={world}", codegen="inductor"), called: steps[name]}
        sides[fast] = by_hand(name, compiled=True)
        rows.append(Rounds.of(sides).row(f"{name}={world}, inductor", "inductor", called, fast))
    chosen = _chosen()
    planned = Rounds.of({"planned": ours(chosen), **{called: steps[name] for name, called in hands.items()}})
    rows.append(planned.row(f"planner's own: {chosen}", "planned", *hands.values()))
    for mesh in (f"fsdp={world}", f"dp=2,tp={world // 2}"):
        rows += with_and_without(mesh)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
