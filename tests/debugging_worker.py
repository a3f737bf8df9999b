"""Started by `ranks` in a folder: what a run tells of itself, beside the same on one process.

Arguments: the folder, into which ``AUTOSHARD_DUMP`` writes.
"""

from __future__ import annotations

import copy
import os
import resource
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import batch, build, full
from guide_blocks import run_blocks
from leaving import leave
from torch import nn

import autoshard
from autoshard.errors import AnomalyError


class Norm(nn.Module):
    """NaN for rows of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt()


class Root(nn.Module):
    """Numbers in forward; in backward the root of zero times nothing, which is NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 0.0).sqrt() + x


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(16, 16), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.up(x))


class Net(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 4096), nn.GELU(), nn.Linear(4096, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def told(model: nn.Module, x: torch.Tensor, watch_forward: bool = True) -> AnomalyError | None:
    """The error of a step in anomaly mode."""
    with torch.autograd.set_detect_anomaly(watch_forward):
        loss = model(x)
    with torch.autograd.detect_anomaly():
        try:
            loss.backward()
        except AnomalyError as error:
            assert isinstance(error, RuntimeError)
            return error
    return None


def nans(mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Net(Norm(), Norm(), Norm()), torch.randn(8, 16)
    plain = copy.deepcopy(model)
    parallel = autoshard.parallelize(model, mesh, example_inputs=x)
    assert told(parallel, x) is None
    plain(x).backward()
    for p, q in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)
    # captured inside of the mode
    assert told(parallel, torch.randn(12, 16)) is None
    with torch.no_grad():
        parallel.layers[1].up.weight.zero_()
        parallel.layers[1].up.bias.zero_()
    error = told(parallel, x)
    assert error is not None and "aten.div.Tensor of layers.1.inner on" in error.what, error
    assert error.where.startswith("debugging_worker.py:"), error
    late = told(parallel, x, watch_forward=False)
    assert late is not None and "inside detect_anomaly" in late.hint, late
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        parallel(x).backward()


def nan_on_one_rank() -> None:
    """All ranks raise, and name it."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    x[-1] = 0.0
    model = Net(Norm(), Norm())
    nn.init.zeros_(model.layers[0].up.bias)
    parallel = autoshard.parallelize(model, "dp=4", example_inputs=torch.randn(8, 16))
    error = told(parallel, x)
    assert error is not None and "layers.0.inner on" in error.what and "rank 3" in error.why, error


def nan_in_backward() -> None:
    torch.manual_seed(0)
    parallel = autoshard.parallelize(Net(Norm(), Root()), "dp=2,tp=2", example_inputs=torch.randn(8, 16))
    error = told(parallel, torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
    assert error is not None and "of layers.1.inner, backward on" in error.what, error


def out_of_memory(watched: bool) -> None:
    """With room in its address space for two of many large tensors, an allocation of the process fails."""
    torch.manual_seed(0)
    x = torch.randn(16384, 16)  # 64 MiB per rank and wide tensor
    wide = nn.Sequential(*(Wide() for _ in range(6)))
    parallel = autoshard.parallelize(wide, "dp=4", example_inputs=x)
    dist.barrier()
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20), before[1]))
    found: RuntimeError | None = None
    try:
        with torch.autograd.set_detect_anomaly(watched):
            parallel(x)
    except RuntimeError as error:
        found = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert found is not None and "DefaultCPUAllocator: " in str(found), found
    (note,) = found.__notes__
    assert f"rank {dist.get_rank()} ran out of memory in aten." in note, note
    assert "(debugging_worker.py:" in note and "64.0 MiB  0.up\n" in note and "parameters\n" in note, note
    dist.barrier()


def guide() -> None:
    names: dict[str, Any] = {"batch": batch(8, 16), "build": partial(build, "Llama")}
    run_blocks("debugging", names)
    seen, model = names["ranges"], names["model"]
    for layer in ("model.layers.0", "model.layers.1"):
        of = (f"{layer}.self_attn.q_proj", f"{layer}.mlp.down_proj backward", f"all-gather fsdp {layer}")
        assert {*of, f"wait all-gather fsdp {layer}", f"reduce-scatter fsdp {layer} backward"} <= seen, seen
    assert "searching dp=2,tp=2" in names["stages"]
    # what the profiler and the anomaly mode left are two steps; without them, the same
    looked = {n: full(p.grad).clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):
        model(**names["batch"]).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p.grad), looked[name], rtol=0, atol=0)
    model(**batch(4, 16))
    model.eval()
    model(**batch(8, 24))


def main() -> None:
    os.chdir(sys.argv[1])
    warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
    dist.init_process_group()
    out_of_memory(watched=False)
    out_of_memory(watched=True)
    os.environ["AUTOSHARD_DUMP"] = "programs"
    guide()
    del os.environ["AUTOSHARD_DUMP"]
    nans("dp=2,tp=2")
    nans("fsdp=4")
    nan_on_one_rank()
    nan_in_backward()
    if dist.get_rank() == 0:
        print("ok")
    leave()


if __name__ == "__main__":
    main()
