"""Started by `ranks`: what users do to a model before and after it is parallelized, beside eager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from leaving import leave
from sampling import all_cases, sampled
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.torch_adapters.groups import timeout_of


class Net(nn.Module):
    """A loss, and what it was computed from."""

    sign = 1.0

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 8)
        self.more = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.more(self.down(self.drop(torch.tanh(self.up(x)))))
        return {"loss": y.pow(2).mean() * self.scale * self.sign, "logits": y}


def batch(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(a: Any, b: Any, what: str) -> None:
    assert torch.allclose(full(a).float(), full(b).float(), rtol=1e-4, atol=1e-6), (what, full(a), full(b))


def same_gradients(parallel: nn.Module, eager: nn.Module, what: str) -> None:
    wanted = dict(eager.named_parameters())
    for name, p in parallel.named_parameters():
        if p is not None and wanted[name].grad is not None:
            assert p.grad is not None, (what, name)
            close(p.grad, wanted[name].grad, f"{what}: gradient of {name}")


def refused(run: Any, words: str, kind: type[Exception] = autoshard.UsageError) -> None:
    """Every rank raises, and names what it is about."""
    try:
        run()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"nothing was raised about {words}")


def hooks(mesh: str) -> None:
    """On the model, on a submodule, on gradients: each runs as often as it does for the eager model."""
    seen: dict[str, list[str]] = {"eager": [], "parallel": []}
    models = {}
    for kind, notes in seen.items():
        net, note = Net(), notes.append
        net.down.register_forward_hook(lambda module, args, out: out * 3)
        net.up.weight.register_hook(lambda grad: grad * 2)
        net.down.bias.register_post_accumulate_grad_hook(lambda p, note=note: note("accumulated"))
        if "pp" not in mesh:
            net.register_forward_hook(lambda module, args, out, note=note: note("called"))
        models[kind] = net
    eager = models["eager"]
    parallel = autoshard.parallelize(models["parallel"], mesh, example_inputs=batch(), microbatches=None)
    parallel.to("cpu").float()  # changes nothing
    eager(batch())["loss"].backward()
    if "pp" in mesh:
        parallel.train_step(batch())
    else:
        parallel(batch())["loss"].backward()
    same_gradients(parallel, eager, f"hooks on {mesh}")
    if "pp" not in mesh:
        assert seen["parallel"] == seen["eager"], seen
        for model in (parallel, eager):  # later, on a submodule
            model.up.register_forward_hook(lambda module, args, out: out * 2)
        close(parallel(batch())["loss"], eager(batch())["loss"], f"a hook that comes later on {mesh}")


def losses_beside_the_loss(mesh: str) -> None:
    """A loss on the logits, with and without the model's own; twice, as the second call knows."""
    eager, parallel = Net(), autoshard.parallelize(Net(), mesh, example_inputs=batch())
    for weights in ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)):
        for model in (eager, parallel):
            model.zero_grad()
            out = model(batch(3))
            assert out["logits"].requires_grad
            loss = weights[0] * out["loss"] if weights[0] else 0.0
            if weights[1]:
                loss = loss + weights[1] * full(out["logits"]).exp().mean()
            loss.backward()
        same_gradients(parallel, eager, f"loss with weights {weights} on {mesh}")


def attributes() -> None:
    """Changed ones are followed, and so is what is put back."""
    eager, parallel = Net(), autoshard.parallelize(Net(), "dp=2,tp=2", example_inputs=batch())
    wanted = float(parallel(batch())["loss"])

    def alike(what: str) -> None:
        close(parallel(batch())["loss"].detach().float(), eager(batch())["loss"].detach().float(), what)

    parallel.scale = eager.scale = 5.0
    alike("another scale")
    parallel.scale = eager.scale = 0.5
    parallel.eval()
    assert float(parallel(batch())["loss"]) == wanted
    parallel.train()
    parallel.drop.p = 0.5
    assert abs(float(parallel(batch())["loss"]) - wanted) > 1e-6
    parallel.drop.p = 0.0
    type(parallel).sign = -1.0  # type: ignore[attr-defined]
    assert Net.sign == -1.0
    alike("an attribute of the class")
    del type(parallel).sign  # type: ignore[attr-defined]
    assert not hasattr(Net, "sign")
    Net.sign = 1.0
    assert float(parallel(batch())["loss"]) == wanted
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, plain = float(parallel(batch())["loss"]), float(eager(batch())["loss"])
    assert abs(cast - plain) < 1e-2 * abs(plain)
    assert float(parallel(batch())["loss"]) == wanted


