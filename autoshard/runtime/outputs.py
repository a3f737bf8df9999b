"""Outputs as user code mixes them with plain tensors: they lie divided over the ranks until they are used.

A `ShardedOutput` is a DTensor. What torch calls with it and plain tensors gets the global tensor, gathered
once; an output that nothing uses is never gathered. Every rank must use an output that one rank uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.torch_adapters.dtensor import Spec, without_torch_function

#: attributes of a tensor that hold its data, or are computed from it
_COMPUTED = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
#: what tells of a tensor without its data, or is said of the output itself
_METADATA = frozenset(
    (
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "__len__",
        "register_hook",
        "retain_grad",
        "requires_grad_",
        "backward",
        "grad",
    )
)


@dataclass(frozen=True)
class Rows:
    """The rows of a rank, of an output whose dim 0 is the batch.

    start, count: in dim 0 of the global tensor. axes: of the mesh, along which ranks have other rows. ways:
    how many ranks those are.
    """

    start: int
    count: int
    axes: tuple[int, ...]
    ways: int


class ShardedOutput(DTensor):
    """An output of a parallel model.

    autoshard_rows: where every rank calls with a batch of its own, what it gets back; None: the global
    tensor.
    """

    autoshard_rows: Rows | None = None
    _autoshard_plain: torch.Tensor | None = None

    @staticmethod
    def of(x: DTensor, rows: Rows | None = None) -> ShardedOutput:
        """The same tensor; without gradient history."""
        new = ShardedOutput(x._local_tensor, x._spec, requires_grad=False)
        new.autoshard_rows = rows
        return new

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        getter = name == "__get__" and getattr(func.__self__, "__name__", "") not in _COMPUTED
        mixed = any(issubclass(t, DTensor) and not issubclass(t, ShardedOutput) for t in types)
        if getter or name in _METADATA or mixed:
            with without_torch_function():
                return func(*args, **kwargs)
        if name == "detach":
            with without_torch_function():
                return cls.of(args[0].detach(), args[0].autoshard_rows)
        args, kwargs = pytree.tree_map_only(ShardedOutput, plain, (args, kwargs))
        return func(*args, **kwargs)


class NotMade:
    """In the place of an output that the program never has for all tokens at once: logits, with tiles.

    Whatever is asked of it raises UsageError.
    """

    def __repr__(self) -> str:
        return "<not made: the plan computes it in tiles>"

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        _not_made(getattr(func, "__name__", "it"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _not_made(name)

    def __getitem__(self, key: object) -> NoReturn:
        _not_made("an index")

    def __iter__(self) -> NoReturn:
        _not_made("iteration")


def _not_made(what: str) -> NoReturn:
    raise UsageError(
        f"{what} of an output that is not made",
        why="head and loss are computed for some tokens at a time (tile_rows), so that logits of all of them "
        "never exist",
        hint="call the model in eval mode for logits, or plan with more memory and without tile_rows",
    )


def plain(x: ShardedOutput) -> torch.Tensor:
    """The plain tensor that an output stands for, gathered once; a collective of the ranks of its mesh."""
    known = x._autoshard_plain
    # without gradients recorded another tensor is wanted than with them
    if known is None or (x.requires_grad and torch.is_grad_enabled() and not known.requires_grad):
        with without_torch_function():
            known = x.full_tensor() if x.autoshard_rows is None else _RowsOf.apply(x, x.autoshard_rows)
        x._autoshard_plain = known
    return known


class _RowsOf(torch.autograd.Function):
    """The rows of this rank. Their gradient is that of a loss of which the mean over ranks is taken."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, rows: Rows) -> torch.Tensor:
        ctx.spec, ctx.rows, ctx.shape = x._spec, rows, x.shape
        return x.full_tensor().narrow(0, rows.start, rows.count).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        spec: Spec = ctx.spec
        rows: Rows = ctx.rows
        padded = grad.new_zeros(ctx.shape)
        padded.narrow(0, rows.start, rows.count).copy_(grad)
        return mean_over(padded, spec.mesh, rows.axes, spec.placements), None


def mean_over(
    grad: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], placements: Sequence[Placement]
) -> DTensor:
    """A global gradient that differs along some axes of the mesh, as the mean over these."""
    ways = prod(mesh.size(axis) for axis in axes)
    parts = [Partial() if axis in axes else Replicate() for axis in range(mesh.ndim)]
    own = DTensor.from_local(grad / ways if ways > 1 else grad, mesh, parts, run_check=False)
    return own.redistribute(mesh, placements)
