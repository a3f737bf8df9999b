"""Started by `ranks`: what training scripts put around a model, in parallel as on one process.

``features_worker.py MESHES [CASE ...]``, meshes separated by semicolons, prints a line for each case: ok, or
what differs.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from calls_worker import batch as tokens
from calls_worker import build, full
from leaving import leave
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import (
    SWALR,
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)
from torch.utils.checkpoint import checkpoint

import autoshard

Script = Callable[[nn.Module], Any]


class Net(nn.Module):
    """A loss, of layers that are sharded in various ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.more = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.share = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.more(self.down(torch.tanh(self.norm(self.up(x))))) - self.share * x).square().mean()


class Normed(Net):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)  # type: ignore[assignment]


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))


def is_pipeline(model: nn.Module) -> bool:
    return bool(getattr(model, "is_pipeline", False))


def step(model: nn.Module, inputs: Any, scale: float = 1.0) -> torch.Tensor:
    """Forward and backward; the loss."""
    if is_pipeline(model):
        return model.train_step(inputs)  # type: ignore[no-any-return, operator]
    loss: Any = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    (loss * scale).backward()
    return loss.detach()  # type: ignore[no-any-return]


def evaluated(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The loss in evaluation mode."""
    model.eval()
    inner = model.module if isinstance(model, AveragedModel) else model
    with torch.no_grad():
        loss = inner.eval_step(inputs) if is_pipeline(inner) else model(inputs)  # type: ignore[operator]
    model.train()
    return loss  # type: ignore[no-any-return]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the values of all parameters and buffers that this rank has a part of."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: full(x.detach()).clone() for name, x in held if x is not None and not x.is_meta}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad.detach()).clone() for name, p in model.named_parameters() if p.grad is not None}


def trained(model: nn.Module, steps: int = 3, inputs: Callable[[int], Any] = rows) -> Any:
    """Losses of some steps, and the state after them."""
    # Adam would make large steps of gradients that are nothing but rounding
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for k in range(steps):
        losses.append(step(model, inputs(k)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, state(model)


def trained_and_evaluated(model: nn.Module) -> Any:
    """And trained again."""
    first = trained(model)
    return first, evaluated(model, rows()), trained(model)


def alike(found: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Of tensors, numbers and texts in dicts and lists; of a dict of tensors by name, those that are here."""
    if isinstance(found, dict):
        assert found.keys() <= wanted.keys(), (sorted(found), sorted(wanted))
        wanted = {key: wanted[key] for key in found}
    if isinstance(found, dict | list | tuple):
        pairs = zip(found.values(), wanted.values(), strict=True) if isinstance(found, dict) else None
        assert len(found) == len(wanted), (found, wanted)
        for name, (a, b) in zip(
            found if isinstance(found, dict) else range(len(found)),
            pairs or zip(found, wanted, strict=True),
            strict=True,
        ):
            try:
                alike(a, b, rtol, atol)
            except AssertionError as error:
                raise AssertionError(f"[{name}] {error}") from None
    elif isinstance(found, torch.Tensor):
        torch.testing.assert_close(full(found).float(), full(wanted).float(), rtol=rtol, atol=atol)
    else:
        assert found == wanted, (found, wanted)


def same(
    mesh: str,
    made: Callable[[], nn.Module],
    script: Script,
    inputs: Any = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """A script does to a parallel model what it does to the model."""
    wanted = script(made())
    model = autoshard.parallelize(made(), mesh, example_inputs=rows() if inputs is None else inputs)
    alike(script(model), wanted, rtol, atol)


def refused(run: Callable[[], Any], *words: str, kinds: Any = autoshard.errors.AutoshardError) -> None:
    """With an error of autoshard's that has all the words, on every rank."""
    try:
        run()
    except kinds as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"nothing was raised about {words}")


# -- hooks


def hooks_that_read(mesh: str) -> None:
    """Registered before and after; what they see has the shapes of one device."""

    def reads(module: Any, args: Any, *out: Any) -> None:
        assert args[0].shape[-1] == module.in_features and args[0].shape[0] == 8 // share
        assert all(x.shape[-1] == module.out_features and x.isfinite().all() for x in out)

    share = 2 if "pp" in mesh else 1

    def made() -> nn.Module:
        net = Net()
        net.up.register_forward_pre_hook(reads)
        net.down.register_forward_hook(reads)
        return net

    def script(model: nn.Module) -> Any:
        nonlocal share
        share = 1
        first = trained(model)
        model.more[0].register_forward_pre_hook(reads)  # type: ignore[index, operator]
        model.more[2].register_forward_hook(reads)  # type: ignore[index, operator]
        return first, trained(model)

    same(mesh, made, script)


def hooks_that_change(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        net.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.down.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
        return net

    factor = 2.0

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * factor

    def script(model: nn.Module) -> Any:
        nonlocal factor
        first = trained(model)
        handle = model.more[2].register_forward_hook(lambda module, args, out: out * 3)  # type: ignore[index, operator]
        second = trained(model)
        handle.remove()
        results = [first, second, trained(model)]
        handle = model.more[2].register_forward_hook(hook)  # type: ignore[index, operator]
        results.append(trained(model))
        # as many hooks as before, and a variable of one of them
        handle.remove()
        model.more[2].register_forward_hook(lambda module, args, out: out - factor)  # type: ignore[index, operator]
        results.append(trained(model))
        factor = 3.0
        results.append(trained(model))
        factor = 2.0
        return results

    same(mesh, made, script)


def copied_after_a_change(mesh: str) -> None:
    """A copy of a model that has other attributes and hooks than at its last call."""

    def script(model: nn.Module) -> Any:
        losses = [step(model, rows())]
        model.share = 2.0  # type: ignore[assignment]
        twin = copy.deepcopy(model)
        alike(gradients(twin), gradients(model), 0, 0)
        losses.append(step(twin, rows()))
        twin.down.register_forward_hook(lambda module, args, out: out * 2)  # type: ignore[operator, union-attr]
        losses.append(step(copy.deepcopy(twin), rows()))
        return losses

    same(mesh, Net, script)


def hooks_of_the_process(mesh: str) -> None:
    """Refused, before and after."""
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    refused(
        lambda: autoshard.parallelize(Net(), mesh, example_inputs=rows()), "all modules", "features_worker"
    )
    handle.remove()
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())
    step(model, rows())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    for _ in range(2):
        refused(lambda: step(model, rows()), "all modules", "features_worker")
    handle.remove()
    step(model, rows())


def hooks_that_keep(mesh: str) -> None:
    """Activations in a list: refused before; after, refused at the call."""
    kept: list[torch.Tensor] = []
    net = Net()
    net.down.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    refused(lambda: autoshard.parallelize(net, mesh, example_inputs=rows()), "kept")
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())
    model.down.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    refused(lambda: step(model, rows()), "kept")


