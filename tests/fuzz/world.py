"""The source of a case in a module of its own, and what is seen of it: values, state, fake tensors."""

from __future__ import annotations

import contextvars
import itertools
import linecache
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor

from autoshard.capture.python_state.changes import Elsewhere

_NUMBERS = itertools.count()
_PLAIN = (bool, int, float, str, type(None))
#: attributes that are not the user's
_OURS = ("_stepper", "_load_state_dict_pre_hooks", "_is_full_backward_hook")

Facts = dict[str, Any]


class Wrong(Exception):
    """Something is not what it should be. failure: its kind, by which a smaller case is recognised."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure, self.detail = failure, detail


def world(source: str) -> types.ModuleType:
    """The source run as a module: with globals, and lines that tracebacks show."""
    name = f"fuzz_case_{next(_NUMBERS)}"
    made = types.ModuleType(name)
    made.__file__ = f"<{name}>"
    linecache.cache[made.__file__] = (len(source), None, source.splitlines(True), made.__file__)
    sys.modules[name] = made
    exec(compile(source, made.__file__, "exec"), made.__dict__)
    return made


def facts(root: Any, name: str, where: types.ModuleType, hooks: bool = False) -> Facts:
    """Everything that can be reached from a value, by path: tensors whole, numbers and texts as they are.

    where: the module whose classes and functions are looked into. hooks: also those of modules.
    """
    return dict(_walk(root, name, where.__name__, hooks, set()))


def state_of(where: types.ModuleType, model: nn.Module, hooks: bool = False) -> Facts:
    """The facts of a model and of the globals of its source."""
    found = facts(model, "model", where, hooks)
    for key, value in vars(where).items():
        if not key.startswith("__") and not isinstance(value, nn.Module):
            found |= facts(value, key, where, hooks)
    return found


def _walk(x: Any, path: str, own: str, hooks: bool, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(x, torch.Tensor):
        yield path, _tensor(x, path)
        return
    if isinstance(x, (*_PLAIN, Elsewhere)):
        yield path, x
        return
    if isinstance(x, contextvars.ContextVar):
        yield path, x.get(None)
        return
    if isinstance(x, random.Random):
        yield path, str(x.getstate()[1][-1])  # how often it was asked
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, list | tuple | dict):
        yield f"len({path})", len(x)
        items = x.items() if isinstance(x, dict) else enumerate(x)
        for key, value in items:
            yield from _walk(value, f"{path}[{key!r}]", own, hooks, seen)
    elif isinstance(x, types.FunctionType) and x.__module__ == own:
        for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if cell.cell_contents is not x:
                yield from _walk(cell.cell_contents, f"{path}.<{key}>", own, hooks, seen)
    elif (
        isinstance(x, nn.Module) or type(x).__module__ == own or (isinstance(x, type) and x.__module__ == own)
    ):
        for key, value in sorted(vars(x).items()):
            if (
                key in _OURS
                or key.startswith("_autoshard")
                or key.startswith("__")
                or (isinstance(x, type) and not isinstance(value, _PLAIN))
            ):
                continue
            if key.endswith("_hooks") or "_hooks_" in key:
                if hooks:
                    yield f"len({path}.{key})", len(value)
                continue
            if key in ("_parameters", "_buffers", "_modules"):
                for inner, held in value.items():
                    yield from _walk(held, f"{path}.{inner}", own, hooks, seen)
                continue
            yield from _walk(value, f"{path}.{key}", own, hooks, seen)


def _tensor(x: torch.Tensor, path: str) -> torch.Tensor:
    local = x.to_local() if isinstance(x, DTensor) else x
    if isinstance(local, FakeTensor | FunctionalTensor) or (local.device.type == "meta"):
        raise Wrong("fake tensor", f"{path} holds a {type(local).__name__} on {local.device}")
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    return whole.detach().clone()


def compare(found: Facts, wanted: Facts, tolerance: float, failure: str) -> float:
    """The worst relative error. Raises Wrong where anything differs by more than the tolerance."""
    worst = 0.0
    for path in dict.fromkeys([*wanted, *found]):
        if "cache" in path or isinstance(found.get(path), Elsewhere):
            continue  # constants kept for the next call; what no program keeps, of which any use is an error
        if path not in found or path not in wanted:
            only = "eager" if path in wanted else "parallel"
            raise Wrong(failure, f"{path} is only {only}: {wanted.get(path, found.get(path))!r:.200}")
        a, b = found[path], wanted[path]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Wrong(failure, f"{path} is {a.dtype} {list(a.shape)}, eager {b.dtype} {list(b.shape)}")
            error = _error(a, b)
            if not error <= tolerance:
                raise Wrong(failure, f"{path} is off by {error:.2g}: {_few(a)}, eager {_few(b)}")
            worst = max(worst, error)
        elif isinstance(a, float) and isinstance(b, float):
            if not (a == b or abs(a - b) <= tolerance * max(abs(a), abs(b)) or (a != a and b != b)):
                raise Wrong(failure, f"{path} is {a}, eager {b}")
        elif type(a) is not type(b) or a != b:
            raise Wrong(failure, f"{path} is {a!r:.100}, eager {b!r:.100}")
    return worst


def _few(x: torch.Tensor) -> list[Any]:
    found: list[Any] = x.reshape(-1)[:4].tolist()
    return found


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = (torch.where(x.isfinite(), x, 0) for x in (a, b))
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
