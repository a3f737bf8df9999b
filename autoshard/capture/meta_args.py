"""Tensors of which only the type is there: what a trace leaves out of its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch


class AbsentUsedError(Exception):
    """An op was called with a tensor that is not there."""


class Absent(torch.Tensor):
    """Has a shape, strides, an element type and requires_grad; any op on it raises AbsentUsedError."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Absent:
        new: Absent = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=torch.device("cpu"),
            requires_grad=like.requires_grad,
        )
        return new

    # reading the type is no op; all else arrives below
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stub leaves out the class and the function
        cls, func: object, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise AbsentUsedError(f"{func} is called with a tensor that was left out")