def hooks_that_ask(mesh: str) -> None:
    """For a number."""
    seen: list[float] = []
    net = Net()
    net.down.register_forward_hook(lambda module, args, out: seen.append(float(out.mean())))
    refused(lambda: autoshard.parallelize(net, mesh, example_inputs=rows()), "features_worker.py")


def backward_hooks(mesh: str) -> None:
    """Of submodules: refused, with the module's name; before and after."""
    net = Net()
    net.down.register_full_backward_hook(lambda module, into, out: None)
    refused(lambda: autoshard.parallelize(net, mesh, example_inputs=rows()), "down", "features_worker.py")
    net = Net()
    net.down.register_full_backward_pre_hook(lambda module, out: None)
    refused(lambda: autoshard.parallelize(net, mesh, example_inputs=rows()), "down")
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())
    model.down.register_full_backward_hook(lambda module, into, out: None)
    refused(lambda: step(model, rows()), "down")


def backward_hooks_of_the_model(mesh: str) -> None:
    seen: list[float] = []

    def made() -> nn.Module:
        net = Net()
        net.register_full_backward_hook(lambda module, into, out: seen.append(float(full(out[0]).sum())))
        return net

    def script(model: nn.Module) -> Any:
        seen.clear()
        result = trained(model)
        model.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
        return result, trained(model), list(seen)

    same(mesh, made, script)


