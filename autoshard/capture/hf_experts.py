"""Hugging Face experts as products in which every row names its expert, for the time of a capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import autoshard.ops.experts  # noqa: F401 (defines the op called here)

#: the name under which transformers finds our implementation
NAME = "autoshard"
#: transformers' own implementations, all of one meaning: what the user registered stays
KNOWN = frozenset({None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe"})


@contextmanager
def registered(interface: Any) -> Iterator[None]:
    """Offer `experts_forward` in transformers' table of implementations (``ALL_EXPERTS_FUNCTIONS``)."""
    interface[NAME] = experts_forward
    try:
        yield
    finally:
        del interface[NAME]


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers' own implementations compute, without a sort over the tokens.

    self: a module under ``use_experts_implementation``. hidden_states [t, h], top_k_index and top_k_weights
    [t, k] -> [t, h]. Rows are the pairs (token, choice) in the order of the tokens.
    """
    tokens, choices = top_k_index.shape
    expert = top_k_index.reshape(-1)
    weights = top_k_weights.reshape(-1)
    outside = None
    if self._is_expert_parallel:  # experts held elsewhere have numbers past the last one
        outside = expert >= self.num_experts
        weights = weights.masked_fill(outside, 0.0)
    rows = hidden_states.unsqueeze(1).expand(tokens, choices, hidden_states.shape[-1])
    rows = rows.reshape(tokens * choices, hidden_states.shape[-1])
    rows = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, expert, outside)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _linear(self, "down_proj", rows, expert, outside)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * weights.unsqueeze(-1)
    summed = rows.reshape(tokens, choices, rows.shape[-1]).sum(dim=1)
    return summed.to(hidden_states.dtype)


def _linear(
    module: Any, name: str, rows: torch.Tensor, expert: torch.Tensor, outside: torch.Tensor | None
) -> torch.Tensor:
    """Every row through its own expert's matrix and bias: [r, k] -> [r, n].

    outside: rows whose expert is not here [r]; they give zeros.
    """
    weight = getattr(module, name)
    # transformers calls [E, k, n] transposed; for us it is [E, n, k]
    made: torch.Tensor = torch.ops.autoshard.expert_mm(
        rows.to(weight.dtype), expert, weight, not module.is_transposed
    )
    if not module.has_bias:
        return made
    bias = getattr(module, f"{name}_bias")
    if outside is None:
        return made + nn.functional.embedding(expert, bias).to(made.dtype)
    added = nn.functional.embedding(expert.masked_fill(outside, 0), bias).to(made.dtype)
    return made + added.masked_fill(outside.unsqueeze(-1), 0.0)
