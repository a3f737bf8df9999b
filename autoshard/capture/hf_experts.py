"""Hugging Face experts as a dispatch of tokens, products of experts, and a combination, for the time of a
capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import autoshard.ops.experts  # noqa: F401 (defines the op called here)

_ops = torch.ops.autoshard
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
    """What transformers' own implementations compute, with each token dispatched and combined once.

    self: a module under ``use_experts_implementation``. hidden_states [t, h], top_k_index and top_k_weights
    [t, k] -> [t, h]. Experts that are held elsewhere have numbers past the last one.
    """
    chosen = _ops.choices(top_k_index)
    slots = _ops.route(chosen, self.num_experts)
    rows = _ops.dispatch(hidden_states, chosen, slots)
    rows = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, slots)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    weights = _ops.dispatch_weights(top_k_weights, chosen, slots)
    # what is linear in its rows takes weighted ones: backward then needs no results of the last product
    linear = not (self.has_bias or self.has_post_expert_norm)
    if linear:
        rows = _ops.scale_rows(rows, weights)
    rows = _linear(self, "down_proj", rows, slots)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    if not linear:
        rows = _ops.scale_rows(rows, weights)
    combined: torch.Tensor = _ops.combine(rows, chosen, slots)
    return combined.to(hidden_states.dtype)


def _linear(module: Any, name: str, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Every row through its own expert's matrix and bias: [s, k] -> [s, n]."""
    weight = getattr(module, name)
    # transformers calls [E, k, n] transposed; for us it is [E, n, k]
    new: torch.Tensor = _ops.expert_mm(rows.to(weight.dtype), slots, weight, not module.is_transposed)
    if not module.has_bias:
        return new
    return new + _ops.expert_rows(getattr(module, f"{name}_bias"), slots).to(new.dtype)