def gradient_hooks(mesh: str) -> None:
    """That scale, clip and read; with handles that are removed, registered before and after."""
    notes: list[Any] = []

    def made() -> nn.Module:
        net = Net()
        net.up.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        net.handle = net.down.weight.register_hook(lambda grad: grad * 2)
        return net

    def script(model: nn.Module) -> Any:
        notes.clear()
        results = [trained(model)]
        model.handle.remove()  # type: ignore[operator, union-attr]
        handles = [
            p.register_hook(lambda grad, n=name: notes.append((n, full(grad).norm())))
            for name, p in model.named_parameters()
            if "more" in name
        ]
        results.append(trained(model))
        for handle in handles:
            handle.remove()
        for p in model.parameters():
            p.register_hook(lambda grad: grad / 2)
        results.append(trained(model))
        return results if "pp" in mesh else (results, sorted(notes, key=lambda note: note[0]))

    same(mesh, made, script)


def optimizer_in_backward(mesh: str, early: bool = False) -> None:
    """One optimizer for each parameter, which steps when its gradient has come."""

    def hooked(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            optimizer = torch.optim.AdamW([p], lr=1e-2)

            def stepped(p: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(stepped)
        return model

    def script(model: nn.Module) -> Any:
        if not early:
            hooked(model)
        losses = [step(model, rows(k)) for k in range(3)]
        assert all(p.grad is None for p in model.parameters())
        return losses, state(model)

    same(mesh, (lambda: hooked(Net())) if early else Net, script)


def optimizer_in_backward_early(mesh: str) -> None:
    optimizer_in_backward(mesh, early=True)


# -- averages


def averaged_model(mesh: str) -> None:
    def script(model: nn.Module) -> Any:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        swa = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
        plain = AveragedModel(model)
        own = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
        averages = (ema, swa, plain, own)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = SWALR(optimizer, swa_lr=0.5, anneal_epochs=3)
        losses = []
        for k in range(4):
            losses.append(step(model, rows(k)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            for average in averages:
                average.update_parameters(model)
        losses += [evaluated(average, rows(9)) for average in averages]
        losses.append(schedule.get_last_lr()[0])
        return losses, [state(average) for average in averages], trained(model, 1)

    same(mesh, Normed, script)


def batch_norms_updated(mesh: str) -> None:
    """`update_bn` of an average, whose statistics are those of all batches."""

    def script(model: nn.Module) -> Any:
        average = AveragedModel(model)
        losses = trained(model, 2)
        average.update_parameters(model)
        update_bn([rows(k) for k in range(3)], average)
        return losses, evaluated(average, rows(9)), state(average), trained(model, 2)

    same(mesh, Normed, script)


def averages_by_hand(mesh: str) -> None:
    """Over parameters, and over the state dict; swapped in for evaluation and back."""

    def script(model: nn.Module) -> Any:
        by_name = {name: x.clone() for name, x in model.state_dict().items()}
        ema = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for k in range(4):
            losses.append(step(model, rows(k)))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for average, p in zip(ema, model.parameters(), strict=True):
                    average.lerp_(p, 0.1)
                for name, x in model.state_dict().items():
                    if x.is_floating_point():
                        by_name[name].mul_(0.9).add_(x, alpha=0.1)
                    else:
                        by_name[name].copy_(x)
            if k % 2:
                # copied in and back
                kept = [p.detach().clone() for p in model.parameters()]
                for average, p in zip(ema, model.parameters(), strict=True):
                    p.data.copy_(average)
                losses.append(evaluated(model, rows(9)))
                for old, p in zip(kept, model.parameters(), strict=True):
                    p.data.copy_(old)
                losses.append(evaluated(model, rows(9)))
                # loaded, and back
                before = copy.deepcopy(model.state_dict())
                model.load_state_dict(by_name)
                losses.append(evaluated(model, rows(9)))
                model.load_state_dict(before)
        return losses, state(model)

    same(mesh, Net, script)


def data_assigned(mesh: str) -> None:
    """`p.data = x` is refused at the next call; what changes data in place is not."""

    def script(model: nn.Module) -> Any:
        losses = [step(model, rows())]
        for p in model.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
            p.data.mul_(0.9)
        losses.append(evaluated(model, rows()))
        return losses, state(model)

    same(mesh, Net, script)
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())
    p = next(p for p in model.parameters() if p is not None)
    kept, p.data = p.data, p.detach() * 0.5
    refused(lambda: step(model, rows()), ".data was assigned", "copy_")
    p.data = kept
    step(model, rows())
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data = p.detach().clone()
    refused(lambda: step(twin, rows()), ".data was assigned")
    if not is_pipeline(model):
        refused(lambda: twin.up(rows()), ".data was assigned")  # type: ignore[operator]
    step(model, rows())


def rows_by_hand(mesh: str) -> None:
    """Rows and the diagonal of weights, and rows of gradients, whatever dims are sharded."""

    def script(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for k in range(3):
            losses.append(step(model, rows(k)))
            for p in model.parameters():
                with autoshard.full_tensors(p, p.grad) as (value, grad):
                    value[0] = 0.0
                    grad[1:3].zero_()
                    if value.dim() == 2:
                        value.diagonal().add_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return losses, state(model)

    same(mesh, Net, script)
    elsewhere = torch.empty(2, device="meta")
    refused(lambda: autoshard.full_tensors(elsewhere).__enter__(), "is of another stage", "parameters()")


# -- parametrizations


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class Skewed(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.scale


def weight_norm_old(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        with warnings.catch_warnings(action="ignore"):
            nn.utils.weight_norm(net.up)
            nn.utils.weight_norm(net.more[0], dim=1)
        return net

    same(mesh, made, trained_and_evaluated)


def weight_norm(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        parametrizations.weight_norm(net.up)
        parametrizations.weight_norm(net.more[2], dim=1)
        return net

    def script(model: nn.Module) -> Any:
        result = trained(model), full(model.up.weight.detach())
        return result, evaluated(model, rows())

    same(mesh, made, trained if "pp" in mesh else script)


def spectral_norm(mesh: str) -> None:
    """Its buffers are changed by every call in training, and not in evaluation."""

    def made() -> nn.Module:
        net = Net()
        parametrizations.spectral_norm(net.up)
        parametrizations.spectral_norm(net.more[2], n_power_iterations=2)
        return net

    def script(model: nn.Module) -> Any:
        first = trained(model)
        return first, evaluated(model, rows()), evaluated(model, rows(1)), trained(model)

    same(mesh, made, script)


def spectral_norm_old(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        nn.utils.spectral_norm(net.up)
        return net

    def script(model: nn.Module) -> Any:
        first = trained(model)
        return first, evaluated(model, rows()), trained(model)

    same(mesh, made, script)


def orthogonal(mesh: str) -> None:
    for way in ("matrix_exp", "cayley", "householder"):

        def made(way: str = way) -> nn.Module:
            net = Net()
            parametrizations.orthogonal(net.up, orthogonal_map=way)
            return net

        same(mesh, made, trained)


def own_parametrization(mesh: str) -> None:
    """Of one's own, one on another, with parameters of theirs; one of a parameter that is frozen."""

    def made() -> nn.Module:
        net = Net()
        net.more.append(nn.Linear(8, 8))
        parametrize.register_parametrization(net.more[3], "weight", Symmetric())
        parametrize.register_parametrization(net.more[0], "weight", Skewed(8))
        parametrize.register_parametrization(net.more[0], "weight", Skewed(8))
        parametrize.register_parametrization(net.down, "bias", Skewed(8))
        net.down.parametrizations.bias.original.requires_grad_(False)
        return net

    def script(model: nn.Module) -> Any:
        first = trained(model)
        second = [] if "pp" in mesh else [full(x.detach()) for x in (model.more[3].weight,)]
        with parametrize.cached():
            return first, second, step(model, rows()), gradients(model)

    same(mesh, made, script)


def parametrized_later(mesh: str) -> None:
    """Refused, and so is what was put on before and is taken away."""
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())

    def doubled() -> None:
        parametrize.register_parametrization(model.up, "weight", Doubled())
        step(model, rows())

    refused(doubled, "up.weight")
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())

    def normed() -> None:
        parametrizations.weight_norm(model.up)
        step(model, rows())

    refused(normed, "up.weight")
    net = Net()
    parametrizations.weight_norm(net.up)
    model = autoshard.parallelize(net, mesh, example_inputs=rows())

    def removed() -> None:
        parametrize.remove_parametrizations(model.up, "weight")
        step(model, rows())

    refused(removed, "parametrizations.weight.original")


def pruned(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        prune.l1_unstructured(net.up, "weight", amount=0.3)
        prune.ln_structured(net.more[0], "weight", amount=0.5, n=2, dim=0)
        prune.random_unstructured(net.down, "bias", amount=2)
        return net

    same(mesh, made, trained_and_evaluated)


def pruned_for_good(mesh: str) -> None:
    def made() -> nn.Module:
        net = Net()
        prune.l1_unstructured(net.up, "weight", amount=0.3)
        prune.remove(net.up, "weight")
        return net

    same(mesh, made, trained)


def pruned_later(mesh: str) -> None:
    """Refused."""
    model = autoshard.parallelize(Net(), mesh, example_inputs=rows())

    def run() -> None:
        prune.l1_unstructured(model.up, "weight", amount=0.3)
        step(model, rows())

    # torch itself cannot look for the smallest elements of some shards
    refused(run, kinds=(autoshard.errors.AutoshardError, RuntimeError))


# -- checkpoints of activations


def checkpointed_llama(mesh: str) -> None:
    """Of both kinds, switched on before or after, and off."""
    for reentrant, early in ((False, False), (True, True)):

        def switched(model: Any, reentrant: bool = reentrant) -> nn.Module:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            return model  # type: ignore[no-any-return]

        def made(early: bool = early, switched: Any = switched) -> nn.Module:
            return switched(build("Llama")) if early else build("Llama")  # type: ignore[no-any-return]

        def script(model: Any, early: bool = early, switched: Any = switched) -> Any:
            if not early:
                switched(model)
            first = trained(model, 2, lambda k: tokens(8, 16, k))
            model.gradient_checkpointing_disable()
            return first, trained(model, 2, lambda k: tokens(8, 16, k))

        same(mesh, made, script, tokens(8, 16))


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: torch.tanh(self.norm(self.up(x))), x, use_reentrant=self.reentrant)
        y = torch.utils.checkpoint.checkpoint_sequential(
            self.more, 2, self.down(y), use_reentrant=self.reentrant
        )
        return (y - 0.5 * x).square().mean()


def checkpointed_by_hand(mesh: str) -> None:
    for reentrant in (False, True):
        same(mesh, lambda r=reentrant: Checkpointed(r), trained)


# -- freezing


def unfrozen(mesh: str) -> None:
    """Layer by layer, with an optimizer made anew, one that gets a group, one that has all from the start."""

    def script(model: nn.Module) -> Any:
        losses = []

        def run(optimizer: Any, steps: int = 2) -> None:
            for k in range(steps):
                losses.append(step(model, rows(k)))
                optimizer.step()
                optimizer.zero_grad()

        for name, p in model.named_parameters():
            p.requires_grad_("more" in name or name == "norm.weight")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        run(optimizer)
        model.down.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.down.parameters()), "lr": 5e-3})
        run(optimizer)
        for p in model.parameters():
            p.requires_grad_(True)
        run(torch.optim.AdamW(model.parameters(), lr=1e-2))
        model.more[2].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        run(torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert all((p.grad is None) or p.requires_grad for p in model.parameters())
        return losses, state(model)

    def made() -> nn.Module:
        net = Net()
        net.up.requires_grad_(False)
        return net

    same(mesh, made, script)


# -- embeddings


def resized(mesh: str) -> None:
    """Before; the new rows are trained, tied or not. Later it is refused."""
    inputs = lambda k: {k: v.clamp(max=70) + 3 for k, v in tokens(8, 16, k).items()}  # noqa: E731
    for tied in (False, True):

        def made(tied: bool = tied) -> nn.Module:
            model: Any = build("Llama" if not tied else "GPT2")
            torch.manual_seed(3)
            model.resize_token_embeddings(72)
            return model  # type: ignore[no-any-return]

        same(mesh, made, lambda m: trained(m, 2, inputs), inputs(0))
    model: Any = autoshard.parallelize(build("Llama"), mesh, example_inputs=tokens(8, 16))

    def run() -> None:
        model.resize_token_embeddings(72)
        step(model, tokens(8, 16))

    refused(run, "resize_token_embeddings")


# -- torch.compile


def compiled_before(mesh: str) -> None:
    same(mesh, lambda: torch.compile(Net()), lambda m: trained(getattr(m, "_orig_mod", m)))  # type: ignore[arg-type, return-value]


def compiled_after(mesh: str) -> None:
    def script(model: nn.Module) -> Any:
        run: Any = torch.compile(model) if hasattr(model, "_autoshard_family") else model
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        losses = []
        for k in range(3):
            losses.append(step(run, rows(k)))
            optimizer.step()
            optimizer.zero_grad()
        run.eval()
        if not is_pipeline(model):
            with torch.no_grad():
                losses.append(run(rows()))
        return losses, state(model)

    same(mesh, Net, script)


def compiled_step(mesh: str) -> None:
    """The whole step, with the loss, in a compiled function; an optimizer's compiled step."""

    def script(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def run(x: torch.Tensor) -> torch.Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()  # type: ignore[no-any-return]

        run_it = torch.compile(run, backend="eager") if hasattr(model, "_autoshard_family") else run
        return [run_it(rows(k)) for k in range(3)], state(model)

    same(mesh, Net, script)


# -- clipping, schedules, optimizers


def clipped_by_value(mesh: str) -> None:
    def script(model: nn.Module) -> Any:
        step(model, rows())
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        first = gradients(model)
        nn.utils.clip_grad_value_(model.parameters(), 1e-4, foreach=True)
        return first, gradients(model)

    same(mesh, Net, script)


def clipped_by_norm(mesh: str) -> None:
    """By torch's functions and ours."""
    llama = lambda: build("Llama")  # noqa: E731

    def script(model: nn.Module) -> Any:
        found = []
        ours = hasattr(model, "_autoshard_family")
        for norm in (2.0, 1.0, float("inf")):
            for clip in (nn.utils.clip_grad_norm_, autoshard.clip_grad_norm_ if ours else None):
                model.zero_grad()
                step(model, tokens(8, 16))
                clip = clip or nn.utils.clip_grad_norm_
                grads = [p.grad for p in model.parameters()]
                found.append(nn.utils.get_total_norm(grads, norm))  # type: ignore[arg-type]
                found.append(clip(model.parameters(), 1e-2, norm))
                found.append(gradients(model))
        model.zero_grad()
        step(model, tokens(8, 16))
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-2, torch.tensor(5.0))
        return found, gradients(model)

    same(mesh, llama, script, tokens(8, 16))


def scheduled(mesh: str) -> None:
    from transformers import get_cosine_schedule_with_warmup
    from transformers.optimization import get_reduce_on_plateau_schedule

    lr = torch.optim.lr_scheduler

    def script(model: nn.Module) -> Any:
        found: list[Any] = []
        for kind in (
            lambda o: lr.OneCycleLR(o, 0.05, total_steps=4),
            lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
            lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.9),
            lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.ExponentialLR(o, 0.5)], [2]),
            lambda o: lr.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
            lambda o: get_cosine_schedule_with_warmup(o, 2, 6),
            lambda o: get_reduce_on_plateau_schedule(o, patience=0, threshold=0.9),
        ):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = kind(optimizer)  # type: ignore[no-untyped-call]
            for k in range(4):
                loss = step(model, rows(k))
                optimizer.step()
                optimizer.zero_grad()
                schedule.step(loss) if isinstance(schedule, lr.ReduceLROnPlateau) else schedule.step()
                found.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))
            found.append(len(copy.deepcopy(schedule.state_dict())))
        return found, state(model)

    same(mesh, Net, script)


