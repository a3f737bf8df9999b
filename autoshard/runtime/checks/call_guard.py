"""What a program took for granted when it was captured, compared at every call.

A call is right if everything that the model's Python code read is what it was: attributes, variables, items
of containers, hooks, modes. Where something differs, the model is captured once more as it is now: the same
graph means that the program is right all the same; another one is refused.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from autoshard.capture.origins import hook_line
from autoshard.capture.python_state.captured_state import CapturedState, value_text
from autoshard.capture.python_state.changes import same_items
from autoshard.capture.python_state.code_reads import PLAIN
from autoshard.capture.python_state.state_reads import MISSING, Read
from autoshard.errors import UsageError
from autoshard.options import Differentiate
from autoshard.program.program import Program
from autoshard.runtime.compile_once import SharedConditions
from autoshard.runtime.eager_calls import EagerHook
from autoshard.torch_adapters.hooks import global_hooks, hook_tables, registrations
from autoshard.torch_adapters.modes import autocast_state

#: positional and keyword arguments of a call
Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Captured:
    """What a capture leaves for calls.

    inputs: that it was made with, without their data. same_graph: whether a module is captured as the graph
    it was. compiled: a program for other inputs, or gradients of all outputs. resized: the same plan, lowered
    for a microbatch of other sizes, and so many of them in a step; None where it does not suit them.
    conditions: on sizes, None where nothing is known. stored: of a program that was stored, texts that
    attributes had then, by label.
    """

    state: CapturedState
    inputs: Inputs
    same_graph: Callable[[nn.Module], bool]
    compiled: Compiling
    resized: Callable[[nn.Module, Inputs, int], Program | None]
    conditions: Callable[[nn.Module], SharedConditions | None]
    stored: Mapping[str, str] | None = None


class Compiling(Protocol):
    """Compiles another program of a model, on the mesh that it has."""

    def __call__(
        self,
        module: nn.Module,
        inputs: Inputs,
        differentiate: Differentiate,
        stored: Sequence[Program],
        pins: Sequence[str],
    ) -> tuple[Program, Captured]:
        """With every parameter where the ``stored`` programs have it. pins: of other tensors.

        Returns what the capture leaves, too.
        """
        ...


@dataclass(frozen=True)
class Difference:
    """Something that is not what it was: its label, then and now, for people; line: where it is read."""

    label: str
    before: str
    now: str
    line: str = ""


@dataclass(frozen=True)
class StoredText:
    """The text of a value that an attribute had when a stored program was compiled, and has not now."""

    text: str

    def __repr__(self) -> str:
        return self.text


class CallGuard:
    """Compares a model with what was captured; below 20 µs for a few hundred attributes.

    same_graph: see `Captured`; None where the model cannot be captured here. stored: labels of attributes,
    with the texts of their values when a stored program was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        state: CapturedState,
        device: str,
        same_graph: Callable[[nn.Module], bool] | None,
        stored: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self.device, self.same_graph = module, device, same_graph
        reads = (*state.reads, *state.variables, *_children(module))
        # a parallel model has its own
        reads = tuple(r for r in reads if r.key != "forward" or r.table is not module.__dict__)
        self.reads = sorted(reads, key=lambda r: type(r.table) is not dict)
        plain = sum(type(r.table) is dict for r in self.reads)
        self.context, self.grad_mode = state.context, state.grad_mode
        #: attributes and globals; what is read of classes and closures is looked up apart
        self.tables: list[Any] = [r.table for r in self.reads[:plain]]
        self.keys = [r.key for r in self.reads[:plain]]
        self.others = self.reads[plain:]
        self.values = self._values()
        for n, read in enumerate(self.reads):
            text = stored.get(read.label, "") if stored else ""
            if text and text != value_text(read.value):
                self.values[n] = StoredText(text)
        self.original = list(self.values)
        self.containers = [(label, c, c.copy()) for label, c in state.containers]
        self.context_values = [var.get(MISSING) for _, var in self.context]
        entries = zip(self.reads, self.values, strict=True)
        self.tensors = [(r.label, r.line, x, x._version) for r, x in entries if _versioned(x)]
        known = {id(x) for _, _, x, _ in self.tensors}
        self.tensors += [
            ("a tensor that is no parameter or buffer", "", x, x._version)
            for x in state.constants
            if _versioned(x) and id(x) not in known
        ]
        inner = [m for m in module.modules() if m is not module]
        self.hooks = [(table, tuple(table)) for m in inner for table in hook_tables(m)]
        self.hooked = [(table, known) for table, known in self.hooks if _users(table)]
        self.registrations = registrations()
        self.environment = dict(os.environ) if state.environment else None
        #: models are captured on the CPU, with gradients recorded, whatever the modes around that are
        autocast = autocast_state(device) if device == "cpu" else (False, None)
        self.modes = (autocast, torch.get_default_dtype(), True if self.grad_mode else None)
        self.accepted: set[tuple[tuple[str, str], ...]] = set()

    def know_hooks_of(self, original: CallGuard) -> None:
        """Compare the hooks of a copy with those that its original was captured with."""
        pairs = zip(self.hooks, original.hooks, strict=True)
        self.hooks = [(table, known) for (table, _), (_, known) in pairs]
        self.hooked = [(t, known) for t, known in self.hooks if _users(t) or tuple(t) != known]

    def _values(self) -> list[Any]:
        return [*map(dict.get, self.tables, self.keys), *(r.table.get(r.key) for r in self.others)]

    def _modes(self) -> tuple[object, ...]:
        grad = torch.is_grad_enabled() if self.grad_mode else None
        return autocast_state(self.device), torch.get_default_dtype(), grad

    def check(self) -> None:
        """Raise UsageError, naming what differs, if the program is not that of the model as it is now."""
        result = [] if self.holds() else self._refused()
        if result:
            raise _refusal(result)

    def accepts(self) -> bool:
        """Whether it is, if need be by another capture."""
        return self.holds() or not self._refused()

    def unchanged(self) -> bool:
        """Whether nothing differs by value: alike on ranks of which one has captured in the meantime."""
        if not self.holds():
            values = self._values()
            if next(self._differences(values), None) is not None:
                return False
            self._take_values(values)
        return True

    def _take_values(self, values: list[Any]) -> None:
        """Compare later calls with these values, which give the same program."""
        self.values = values
        self.registrations = registrations()

    def holds(self) -> bool:
        """Whether all that was read is as it was, and no hook was registered since."""
        return (
            all(map(operator.is_, self._values(), self.values))
            and self._modes() == self.modes
            and all(map(_unchanged, self.tensors))
            and all(same_items(c, before) for _, c, before in self.containers)
            and all(v.get(MISSING) is x for (_, v), x in zip(self.context, self.context_values, strict=True))
            and all(tuple(table) == known for table, known in self.hooked)
            and registrations() == self.registrations
            and (self.environment is None or self.environment == os.environ)
        )

    def _refused(self) -> list[Difference]:
        """What differs, if it gives another graph."""
        values = self._values()
        result = list(self._differences(values))
        key = tuple((d.label, d.now) for d in result)
        if result and key not in self.accepted:
            # what no capture sees makes no difference to its graph
            unseen = self.device != "cpu" and self._modes()[0] != self.modes[0]
            unseen |= any(not set(table) <= set(known) for table, known in self.hooks) or bool(global_hooks())
            if unseen or self.same_graph is None or not self.same_graph(self.module):
                return result
            self.accepted.add(key)
        self._take_values(values)
        return []

    def _differences(self, values: list[Any]) -> Iterator[Difference]:
        for read, before, now in zip(self.reads, self.original, values, strict=True):
            alike = isinstance(before, StoredText) or type(before) is type(now)
            if before is not now and not (alike and _equal(before, now)):
                yield Difference(read.label, _text(before), _text(now), read.line)
        for label, line, tensor, version in self.tensors:
            if tensor._version != version:
                yield Difference(label, "as it was", f"changed in place (version {tensor._version})", line)
        for label, container, copied in self.containers:
            if not same_items(container, copied):
                yield Difference(label, _text(copied), _text(container))
        for (label, var), old in zip(self.context, self.context_values, strict=True):
            if var.get(MISSING) is not old and not _equal(var.get(MISSING), old):
                yield Difference(label, _text(old), _text(var.get(MISSING)))
        autocast, dtype, grad = self.modes
        names = (f"autocast for {self.device}", "the default dtype", "grad mode")
        for name, old, new in zip(names, (autocast, dtype, grad), self._modes(), strict=True):
            if old != new:
                yield Difference(name, str(old), str(new))
        before = self.environment or {}
        for name in sorted({*before, *os.environ} if self.environment is not None else ()):
            if before.get(name) != os.environ.get(name):
                yield Difference(f"the variable {name}", str(before.get(name)), str(os.environ.get(name)))
        for table, known in self.hooks:
            if tuple(table) != known:
                line = next((hook_line(h) for h in reversed(list(table.values()))), "")
                yield Difference("the hooks of a submodule", _hooks_text(known), _hooks_text(table), line)
        for hook in global_hooks():
            yield Difference("the hooks for all modules", "none", "one", hook_line(hook))


