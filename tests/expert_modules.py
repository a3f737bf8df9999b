"""A mixture whose experts are modules of their own, called in a loop, as Mistral's reference code does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutput


class Expert(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.w1, self.w3 = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int, experts: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, dropout) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = torch.topk(self.gate(tokens), 2)
        weights = weights.softmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out[token] += weights[token, choice, None] * expert(tokens[token])
        return x + out.view_as(x)


class ExpertModules(nn.Module):
    """input_ids, labels [batch, length] -> loss and logits."""

    def __init__(
        self, layers: int = 2, width: int = 32, experts: int = 4, vocab: int = 96, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, experts, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return CausalLMOutput(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """26 billion parameters without values, for plans."""
    with torch.device("meta"):
        model = ExpertModules(32, 4096, 8, 32_000).bfloat16()
    ids = torch.zeros(64, 4096, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}
