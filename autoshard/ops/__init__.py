"""Ops that stay whole in captured graphs (attention, cross-entropy, dropout) and ops of programs.

Importing this package defines them all in the ``autoshard`` namespace of ``torch.ops``.
"""

from autoshard.ops import attention, dropout, loss, parallel

__all__ = ["attention", "dropout", "loss", "parallel"]
