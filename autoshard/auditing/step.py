"""One step, of the reference or of a rank, and what it leaves: gradients where the optimizer takes them,
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.auditing.buffers import Buffer, CopiedBuffers
from autoshard.auditing.locate import behind, lines_of
from autoshard.auditing.recording import Recorder, Recording, run
from autoshard.auditing.state import (
    HALF,
    Elements,
    Parameters,
    RankParameter,
    array,
    has_memory,
    laid_as,
    local,
    partial_ranks,
)
from autoshard.runtime.optim.optimizer_hooks import parameters_in


@dataclass
class StepWatch:
    """Sees the modules that a thread calls, and its optimizers' steps.

    Modules are looked at when one is first called, before FSDP gathers what it has.
    """

    elements: Elements
    recorder: Recorder
    parameters: dict[int, tuple[torch.Tensor, RankParameter]] = field(default_factory=dict)
    optimizer_line: str = ""
    read: dict[int, tuple[torch.Tensor, RankParameter]] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    called: dict[int, nn.Module] = field(default_factory=dict)
    _seen: dict[int, nn.Module] = field(default_factory=dict)
    _slots: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    _thread: int = field(default_factory=get_ident)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks of torch for all modules and optimizers; they do nothing in other threads."""
        hooks = (
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._step),
        )
        try:
            with Recording(self.recorder, self._read):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def result(self) -> Parameters:
        """What the rank has at the end of its step."""
        with self.recorder.pause():
            self._replace_gathered()
            self._add_used()
            self._take([p for p, _ in self.parameters.values() if id(p) not in self.taken])
            called = [h.elements for _, h in self.parameters.values() if h.in_module]
            known = np.concatenate([*called, np.zeros(0, int)])
            return [
                replace(
                    held,
                    after=array(p) if has_memory(p) else None,
                    used=self.recorder.first_use(local(p)),
                    stepped=self.optimizer_line,
                    # what no module has, though, is no shard of theirs
                    in_module=held.in_module or not np.isin(held.elements, known).all(),
                )
                for p, held in self.parameters.values()
            ]

    def buffers(self, copied: CopiedBuffers) -> dict[str, Buffer]:
        """What the rank has of the reference's buffers, where it called the module or wrote to them."""
        with self.recorder.pause():
            return {
                name: Buffer(array(x), self._written(x))
                for module in {**copied.modules, **self.called}.values()
                for name, _, x in copied.of(module)
                if id(module) in self.called or self.recorder.writer(x) is not None
            }

    def _written(self, buffer: torch.Tensor) -> tuple[str, ...]:
        writer, records = self.recorder.writer(buffer), self.recorder.records
        return () if writer is None else lines_of([records[writer], *behind(records, records[writer])])

    def _called(self, module: nn.Module, _: Any) -> None:
        if get_ident() != self._thread:
            return
        self.called[id(module)] = module
        if id(module) in self._seen:
            return
        with self.recorder.pause():
            for name, child in module.named_modules():
                if id(child) in self._seen:
                    continue
                self._seen[id(child)] = child
                for key, p in child.named_parameters(recurse=False):
                    if id(p) not in self.parameters:
                        self._add(child, key, f"{name}.{key}" if name else key)

    def _add(self, module: nn.Module, key: str, name: str) -> None:
        p = module._parameters[key]
        assert p is not None
        new = self.recorder.writer(local(p))
        held = RankParameter(name, self.elements.held(p), p.requires_grad, made=new)
        self.parameters[id(p)] = (p, held)
        self._slots[id(p)] = (module, key)

    def _replace_gathered(self) -> None:
        """Put shards in place of what `FSDPModule.unshard` gathered ahead of the first call."""
        for number, (module, key) in list(self._slots.items()):
            p, held = self.parameters[number]
            now = module._parameters.get(key)
            if now is not None and now is not p and id(now) not in self.parameters and _gradient(p) is None:
                del self.parameters[number], self._slots[number]
                self._add(module, key, held.name)

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if get_ident() == self._thread:
            self.optimizer_line = self.optimizer_line or str(self.recorder.line(outer=True))
            with self.recorder.pause():
                self._replace_gathered()
                self._add_used()
                self._take(parameters_in(optimizer))

    def _read(self, p: torch.Tensor) -> None:
        """What it holds, before a step changes it."""
        known = id(p) in self.parameters or id(p) in self.read
        if not known and p.device.type != "meta" and p.dtype not in HALF:  # FSDP gathers copies of 16 bits
            with self.recorder.pause():
                held = RankParameter("", self.elements.held(p), p.requires_grad, in_module=False)
                self.read[id(p)] = (p, held)

    def _add_used(self) -> None:
        """Parameters that have gradients, or are frozen, though no module of theirs was called."""
        for key, (p, held) in self.read.items():
            counts = _gradient(p) is not None or (not held.trained and (held.elements >= 0).any())
            if key not in self.parameters and counts and has_memory(p):
                if local(p).numel() != len(held.elements):  # it was gathered, as FSDP's flat ones are
                    held = replace(held, elements=self.elements.held(p))
                self.parameters[key] = (p, held)

    def _shard(self, p: torch.Tensor) -> None:
        """A parameter that an optimizer has and no module: as ZeRO's flat ones."""
        held = RankParameter("a parameter of the optimizer", self.elements.held(p), in_module=False)
        self.parameters[id(p)] = (p, held)

    def _take(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            if id(p) in self.taken or not (has_memory(p) or _gradient(p) is not None):
                continue  # an optimizer made of gathered parameters has what FSDP frees
            if id(p) not in self.parameters:
                self._shard(p)
            self.taken.add(id(p))
            gradient = _gradient(p)
            if gradient is not None:
                known, held = self.parameters[id(p)]
                writer, summed = self.recorder.writer(local(gradient)), partial_ranks(gradient)
                taken = replace(held, gradient=array(laid_as(p, gradient)), writer=writer, summed=summed)
                self.parameters[id(p)] = (known, taken)


def _gradient(p: torch.Tensor) -> torch.Tensor | None:
    """Megatron's buffers are `main_grad`."""
    if not (p.is_leaf or p.retains_grad):
        return None
    return getattr(p, "main_grad", None) if p.grad is None else p.grad


@dataclass(frozen=True)
class StepState:
    """What a step leaves, of the reference or of a rank. buffers: by their names in the reference."""

    parameters: Parameters = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)


def run_step(
    step: Callable[[], Any],
    elements: Elements,
    recorder: Recorder,
    copied: CopiedBuffers | None = None,
    mode: AbstractContextManager[Any] | None = None,
) -> StepState:
    """Run a step of this thread, its ops by a dispatch mode. copied: of the model that it is given."""
    watch = StepWatch(elements, recorder)
    with mode or nullcontext(), watch.watching():
        run(step)
    return StepState(watch.result(), watch.buffers(copied) if copied else {})
