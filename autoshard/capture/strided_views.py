"""Views given by strides that are nothing but reshapes.

Strides are no part of our graphs: these ops can only be read where the traced tensors still have them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_VIEW = torch.ops.aten.as_strided.default
_SCATTER = torch.ops.aten.as_strided_scatter.default


def reshaped(node: fx.Node) -> fx.Node | None:
    """What a strided view or scatter is a reshape of; None if it is more than that, or another op."""
    args: list[Any] = list(node.args)
    if node.target is _VIEW:
        base, *rest = args
        source = base
    elif node.target is _SCATTER:
        base, source, *rest = args
    else:
        return None
    if not isinstance(base, fx.Node) or not isinstance(source, fx.Node) or node.kwargs:
        return None
    memory = base.meta.get("val")
    if not isinstance(memory, torch.Tensor) or not _covers(memory, *rest):
        return None
    return source


def _covers(base: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None) -> bool:
    """Whether a view has all elements of its base, in the same order."""
    if (base.storage_offset() if offset is None else offset) != base.storage_offset():
        return False
    if list(size) == list(base.shape):
        return all(a == b or n == 1 for a, b, n in zip(stride, base.stride(), size, strict=True))
    return base.is_contiguous() and _numel(size) == base.numel() and _contiguous(size, stride)


def _numel(size: list[int]) -> int:
    return int(torch.Size(size).numel())


def _contiguous(size: list[int], stride: list[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
