"""From an op to its Triton launch. Imports triton only when a kernel is first launched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

#: element types that kernels take; others run the reference
KERNEL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
#: of pointers and strides, for accesses of 16 bytes
ALIGN = 16


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    kernel: a function under ``triton.jit``. args: tensors and numbers in its order. constants: its
    ``constexpr`` arguments. narrow: most accesses of less than 16 bytes that its machine code may have
    where sizes and pointers are multiples of 16: scales, statistics of rows.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    narrow: int = 0

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](*self.args, **self.constants, num_warps=self.warps)


#: what a launch function gives: the op's result, which the launches, run in order, fill
Prepared: TypeAlias = "tuple[Any, Sequence[Launch]]"


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


def prepare_of(module: str, name: str) -> Callable[..., Prepared]:
    """Function ``name`` of ``kernels/<module>.py``; needs triton."""
    result: Callable[..., Prepared] = getattr(import_module(f"autoshard.kernels.{module}"), name)
    return result


def run_kernel(prepare: Callable[..., Prepared], *args: Any) -> Any:
    """The result of an op by its launches."""
    result, launches = prepare(*args)
    for launch in launches:
        launch.run()
    return result


def launched(module: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The CUDA implementation of an op whose launches `prepare_of` gives.

    Without triton, and for element types that kernels do not take (fp64), it is the reference.
    """

    def call(*args: Any) -> Any:
        tensors = list(_tensors(args))
        floats = {t.dtype for t in tensors if t.is_floating_point()}
        floats |= {a for a in args if isinstance(a, torch.dtype)}
        if not floats <= KERNEL_DTYPES or not has_triton():
            return reference(*args)
        # triton launches on the current device, whichever the tensors are on
        with torch.cuda.device_of(tensors[0]):
            return run_kernel(prepare_of(module, name), *args)

    return call


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    """All tensors among arguments, those in lists, too."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and starting at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGN == 0 else x.clone()


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor with the elements of its last dim side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere (interpreter, compiling ahead of time) a small number."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