def _children(module: nn.Module) -> Iterator[Read]:
    """Submodules without parameters: those with some are missed by their parameters if they are replaced."""
    for name, each in module.named_modules():
        for key, child in each._modules.items():
            if child is not None and next(child.parameters(), None) is None:
                yield Read(each._modules, key, f"{name}.{key}".lstrip("."))


def _users(table: Mapping[int, Any]) -> bool:
    """Whether hooks of the user's are among those of a module."""
    return any(not isinstance(hook, EagerHook) for hook in table.values())


def _versioned(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _unchanged(entry: tuple[str, str, torch.Tensor, int]) -> bool:
    return entry[2]._version == entry[3]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, StoredText):
        return a.text == value_text(b)
    return isinstance(a, (*PLAIN, tuple, frozenset)) and bool(a == b)


def _hooks_text(numbers: Iterable[int]) -> str:
    """torch numbers hooks in the order in which they are registered."""
    listed = list(numbers)
    return f"{len(listed)} (registered as number {', '.join(map(str, listed))})" if listed else "0"


def _text(value: object) -> str:
    shown = isinstance(value, (*PLAIN, StoredText, tuple, list, dict, set))
    text = repr(value) if shown else f"a {type(value).__name__}"
    return text if len(text) < 80 else f"{text[:77]}..."


def _refusal(result: list[Difference]) -> UsageError:
    first, more = result[0], len(result) - 1
    others = ", ".join(dict.fromkeys(d.label for d in result[1:6]))
    return UsageError(
        f"{first.label} is {first.now}, and was {first.before} when the model was captured",
        where=first.line,
        why="the program holds the old value, and another one gives another graph"
        + (f" (different, too: {others}{' ...' if more > 5 else ''})" if more else ""),
        hint="set it before the model is parallelized, pass it as an argument of forward as a tensor, or "
        "parallelize a second model for it",
    )
