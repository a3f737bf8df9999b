"""Started by torchrun: models on the meta device get their weights from a checkpoint.

``weights_worker.py FOLDER NAMES MESHES`` prints a line for each: ok, or what differs.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from calls_worker import backward, batch, build, full
from leaving import leave
from torch import nn

import autoshard


def on_meta(plain: nn.Module) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = type(plain)(plain.config)
    return model


def same_as(plain: nn.Module, parallel: nn.Module) -> None:
    """Every parameter to the bit; loss and gradient norm of a step as they are."""
    theirs = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, x in [*parallel.named_parameters(), *parallel.named_buffers()]:
        assert torch.equal(full(x.detach()), theirs[name].detach()), name
    kwargs = batch(8, 16)
    loss = plain(**kwargs).loss
    if parallel.is_pipeline:
        torch.testing.assert_close(parallel.train_step(kwargs), loss.detach(), rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(full(parallel(**kwargs).loss), loss, rtol=1e-5, atol=1e-6)


def loaded(plain: nn.Module, folder: Path, mesh: str) -> None:
    parallel = autoshard.parallelize(on_meta(plain), mesh, example_inputs=batch(8, 16))
    assert all(p.is_meta for p in parallel.parameters())
    refused(lambda: backward(parallel, batch(8, 16)), "has no values")
    found = autoshard.load_weights(parallel, folder)
    assert not found.missing_keys and not found.unexpected_keys
    same_as(plain, parallel)


def broadcast(plain: nn.Module, folder: Path, mesh: str) -> None:
    parallel = autoshard.parallelize(on_meta(plain), mesh, example_inputs=batch(8, 16))
    source = folder if dist.get_rank() == 0 else None
    autoshard.load_weights(parallel, source, broadcast=True)
    same_as(plain, parallel)


def emptied(plain: nn.Module, folder: Path, mesh: str) -> None:
    """Memory without values is refused; with a state dict loaded, it is the model."""
    parallel = autoshard.parallelize(on_meta(plain), mesh, example_inputs=batch(8, 16))
    parallel.to_empty(device="cpu")
    refused(lambda: backward(parallel, batch(8, 16)), "has no values")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for p in parallel.parameters():
            p.to_local().normal_(std=0.02)
    refused(lambda: backward(parallel, batch(8, 16)), "different weights")
    parallel.load_state_dict(plain.state_dict(), strict=not parallel.is_pipeline)
    same_as(plain, parallel)


def trains(plain: nn.Module, folder: Path, mesh: str) -> None:
    """An optimizer that was made before the weights were loaded trains them."""
    parallel = autoshard.parallelize(on_meta(plain), mesh, example_inputs=batch(8, 16))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, plain))
    autoshard.load_weights(parallel, folder)
    for _ in range(2):
        backward(parallel, batch(8, 16))
        backward(plain, batch(8, 16))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    theirs_now = dict(plain.named_parameters())
    for name, p in parallel.named_parameters():
        torch.testing.assert_close(full(p.detach()), theirs_now[name].detach(), rtol=1e-4, atol=1e-6)


def refusals(plain: nn.Module, folder: Path, mesh: str) -> None:
    parallel = autoshard.parallelize(on_meta(plain), mesh, example_inputs=batch(8, 16))
    state = {n: x.detach() for n, x in plain.state_dict().items()}
    first = next(iter(state))
    refused(lambda: autoshard.load_weights(parallel, folder / "none"), "cannot be read")
    refused(lambda: autoshard.load_weights(parallel, {**state, "other": torch.ones(1)}), "an unknown other")
    refused(lambda: autoshard.load_weights(parallel, {**state, first: torch.ones(1)}), "has shape [1]")
    # one rank alone has a problem: all are told
    here = state if dist.get_rank() else {**state, "other": torch.ones(1)}
    refused(lambda: autoshard.load_weights(parallel, here), "other")
    assert all(p.is_meta for p in parallel.parameters())
    del state[first]
    refused(lambda: autoshard.load_weights(parallel, state), f"no {first}")
    assert autoshard.load_weights(parallel, state, strict=False).missing_keys == [first]


def little_memory(folder: Path) -> None:
    """A rank's peak is that of its shard and one tensor, not that of the model."""
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    bytes_ = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="100MB")
    dist.barrier()
    ids = torch.zeros(4, 8, dtype=torch.int64)
    parallel = autoshard.parallelize(model, "fsdp=4", example_inputs={"input_ids": ids, "labels": ids})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    autoshard.load_weights(parallel, folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # the first rank built the model: its peak lies behind it
    grown = after - resident if after > before else 0
    print(
        f"memory: model {bytes_ >> 20} MiB, largest tensor {largest >> 20}, grown by {grown >> 20}",
        flush=True,
    )
    assert grown < bytes_ / 4 + 3 * largest, grown


def refused(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except autoshard.UsageError as error:
        assert what in str(error), error
    else:
        raise AssertionError(f"not refused: {what}")


def main() -> None:
    dist.init_process_group()
    folder, names, meshes = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(";")
    for name in names:
        if dist.get_rank() == 0:
            build(name).save_pretrained(folder / name, max_shard_size="20kB")
    dist.barrier()
    for mesh in meshes:
        for name in names:
            for case in (loaded, broadcast, emptied, trains, refusals):
                if name != names[0] and case is not loaded:
                    continue
                case(build(name), folder / name, mesh)
                if dist.get_rank() == 0:
                    print("ok", mesh, name, case.__name__, flush=True)
    little_memory(folder / "large")
    if dist.get_rank() == 0:
        print("ok memory", flush=True)
    leave()


if __name__ == "__main__":
    main()
