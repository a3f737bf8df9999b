"""Which elements of the reference's parameters a rank holds, read from their values.

An audit gives every element of the reference a value of its own. A rank that takes its parameters from the
reference, in whatever layout (DTensors, flat buffers, interleaved heads, padded rows), tells by its values
what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.runtime.optim.optimizer_hooks import local as local_part
from autoshard.torch_adapters.blocks import part_at

#: relative size of the noise that makes values differ
_NOISE = 1e-3
#: types of too few values to tell elements apart
HALF = frozenset((torch.bfloat16, torch.float16))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, in memory."""
    tensor = local_part(tensor).detach()
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its values are there: FSDP frees those of gathered parameters."""
    mine = local(tensor)
    return mine.untyped_storage().nbytes() >= mine.numel() * mine.element_size()


def array(tensor: torch.Tensor) -> np.ndarray:
    """A rank's values in float64, one dim; of complex numbers both parts."""
    mine = local(tensor)
    mine = torch.view_as_real(mine.resolve_conj()) if mine.is_complex() else mine
    # a copy first: memory that numpy sees can no longer be resized, which FSDP does
    values: np.ndarray = mine.to(torch.float64, copy=True).reshape(-1).numpy(force=True)
    return values


def partial_ranks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ranks whose parts a DTensor adds up to."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return ()
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    at = tuple(slice(None) if p.is_partial() else k for p, k in zip(tensor.placements, place, strict=True))
    return tuple(mesh.mesh[at].flatten().tolist())


def laid_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A rank's part of a gradient, NaN where it has none, of the elements that it has of the parameter."""
    mine = local(gradient)
    if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
        return mine
    if gradient.placements == parameter.placements:
        return mine
    mesh, place = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert place is not None
    given, wanted = (part_at(parameter.shape, mesh.shape, x.placements, place) for x in (gradient, parameter))
    full = mine.new_full(parameter.shape, float("nan"))
    given.write(full, mine)
    return wanted.read(full)


def add_partials(ranks: list[Parameters]) -> list[Parameters]:
    """Gradients that are Partial, added up, as whoever reads such a DTensor has them."""
    by_elements = [{h.elements.tobytes(): h.gradient for h in held} for held in ranks]

    def full(held: RankParameter) -> RankParameter:
        if not held.summed:
            return held
        of_ranks = [by_elements[k].get(held.elements.tobytes()) for k in held.summed]
        return replace(held, gradient=np.sum([g for g in of_ranks if g is not None], axis=0))

    return [[full(h) for h in held] for held in ranks]


def make_distinct(model: nn.Module, seed: int) -> None:
    """Add noise to the parameters until no value stands twice. They are float64."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = float(parameter.abs().mean()) or 0.02
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(
                noise * scale * (_NOISE if parameter.numel() > 1 and float(parameter.std()) else 0.05)
            )


def restorer(model: nn.Module) -> Callable[[], None]:
    """What gives a model its present parameters and buffers back."""
    kept = [
        (slots, key, tensor, tensor.detach().clone())
        for module in model.modules()
        for slots in cast("list[dict[str, torch.Tensor | None]]", [module._parameters, module._buffers])
        for key, tensor in slots.items()
        if tensor is not None
    ]

    def restore() -> None:
        for slots, key, tensor, values in kept:
            tensor.data = values
            slots[key] = tensor

    return restore


@dataclass(frozen=True)
class Elements:
    """The elements of all parameters of the reference, one after the other.

    names: of parameters; starts: first element of each, and the end.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: np.ndarray
    values: np.ndarray
    _sorted: np.ndarray
    _order: np.ndarray

    @classmethod
    def of(cls, model: nn.Module) -> Elements:
        """Those of a model."""
        named = dict(model.named_parameters())
        arrays = [array(p) for p in named.values()]
        values = np.concatenate(arrays) if arrays else np.zeros(0)
        order = np.argsort(values, kind="stable")
        return cls(
            tuple(named),
            tuple(tuple(p.shape) for p in named.values()),
            np.cumsum([0, *map(len, arrays)]),
            values,
            values[order],
            order,
        )

    def held(self, tensor: torch.Tensor) -> np.ndarray:
        """The element that each value of a rank's tensor is, -1 where it is none.

        Raises UsageError for 16 bits, which are too few to tell elements apart.
        """
        kind = local(tensor).dtype
        if kind not in HALF:
            return self._rounded(array(tensor)) if kind == torch.float32 else self._exact(array(tensor))
        raise UsageError(
            f"a parameter of a rank is {str(kind).removeprefix('torch.')}",
            why="what a rank holds is read from values, of which 16 bits have too few",
            hint="make parameters in the default type, float64 here; gathered copies may have any",
        )

    @cached_property
    def _narrow(self) -> np.ndarray:
        return self._sorted.astype(np.float32).astype(np.float64)

    def _exact(self, values: np.ndarray) -> np.ndarray:
        if not len(self._sorted):
            return np.full(len(values), -1)
        at = np.searchsorted(self._sorted, values).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[at] == values, self._order[at], -1)

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Of float32: where two elements round to one value, the one that follows the element before."""
        rounded = self._narrow
        first = np.searchsorted(rounded, values, side="left")
        last = np.searchsorted(rounded, values, side="right")
        result = np.where(last > first, self._order[first.clip(max=max(len(rounded) - 1, 0))], -1)
        for k in np.flatnonzero(last - first > 1):
            choices = self._order[first[k] : last[k]]
            result[k] = result[k - 1] + 1 if k and result[k - 1] + 1 in choices else choices[0]
        return result

    def parameters_of(self, elements: np.ndarray) -> list[int]:
        """Numbers of the parameters that elements are of."""
        held = elements[elements >= 0]
        return [int(k) for k in np.unique(np.searchsorted(self.starts, held, side="right") - 1)]

    def slice_of(self, number: int) -> slice:
        """The elements of a parameter."""
        return slice(int(self.starts[number]), int(self.starts[number + 1]))


@dataclass(frozen=True)
class RankParameter:
    """A parameter of a rank. elements: of the reference, -1 where none. gradient, after: its values, or None.

    writer: the record that wrote the gradient last. made, used: the records that
    wrote and first read it; stepped: the line
    of the optimizer's step. summed: the ranks over which its gradient is a DTensor's Partial. in_module:
    else it is an optimizer's alone.
    """

    name: str
    elements: np.ndarray
    trained: bool = True
    gradient: np.ndarray | None = None
    after: np.ndarray | None = None
    writer: int | None = None
    made: int | None = None
    used: int | None = None
    stepped: str = ""
    summed: tuple[int, ...] = ()
    in_module: bool = True


#: of one rank, or of the reference
Parameters: TypeAlias = "list[RankParameter]"


def same_values(model: nn.Module, elements: Elements) -> bool:
    """Whether a model still has the values that its elements were read from."""
    arrays = [array(p) for p in model.parameters()]
    return np.array_equal(np.concatenate(arrays) if arrays else np.zeros(0), elements.values)
