"""The arguments of a call, in whatever way they are passed, in the order of the program's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.program.program import Signature
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.torch_adapters.records import to_records

Kwargs = dict[str, Any]


def number_tensor(value: int | float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A number of Python as a tensor, which takes part in promotion as the number does. dtype: of a float."""
    return torch.tensor(value, dtype=dtype if isinstance(value, float) else torch.int64)


class Arguments:
    """Matches calls with the call that a program was compiled for, by the names of forward's parameters."""

    def __init__(self, forward: Callable[..., Any], signature: Signature) -> None:
        """forward: of the user's class, unbound."""
        self.names, self.leaves = signature.input_names, signature.in_leaves
        self.spec = pytree.treespec_loads(signature.in_tree)
        self.signature = _without_self(forward)
        #: of floating-point inputs, by position
        self.floats = {
            int(p.target): torch_dtype(p.type.dtype)
            for p in signature.ports
            if p.kind == "input" and p.target.isdigit() and torch_dtype(p.type.dtype).is_floating_point
        }
        positions = list(range(self.spec.num_leaves))
        args, kwargs = pytree.tree_unflatten(positions, self.spec)
        self.like = self._named(args, kwargs)

    def matched(self, args: tuple[Any, ...], kwargs: Kwargs) -> list[Any] | None:
        """The leaves of a call; None if they are not those the program was compiled for."""
        try:
            leaves = self.flattened(args, kwargs)
        except UsageError:
            return None
        # a number that differs from call to call
        return [
            number_tensor(leaf, self.floats.get(k, torch.float64))
            if kind == "tensor" and type(leaf) in (int, float)
            else leaf
            for k, ((kind, _), leaf) in enumerate(zip(self.leaves, leaves, strict=True))
        ]

    def unflattened(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], Kwargs]:
        """(positional, keyword) arguments, from their leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def flattened(self, args: tuple[Any, ...], kwargs: Kwargs) -> list[Any]:
        """The leaves of a call. Raises UsageError if they are not those the program was compiled for."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec:
            leaves = self._matched(self._named(args, kwargs))
        for (kind, wanted), name, leaf in zip(self.leaves, self.names, leaves, strict=True):
            if kind == "static" and repr(leaf) != wanted:
                raise UsageError(
                    f"argument {name} is {leaf!r}",
                    why=f"it was {wanted} when the program was compiled, and is part of the program",
                    hint="compile again with this value",
                )
        return leaves

    def _named(self, args: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
        """Arguments by the name of the parameter that takes them; those in ``**kwargs`` by their own."""
        if self.signature is None:
            return {"args": args, **kwargs}
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._differ(str(error)) from None
        named = dict(bound.arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
        return named

    def _default(self, name: str) -> Any:
        parameter = self.signature.parameters.get(name) if self.signature is not None else None
        return inspect.Parameter.empty if parameter is None else parameter.default

    def _matched(self, named: Kwargs) -> list[Any]:
        """The leaves by position; an argument that only one side has counts as its default."""
        for name, value in named.items():
            if name not in self.like and not _alike(value, self._default(name)):
                raise self._differ(f"{name} was not given then")
        leaves: list[Any] = [None] * self.spec.num_leaves
        for name, like in self.like.items():
            value = named.get(name, self._default(name))
            if value is inspect.Parameter.empty:
                raise self._differ(f"{name} is missing")
            positions, wanted = pytree.tree_flatten(like)
            result, spec = pytree.tree_flatten(_in_order_of(like, value))
            if spec != wanted:
                raise self._differ(f"{name} is built in another way")
            for position, leaf in zip(positions, result, strict=True):
                leaves[position] = leaf
        return leaves

    def _differ(self, what: str) -> UsageError:
        return UsageError(
            "the call's arguments differ from those the program was compiled for",
            why=f"{what}; compiled for: {', '.join(self.names)}",
            hint="pass the same arguments as example_inputs had, or compile again for these",
        )


def _without_self(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of an unbound method for those who call it bound, None if it has none."""
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):
        return None
    parameters: Sequence[inspect.Parameter] = list(signature.parameters.values())
    first_is_self = parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL
    return signature.replace(parameters=parameters[1:] if first_is_self else parameters)


def _alike(value: Any, default: Any) -> bool:
    return type(value) is type(default) and repr(value) == repr(default)


def _in_order_of(like: Any, value: Any) -> Any:
    """The value with its dicts in the order of those in ``like``."""
    if type(value) is not type(like):
        return value
    if isinstance(like, dict) and like.keys() == value.keys():
        return type(like)((k, _in_order_of(v, value[k])) for k, v in like.items())
    if type(like) in (list, tuple) and len(like) == len(value):
        return type(like)(_in_order_of(a, b) for a, b in zip(like, value, strict=True))
    return value


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of example inputs in any accepted form, with records for the user's
    dataclasses and named tuples."""
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), to_records(dict(example_inputs))
    if isinstance(example_inputs, tuple | list):
        items = tuple(example_inputs)
        if len(items) == 2 and isinstance(items[0], tuple) and isinstance(items[1], Mapping):
            return to_records(items[0]), to_records(dict(items[1]))
        return to_records(items), {}
    raise UsageError(
        f"example_inputs is {type(example_inputs).__name__}",
        hint="give a dict of keyword arguments, a tuple of positional ones, or a single tensor",
    )
