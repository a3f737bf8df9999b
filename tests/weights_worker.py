"""Started by torchrun: models on the meta device get their weights from a checkpoint.

``weights_worker.py FOLDER NAMES MESHES`` prints a line for each: ok, or what differs.
"""

from __future__ import annotations

import copy
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


def heads(folder: Path, mesh: str) -> None:
    """What the checkpoint of the bare model does not have is drawn as `from_pretrained` draws it."""
    ids = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(0))
    kwargs = {"input_ids": ids, "labels": torch.arange(8) % 3}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in ("Llama", "Bert"):
        config = getattr(transformers, f"{name}Config")(vocab_size=50, num_labels=3, pad_token_id=0, **sizes)
        base, cls = (getattr(transformers, name + end) for end in ("Model", "ForSequenceClassification"))
        if dist.get_rank() == 0:
            # saving writes into the config, which ranks must have alike for one to compile for all
            base(copy.deepcopy(config)).save_pretrained(folder / f"base-{name}")
        dist.barrier()
        torch.manual_seed(5)
        plain = cls.from_pretrained(folder / f"base-{name}", config=config).train(False)
        after = torch.rand(())
        for shared in (False, True):
            with torch.device("meta"):
                model = cls(config).train(False)
            parallel = autoshard.parallelize(model, mesh, example_inputs=kwargs)
            torch.manual_seed(5 if dist.get_rank() == 0 or not shared else 6)
            found = autoshard.load_weights(parallel, folder / f"base-{name}", strict=False, broadcast=shared)
            assert any("score" in n or "classifier" in n for n in found.missing_keys), found
            if not shared:
                assert torch.equal(torch.rand(()), after)  # random numbers go on where they would
            theirs = dict(plain.named_parameters())
            for key, x in parallel.named_parameters():
                assert torch.equal(full(x.detach()), theirs[key].detach()), key
            loss = parallel.eval_outputs(kwargs).loss
            torch.testing.assert_close(loss, plain(**kwargs).loss.detach(), rtol=1e-5, atol=1e-6)


def layers(folder: Path, mesh: str) -> None:
    """Of plain modules ``reset_parameters`` draws; what nothing draws stays without values."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), _Scaled())
    state = {"0.weight": torch.ones(8, 8), "1.bias": torch.ones(8)}
    parallel = autoshard.parallelize(model.to("meta"), mesh, example_inputs=(torch.ones(8, 8),))
    torch.manual_seed(dist.get_rank())
    found = autoshard.load_weights(parallel, state, strict=False)
    assert found.missing_keys == ["0.bias", "1.weight", "2.scale"], found
    here = dict(parallel.named_parameters())
    assert torch.equal(full(here["0.weight"].detach()), state["0.weight"])
    assert torch.equal(full(here["1.weight"].detach()), torch.ones(8))
    assert full(here["0.bias"].detach()).unique().numel() == 8
    refused(lambda: parallel(torch.ones(8, 8)), "2.scale has no values")
    autoshard.load_weights(parallel, {"2.scale": torch.ones(8)}, strict=False)
    assert torch.equal(full(here["0.weight"].detach()), state["0.weight"])
    assert parallel(torch.ones(8, 8)).shape == (8, 8)  # ranks have the same


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def little_memory(folder: Path) -> None:
    """A rank's peak is that of its shard and one tensor, not that of the model."""
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    bytes_ = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        built = transformers.LlamaForCausalLM(copy.deepcopy(config))
        built.save_pretrained(folder, max_shard_size="100MB")
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
        heads(folder, mesh)
        if "pp" not in mesh:
            layers(folder, mesh)
        if dist.get_rank() == 0:
            print("ok", mesh, "first values", flush=True)
    little_memory(folder / "large")
    if dist.get_rank() == 0:
        print("ok memory", flush=True)
    leave()


if __name__ == "__main__":
    main()
