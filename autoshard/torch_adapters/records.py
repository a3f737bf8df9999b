"""Dataclasses and named tuples of users in what models take and return, as nodes of torch's pytrees.

torch sees no tensors inside a dataclass, and cannot write a named tuple down, unless its class is registered,
for the whole process. Here their values stand in a `Record` instead, which names the class.
Tried with torch 2.11 to 2.13.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from autoshard.errors import CaptureError, UsageError

#: as programs write the type of a record
NAME = "autoshard.Record"


@dataclass(frozen=True, eq=False)
class Record:
    """kind: ``module:Class`` of the user's. names: of its fields. values: of each."""

    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            return self.values[self.names.index(name)]
        raise AttributeError(f"{self.kind} has no field {name!r}")


def _dumped(context: Any) -> str:
    return json.dumps(context)


def _loaded(text: Any) -> tuple[str, tuple[str, ...]]:
    kind, names = json.loads(text)
    return kind, tuple(names)


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.values), (record.kind, record.names)),
    lambda values, context: Record(context[0], context[1], tuple(values)),
    serialized_type_name=NAME,
    to_dumpable_context=_dumped,
    from_dumpable_context=_loaded,
    flatten_with_keys_fn=lambda record: (
        [(pytree.GetAttrKey(n), v) for n, v in zip(record.names, record.values, strict=True)],
        (record.kind, record.names),
    ),
)


def has_records(tree: Any) -> bool:
    """Whether `to_records` changes something."""
    if type(tree) in (list, tuple):
        return any(map(has_records, tree))
    if type(tree) is dict:
        return any(map(has_records, tree.values()))
    return _is_of_user(type(tree))


def to_records(tree: Any) -> Any:
    """The same with records in place of dataclasses and named tuples whose classes are not registered.

    Raises CaptureError for one that its fields alone do not make.
    """
    if not has_records(tree):
        return tree
    return pytree.tree_map(_record, tree, is_leaf=lambda x: _is_of_user(type(x)))


def _record(value: Any) -> Any:
    kind = type(value)
    if not _is_of_user(kind):
        return value
    name = f"{kind.__module__}:{kind.__qualname__}"
    names = _fields(kind)
    more = sorted(vars(value).keys() - set(names)) if hasattr(value, "__dict__") else []
    missing = [n for n in names if not hasattr(value, n)]
    if more or missing or _class_named(name) is not kind:
        why = (
            f"it has attributes besides its fields: {', '.join(more)}"
            if more
            else f"it has no {missing[0]}"
            if missing
            else "the class stands inside a function, and other ranks could not find it"
        )
        raise CaptureError(
            f"a {name.replace(':', '.')} cannot be taken apart",
            why=why,
            hint="define the class in a module, with fields alone, or use tuples and dicts",
        )
    return Record(name, names, tuple(to_records(getattr(value, n)) for n in names))


def from_records(tree: Any) -> Any:
    """The same with the user's classes in place of records. Raises UsageError if one is not there."""
    return pytree.tree_map(_restored, tree, is_leaf=lambda x: isinstance(x, Record))


def _restored(value: Any) -> Any:
    if not isinstance(value, Record):
        return value
    kind = _class_named(value.kind)
    if kind is None or not _is_of_user(kind) or _fields(kind) != value.names:
        raise UsageError(
            f"{value.kind.replace(':', '.')} is no class with the fields {', '.join(value.names)}",
            why="the model that was compiled takes or returns one",
            hint="import the module that defines it before the program is loaded",
        )
    values = [from_records(v) for v in value.values]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    new = object.__new__(kind)
    for name, field in zip(value.names, values, strict=True):
        object.__setattr__(new, name, field)
    return new


def check_record(context: Any, children: Sequence[Any]) -> None:
    """ValueError unless the context of a stored record is one."""
    kind, names = _loaded(context)
    words = [*kind.replace(":", ".", 1).split("."), *names]
    if not all(isinstance(w, str) and w.isidentifier() for w in words) or kind.count(":") != 1:
        raise ValueError(f"a record of {kind!r}")
    if len(names) != len(children) or len(set(names)) != len(names):
        raise ValueError(f"a record of {len(children)} values with {len(names)} names")


def _is_of_user(kind: type) -> bool:
    """A dataclass or a named tuple that torch's pytrees cannot take apart and write down."""
    if kind is Record or kind in pytree.SUPPORTED_SERIALIZED_TYPES:
        return False
    if dataclasses.is_dataclass(kind):
        return not issubclass(kind, (tuple, list, dict)) and kind not in pytree.SUPPORTED_NODES
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, tuple):
        return tuple(kind._fields)  # type: ignore[attr-defined]
    return tuple(f.name for f in dataclasses.fields(kind))  # type: ignore[arg-type]


def _class_named(name: str) -> type | None:
    """A class of a module that is imported already: nothing is imported for a program."""
    module, _, path = name.partition(":")
    result: Any = sys.modules.get(module)
    for word in path.split("."):
        result = vars(result).get(word) if hasattr(result, "__dict__") else None
    return result if isinstance(result, type) else None
