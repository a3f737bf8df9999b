"""Which Python attributes a model's code reads while it is traced.

A traced graph holds the values that attributes had then. For the time of a capture every module, and every
object that a module's attributes lead to (configs), is of a subclass of its class that notes what is read.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

#: instance attributes of nn.Module that hold its parameters, children and hooks: they are seen otherwise
TABLES = frozenset(vars(nn.Module())) - {"training"}
#: how far from a module's attributes objects are followed, and how many of them at most, beside the modules
_DEPTH, _MOST = 3, 2000
_CALLABLE = (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType)

#: notes that an attribute of an object was read
Note = Callable[[Any, str], None]


class Missing:
    """Stands for an attribute that is not there."""

    def __repr__(self) -> str:
        return "not set"


MISSING = Missing()


class ClassValues(Mapping[str, Any]):
    """What attributes of an object are that its class has, unless the object has them."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        owner = self._owner
        for table in (owner.__dict__, *map(vars, type(owner).__mro__)):
            if key in table:
                return table[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._owner.__dict__)

    def __len__(self) -> int:
        return len(self._owner.__dict__)


@dataclass(frozen=True)
class Read:
    """One attribute or variable that a capture depends on.

    table: the namespace that holds it (``__dict__`` of an object, globals of a Python module). key: in it.
    label: how a user writes it, ``layers.0.dropout.p``. line: ``file:line`` of the first read.
    """

    table: Mapping[str, Any] = field(repr=False, compare=False)
    key: str
    label: str
    line: str = ""

    @property
    def value(self) -> Any:
        return self.table.get(self.key, MISSING)


def of_python_class(value: object) -> bool:
    """Whether a value's class was made at run time, not in C."""
    return type(value).__flags__ & (1 << 9) != 0


def plain_object(value: object) -> bool:
    """Whether a value is a namespace, or of a class written in Python, whose attributes may be read."""
    return (
        not isinstance(value, (*_CALLABLE, nn.Module, torch.Tensor, Enum))
        and (isinstance(value, SimpleNamespace) or of_python_class(value))
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def objects_of(model: nn.Module) -> dict[int, tuple[Any, str]]:
    """Modules and the plain objects that their attributes lead to: identity -> (object, label)."""
    result: dict[int, tuple[Any, str]] = {}
    queue: deque[tuple[Any, str, int]] = deque((m, name, 0) for name, m in model.named_modules())
    most = len(queue) + _MOST
    while queue and len(result) < most:
        value, label, depth = queue.popleft()
        if id(value) in result:
            continue
        result[id(value)] = value, label
        if depth >= _DEPTH:
            continue
        for key, inner in value.__dict__.items():
            if key in TABLES and depth == 0 and isinstance(value, nn.Module):
                continue
            name = f"{label}.{key}".lstrip(".")
            listed = isinstance(inner, (list, tuple))
            inside = [(f"{name}[{n}]", x) for n, x in enumerate(inner)] if listed else [(name, inner)]
            queue += [(x, called, depth + 1) for called, x in inside if plain_object(x)]
    return result


class _Noting:
    """Put before the class of an object for the time of a capture; laid out as classes of users are."""

    _autoshard_note: Note

    def __init_subclass__(cls, **options: Any) -> None:
        """Nothing of what the user's class does for its subclasses."""

    def __getattribute__(self, name: str) -> Any:
        try:
            return super().__getattribute__(name)
        finally:
            # also of what is not there: code may ask by hasattr
            if not name.startswith("__"):
                type(self)._autoshard_note(self, name)


@dataclass
class AttributeReads:
    """What was read of a model's objects while ``active``. unseen: objects whose reads cannot be noted."""

    objects: dict[int, tuple[Any, str]]
    line_of: Callable[[Any], str]
    active: bool = False
    reads: dict[tuple[int, str], Read] = field(default_factory=dict)
    #: (identity of a namespace, key) -> what its first read in the present run gave
    first: dict[tuple[int, str], Any] = field(default_factory=dict)
    unseen: list[tuple[Any, str]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note reads; every object is of its own class when this ends."""
        subclasses: dict[type, type | None] = {}
        changed: list[tuple[Any, type]] = []
        try:
            for value, label in self.objects.values():
                kind = type(value)
                if kind not in subclasses:
                    subclasses[kind] = self._noting(kind)
                subclass = subclasses[kind]
                if subclass is None or not _reclassed(value, subclass):
                    self.unseen.append((value, label))
                else:
                    changed.append((value, kind))
            yield
        finally:
            for value, kind in changed:
                object.__setattr__(value, "__class__", kind)

    def _noting(self, kind: type) -> type | None:
        """The class with notes; None where there can be none: then all attributes count as read."""
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        try:
            return type(kind)(kind.__name__, (_Noting, kind), {**names, "_autoshard_note": self._note})
        except Exception:  # a metaclass of the user's may raise anything
            return None

    def _note(self, owner: Any, name: str) -> None:
        if not self.active or name in TABLES or id(owner) not in self.objects:
            return
        table: Mapping[str, Any] = object.__getattribute__(owner, "__dict__")
        key = id(table), name
        if key in self.first:
            return
        self.first[key] = table.get(name, MISSING)
        if key in self.reads:
            return
        if name not in table:
            if any(name in table.get(held, ()) for held in ("_parameters", "_buffers", "_modules")):
                return
            holder = next((c for c in type(owner).__mro__ if name in vars(c)), None)
            if holder is not None and not _is_method(owner, holder, name):
                if holder in (type(owner), nn.Module) or not _is_data(vars(holder)[name]):
                    return
                table = ClassValues(owner)
        label = self.objects[id(owner)][1]
        line = self.line_of(inspect.currentframe())
        self.reads[key] = Read(table, name, f"{label}.{name}".lstrip("."), line)

    def all_reads(self) -> list[Read]:
        """Reads noted, and every attribute of the objects whose reads cannot be."""
        result = list(self.reads.values())
        for value, label in self.unseen:
            result += [
                Read(value.__dict__, key, f"{label}.{key}".lstrip("."))
                for key in value.__dict__
                if key not in TABLES
            ]
        return result


def _is_method(owner: object, holder: type, name: str) -> bool:
    """Whether an attribute is a method of a module that a user may set another function in place of."""
    users = name == "forward" or holder.__module__.partition(".")[0] != "torch"
    return users and isinstance(owner, nn.Module) and isinstance(vars(holder)[name], FunctionType)


def _is_data(value: object) -> bool:
    """Whether a class attribute is a value, not a method or a descriptor."""
    return not callable(value) and not hasattr(type(value), "__get__")


def _reclassed(value: Any, kind: type) -> bool:
    try:
        object.__setattr__(value, "__class__", kind)
    except TypeError:
        return False
    return True
