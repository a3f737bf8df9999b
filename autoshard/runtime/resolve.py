"""From program text to what one rank calls: symbols become numbers, op names become functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import autoshard.ops  # noqa: F401 (defines ops that programs call)
from autoshard.errors import VerificationError
from autoshard.ir import Arg, Dtype, LocalOffset, LocalSize, ShardOf
from autoshard.ir.placement import Shard, local_extent
from autoshard.torch_adapters.dtypes import torch_dtype

#: Ops whose kernels take tensors for dense, and fail or silently give wrong numbers on others. Eager PyTorch
#: copies before it calls them, but a program does not know which values are strided: views and shards are.
DENSE = frozenset(
    f"aten.{name}.default"
    for name in (
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_weight_norm_interface",
        "_weight_norm_interface_backward",
        "nll_loss2d_backward",
        "adaptive_max_pool3d_backward",
        "_pdist_forward",
        "_pdist_backward",
        "view_as_complex",
        # factors of a transposed matrix are others, and backward wants those that the capture saw
        "_linalg_det",
        "_linalg_slogdet",
        "linalg_matrix_exp",
    )
)


class RankView:
    """A rank of a mesh: resolves sizes and offsets."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], coords: Sequence[int]) -> None:
        self.names, self.sizes, self.coords = tuple(names), tuple(sizes), tuple(coords)

    def size_of(self, axis: str) -> int:
        return self.sizes[self.names.index(axis)]

    def coord_of(self, axis: str) -> int:
        return self.coords[self.names.index(axis)]

    def _extent(self, size: int, shards: Sequence[ShardOf]) -> tuple[int, int]:
        split = [(Shard(0, s.outer, s.inner), self.size_of(s.axis), self.coord_of(s.axis)) for s in shards]
        return local_extent(size, split)

    def value(self, arg: Arg) -> Any:
        """An argument with symbols and dtypes resolved; Refs stay."""
        if isinstance(arg, LocalSize):
            return self._extent(arg.size, arg.shards)[1]
        if isinstance(arg, LocalOffset):
            return self._extent(arg.size, arg.shards)[0]
        if isinstance(arg, Dtype):
            return torch_dtype(arg.name)
        if isinstance(arg, tuple):
            return tuple(self.value(a) for a in arg)
        return arg


def find_op(name: str) -> Callable[..., Any]:
    """What calls the torch operator ``namespace.name.overload``; VerificationError if this torch lacks it."""
    return _dense(torch_op(name)) if name in DENSE else torch_op(name)


def torch_op(name: str) -> Any:
    """The operator itself."""
    namespace, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError as error:
        raise VerificationError(
            f"the program calls {name}, which this installation does not have",
            why=str(error),
            hint="import the library that defines it (transformers, for instance), or use the torch version "
            "the program was compiled with",
        ) from None


def _dense(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op on dense copies of those of its tensors that are not."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*(x.contiguous() if isinstance(x, torch.Tensor) else x for x in args), **kwargs)

    run._schema = op._schema  # type: ignore[attr-defined]
    return run


def makes_on_device(op: Callable[..., Any]) -> bool:
    """Whether an op makes a tensor from nothing and so must be told the device."""
    schema = op._schema  # type: ignore[attr-defined]
    has_device = any(a.name == "device" for a in schema.arguments)
    takes_tensor = any("Tensor" in str(a.type) for a in schema.arguments)
    return has_device and not takes_tensor