def optimizer_ways(mesh: str) -> None:
    """foreach and fused; states copied, loaded into another optimizer, which goes on."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.RMSprop, {"foreach": True, "centered": True}),
        (torch.optim.Adamax, {"foreach": True}),
    ]

    def script(model: nn.Module) -> Any:
        found = []
        for kind, more in kinds:
            optimizer = kind(model.parameters(), lr=1e-3, **more)
            for k in range(2):
                step(model, rows(k))
                optimizer.step()
                optimizer.zero_grad()
            kept, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            runs = []
            for again in (False, True):
                if again:
                    model.load_state_dict(before)
                    optimizer = kind(model.parameters(), lr=0.5, **more)
                    optimizer.load_state_dict(kept)
                for k in range(2):
                    step(model, rows(k + 5))
                    optimizer.step()
                    optimizer.zero_grad()
                runs.append(state(model))
            alike(runs[1], runs[0], 0, 0)
            found.append(runs[0])
        return found

    same(mesh, Net, script)


# -- loss scaling


def scaled(mesh: str, kind: Any = torch.amp.GradScaler) -> None:
    """A step with an infinite gradient, of one parameter on one rank, is skipped everywhere."""

    def script(model: nn.Module) -> Any:
        scaler = kind("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for k in range(6):
            x = rows(k)
            if k == 3:
                x[5, 2] = 1e30
            loss = model(x)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip = autoshard.clip_grad_norm_ if hasattr(model, "_autoshard") else nn.utils.clip_grad_norm_
            norm = clip(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((torch.tensor(scaler.get_scale()), state(model)))
            if k != 3:
                found.append((loss.detach(), norm))
        scales = [float(x[0]) for x in found[::2]]
        assert min(scales) < max(scales), scales
        return found

    same(mesh, Net, script)


def scaled_with_ours(mesh: str) -> None:
    scaled(mesh, autoshard.GradScaler)


def infinite_somewhere(mesh: str) -> None:
    """In the gradient of one element of one parameter: only one rank has it."""

    def script(model: nn.Module) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        marks = torch.zeros(32, 8)
        marks[17, 3] = torch.inf
        found = []
        for k in range(3):
            loss = model(rows(k))
            if k == 1:
                weight = model.more[0].weight  # type: ignore[index]
                grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
                for p, g in zip(model.parameters(), grads, strict=True):
                    p.grad = g
                with torch.no_grad():
                    inf = marks
                    if hasattr(weight, "placements"):
                        from torch.distributed.tensor import distribute_tensor

                        inf = distribute_tensor(marks, weight.device_mesh, weight.placements)
                    weight.grad.add_(inf)
            else:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((torch.tensor(scaler.get_scale()), state(model)))
        assert found[1][0] == 2.0**9
        return found

    same(mesh, Net, script)


# -- 8 bit


class Wide(nn.Module):
    """Large enough for moments in blocks: torchao leaves those of fewer than 4096 elements as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(x))) - x).square().mean()


