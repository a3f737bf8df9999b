"""What a captured graph takes for granted beside tensors: the record that calls are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autoshard.capture.joint_trace import depends_on_arguments, evaluated, recording
from autoshard.capture.origins import user_line_of
from autoshard.capture.python_state.changes import (
    Change,
    Changes,
    PythonState,
    check_changes,
    nested,
    refuse_source,
    tensors_of,
)
from autoshard.capture.python_state.code_reads import PLAIN, CodeReads
from autoshard.capture.python_state.kept_tables import table_text
from autoshard.capture.python_state.state_reads import (
    MISSING,
    AttributeReads,
    ClassValues,
    Missing,
    Read,
    objects_of,
)
from autoshard.ir import Joint
from autoshard.torch_adapters.modes import grad_mode_noted

_UNREAD = object()
#: characters of a value's text; of longer ones a hash is stored
_LONGEST = 200
#: of a method of tensors that says whether they were made while no gradients are recorded
_INFERENCE = "is_inference"


@dataclass(frozen=True)
class CapturedState:
    """Live references to what the code of a model read.

    reads: attributes. variables: globals, closure variables. context: context variables, with labels.
    containers: whose items were read. grad_mode: whether the code asked if gradients are recorded.
    environment: whether it mentions the environment's variables. left: what a call writes into attributes
    and does not read. constants: tensors that the graph holds copies of. tables: tensors made from numbers
    that a call leaves for the next ones, by label (`kept_tables`). graph: as it was captured, repeats not
    expanded.
    """

    reads: tuple[Read, ...] = ()
    variables: tuple[Read, ...] = ()
    context: tuple[tuple[str, ContextVar[Any]], ...] = ()
    containers: tuple[tuple[str, Any], ...] = ()
    grad_mode: bool = False
    environment: bool = False
    left: tuple[Change, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    graph: Joint | None = None

    @cached_property
    def digest(self) -> str:
        """Of the captured graph; empty if there is none."""
        return "" if self.graph is None else graph_digest(self.graph)


def texts_of(reads: Iterable[Read]) -> dict[str, str]:
    """Labels of what was read, with values as text; no text for an object."""
    return {read.label: value_text(read.value) for read in reads}


def value_text(value: object) -> str:
    """A value as a program folder holds it; empty for what has no short text of its own."""
    text = repr(value) if isinstance(value, (*PLAIN, Missing)) else ""
    return text if len(text) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()


def state_here(
    model: nn.Module, texts: Mapping[str, str], grad_mode: bool = False, environment: bool = False
) -> CapturedState:
    """The state of a model of which another process captured a graph, as it is here.

    texts: of the attributes that were read there, by label. The other fields: see `CapturedState`.
    """
    owners = {label: value for value, label in objects_of(model).values()}
    reads = []
    for label, text in texts.items():
        path, _, key = label.rpartition(".")
        if path in owners:
            table = owners[path].__dict__
            # what was not set on the object itself may be a method of its class
            own = key in table or text == repr(MISSING)
            reads.append(Read(table if own else ClassValues(owners[path]), key, label))
    code = CodeReads.of(model)
    containers = tuple(nested((r.label, r.value) for r in (*reads, *code.variables)))
    return CapturedState(
        tuple(reads), tuple(code.variables), tuple(code.context), containers, grad_mode, environment
    )


@dataclass
class StateWatch:
    """Notes what a model's code reads and changes, for all runs of one capture."""

    attributes: AttributeReads
    code: CodeReads
    state: PythonState
    ignored: frozenset[tuple[int, str]]
    #: what the last run of the full model left changed
    changes: Changes = field(default_factory=Changes)
    groups: list[list[nn.Module]] = field(default_factory=list)
    #: real tensors that the graphs hold copies of
    constants: list[torch.Tensor] = field(default_factory=list)
    #: what runs leave for the next, as text
    tables: dict[str, str] = field(default_factory=dict)
    #: identities of the namespaces of repeated layers
    inner: frozenset[int] = frozenset()
    #: whether the code has asked if gradients are recorded
    asked_grad_mode: bool = False

    @classmethod
    def of(cls, model: nn.Module, code: CodeReads, replaced: Iterable[tuple[Any, str]]) -> StateWatch:
        """Watch a model. replaced: (object, attribute) that a capture itself has set."""
        objects = objects_of(model)
        ignored = frozenset((id(o.__dict__), name) for o, name in replaced)
        return cls(AttributeReads(objects, user_line_of), code, PythonState.of(objects, code), ignored)

    @contextmanager
    def after(self, earlier: Changes) -> Iterator[StateWatch]:
        """The watch of a run that begins with what an earlier one left changed; hooks and modules stay."""
        before, changes = self.state, earlier.read
        for change in changes:
            _set(change.read, change.after)
        if changes:
            for table, held in earlier.tables:
                table.update(held)
            self.state = PythonState.of(self.attributes.objects, self.code)
        try:
            yield self
        finally:
            self.state = before
            for change in changes:
                _set(change.read, change.before)

    def outer_changed(self) -> bool:
        """Whether the run has changed variables, or objects outside of repeated layers, so far."""
        return self.state.moved(self.inner)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The code of the model runs: its reads count."""
        self.attributes.active = True
        try:
            with grad_mode_noted(self.note_grad_mode), self.code.caches_apart():
                yield
        finally:
            self.attributes.active = False

    def note_grad_mode(self) -> None:
        """The model's code asks whether gradients are recorded, or something that follows from that."""
        self.asked_grad_mode = True

    def finish_run(self) -> None:
        """A run has ended: refuse what it changed and a program cannot. Raises CaptureError."""
        if recording() is None:
            self.state.restore()
            self.attributes.first.clear()
            return
        variables = {(id(r.table), r.key) for r in self.code.variables}

        def was_read(change: Change) -> bool:
            key = id(change.read.table), change.read.key
            return key in variables or self.attributes.first.get(key, _UNREAD) is change.before

        try:
            self.changes = check_changes(self.state, was_read, depends_on_arguments)
            for change in self.changes.kept:
                for k, tensor in enumerate(tensors_of(change.after)):
                    self.tables[f"{change.read.label}[{k}]"] = evaluated(tensor, table_text)
        finally:
            self.state.restore()
            self.attributes.first.clear()

    def captured(self, graph: Joint) -> CapturedState:
        """The record, once the model is as it was before the capture. graph: what was captured.

        Raises CaptureError for an iterator among what was read.
        """
        # what forward writes before it reads it is no state
        ignored = {*self.ignored, *((id(c.read.table), c.read.key) for c in self.changes.left)}
        attributes = _distinct(self._of_repeats(self.attributes.all_reads()), ignored)
        variables = _distinct(self.code.variables, {*ignored, *attributes})
        result = (*attributes.values(), *variables.values())
        for read in result:
            refuse_source(read)
        containers = tuple(nested((r.label, r.value) for r in result))
        return CapturedState(
            tuple(attributes.values()),
            tuple(variables.values()),
            tuple(self.code.context),
            containers,
            self.asked_grad_mode or _INFERENCE in self.code.names,
            bool(self.code.names & {"environ", "getenv"}),
            self.changes.left,
            tuple(self.constants),
            self.tables,
            graph,
        )

    def _of_repeats(self, reads: Iterable[Read]) -> Iterator[Read]:
        """Reads, and those that siblings of a layer traced once would have made."""
        siblings: dict[int, list[tuple[Mapping[str, Any], str]]] = {}
        names = {id(value): label for value, label in self.attributes.objects.values()}
        for members in self.groups:
            trees = [dict(m.named_modules(remove_duplicate=False)) for m in members]
            for path in trees[0]:
                inside = [t[path] for t in trees if path in t]
                tables = [(m.__dict__, names.get(id(m)) or path) for m in inside]
                for module in inside:
                    siblings[id(module.__dict__)] = tables
        for read in reads:
            yield read
            for table, label in siblings.get(id(read.table), ()):
                if table is not read.table:
                    yield Read(table, read.key, f"{label}.{read.key}".lstrip("."), read.line)


def _distinct(reads: Iterable[Read], ignored: Container[tuple[int, str]]) -> dict[tuple[int, str], Read]:
    result: dict[tuple[int, str], Read] = {}
    for read in reads:
        key = id(read.table), read.key
        if key not in ignored:
            result.setdefault(key, read)
    return result


def _set(read: Read, value: Any) -> None:
    if isinstance(read.table, dict):
        if value is MISSING:
            read.table.pop(read.key, None)
        else:
            read.table[read.key] = value


def graph_digest(joint: Joint) -> str:
    """A hash of all that a captured graph computes: equal for graphs that give equal programs."""
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            digest.update(repr(part).encode())

    def add_joint(each: Joint) -> None:
        add(each.in_tree, each.in_leaves, each.out_tree, each.out_leaves, each.tied, each.frozen)
        add([(p.kind, p.name, p.target, p.type) for p in each.ports], each.results, each.graph.outputs)
        for node in each.graph.nodes:
            add(node.op, node.args, node.kwargs, node.outs, node.types)
        for name, value in sorted(each.constants.items()):
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        add(sorted((k, sorted(v.items())) for k, v in each.away.items()))
        for body in each.bodies:
            add_joint(body.joint)

    add_joint(joint)
    return digest.hexdigest()
