"""A key of all that a capture of a model depends on, without running it: equal keys, equal graphs.

The key holds structure, shapes, types and modes of modules; every attribute that they and their objects have;
the bytecode of the user's functions with the variables that they name; versions of the libraries. Values of
floating-point parameters are no part of it: they are arguments of a program.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard._version import __version__
from autoshard.capture.python_state.changes import Elsewhere
from autoshard.capture.python_state.code_reads import (
    LIBRARIES,
    PLAIN,
    codes_of,
    globals_of,
    is_array,
    top_package,
)
from autoshard.capture.python_state.state_reads import of_python_class
from autoshard.torch_adapters.hooks import global_hooks, hook_tables
from autoshard.torch_adapters.modes import autocast_state

#: in the paths of packages that a version stands for; what users replace in them is followed
_INSTALLED = ("site-packages", "dist-packages")
#: elements of a tensor that code may hold, or look at, beside parameters
_LARGEST = 1 << 20
#: objects in all; a model with more is not worth a key
_MOST = 1_000_000
#: attributes of `nn.Module` that are described apart, or say nothing of a capture
_APART = frozenset(vars(nn.Module())) - {"training"}
#: objects of C that are known by their text, or say nothing of a computation
_BY_TEXT = (slice, range, PurePath, torch.Size, type(Ellipsis), torch.finfo)
_BY_KIND = (type(threading.Lock()), type(threading.RLock()), weakref.ReferenceType)
#: attributes that differ from process to process: a `hash`, in GenerationConfig
_VOLATILE = ("_original_object_hash",)
#: variables of the environment that libraries ask for
_PREFIXES = ("TRANSFORMERS_", "HF_", "TORCH_", "PYTORCH_")
#: entries of classes that are no code of the user's
_DESCRIPTORS = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.BuiltinFunctionType,
)


class NoKeyError(Exception):
    """Something that a model's code may read has no description that another process could compare."""


def model_key(model: nn.Module, inputs: Any, *more: object, code: Iterable[object] = ()) -> str:
    """A hash, the same in every process in which a capture gives the same graph.

    inputs: positional and keyword arguments; of floating-point tensors, shape and type count. more: what else
    counts, by its ``repr``: mesh, options. code: and objects of the user's that do.

    Raises NoKeyError where there is no such key.
    """
    describe = _Describe()
    describe.text(sys.version, torch.__version__, __version__)
    describe.text(*(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)))
    modes = (autocast_state("cpu"), autocast_state("cuda"), torch.get_default_dtype())
    describe.text(modes, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *more)
    try:
        leaves, spec = pytree.tree_flatten(inputs)
        describe.text(spec)
        for leaf in leaves:
            describe.argument(leaf)
        for each in (*global_hooks(), *code):
            describe.add(each)
        describe.add(model)
    except RecursionError:
        raise NoKeyError("its objects are nested too deeply") from None
    return describe.hash.hexdigest()


def _installed(value: Any) -> bool:
    """Whether a function or class is of a package that a version stands for."""
    package = top_package(value.__module__)
    if package in LIBRARIES:
        return True
    path = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return any(part in path for part in _INSTALLED)