def in_8_bits(mesh: str) -> None:
    from torchao.optim import AdamW8bit

    wide = lambda k: torch.randn(8, 64, generator=torch.Generator().manual_seed(k))  # noqa: E731

    def script(model: nn.Module) -> Any:
        torch.compiler.reset()  # torchao's step, compiled for plain tensors, is not one for DTensors
        optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        losses = []
        for k in range(5):
            losses.append(step(model, wide(k % 2)))
            optimizer.step()
            optimizer.zero_grad()
        for p in model.parameters():
            if isinstance(p, DTensor):
                for axis in (k for k, placed in enumerate(p.placements) if placed.is_replicate()):
                    here = p.detach().to_local()
                    first = funcol.broadcast(here, 0, (p.device_mesh, axis))
                    assert torch.equal(first, here)
        return losses, state(model)

    same(mesh, Wide, script, wide(0), rtol=2e-2, atol=2e-3)


ALL = (
    hooks_that_read,
    hooks_that_change,
    hooks_that_keep,
    hooks_that_ask,
    hooks_of_the_process,
    copied_after_a_change,
    backward_hooks,
    gradient_hooks,
    optimizer_in_backward,
    optimizer_in_backward_early,
    averaged_model,
    averages_by_hand,
    data_assigned,
    rows_by_hand,
    weight_norm_old,
    weight_norm,
    spectral_norm,
    spectral_norm_old,
    orthogonal,
    own_parametrization,
    pruned,
    pruned_for_good,
    checkpointed_llama,
    checkpointed_by_hand,
    unfrozen,
    resized,
    compiled_before,
    clipped_by_value,
    scheduled,
    optimizer_ways,
)
#: that call the model, or use something that every rank must have, or what knows nothing of pipelines
WITHOUT_PIPELINE = (
    parametrized_later,
    pruned_later,
    backward_hooks_of_the_model,
    batch_norms_updated,
    compiled_after,
    compiled_step,
    clipped_by_norm,
    scaled,
    scaled_with_ours,
    infinite_somewhere,
    in_8_bits,
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes, names = sys.argv[1].split(";"), sys.argv[2:]
    for mesh in meshes:
        for case in (*ALL, *(() if "pp" in mesh else WITHOUT_PIPELINE)):
            name = case.__name__
            if names and name not in names:
                continue
            begun = time.monotonic()
            try:
                case(mesh)
                said = f"ok {mesh} {name} {time.monotonic() - begun:.1f} s"
            except Exception as error:  # told of below
                said = f"BAD {mesh} {name} {type(error).__name__}: {str(error)[:1500]}"
                if dist.get_rank() == 0:
                    import traceback

                    traceback.print_exc()
            if dist.get_rank() == 0:
                print(f"\n{said}", flush=True)
    leave()


if __name__ == "__main__":
    main()
