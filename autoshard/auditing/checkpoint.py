"""Whether what ranks save is what ranks of another mesh need: each element of the reference's parameters and
buffers, and of an optimizer's states, where it belongs.

States and buffers get values that tell which they are: multiples of the parameter they belong to, or numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.auditing.buffers import CopiedBuffers
from autoshard.auditing.findings import AuditFinding, some_of
from autoshard.auditing.state import Elements, array, local
from autoshard.errors import UsageError
from autoshard.runtime.optim.optimizer_hooks import parameters_in


@dataclass(frozen=True)
class Built:
    """What a rank saves or loads into. copied: the buffers of the model that it was given."""

    model: nn.Module
    optimizer: Optimizer | None
    copied: CopiedBuffers | None

    @classmethod
    def of(cls, value: Any, copied: CopiedBuffers | None) -> Built:
        """From what the user's function returns.

        Raises UsageError if that is no model, and no model with its optimizer.
        """
        model, optimizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
            raise UsageError(
                "build returns no model",
                why=f"it returns {type(value).__name__}",
                hint="return the rank's model, or (model, optimizer)",
            )
        return cls(model, optimizer, copied)

    def arguments(self) -> tuple[Any, ...]:
        """What `save` and `load` take before the folder."""
        return (self.model,) if self.optimizer is None else (self.model, self.optimizer)

    def parameters(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Of the model and the optimizer, with names, by id."""
        named: dict[int, tuple[str, torch.Tensor]] = {
            id(p): (name, p) for name, p in self.model.named_parameters()
        }
        for p in () if self.optimizer is None else parameters_in(self.optimizer):
            named.setdefault(id(p), ("a parameter of the optimizer", p))
        return named

    def buffers(self) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
        """Those that are saved: name in the reference, module, key in it, values."""
        if self.copied is None:
            return
        for module in self.model.modules():
            for name, key, x in self.copied.of(module):
                if x.is_floating_point() and key not in module._non_persistent_buffers_set:
                    yield name, module, key, x

    def state(self, p: torch.Tensor, key: str) -> Any:
        """One of the optimizer's states, or None."""
        return None if self.optimizer is None else self.optimizer.state.get(p, {}).get(key)


@dataclass
class SavedStates:
    """The states that ranks save. keys: of a parameter of the reference, by its number; whether each has an
    element for each of the parameter's."""

    keys: dict[int, dict[str, bool]] = field(default_factory=lambda: defaultdict(dict))

    def of(self, parameters: Iterable[int]) -> dict[str, bool]:
        """The states of some parameters."""
        return {key: each for number in parameters for key, each in self.keys[number].items()}

    def fill(self, built: Built, elements: Elements) -> None:
        """Give buffers known values, and the states of an optimizer, stepped without gradients."""
        for name, _, _, x in built.buffers():
            x.copy_(_numbers(name, x).view(x.shape))
        if built.optimizer is None:
            return
        parameters = list(parameters_in(built.optimizer))
        values = [local(p).clone() for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        built.optimizer.step()
        built.optimizer.zero_grad()
        with torch.no_grad():
            for p, before in zip(parameters, values, strict=True):
                local(p).copy_(before)
                numbers, state = elements.parameters_of(elements.held(p)), built.optimizer.state[p]
                for key, value in state.items():
                    each = torch.is_tensor(value) and local(value).shape == local(p).shape
                    if each:
                        local(value).copy_(local(p) * _multiple(key))
                    elif torch.is_tensor(value) and value.dim() == 0:
                        value.fill_(_multiple(key))
                    elif type(value) in (int, float):
                        state[key] = type(value)(_multiple(key))
                    else:
                        continue
                    for number in numbers:
                        self.keys[number][key] = each


@dataclass(frozen=True)
class LoadedPart:
    """What a load has to bring. value: what is there. wanted: NaN where it may be anything."""

    name: str
    value: Callable[[], Any]
    wanted: np.ndarray

    def wrong(self) -> tuple[str, int, int] | None:
        """If there are other values: name, how many, of how many."""
        known = ~np.isnan(self.wanted)
        value = self.value()
        values = np.zeros(0) if value is None else array(torch.as_tensor(value))
        if len(values) != len(known):
            return self.name, int(known.sum()), int(known.sum())
        differ = int((~np.isclose(values[known], self.wanted[known], rtol=1e-6, atol=0)).sum())
        return (self.name, differ, int(known.sum())) if differ else None


def cleared(built: Built, elements: Elements, saved: SavedStates) -> list[LoadedPart]:
    """What a load has to bring into a rank's model and optimizer, whose values are taken away."""
    loaded = [*_parameter_parts(built, elements, saved), *_buffer_parts(built)]
    with torch.no_grad():
        for x, _ in loaded:
            if x is not None:
                local(x).fill_(float("nan"))
    return [part for _, part in loaded]


def _parameter_parts(
    built: Built, elements: Elements, saved: SavedStates
) -> Iterator[tuple[torch.Tensor | None, LoadedPart]]:
    """Parameters, and the states that an optimizer has of them. With what is to be cleared."""
    places = {
        id(p): partial(module._parameters.get, key)
        for module in built.model.modules()
        for key, p in module.named_parameters(recurse=False)
    }
    for number, (name, p) in built.parameters().items():
        held = elements.held(p)
        wanted = np.where(held >= 0, elements.values[held], np.nan)
        yield p, LoadedPart(name, places.get(number, p.detach), wanted)
        for key, each in saved.of(elements.parameters_of(held)).items():
            value = (wanted if each else np.ones(1)) * _multiple(key)
            yield None, LoadedPart(f"{key} of {name}", partial(built.state, p, key), value)


def _buffer_parts(built: Built) -> Iterator[tuple[torch.Tensor, LoadedPart]]:
    """Buffers that are saved. With what is to be cleared."""
    for name, module, key, x in built.buffers():
        yield x, LoadedPart(name, partial(module._buffers.get, key), _numbers(name, x).numpy())


def findings_of(wrong: Sequence[Sequence[tuple[str, int, int]]], mesh: str) -> list[AuditFinding]:
    """One per tensor; one for all tensors of which the same ranks have nothing. wrong: by rank of the mesh
    that loads."""
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for rank, names in enumerate(wrong):
        for name, differ, of in names:
            by_name.setdefault(name, []).append((rank, differ, of))
    out, nothing = [], defaultdict(list)
    for name, where in by_name.items():
        ranks = tuple(rank for rank, _, _ in where)
        if all(differ == of for _, differ, of in where):
            nothing[ranks].append(name)
            continue
        told = ", ".join(f"{differ} of {of} elements on rank {rank}" for rank, differ, of in where)
        what = f"{name} has other values than were saved once {mesh} has loaded it: {told}"
        out.append(AuditFinding("state", what, (name,), ranks))
    for ranks, some in nothing.items():
        what = f"{some[0]} has none of the values that were saved once {mesh} has loaded it"
        details: tuple[str, ...] = ()
        if len(some) > 1:
            what = f"{len(some)} tensors have none of the values that were saved once {mesh} has loaded them"
            details = (f"tensors: {', '.join(some_of(some))}",)
        out.append(AuditFinding("state", what, tuple(some), ranks, details=details))
    return out


def _numbers(name: str, x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), dtype=torch.float64) + _multiple(name)


def _multiple(key: str) -> int:
    """A number that is a name's alone."""
    return 2 + crc32(key.encode()) % 9973
