"""Ops that stay whole in captured graphs (attention, cross-entropy, dropout) and ops of programs.

Importing this package defines them all in the ``autoshard`` namespace of ``torch.ops``.
"""

from autoshard.kernels import (
    bucket,
    norm,
    norm_quant,
    optim,
    quant,
    quant_reduce,
    vocab_ce,
    vocab_embedding,
)
from autoshard.ops import (
    attention,
    attention_parts,
    attention_rows,
    causal_conv,
    ctc,
    dropout,
    experts,
    loss,
    packed,
    recurrent,
    scaled,
    scaled_experts,
    scatter,
    similar_rows,
    total,
)

__all__ = [
    "attention",
    "attention_parts",
    "attention_rows",
    "bucket",
    "causal_conv",
    "ctc",
    "dropout",
    "experts",
    "loss",
    "norm",
    "norm_quant",
    "optim",
    "packed",
    "quant",
    "quant_reduce",
    "recurrent",
    "scaled",
    "scaled_experts",
    "scatter",
    "similar_rows",
    "total",
    "vocab_ce",
    "vocab_embedding",
]
