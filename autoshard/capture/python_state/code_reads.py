"""Which variables outside a model's objects its code can read: globals, closures, context variables.

Functions are followed from the methods of the model's classes and from its hooks, by the names in their
bytecode; nothing is run. What is guarded is a superset of what the forward uses.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.capture.origins import short_path
from autoshard.capture.python_state.state_reads import Read, plain_object

#: packages whose variables are not the user's
LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "autoshard", "numpy"})
#: their objects are not looked into; variables of plain values are
_KEPT_APART = frozenset({"transformers", "peft", "accelerate"})
_LOAD_GLOBAL, _LOAD_NAME = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"]
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CONTAINERS = (list, dict, set, deque)
_VALUES = (tuple, frozenset, *CONTAINERS, torch.Tensor)


@dataclass
class CodeReads:
    """What the code of a model can read beside its objects.

    variables: globals and closure cells of plain values, containers, tensors and functions. context: context
    variables. containers: (label, container) that code could put something of a call into. names: of all
    attributes and functions that the code mentions. caches: functions that keep what they return.
    """

    variables: list[Read] = field(default_factory=list)
    context: list[tuple[str, ContextVar[Any]]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    caches: list[_lru_cache_wrapper[Any]] = field(default_factory=list)

    @contextmanager
    def caches_apart(self) -> Iterator[None]:
        """What is put into caches meanwhile, tensors without values, goes out of them, with all else."""
        before = [cache.cache_info().misses for cache in self.caches]
        try:
            yield
        finally:
            for cache, misses in zip(self.caches, before, strict=True):
                if cache.cache_info().misses > misses:
                    cache.cache_clear()

    @classmethod
    def of(cls, model: nn.Module) -> CodeReads:
        """Of the forward of a model's modules and their hooks."""
        reads = cls()
        walk = _Walk(reads)
        for kind in {
            c for m in model.modules() for c in type(m).__mro__ if top_package(c.__module__) not in LIBRARIES
        }:
            walk.methods_of(kind)
        for function in _entries(model):
            walk.add(function)
        walk.run()
        return reads


def is_array(value: object) -> bool:
    """Whether a value is an array of numpy, which may not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_source(value: object) -> bool:
    """Whether a value is an iterator, or a generator of random numbers."""
    numpy = sys.modules.get("numpy")
    generators = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (Iterator, random.Random, *generators))


def top_package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _entries(model: nn.Module) -> Iterator[Any]:
    """Where the walk begins: forwards of classes that are not torch's, functions on instances, hooks."""
    for module in model.modules():
        yield getattr(type(module), "forward", None)
        for value in vars(module).values():
            if isinstance(value, (FunctionType, MethodType, partial)):
                yield value
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            yield from hooks.values()