class _Describe:
    """Feeds a hash with a model. An object that was met is named by its number."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.met: dict[int, int] = {}
        self.classes: set[type] = set()
        #: objects made on the way, whose identities must not be given to others
        self.kept: list[object] = []

    def text(self, *parts: object) -> None:
        for part in parts:
            self.hash.update(f"{part!r};".encode())

    def argument(self, leaf: object) -> None:
        """An argument of a call: of a large or floating-point tensor its type alone counts."""
        if not isinstance(leaf, torch.Tensor):
            self.add(leaf)
            return
        self._tensor_type(leaf)
        if not leaf.is_floating_point() and leaf.numel() <= 1024 and leaf.device.type != "meta":
            self._numbers(leaf)

    def add(self, value: Any) -> None:
        """Any value that code may read."""
        if type(value) in PLAIN:
            self.text(value)
            return
        if id(value) in self.met:
            self.text("met", self.met[id(value)])
            return
        self.met[id(value)] = len(self.met)
        self.kept.append(value)
        if len(self.met) > _MOST:
            raise NoKeyError("it has too many objects")
        self.text(type(value).__module__, type(value).__qualname__)
        self._described(value)

    def _described(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Elsewhere):
            self.text(repr(value))
        elif isinstance(value, torch.Tensor):
            self._tensor_type(value)
            if not isinstance(value, nn.Parameter):
                self._numbers(value)
        elif isinstance(value, Enum):
            self.text(value.name)
        elif isinstance(value, (*PLAIN, *_BY_TEXT)):
            self.text(value if isinstance(value, PLAIN) else str(value))
            self._attributes(value)
        elif isinstance(value, Mapping):
            self._mapping(value)
        elif isinstance(value, (list, tuple, deque)):
            self.text(len(value))
            self._each(value)
        elif isinstance(value, (set, frozenset)):
            self._each(sorted(value, key=repr))
        elif isinstance(value, types.BuiltinFunctionType):
            self.text(value.__module__, value.__qualname__)
            if not isinstance(value.__self__, (types.ModuleType, type)):
                self.add(value.__self__)
        elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
            self._callable(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if is_array(value):
            self.text(value.dtype, value.shape, value.tobytes())
        elif isinstance(value, (re.Pattern, logging.Logger, types.ModuleType, torch.Generator)):
            self.text(getattr(value, "pattern", getattr(value, "name", getattr(value, "__name__", ""))))
        elif isinstance(value, ContextVar):
            self.text(value.name)
            self.add(value.get(None))
        elif isinstance(value, (staticmethod, classmethod, property)):
            for part in ("__func__", "fget", "fset"):
                self.add(getattr(value, part, None))
        elif hasattr(value, "__wrapped__"):
            self.add(value.__wrapped__)
        elif of_python_class(value) and not isinstance(value, Iterator):
            self._class(type(value))
            self._attributes(value)
        elif not isinstance(value, _BY_KIND):
            raise NoKeyError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self.text(len(value))
        for key, inner in list(value.items()):
            self.add(key)
            self.add(inner)
        self._attributes(value)

    def _attributes(self, value: Any) -> None:
        """Of an object, in its namespace and its slots."""
        for key, inner in list(getattr(value, "__dict__", {}).items()):
            if key not in _VOLATILE:
                self.text(key)
                self.add(inner)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else tuple(slots):
                if key not in ("__dict__", "__weakref__") and hasattr(value, key):
                    self.text(key)
                    self.add(getattr(value, key))

    def _module(self, module: nn.Module) -> None:
        self._class(type(module))
        for key, value in list(vars(module).items()):
            if key not in _APART:
                self.text(key)
                self.add(value)
        for name, parameter in module._parameters.items():
            self.text(name)
            self.add(parameter)
        for name, buffer in module._buffers.items():
            self.text(name, name in module._non_persistent_buffers_set)
            if buffer is not None:
                self._tensor_type(buffer)
                if not buffer.is_floating_point() and buffer.device.type != "meta":
                    self._numbers(buffer)
        for table in hook_tables(module):
            self.text(len(table))
            self._each(table.values())
        for name, child in module._modules.items():
            self.text(name)
            self.add(child)

    def _tensor_type(self, x: torch.Tensor) -> None:
        self.text(type(x).__qualname__, tuple(x.shape), x.dtype, x.requires_grad, x.layout)
        if x.layout == torch.strided and x.device.type != "meta":
            self.text(x.is_contiguous())

    def _numbers(self, x: torch.Tensor) -> None:
        if x.device.type == "meta" or x.numel() > _LARGEST or x.layout != torch.strided:
            raise NoKeyError(f"it holds a {x.device.type} tensor of {x.numel():,} elements")
        if not isinstance(x, nn.Parameter) and type(x) is not torch.Tensor:
            raise NoKeyError(f"it holds a {type(x).__qualname__}")
        self.text(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _class(self, kind: type) -> None:
        """Name and, where the class is the user's, all that it holds."""
        for each in kind.__mro__:
            self.text(each.__module__, each.__qualname__)
            if each in self.classes:
                continue
            self.classes.add(each)
            ours = not _installed(each)
            for key, value in list(vars(each).items()):
                if isinstance(value, types.FunctionType):
                    # of a library's class: what a user may have replaced
                    if ours or key == "forward" or not _installed(value):
                        self.text(key)
                        self.add(value)
                elif ours and not key.startswith(("__", "_abc_")) and not isinstance(value, _DESCRIPTORS):
                    self.text(key)
                    self.add(value)

    def _callable(self, value: Any) -> None:
        if isinstance(value, partial):
            self._each((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self._each((value.__self__, value.__func__))
        else:
            self._function(value)

    def _function(self, function: types.FunctionType) -> None:
        self.text(function.__module__, function.__qualname__)
        self._each((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:
                self.text("empty")
        self.add(getattr(function, "__wrapped__", None))
        package = top_package(function.__module__)
        if package in LIBRARIES:
            return
        library = _installed(function)
        if library:
            self.text(getattr(sys.modules.get(package), "__version__", ""))
        for code in codes_of(function.__code__):
            if not library:
                constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
                self.text(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
                self._each(constants)
                if {"environ", "getenv"} & set(code.co_names):
                    raise NoKeyError(f"{function.__qualname__} reads variables of the environment")
            self._globals(function.__globals__, code, package, library)

    def _globals(self, table: Mapping[str, Any], code: types.CodeType, package: str, library: bool) -> None:
        """What code names; of a library's code, functions of the user's that stand there."""
        names = code.co_names
        loaded = globals_of(code) if any(n in table for n in names) else set()
        result = [(n, table[n]) for n in names if n in loaded and n in table]
        inside = [(f"{n}.{k}", vars(m)[k]) for n, m in result if isinstance(m, types.ModuleType)
                  for k in names if k in vars(m)]  # fmt: skip
        for name, value in (*result, *inside):
            if isinstance(value, PLAIN):
                self.text(name, value)
            elif self._followed(value, package) if library else not isinstance(value, types.ModuleType):
                self.text(name)
                self.add(value)

    def _followed(self, value: Any, package: str) -> bool:
        """Whether a variable that a library's code names is the user's, or a function of the library."""
        if isinstance(value, types.FunctionType):
            return top_package(value.__module__) == package or not _installed(value)
        return isinstance(value, type) and not _installed(value)
