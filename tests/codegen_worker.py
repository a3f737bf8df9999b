"""Two gloo processes train a net whose segments are compiled, and compare it with one device."""

from __future__ import annotations

import torch
from leaving import leave
from torch import nn

import autoshard

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.outer(torch.nn.functional.gelu(self.inner(self.norm(x)))))
        return y


class Net(nn.Module):
    def __init__(self, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def net(layers: int, dropout: float = 0.0) -> Net:
    """With the same weights each time."""
    torch.manual_seed(0)
    return Net(layers, dropout)


def main() -> None:
    torch.set_num_threads(1)
    plain = net(2)
    parallel = autoshard.parallelize(
        net(2), "fsdp=2", example_inputs=(X,), cluster="cpu-gloo", codegen="inductor"
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, parallel)]
    for _ in range(3):
        losses = [m(X) for m in (plain, parallel)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(q.detach().full_tensor(), p.detach(), rtol=1e-3, atol=1e-5)
    print("compiled and equal", flush=True)
    leave()


if __name__ == "__main__":
    main()