@dataclass
class _Walk:
    reads: CodeReads
    queue: list[FunctionType] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    #: methods of the classes met, by name: a call of one is known by its name alone
    methods: dict[str, list[Callable[..., Any]]] = field(default_factory=dict)
    #: where those of the user's classes are held
    places: dict[str, list[Read]] = field(default_factory=dict)
    classes: set[type] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """A callable of the user's: its code is read."""
        while True:
            if isinstance(value, partial):
                for inner in (*value.args, *value.keywords.values()):
                    self._value(f"{value.func!r} argument", inner)
                value = value.func
            elif isinstance(value, MethodType):
                owner = value.__self__
                if plain_object(owner):
                    self._object(type(owner).__name__, owner)
                value = value.__func__
            else:
                break
        if isinstance(value, FunctionType | _lru_cache_wrapper) and hasattr(value, "__wrapped__"):
            if isinstance(value, _lru_cache_wrapper) and value not in self.reads.caches:
                self.reads.caches.append(value)
            self.add(value.__wrapped__)
        if not isinstance(value, FunctionType):
            # an object that is called: its method is read
            call = next((vars(c)["__call__"] for c in type(value).__mro__ if "__call__" in vars(c)), None)
            if not (plain_object(value) and isinstance(call, FunctionType)):
                return
            self._object(type(value).__name__, value)
            value = call
        if id(value) in self.seen or top_package(value.__module__) in LIBRARIES:
            return
        self.seen.add(id(value))
        self.queue.append(value)

    def run(self) -> None:
        while self.queue:
            function = self.queue.pop()
            for code in codes_of(function.__code__):
                self._globals(function, code)
            self._closure(function)
        for name in ("__call__", "forward", *sorted(self.reads.names)):
            self.reads.variables += self.places.pop(name, ())

    def _globals(self, function: FunctionType, code: CodeType) -> None:
        table, where = function.__globals__, f"{short_path(code.co_filename)}:{code.co_firstlineno}"
        self.reads.names.update(code.co_names)
        loaded = globals_of(code) if any(name in table for name in code.co_names) else ()
        for name in code.co_names:
            for method in self.methods.get(name, ()):
                self.add(method)
            if name not in table or name not in loaded:
                continue
            value = table[name]
            if isinstance(value, ModuleType):
                if top_package(value.__name__) not in LIBRARIES | _KEPT_APART:
                    for inner in code.co_names:
                        if inner in vars(value):
                            self._variable(vars(value), inner, f"{name}.{inner}", where, value.__name__)
            else:
                self._variable(table, name, name, where, function.__module__)

    def _closure(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            label = f"{function.__qualname__}.{name}"
            where = short_path(function.__code__.co_filename)
            self._variable(_Cell(cell), "cell_contents", label, where, function.__module__)

    def _variable(self, table: Mapping[str, Any], key: str, label: str, where: str, module: object) -> None:
        try:
            value = table[key]
        except (KeyError, ValueError):
            return  # an empty cell
        ours = top_package(module) not in _KEPT_APART
        if isinstance(value, type):
            self._class(value)
        elif isinstance(value, ContextVar):
            self.reads.context.append((label, value))
        elif isinstance(value, (FunctionType, MethodType, partial, _lru_cache_wrapper)):
            self.add(value)
            if ours:
                self.reads.variables.append(Read(table, key, label, where))
        elif (ours and (isinstance(value, (*PLAIN, *_VALUES)) or is_array(value))) or (
            type(table) is dict and isinstance(value, PLAIN)
        ):
            self.reads.variables.append(Read(table, key, label, where))
            self._value(label, value)
        elif ours and is_source(value):
            self.reads.variables.append(Read(table, key, label, where))
        elif plain_object(value) and top_package(type(value).__module__) not in _KEPT_APART | LIBRARIES:
            self.reads.variables.append(Read(table, key, label, where))
            self._object(label, value)

    def _value(self, label: str, value: Any) -> None:
        if isinstance(value, (tuple, *CONTAINERS)) or is_array(value):
            self.reads.containers.append((label, value))

    def _object(self, label: str, value: Any) -> None:
        """An object that the code holds: what it has counts as read."""
        if id(value) in self.seen or isinstance(value, nn.Module):
            return
        self.seen.add(id(value))
        self._class(type(value))
        for key, inner in vars(value).items():
            self.reads.variables.append(Read(vars(value), key, f"{label}.{key}"))
            self._value(f"{label}.{key}", inner)

    def _class(self, kind: type) -> None:
        """Methods and values of a class, for code that mentions their names."""
        if kind in self.classes or top_package(kind.__module__) in LIBRARIES | _KEPT_APART:
            return
        self.classes.add(kind)
        self.methods_of(kind)
        for key, value in vars(kind).items():
            if isinstance(value, PLAIN) and not key.startswith("__"):
                self.reads.variables.append(Read(vars(kind), key, f"{kind.__name__}.{key}"))

    def methods_of(self, kind: type) -> None:
        """Methods of a class are read if code mentions their names, ``forward`` in any case."""
        ours = top_package(kind.__module__) not in _KEPT_APART
        for key, value in vars(kind).items():
            method = value.fget if isinstance(value, property) else value
            method = method.__func__ if isinstance(method, staticmethod | classmethod) else method
            if isinstance(method, FunctionType | _lru_cache_wrapper):
                self.methods.setdefault(key, []).append(method)
                if ours:
                    self.places.setdefault(key, []).append(Read(vars(kind), key, f"{kind.__name__}.{key}"))
                if key in self.reads.names or key == "__call__":
                    self.add(method)


class _Cell(Mapping[str, Any]):
    """The variable of a closure as a namespace."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, key: str) -> Any:
        return self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(("cell_contents",))

    def __len__(self) -> int:
        return 1


def globals_of(code: CodeType) -> set[str]:
    """Names that code loads as variables of its module: a name may be one of attributes alone.

    Read from the bytecode itself: `dis.get_instructions` takes a large part of a capture.
    """
    result: set[str] = set()
    above = 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number = above | low
        above = number << 8 if op == dis.EXTENDED_ARG else 0
        if op == _LOAD_GLOBAL:
            result.add(code.co_names[number >> 1])  # the lowest bit: whether it is called next
        elif op == _LOAD_NAME:
            result.add(code.co_names[number])
    return result


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)
