"""SOAP and Shampoo for one process, as their papers have them, without blocks."""

from __future__ import annotations

from typing import Any

import torch


class Soap(torch.optim.Optimizer):
    """Vyas et al., 2409.11321, algorithm 3; Adam for vectors. Leading dims are batches."""

    def __init__(
        self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, every: int = 2, eps: float = 1e-8
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": (0.9, 0.95), "weight_decay": weight_decay, "every": every, "eps": eps}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(self.update(p.grad, self.state[p], group), alpha=group["lr"])

    def update(self, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        first, second = group["betas"]
        if not state:
            dims = g.shape[-2:] if g.dim() > 1 else ()
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
            state["factors"] = [g.new_zeros(*g.shape[:-2], n, n) for n in dims]
            state["bases"] = [
                torch.eye(n, dtype=g.dtype).expand(x.shape).clone()
                for n, x in zip(dims, state["factors"], strict=True)
            ]
        for x, product in zip(state["factors"], (g @ g.mT, g.mT @ g) if g.dim() > 1 else (), strict=True):
            x.lerp_(product, 1 - second)
        if state["step"] % group["every"] == 0:
            for x, basis in zip(state["factors"], state["bases"], strict=True):
                basis.copy_(
                    torch.linalg.qr(x @ basis).Q
                    if state["step"]
                    else torch.linalg.eigh(x.double()).eigenvectors
                )
        state["step"] += 1

        def turned(x: torch.Tensor) -> torch.Tensor:
            return state["bases"][0].mT @ x @ state["bases"][1] if x.dim() > 1 else x

        state["exp_avg"].lerp_(g, 1 - first)
        state["exp_avg_sq"].lerp_(turned(g).square(), 1 - second)
        scale = (1 - first ** state["step"]) / (1 - second ** state["step"]) ** 0.5
        new = turned(state["exp_avg"]) / (state["exp_avg_sq"].sqrt() + group["eps"]) / scale
        return state["bases"][0] @ new @ state["bases"][1].mT if new.dim() > 1 else new


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., 2018, algorithm 1, with momentum; vectors as columns. Leading dims are batches."""

    def __init__(
        self, params: Any, lr: float = 1e-2, momentum: float = 0.9, eps: float = 1e-2, every: int = 1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g, state = p.grad if p.dim() > 1 else p.grad[:, None], self.state[p]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(g)
                    for name, n in zip(("left", "right"), g.shape[-2:], strict=True):
                        eye = torch.eye(n, dtype=g.dtype) * group["eps"]
                        state[name] = {"sum": eye.expand(*g.shape[:-2], n, n).clone()}
                state["left"]["sum"].add_(g @ g.mT)
                state["right"]["sum"].add_(g.mT @ g)
                for name in ("left", "right") if state["step"] % group["every"] == 0 else ():
                    values, vectors = torch.linalg.eigh(state[name]["sum"])
                    state[name]["root"] = vectors * values.pow(-0.25)[..., None, :] @ vectors.mT
                state["step"] += 1
                state["momentum"].mul_(group["momentum"])
                state["momentum"].add_(state["left"]["root"] @ g @ state["right"]["root"])
                p.sub_(state["momentum"].view_as(p), alpha=group["lr"])
