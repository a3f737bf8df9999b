"""What a forward changes beside tensors: attributes, variables, lists. A program changes none of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture.python_state.code_reads import CONTAINERS, PLAIN, CodeReads, is_array, is_source
from autoshard.capture.python_state.state_reads import MISSING, TABLES, Read
from autoshard.errors import CaptureError, UsageError
from autoshard.torch_adapters.hooks import hook_tables

#: whether a tensor of the trace depends on an input or a parameter
Depends = Callable[[torch.Tensor], bool]


@dataclass(frozen=True)
class Change:
    """A namespace's entry that a forward left with another value."""

    read: Read
    before: Any
    after: Any


@dataclass(frozen=True)
class PythonState:
    """Values of all that a forward can change, as they were before it."""

    tables: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
    variables: tuple[tuple[Read, Any], ...]
    containers: tuple[tuple[str, Any, Any], ...]
    context: tuple[tuple[str, ContextVar[Any], Any], ...] = ()
    #: tables of the modules' hooks and children, and what they held
    tables_of_modules: tuple[tuple[Any, dict[Any, Any]], ...] = ()
    #: generators of random numbers: what puts one back
    generators: tuple[Callable[[], None], ...] = ()
    #: modules: label, attributes, names of the buffers that have a tensor
    buffers: tuple[tuple[str, dict[str, Any], frozenset[str]], ...] = ()

    @classmethod
    def of(cls, objects: Mapping[int, tuple[Any, str]], code: CodeReads) -> PythonState:
        """As it is now. objects: the model's, see `state_reads.objects_of`."""
        tables, containers = [], list(code.containers)
        for value, label in objects.values():
            skip = TABLES if isinstance(value, nn.Module) else ()
            entries = {k: v for k, v in value.__dict__.items() if k not in skip}
            tables.append((label, value.__dict__, entries))
            containers += [(f"{label}.{k}".lstrip("."), v) for k, v in entries.items()]
        copies = tuple((label, c, c.copy()) for label, c in nested(containers))
        context = tuple((label, var, var.get(MISSING)) for label, var in code.context)
        values = [v for _, _, entries in tables for v in entries.values()]
        values += [r.value for r in code.variables]
        generators = tuple(back for back in map(_putting_back, values) if back is not None)
        modules = [value for value, _ in objects.values() if isinstance(value, nn.Module)]
        held = tuple((t, dict(t)) for m in modules for t in (*hook_tables(m), m.__dict__["_modules"]))
        variables = tuple((r, r.value) for r in code.variables)
        buffers = tuple(
            (label, m.__dict__, frozenset(k for k, b in m._buffers.items() if b is not None))
            for m, label in objects.values()
            if isinstance(m, nn.Module)
        )
        return cls(tuple(tables), variables, copies, context, held, generators, buffers)

    def changed_tables(self) -> list[tuple[Any, dict[Any, Any]]]:
        """Tables to which forward has added hooks, or in which it put other modules, and what they hold."""
        changed = (t for t, before in self.tables_of_modules if not same_items(t, before))
        return [(table, dict(table)) for table in changed]

    def changes(self) -> Iterator[Change]:
        """Attributes and variables that have another value now."""
        for label, now, before in self.tables:
            for key in {**before, **now}:
                if key in TABLES or key == "forward":
                    continue
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if old is not new and not _equal(old, new):
                    yield Change(Read(now, key, f"{label}.{key}".lstrip(".")), old, new)
        for read, old in self.variables:
            new = read.value
            if old is not new and not _equal(old, new):
                yield Change(read, old, new)

    def buffers_made(self) -> Iterator[Change]:
        """Buffers that had no tensor and have one now."""
        for label, attributes, before in self.buffers:
            for key, buffer in attributes["_buffers"].items():
                if buffer is not None and key not in before:
                    yield Change(Read(attributes, key, f"{label}.{key}".lstrip(".")), MISSING, buffer)

    def moved(self, inner: Collection[int]) -> bool:
        """Whether anything but what stands in some namespaces has changed. inner: identities of those."""
        return (
            any(r.value is not old for r, old in self.variables)
            or any(var.get(MISSING) is not old for _, var, old in self.context)
            or any(not same_items(c, before) for _, c, before in self.containers)
            or any(
                now.get(k) is not v
                for _, now, before in self.tables
                if id(now) not in inner
                for k, v in before.items()
            )
        )

    def restore(self) -> None:
        """Put everything back; tables of parameters, buffers and hooks are put back by `Kept`."""
        for change in list(self.changes()):
            table = change.read.table
            if isinstance(table, dict):
                if change.before is MISSING:
                    del table[change.read.key]
                else:
                    table[change.read.key] = change.before
        for back in self.generators:
            back()
        for _, container, before in self.containers:
            if not same_items(container, before):
                container.clear()
                container.extend(before) if hasattr(container, "extend") else container.update(before)

    def grown(self) -> Iterator[tuple[str, list[Any]]]:
        """Containers with other contents: (label, items that are new)."""
        for label, container, before in self.containers:
            if same_items(container, before):
                continue
            known = {id(x) for x in _items(before)}
            changed_keys = isinstance(before, dict) and any(
                k in container and container[k] is not v for k, v in before.items()
            )
            fresh = [x for x in _items(container) if id(x) not in known]
            yield label, fresh if isinstance(before, dict) and not changed_keys else [*fresh, MISSING]


