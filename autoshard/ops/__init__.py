"""Ops that stay whole in captured graphs (attention, cross-entropy, dropout) and ops of programs.

Importing this package defines them all in the ``autoshard`` namespace of ``torch.ops``.
"""

from autoshard.kernels import vocab_ce, vocab_embedding
from autoshard.ops import attention, dropout, loss

__all__ = ["attention", "dropout", "loss", "vocab_ce", "vocab_embedding"]
