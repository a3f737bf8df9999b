"""What a rank's step computes, op by op, with a few of the values of each result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.capture.origins import CodeLine, code_line_of
from autoshard.torch_adapters.node_lines import ENGINE_CODE, current_node_number, next_node_number

#: values of a result that are kept; a result of the reference is taken to be another's if all are there
SAMPLES = 24


@dataclass(frozen=True)
class Sample:
    """Values of a tensor at places that its number of elements decides."""

    shape: tuple[int, ...]
    values: np.ndarray


NOWHERE = CodeLine()


@dataclass(frozen=True)
class OpRecord:
    """One op, or one rank's part in a collective.

    reads: numbers of the records whose results it takes. samples: of its floating results, after it ran.
    ranks: of its group, for a collective; reduction: ``sum`` and so on. alike: every rank gave the same.
    given: samples of what it took. outer: where backward was called, for an op of backward. sender: the line
    that sent a message. differentiable: whether autograd records it.
    """

    number: int
    op: str
    line: CodeLine
    reads: tuple[int, ...]
    samples: tuple[Sample, ...]
    ranks: tuple[int, ...] = ()
    reduction: str = ""
    alike: bool = False
    given: tuple[Sample, ...] = ()
    outer: CodeLine = NOWHERE
    sender: CodeLine = NOWHERE
    differentiable: bool = False


@dataclass
class Recorder:
    """The records of a rank, in order.

    keeps_values: keep the results themselves, as of a reference. keeps_records: else only lines are known,
    and no memory is kept. cuts: records whose results leave autograd.
    """

    keeps_values: bool = False
    keeps_records: bool = True
    records: list[OpRecord] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    cuts: set[int] = field(default_factory=set)
    paused: bool = False
    _writer: dict[int, int] = field(default_factory=dict)
    _kept: dict[int, Any] = field(default_factory=dict)  # storages, so that no other one gets their address
    _unwritten: set[int] = field(default_factory=set)
    _read: dict[int, int] = field(default_factory=dict)
    _lines: dict[int, CodeLine] = field(default_factory=dict)

    def op(
        self, name: str, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], writes: bool
    ) -> None:
        """An op that ran. writes: to memory that it is given."""
        if not self.keeps_records:
            self.line()
            return
        outputs = list(outputs)
        results = [x for x in outputs if x.is_floating_point() and x.numel()]
        if self.keeps_values:
            new = [x for x in results if writes or _memory(x) not in self._writer]
            self.values.extend(x.detach().clone() for x in new)
        self._add(name, self.line(), [*inputs], outputs, views=not writes, outer=self.backward_line())
        self.dtypes.update(x.dtype for x in results)

    def collective(
        self,
        name: str,
        line: CodeLine,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        **how: Any,
    ) -> None:
        """A rank's part in a collective that has ended. how: fields of `OpRecord`."""
        if not self.keeps_records:
            return
        with self.pause():
            self._add(name, line, [*inputs], [*outputs], **how)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, this thread's ops are the audit's, not the user's."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def first_use(self, tensor: torch.Tensor) -> int | None:
        """The record that first reads a tensor's memory."""
        return self._read.get(_memory(tensor))

    def writer(self, tensor: torch.Tensor) -> int | None:
        """The number of the record that last wrote to a tensor's memory."""
        return self._writer.get(_memory(tensor))

    def _add(
        self,
        name: str,
        line: CodeLine,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        views: bool = False,
        **more: Any,
    ) -> None:
        """views: whether results in memory of inputs are these, seen in another way."""
        number = len(self.records)
        inputs, written = [x for x in inputs if x.numel()], [x for x in written if x.numel()]
        for x in (*inputs, *written):
            self._kept.setdefault(_memory(x), x.untyped_storage())
        for x in inputs:
            self._read.setdefault(_memory(x), number)
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        for x in inputs:
            writer = self._writer.get(_memory(x))
            if writer is not None and self.records[writer].differentiable and not x.requires_grad:
                self.cuts.add(writer)
        touched = {_memory(x) for x in (*inputs, *written)}
        reads = tuple(sorted(self._writer[m] for m in touched if m in self._writer))
        for result in written:
            self._writer[_memory(result)] = number
        # memory that nothing was written to has any values
        if "empty" in name:
            self._unwritten.update(map(_memory, written))
        else:
            seen = set(map(_memory, inputs)) if views else set()
            self._unwritten -= set(map(_memory, written)) - seen
        results = [x for x in written if x.is_floating_point() and _memory(x) not in self._unwritten]
        samples = tuple(map(sample, results))
        self.records.append(OpRecord(number, name, line, reads, samples, differentiable=recorded, **more))

    def line(self, outer: bool = False) -> CodeLine:
        """The user's line that runs; of an op of backward, that of the op of forward it belongs to.

        outer: where backward is called, if there is no such op.
        """
        number, frame = current_node_number(), inspect.currentframe()
        if number is not None:
            inside = code_line_of(frame, ENGINE_CODE) or self._lines.get(number, NOWHERE)
            return inside or (code_line_of(frame, RUN_STEP) if outer else NOWHERE)
        line = code_line_of(frame, RUN_STEP)
        self._lines.setdefault(next_node_number() - 1, line)  # later ops may make no node
        return line

    def backward_line(self) -> CodeLine:
        """Where the backward that runs was called; nowhere in forward."""
        if current_node_number() is None:
            return NOWHERE
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not ENGINE_CODE:
            frame = frame.f_back
        return code_line_of(frame, RUN_STEP)


class Recording(TorchDispatchMode):
    """Records what runs inside it. read: told of every parameter that an op takes, and of tensors that could
    be one."""

    def __init__(self, recorder: Recorder, read: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.recorder, self.read = recorder, read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [] if self.recorder.paused else tensors((args, kwargs))
        for x in inputs:
            if isinstance(x, torch.nn.Parameter) or (x.requires_grad and x.is_leaf and not x._is_view()):
                self.read(x)
        if are_wrapped(types):
            return NotImplemented  # a DTensor comes back as the ops of its shard
        result = func(*args, **(kwargs or {}))
        if not self.recorder.paused:
            outputs = tensors(result)
            if all(type(x) in PLAIN and x.device.type != "meta" for x in (*inputs, *outputs)):
                self.recorder.op(str(func), inputs, outputs, func._schema.is_mutable)
        return result


#: types that hold values
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def are_wrapped(types: Any) -> bool:
    """Whether there is a DTensor or the like among types of tensors."""
    return any(kind not in PLAIN and not issubclass(kind, FakeTensor) for kind in types)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def sample(tensor: torch.Tensor) -> Sample:
    """A few of a tensor's values."""
    flat = tensor.detach().reshape(-1)
    values = flat[_places(flat.numel())].to(torch.float64).numpy(force=True)
    return Sample(tuple(tensor.shape), values)


@lru_cache(maxsize=4096)
def _places(count: int) -> torch.Tensor:
    """Places that are alike for all tensors of a size, spread over all of it."""
    if count <= SAMPLES:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, count, (SAMPLES,), generator=generator).sort().values


def run(step: Callable[[], Any]) -> Any:
    """Call a step; lines are looked for inside of it."""
    return step()


RUN_STEP = run.__code__
