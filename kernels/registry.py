"""What is known of every kernel: reference, launch, what it moves, how exact it is, samples of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from autoshard.kernels.launch import Prepared, prepare_of
from autoshard.kernels.samples import Generator

#: modules of this folder that have kernels
MODULES = ("attention", "bucket", "norm", "norm_quant", "optim", "quant", "quant_reduce", "vocab_ce")


@dataclass(frozen=True)
class Operand:
    """A tensor as far as its cost matters. width: bytes of an element."""

    shape: tuple[int, ...]
    width: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


@dataclass(frozen=True)
class Cost:
    """What one call asks of a device: bytes read and written, FLOP on the vector units, kernel launches."""

    read: float
    written: float
    flop: float = 0.0
    launches: int = 1

    @property
    def moved(self) -> float:
        """Bytes over the device's memory bus."""
        return self.read + self.written


#: (tensor arguments, outputs) -> cost. The planner and the benchmark both ask this function.
CostFn: TypeAlias = Callable[[Sequence[Operand], Sequence[Operand]], Cost]
#: (generator, element type, device) -> argument lists
SampleFn: TypeAlias = Callable[[Generator, torch.dtype, torch.device], Iterator[tuple[Any, ...]]]

#: largest error allowed, as a part of the largest value of an output, where a result is rounded once
ROUNDING: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
)


@dataclass(frozen=True)
class KernelSpec:
    """One op with a Triton kernel.

    name: of the op in the ``autoshard`` namespace. reference: plain torch, the CPU implementation; given
    fp64 tensors it computes in fp64, which is what kernels are compared with. launch: (module, function) of
    the Triton launch, imported when it is first called. cost: see `CostFn`. samples: small arguments with odd
    sizes. large: arguments for a benchmark. tolerance: by element type. exact: whether the launch must give
    the reference's values. mutated: how many of the first arguments it changes, which is all that it does.
    codes: by how much integers of a wire may differ, where a value lies between two.
    """

    name: str
    reference: Callable[..., Any]
    launch: tuple[str, str]
    cost: CostFn
    samples: SampleFn
    large: SampleFn
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: ROUNDING)
    exact: bool = False
    mutated: int = 0
    codes: int = 0

    @property
    def op(self) -> str:
        """As programs call it."""
        return f"autoshard.{self.name}.default"

    def prepare(self) -> Callable[..., Prepared]:
        """What makes the Triton launches; needs triton."""
        return prepare_of(*self.launch)


@cache
def specs() -> Mapping[str, KernelSpec]:
    """Op name in programs -> kernel."""
    result = [spec for name in MODULES for spec in import_module(f"autoshard.kernels.{name}").SPECS]
    return MappingProxyType({spec.op: spec for spec in result})


def all_moved(ins: Sequence[Operand], outs: Sequence[Operand]) -> Cost:
    """Every argument read once, every output written once."""
    read, written = sum(x.nbytes for x in ins), sum(x.nbytes for x in outs)
    return Cost(read, written, float(max((x.numel for x in (*ins, *outs)), default=0)))


def operand(x: torch.Tensor) -> Operand:
    return Operand(tuple(x.shape), x.element_size())
