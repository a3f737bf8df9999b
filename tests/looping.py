"""Models that loop over a sequence in Python."""

from __future__ import annotations

import torch
from torch import nn

#: features of an input
WIDTH = 8


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(16, WIDTH)

    def loss(self, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.out(y) - labels).square().mean()

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).chunk(3, -1)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [y.view(*y.shape[:2], 4, 4).transpose(1, 2) for y in self.parts(x)]

    def merged(self, y: torch.Tensor) -> torch.Tensor:
        return y.transpose(1, 2).flatten(2)


class LinearAttention(_Mixed):
    """A state per head; results are written into a tensor."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        state, out = x.new_zeros(x.shape[0], 4, 4, 4), torch.zeros_like(q)
        for i in range(x.shape[1]):
            state = state * 0.9 + k[:, :, i, :, None] * v[:, :, i, None, :]
            out[:, :, i] = (q[:, :, i, :, None] * state).sum(-2)
        return self.loss(self.merged(out), labels)


class Blocks(_Mixed):
    """Four positions a step, put together."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        state, outs = x.new_zeros(x.shape[0], 4, 4, 4), []
        for i in range(0, x.shape[1], 4):
            qi, ki, vi = (y[:, :, i : i + 4] for y in (q, k, v))
            outs.append(qi @ state + (qi @ ki.transpose(-1, -2)).tril() @ vi)
            state = state * 0.7 + ki.transpose(-1, -2) @ vi
        return self.loss(self.merged(torch.cat(outs, 2)), labels)


class Backwards(_Mixed):
    """From the end to the beginning; what is read and the last state are used after the loop, too."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x)
        state, outs = x.new_zeros(x.shape[0], 16), [q] * x.shape[1]
        for i in reversed(range(x.shape[1])):
            state = state * torch.sigmoid(k[:, i]) + v[:, i]
            outs[i] = q[:, i] + state
        return self.loss(torch.stack(outs, 1) + q, labels) + state.square().mean()


class EverySecond(_Mixed):
    """Of two tensors, positions in turn."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, _, v = self.parts(x)
        state, outs = x.new_zeros(x.shape[0], 16), []
        for i in range(0, x.shape[1], 2):
            state = state * torch.sigmoid(q[:, i]) + torch.relu(v[:, i + 1])
            outs.append(state)
        return self.loss(torch.stack(outs, 1).repeat_interleave(2, 1), labels)


class Sums(_Mixed):
    """A sum, and a loop that begins with it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x)
        state = torch.zeros_like(q[:, 0])
        for i in range(x.shape[1]):
            state = state + torch.tanh(q[:, i]) * k[:, i]
        for i in range(x.shape[1]):
            state = torch.sin(state) + v[:, i]
        return self.loss(state[:, None], labels)


class Overwritten(_Mixed):
    """Blocks of a tensor are read and written, then positions of it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x)
        out, state = q.clone(), x.new_zeros(x.shape[0], 2, 16)
        for i in range(0, x.shape[1], 2):
            state = torch.tanh(state + k[:, i : i + 2]) * v[:, i : i + 2]
            out[:, i : i + 2] = out[:, i : i + 2] + state
        last, outs = x.new_zeros(x.shape[0], 1, 16), []
        for i in range(x.shape[1]):
            last = 0.5 * last + out[:, i : i + 1]
            outs.append(last)
        return self.loss(torch.cat(outs, 1), labels)


class Cell(nn.Module):
    """A recurrent cell, whose weights every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 16)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outs.append(h)
        return (self.out(torch.stack(outs, 1)) - labels).square().mean()


class Dropped(_Mixed):
    """Other random numbers in every step."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.parts(x)
        state, outs = x.new_zeros(x.shape[0], 16), []
        for i in range(x.shape[1]):
            state = nn.functional.dropout(state + q[:, i], 0.5) * k[:, i]
            outs.append(state)
        return self.loss(torch.stack(outs, 1), labels)


class Unordered(_Mixed):
    """Positions in no order."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.parts(x)
        state, outs = x.new_zeros(x.shape[0], 16), []
        for i in range(x.shape[1]):
            state = torch.tanh(state + q[:, i * i % x.shape[1]]) * k[:, i]
            outs.append(state)
        return self.loss(torch.stack(outs, 1), labels)


def loop_inputs(length: int, batch: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(batch, length, WIDTH, dtype=torch.float64) for name in ("x", "labels")}


class Growing(_Mixed):
    """Every step reads one position more, as does the forward substitution of a gated delta net; then a loop
    whose steps are alike."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, _ = (y.unflatten(2, (-1, 20)) for y in self.heads(x))
        scores = (q @ k.transpose(-1, -2)).tril(-1) * 0.1
        for i in range(1, 20):
            row, above = scores[..., i, :i].clone(), scores[..., :i, :i].clone()
            scores[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        values = self.merged((scores @ q).flatten(2, 3))
        state, outs = values[:, 0], []
        for i in range(x.shape[1]):
            state = torch.tanh(state + values[:, i])
            outs.append(state)
        return self.loss(torch.stack(outs, 1), labels)


class Broadening(_Mixed):
    """A state that begins as one row for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, _, _ = self.parts(x)
        state, outs = self.first, []
        for i in range(x.shape[1]):
            state = torch.tanh(state + q[:, i])
            outs.append(state)
        return self.loss(torch.stack(outs, 1), labels)


class TwoBeginnings(_Mixed):
    """One value in every step but the first, which begins with two."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x)
        one, two, outs = q[:, 0], k[:, 0], []
        for i in range(x.shape[1]):
            one = two = torch.tanh(one * 0.5 + v[:, i]) * torch.sigmoid(two)
            outs.append(one)
        return self.loss(torch.stack(outs, 1), labels)