@dataclass(frozen=True)
class Changes:
    """What a run left changed. read: plain values that it also read before. left: what it only wrote. kept:
    tensors made from numbers that it leaves for the next one."""

    read: tuple[Change, ...] = ()
    left: tuple[Change, ...] = ()
    kept: tuple[Change, ...] = ()
    #: tables of hooks and children that it changed, and what they hold
    tables: tuple[tuple[Any, dict[Any, Any]], ...] = ()


def check_changes(state: PythonState, was_read: Callable[[Change], bool], depends: Depends) -> Changes:
    """Refuse what a program could not do, and give the rest.

    was_read: whether the forward read the entry before it changed it. Raises CaptureError for a tensor of the
    call that the next call would read, and for a container whose entries changed. Constants that a forward
    stores for its next call (masks, tables) are no change of what it computes.
    """
    read, left, kept = [], [], []
    for change in (*state.changes(), *state.buffers_made()):
        dependent = any(map(depends, tensors_of(change.after)))
        if dependent and was_read(change):
            raise CaptureError(
                f"forward keeps a tensor of its call in {change.read.label} for the next one",
                where=change.read.line,
                why="a program changes parameters and buffers alone: every call would be the first",
                hint="register_buffer it and copy_ into it, or take it as an argument and return the new one",
            )
        if isinstance(change.after, PLAIN) and was_read(change):
            read.append(change)
        elif dependent or isinstance(change.after, PLAIN):
            left.append(change if not dependent else replace(change, after=Elsewhere(change.read.label)))
        elif tensors_of(change.after):
            kept.append(change)
    if not read:
        kept = [c for c in kept if was_read(c)]
    for label, fresh in state.grown():
        if any(x is MISSING for x in fresh) or any(any(map(depends, tensors_of(x))) for x in fresh):
            raise CaptureError(
                f"forward or a hook of the model changes {label}",
                why="Python runs once, while the model is captured: a program puts nothing into it",
                hint="return what is collected from forward, or remove the hook before the capture",
            )
    return Changes(tuple(read), tuple(left), tuple(kept), tuple(state.changed_tables()))


class Elsewhere:
    """Stands where forward left a tensor of its call, which a program does not: any use is an error."""

    def __init__(self, label: str) -> None:
        object.__setattr__(self, "_label", label)

    def _used(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"{object.__getattribute__(self, '_label')} is read outside of forward",
            why="forward puts a tensor of its call there, a program gives its outputs alone",
            hint="return it from forward",
        )

    def __repr__(self) -> str:
        return f"<not kept by a program: {object.__getattribute__(self, '_label')}>"

    __getattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __float__ = __int__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _used
    __matmul__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _used

    def __deepcopy__(self, memo: object) -> Elsewhere:
        return self

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return Elsewhere, (object.__getattribute__(self, "_label"),)


def refuse_counting(change: Change) -> CaptureError:
    """The error for a value that changes from call to call, and is read."""
    return CaptureError(
        f"forward changes {change.read.label}, which it reads: from {change.before!r} to {change.after!r}",
        where=change.read.line,
        why="a program is captured once and would use the first value at every call",
        hint="make it a tensor in register_buffer and change that in place, or pass the value as an argument",
    )


def refuse_source(read: Read) -> None:
    """Raise CaptureError if what was read gives another value each time it is asked."""
    if is_source(read.value):
        kind = "iterator" if isinstance(read.value, Iterator) else "random generator"
        raise CaptureError(
            f"forward takes values from the {kind} {read.label}",
            where=read.line,
            why="it gives another value at every call, a program always the first",
            hint="pass the values as arguments of forward",
        )


def nested(containers: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Containers among labelled values, and those inside them, each once."""
    seen: set[int] = set()
    queue = list(containers)
    while queue:
        label, value = queue.pop()
        if id(value) in seen or (not isinstance(value, (tuple, *CONTAINERS)) and not is_array(value)):
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            yield label, value
        if not is_array(value):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            queue += [(f"{label}[{key!r}]", inner) for key, inner in items]


def same_items(a: Any, b: Any) -> bool:
    """Whether two containers of a kind hold the same objects."""
    if is_array(a):
        return a.shape == b.shape and a.dtype == b.dtype and bool(a.tobytes() == b.tobytes())
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(k in b and (b[k] is v or _equal(b[k], v)) for k, v in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    """Equal values of one type; tensors and objects are equal to themselves alone."""
    if a is b:
        return True
    if type(a) is not type(b):
        return isinstance(a, set) and isinstance(b, set) and a == b
    if isinstance(a, (*PLAIN, frozenset)):
        return bool(a == b)
    if isinstance(a, (tuple, *CONTAINERS)):
        return same_items(a, b)
    if isinstance(a, slice | range):
        return bool(a == b)
    return False


def _putting_back(value: Any) -> Callable[[], None] | None:
    """What puts a generator of random numbers back to where it is now; None for other values."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if is_source(value) and hasattr(value, "bit_generator"):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _items(container: Any) -> Sequence[Any]:
    return list(container.values()) if isinstance(container, dict) else list(container)


def tensors_of(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    result = [x for x in leaves if isinstance(x, torch.Tensor)]
    for leaf in leaves:
        if isinstance(leaf, set):
            result += [x for x in leaf if isinstance(x, torch.Tensor)]
    return result
