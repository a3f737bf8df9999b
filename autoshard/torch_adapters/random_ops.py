"""Which ops draw random numbers, as torch itself tags them."""

from __future__ import annotations

import torch


def is_random(op: str) -> bool:
    """Whether ``namespace.name.overload`` gives other results at every call."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    result = getattr(packet, overload, None)
    return result is not None and torch.Tag.nondeterministic_seeded in result.tags
