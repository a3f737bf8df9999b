"""Numbers that autograd gives to the nodes of backward, so that they lead to the op of forward.

Leans on ``torch._C._current_autograd_node``, ``torch.autograd._get_sequence_nr`` and on the function that
starts the engine. Tried on torch 2.13.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import _engine_run_backward

#: the function under which backward runs
ENGINE_CODE = _engine_run_backward.__code__


def next_node_number() -> int:
    """The number that this thread's next node of backward will have."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def current_node_number() -> int | None:
    """The number of the node of backward that this thread runs, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