def evaluated_between(folder: str) -> None:
    """Layers whose code asks for the mode, which the graph does not depend on, captured and stored."""
    ids = torch.arange(64).reshape(4, 16)
    inputs = {"input_ids": ids, "labels": ids}
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    models = [LlamaForCausalLM(config) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    wanted = models[0](**inputs).loss.detach()
    program = autoshard.compile(models[0], autoshard.plan(models[0], "dp=2,tp=2", example_inputs=inputs))
    if dist.get_rank() == 0:
        program.save(folder)
    dist.barrier()
    for parallel in (
        autoshard.parallelize(models[0], "dp=2,tp=2", example_inputs=inputs),
        autoshard.load(folder, models[1]),
    ):
        for mode in (True, False, True):
            close(parallel.train(mode)(**inputs).loss.detach(), wanted, f"loss with training={mode}")
    parallel.model.layers[1].self_attn.attention_dropout = 0.5
    assert abs(float(parallel(**inputs).loss.detach()) - float(wanted)) > 1e-5, "dropout that is set later"
    close(parallel.eval()(**inputs).loss.detach(), wanted, "loss in evaluation, with dropout set")


def forward_of_the_instance() -> None:
    """It is part of every program, and of calls that run as they are written."""

    def wrapped() -> Net:
        net = Net()
        inner = net.forward
        net.forward = lambda x: {k: 2 * v for k, v in inner(x).items()}  # type: ignore[method-assign]
        return net

    eager, parallel = wrapped(), autoshard.parallelize(wrapped(), "dp=2,tp=2", example_inputs=batch())
    close(parallel(batch())["loss"], eager(batch())["loss"], "the first call")
    assert len(parallel._autoshard_family.programs) == 1
    close(parallel(batch(1, 3))["loss"], eager(batch(1, 3))["loss"], "another size")
    close(parallel.eval()(batch())["loss"], eager(batch())["loss"], "in evaluation")


def clipped_together() -> None:
    """Two models, each on a mesh of its own that equals the other's, clipped by one norm."""
    nets = [Net(seed) for seed in (0, 1)]
    models = [autoshard.parallelize(Net(seed), "dp=2,tp=2", example_inputs=batch()) for seed in (0, 1)]
    norms = []
    for pair, clip in ((nets, torch.nn.utils.clip_grad_norm_), (models, autoshard.clip_grad_norm_)):
        (pair[0](batch(1))["loss"] + 3 * pair[1](batch(2))["loss"]).backward()
        norms.append(clip([p for net in pair for p in net.parameters()], 1e-3))
    close(norms[1], norms[0], "the norm over two models")
    for model, net in zip(models, nets, strict=True):
        same_gradients(model, net, "clipped together")


def optimizers_made_before() -> None:
    """They train the model, lazily parallelized or not; one that has made steps is refused."""
    for lazy in (True, False):
        losses = {}
        for kind in ("eager", "parallel"):
            net: Any = Net()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            if kind == "parallel":
                net = autoshard.parallelize(net, "fsdp=4", example_inputs=None if lazy else batch())
            losses[kind] = []
            for _ in range(3):
                loss = net(batch())["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[kind].append(loss.detach())
        close(torch.stack(losses["parallel"]), torch.stack(losses["eager"]), f"losses, lazy {lazy}")
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(batch())["loss"].backward()
    optimizer.step()
    parallel = autoshard.parallelize(net, "fsdp=4", example_inputs=batch())
    parallel(batch())["loss"].backward()
    refused(optimizer.step, "has made steps")


def frozen_and_not() -> None:
    net = Net()
    net.up.weight.requires_grad_(False)
    parallel = autoshard.parallelize(net, "dp=2,tp=2", example_inputs=batch())
    parallel.down.weight.requires_grad_(False)
    parallel(batch())["loss"].backward()
    assert parallel.up.weight.grad is None and parallel.down.weight.grad is None
    parallel.up.weight.requires_grad_(True)
    parallel.zero_grad()
    parallel(batch())["loss"].backward()
    eager = Net()
    eager(batch())["loss"].backward()
    close(parallel.up.weight.grad, eager.up.weight.grad, "what is trained later")


class Asks(nn.Module):
    """Another result where gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y * 3 if y.requires_grad else y).square().mean()


def code_that_asks_for_gradients() -> None:
    """Called without them, it runs as it is, on gathered parameters."""
    eager, parallel = Asks(), autoshard.parallelize(Asks(), "fsdp=4", example_inputs=batch())
    for recorded in (True, False, True):
        with torch.set_grad_enabled(recorded):
            close(parallel(batch()).detach(), eager(batch()).detach(), f"gradients recorded: {recorded}")


def ranks_given_different_things(mesh: str) -> None:
    """Batches, weights and seeds that differ are named at the first call, on all ranks."""
    rank = dist.get_rank()
    make = lambda net, **more: autoshard.parallelize(net, mesh, example_inputs=batch(), **more)  # noqa: E731
    call = (lambda m, x: m.train_step(x)) if "pp" in mesh else (lambda m, x: m(x)["loss"])
    model = make(Net())
    refused(lambda: call(model, batch(rank)), "input args[0] is not the same on all ranks")
    call(model, batch())
    refused(lambda: call(make(Net(seed=rank)), batch()), "parameter", autoshard.errors.VerificationError)
    refused(lambda: call(make(Net(), seed=rank % 2), batch()), "seed", autoshard.errors.VerificationError)
    loaded = make(Net(seed=rank))
    loaded.load_state_dict(Net().state_dict())
    close(call(loaded, batch()), Net()(batch())["loss"], "loaded weights")


def a_short_last_batch() -> None:
    """Of the size of a rank's part: it is taken as that if ranks differ, and as a batch if they do not."""
    rank, eager = dist.get_rank(), Net()
    parallel = autoshard.parallelize(Net(), "dp=4", example_inputs=batch())
    close(parallel(batch())["loss"].detach(), eager(batch())["loss"].detach(), "a global batch")
    part = parallel(batch()[2 * rank : 2 * rank + 2])["loss"].detach()
    close(part, eager(batch())["loss"].detach(), "a part of it")
    for rows in (2, 1, 6):
        small = parallel(batch()[:rows])["loss"].detach()
        close(small, eager(batch()[:rows])["loss"].detach(), f"a global batch of {rows}")


def a_batch_of_each_rank(mesh: str) -> None:
    """As a script for DDP has it: the loss and gradients are those of all rows."""
    rank, eager = dist.get_rank(), Net()
    parallel = autoshard.parallelize(Net(), mesh, example_inputs=batch(rank), local_batch=True)
    wanted = eager(torch.cat([batch(k) for k in range(4)]))["loss"]
    wanted.backward()
    if "pp" in mesh:
        loss = parallel.train_step(batch(rank))
    else:
        loss = parallel(batch(rank))["loss"]
        loss.backward()
    close(loss.detach(), wanted.detach(), f"loss with local_batch on {mesh}")
    same_gradients(parallel, eager, f"local_batch on {mesh}")
    for rows in ([5, 5, 2, 3], [3, 2, 1, 0]):
        wanted = eager(torch.cat([batch(k, n) for k, n in enumerate(rows)]))["loss"].detach()
        if "pp" in mesh:
            close(parallel.train_step(batch(rank, rows[rank])), wanted, f"rows of each rank on {mesh}")
            continue
        found = parallel(batch(rank, rows[rank]))
        close(found["loss"].detach(), wanted, f"rows of each rank on {mesh}")
        assert (found["logits"] + 0).shape[0] == rows[rank]


def main() -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    for mesh in ("dp=2,tp=2", "pp=2,dp=2", *(["fsdp=4"] if all_cases() else [])):
        hooks(mesh)
        ranks_given_different_things(mesh)
        a_batch_of_each_rank(mesh)
    for mesh in ("dp=2,tp=2", *(["fsdp=4"] if all_cases() else [])):
        losses_beside_the_loss(mesh)
    ways: list[Callable[[], None]] = [
        attributes,
        a_short_last_batch,
        partial(evaluated_between, sys.argv[1]),
        clipped_together,
        forward_of_the_instance,
        optimizers_made_before,
        frozen_and_not,
        code_that_asks_for_gradients,
    ]
    for number in sampled(range(len(ways)), 3):
        ways[number]()
    model = autoshard.parallelize(Net(), "dp=2,tp=2", example_inputs=batch())
    assert {timeout_of(g) for g in model._autoshard.axis_groups} == {77.0}
    if dist.get_rank() == 0:
        print("all is as it is for the eager model", flush=True)
    leave()


if __name__ == "__main__":
    main()
