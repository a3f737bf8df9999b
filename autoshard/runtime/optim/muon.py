"""Muon on sharded matrices: each is put together on one rank, orthogonalised there, and sent back in parts.

Momentum and updates are made on shards. Only what is orthogonalised needs the matrix: bfloat16, to one rank
and back, where gathering sends it to all and makes all compute the same. What replicas have is only sent
back; experts that are divided by number, and have no replicas, are not sent at all.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
for LLM training", 2502.16982 (scale of updates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from typing import Any

import torch

from autoshard.cost.orthogonal import iteration_flop
from autoshard.errors import UsageError, nearest
from autoshard.runtime.optim.optimizer_hooks import local, loss_of
from autoshard.runtime.optim.owners import SharedTensors
from autoshard.torch_adapters.dtensor import dtensor_as

_SCALES = ("original", "match_rms_adamw")


class Muon(torch.optim.Muon):
    """torch's Muon, for parameters that are sharded over any axes of a DeviceMesh.

    Its state is that of torch.optim.Muon, so that checkpoints of either are those of the other. Arguments
    that are not told here are torch's.

    Args:
        params: matrices, or batches of them ([experts, rows, columns]); others take another optimizer.

    Raises:
        UsageError: a parameter has one dim or more than three, or `adjust_lr_fn` is not known.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if adjust_lr_fn is not None and adjust_lr_fn not in _SCALES:
            raise UsageError(f"Muon knows no {adjust_lr_fn!r}", hint=nearest(adjust_lr_fn, _SCALES))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        # not torch's Muon's: it refuses batches of matrices
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._shared_matrices = SharedTensors(iteration_flop, batched=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        for p in [given] if isinstance(given, torch.Tensor) else (given := list(given)):
            if p.dim() not in (2, 3):
                raise UsageError(
                    f"Muon is given a parameter of shape {list(p.shape)}",
                    why="it orthogonalises matrices",
                    hint="give norms and biases, and by custom embeddings and heads, to AdamW",
                )
        super().add_param_group({**param_group, "params": given})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._shared_matrices = SharedTensors(iteration_flop, batched=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure does. Collective over the ranks that share parameters."""
        loss = loss_of(closure)
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            updates = [[self._update(p, group)] for p in given]

            def orthogonal(_: int, full: list[torch.Tensor], group: dict[str, Any] = group) -> torch.Tensor:
                return newton_schulz(full[0], group["ns_coefficients"], group["ns_steps"], group["eps"])

            for number, update in self._shared_matrices.computed(given, updates, orthogonal):
                mine, scale = local(given[number]), _scale(given[number].shape, group["adjust_lr_fn"])
                mine.mul_(1 - group["lr"] * group["weight_decay"])
                mine.add_(update.view(mine.shape), alpha=-group["lr"] * scale)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """This rank's part of what is orthogonalised, in bfloat16."""
        assert p.grad is not None
        gradient, state = local(p.grad), self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = dtensor_as(p, torch.zeros_like(gradient))
        buffer = local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.bfloat16()


def _scale(shape: Sequence[int], how: str | None) -> float:
    """What makes updates of all shapes alike in size."""
    rows, columns = shape[-2:]
    if how == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1.0, rows / columns))


def newton_schulz(
    x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """The nearest orthogonal matrix, about: singular values come to lie around 1. x: [..., rows, columns] in
    bfloat16."""
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
