"""From an op to its Triton launch. Imports triton only when a kernel is first launched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

#: element types that kernels take; others run the reference
KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


@cache
def has_triton() -> bool:
    """Whether triton is installed; warns once where it is not."""
    if find_spec("triton") is None:
        warnings.warn(
            "triton is not installed: autoshard's ops run their plain torch versions on this GPU; "
            "install autoshard[gpu]",
            stacklevel=3,
        )
        return False
    return True


def launched(module: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA implementation of an op: function ``name`` of ``kernels/<module>.py``.

    Without triton, and for element types that kernels do not take (fp64), it is the reference.
    """

    def call(*args: Any) -> Any:
        floats = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        if not floats <= KERNEL_DTYPES or not has_triton():
            return reference(*args)
        return getattr(import_module(f"autoshard.kernels.{module}"), name)(*args)

    return call


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 2 for the interpreter, whose programs run one after the other."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
