"""AdamW on what a rank holds of every parameter, with clipping and float32 copies in the same pass.

torch's own optimizers work on DTensors op by op, each through DTensor's dispatch; a step that is the same for
every element needs none of it. Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

import autoshard.kernels.optim  # noqa: F401  (defines the op that is called below)
from autoshard.errors import UsageError
from autoshard.runtime.optim.clip import clip_scale, grad_norm
from autoshard.runtime.optim.optimizer_hooks import local, loss_of, parameters_in
from autoshard.torch_adapters.dtensor import dtensor_as

_HALF = (torch.bfloat16, torch.float16)
#: state that is kept in float32 for parameters with a master copy
_WIDE = ("exp_avg", "exp_avg_sq", "master")


class AdamW(torch.optim.AdamW):
    """torch's AdamW, stepping on local shards.

    params, lr, betas, eps, weight_decay: as of torch.optim.AdamW, whose state it has, so that checkpoints of
    either are those of the other. clip_norm: the most that the norm of all gradients of the model may be, as
    `clip_grad_norm_` has it; None leaves them. Every rank must then call `step`. Gradients that were clipped
    may be left as they were. master: whether parameters of half precision are copies of float32 ones, which
    are kept in the state with float32 moments, updated, and rounded into the parameters in the same pass.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        master: bool = False,
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(
                f"clip_norm is {clip_norm}", why="it must be positive", hint="None does not clip"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.clip_norm, self.master = clip_norm, master

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure does. Parameters without a gradient stay as they are."""
        loss = loss_of(closure)
        scale = None
        if self.clip_norm is not None:
            every = list(parameters_in(self))
            scale = clip_scale(grad_norm(every)[0], self.clip_norm)
        seen: set[int] = set()
        for group in self.param_groups:
            _check_group(group)
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                if not self.state[p]:
                    self._begin(p)
                elif self._is_wide(p) and "master" not in self.state[p]:
                    self._widen(p)  # of another optimizer
            plain = []
            for p in given:
                if "master" in self.state[p] or p.grad.dtype != p.dtype:
                    self._step_wide(p, group, scale)
                else:
                    plain.append(p)
            self._step_plain(plain, group, scale, seen)
        return loss

    def _begin(self, p: torch.Tensor) -> None:
        own, state = local(p), self.state[p]
        kind = torch.float32 if self._is_wide(p) else p.dtype
        # where what counts it needs it: torch's fused step on the device, ours as a number
        state["step"] = torch.zeros((), device=own.device if kind == p.dtype else "cpu")
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = dtensor_as(p, torch.zeros_like(own, dtype=kind))
        if kind != p.dtype:
            state["master"] = dtensor_as(p, own.to(kind))

    def _is_wide(self, p: torch.Tensor) -> bool:
        return self.master and p.dtype in _HALF

    def _widen(self, p: torch.Tensor) -> None:
        """Float32 copies of a parameter and of moments that were kept in its type."""
        state = self.state[p]
        state["step"] = state["step"].cpu()
        for name, x in (("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"]), ("master", p)):
            state[name] = dtensor_as(p, local(x).to(torch.float32))

    def _step_wide(self, p: torch.Tensor, group: Mapping[str, Any], scale: torch.Tensor | None) -> None:
        """In float32, by the kernel; p is its copy, whose elements count where somebody has changed them."""
        state, own = self.state[p], local(p)
        state["step"] += 1
        assert p.grad is not None
        grad = local(p.grad)
        factor = (
            torch.ones((), dtype=torch.float32, device=own.device)
            if scale is None
            else scale.to(own.device, torch.float32)
        )
        moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
        updated, copy = (local(state["master"]), own) if "master" in state else (own, None)
        rates = float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], int(state["step"])
        torch.ops.autoshard.adamw_shard(updated, *moments, copy, grad.contiguous(), factor, *rates)

    def _step_plain(
        self,
        given: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        scale: torch.Tensor | None,
        seen: set[int],
    ) -> None:
        """In the parameters' own type, all at once, by torch's fused step."""
        if not given:
            return
        params = [local(p) for p in given]
        grads = []
        for p in given:
            assert p.grad is not None
            grad = local(p.grad)
            # what clips writes the gradient, too: one that two parameters share must not be clipped twice
            grads.append(grad.clone() if scale is not None and grad.data_ptr() in seen else grad)
            seen.add(grad.data_ptr())
        beta1, beta2 = group["betas"]
        adamw(
            params,
            grads,
            [local(self.state[p]["exp_avg"]) for p in given],
            [local(self.state[p]["exp_avg_sq"]) for p in given],
            [],
            [self.state[p]["step"] for p in given],
            fused=True,
            grad_scale=None if scale is None else scale.reciprocal().to(params[0].device, torch.float32),
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before or after the parameters of the model are loaded. Float32 state stays float32."""
        super().load_state_dict(state_dict)
        numbers = [k for group in state_dict["param_groups"] for k in group["params"]]
        own = list(parameters_in(self))
        for number, p in zip(numbers, own, strict=True):
            given, state = state_dict["state"].get(number, {}), self.state[p]
            if "step" in given:
                where = "cpu" if "master" in given else local(p).device
                state["step"] = torch.as_tensor(given["step"], dtype=torch.float32).to(where, copy=True)
            if "master" not in given:
                continue
            for name in _WIDE:
                kept = local(given[name]).to(local(p).device, torch.float32, copy=True)
                state[name] = dtensor_as(p, kept)


def _check_group(group: Mapping[str, Any]) -> None:
    """UsageError for what torch's class knows and this one does not: a loaded group may ask for it."""
    for name in ("amsgrad", "maximize", "differentiable", "capturable"):
        if group.get(name):
            raise UsageError(
                f"{name} is set in a group of parameters",
                why="autoshard.AdamW has no such step",
                hint="use torch.optim.AdamW, which takes parallel models, too",
            )
