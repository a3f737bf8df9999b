"""Calls and steps of a program as CUDA graphs: recorded once, launched at once from then on.

The first `WARM` calls run op by op: they compile, and let libraries and communicators set themselves up. The
next one is recorded, forward and backward apart, or a full step of microbatches together. A graph reads and
writes the same memory each time. So inputs, seeds and gradients of outputs are copied to where it reads them;
outputs are copied out; and gradients that are still to be added to are moved out of the way of a replay.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError
from autoshard.ir import Graph, Node, refs_of
from autoshard.ir.collectives import COLLECTIVES, is_collective
from autoshard.ir.row_tiles import TILES, tiles_of
from autoshard.ir.scans import SCAN, scan_of
from autoshard.program.program import Program
from autoshard.rules.attention import KEYS, numbers_documents
from autoshard.runtime.optim.optimizer_hooks import local
from autoshard.runtime.outputs import Rows
from autoshard.runtime.resolve import torch_op
from autoshard.runtime.said import say_once
from autoshard.torch_adapters.cuda_graphs import UNRECORDABLE, CudaGraphRecorder, GraphRecorder, users_of

if TYPE_CHECKING:
    from autoshard.runtime.runner import Parts, Runner, Watched

#: calls before the one that is recorded
WARM = 2


def graphs_of(runner: Runner) -> CallGraphs | None:
    """Those of a program that wants them. Raises UsageError where a step cannot be recorded."""
    program = runner.program
    if not program.cuda_graphs:
        return None
    if why := _unrecordable(program):
        raise UsageError(
            "cuda_graphs=True for a step that changes from call to call", why=why, hint="cuda_graphs=False"
        )
    return CallGraphs(runner, recorder_on(runner.device)) if runner.guard is None else None


def recorder_on(device: torch.device) -> Callable[[], GraphRecorder]:
    """What makes recorders. Raises UsageError for another device than CUDA's."""
    if device.type != "cuda":
        raise UsageError(
            f"cuda_graphs=True on {device.type}", hint="graphs are for CUDA devices: cuda_graphs=False"
        )
    return CudaGraphRecorder


def _unrecordable(program: Program) -> str:
    """Why the steps of a program are not the same work each time, "" if they are."""
    if program.stages is not None:
        return "messages between the stages of a pipeline are not recorded"
    if program.offload:
        return "values travel to host memory, which is not recorded"
    lowered = program.lowered
    bodies = [lowered.main, *(segment.graph.nodes for segment in lowered.segments.values())]
    if any(_by_documents(segment.graph) for segment in lowered.segments.values()):
        return "attention by documents waits for the device in the middle of a step"
    for node in _nodes(item for body in bodies for item in body if isinstance(item, Node)):
        if is_collective(node):
            fixed = COLLECTIVES[node.op].agreed
        else:
            fixed = UNRECORDABLE.isdisjoint(torch_op(node.op).tags)
        if not fixed:
            return f"{node.op} waits for the device in the middle of a step"
    return ""


def _by_documents(graph: Graph) -> bool:
    """Whether the values of a mask decide which calls an attention makes."""
    types = graph.types()
    attention = (n for n in graph.nodes if n.op in KEYS)
    return any(numbers_documents(types[ref]) for node in attention for ref in refs_of(node))


def _nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """With those that run in tiles, or step after step."""
    for node in nodes:
        if node.op == TILES:
            yield from _nodes(tiles_of(node).body.nodes)
        elif node.op == SCAN:
            yield from _nodes(scan_of(node).body.nodes)
        else:
            yield node


class RecordedPass:
    """A call whose forward a graph ran. watched: see `Runner.watched`."""

    def __init__(self, runner: Runner, call: _RecordedCall, watched: Sequence[Watched]) -> None:
        self.runner, self._call, self.watched = runner, call, watched

    def backward(self, tangents: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], DTensor]:
        return self._call.backward(tangents)


class CallGraphs:
    """The graphs of one program on one rank. recorder: makes what records one call."""

    def __init__(self, runner: Runner, recorder: Callable[[], GraphRecorder]) -> None:
        self.runner, self.recorder = runner, recorder
        self.calls, self._told = 0, False
        #: by `_addresses`, only those of now
        self._calls: dict[tuple[int, ...], _RecordedCall] = {}
        self._steps: dict[tuple[int, ...], _RecordedStep] = {}
        # NCCL waits for graphs with its messages, also at exit
        weakref.finalize(self, _release, weakref.ref(self))
        #: the last call, until its backward has run or its outputs are dropped
        self._open: Callable[[], RecordedPass | None] = lambda: None

    def copied(self, runner: Runner) -> CallGraphs:
        """None recorded yet, of a copy of the model."""
        return CallGraphs(runner, self.recorder)

    def release(self) -> None:
        """Drop what was recorded; the next call records anew."""
        self._calls.clear()
        self._steps.clear()

    def _is_warm(self) -> bool:
        self.calls += 1
        return self.calls > WARM and not torch.is_anomaly_enabled()

    def forward(
        self,
        params: Sequence[Any],
        inputs: Sequence[Any],
        buffers: Mapping[str, torch.Tensor],
        rows: Rows | None,
    ) -> tuple[RecordedPass, list[Any]] | None:
        """(the call, its outputs); None where its ops are to be called: before it is warm, and while backward
        of the call before is still to come."""
        if not self._is_warm():
            return None
        runner = self.runner
        if self._open() is not None:
            if not self._told:
                self._told = True
                say_once("a call before the backward of the last one runs without its CUDA graph")
            return None
        given = [runner.input_shard(x, port) for port, x in zip(runner.inputs, inputs, strict=True)]
        at = _addresses(params, buffers)
        if at not in self._calls:
            self._calls.clear()  # its memory serves the next
            self._calls[at] = _RecordedCall(runner, self.recorder(), params, given, buffers)
        outs = runner.outputs(self._calls[at].forward(params, given), rows)
        ran = RecordedPass(runner, self._calls[at], runner.watched({}, params))
        self._open = weakref.ref(ran)
        return ran, outs

    def step(
        self,
        params: Sequence[Any],
        calls: Sequence[Sequence[Any]],
        buffers: Mapping[str, torch.Tensor],
        run: StepFunction,
    ) -> tuple[torch.Tensor, Parts] | None:
        """(loss, gradients) of a step; None before it is warm, and where its loss is scaled.

        calls: the inputs of every microbatch. run: the step op by op.
        """
        # the scale is another tensor at every step
        if not self._is_warm() or self.runner.loss_scale is not None:
            return None
        ports = self.runner.inputs
        given = [self.runner.input_shard(x, p) for xs in calls for p, x in zip(ports, xs, strict=True)]
        at = _addresses(params, buffers)
        if at not in self._steps:
            self._steps.clear()
            self._steps[at] = _RecordedStep(self.runner, self.recorder(), len(calls), given, run)
        return self._steps[at].step(params, given)


def _release(graphs: weakref.ref[CallGraphs]) -> None:
    if (here := graphs()) is not None:
        here.release()


#: (inputs of every microbatch, their seeds) -> (loss, gradients)
StepFunction: TypeAlias = (
    "Callable[[Sequence[Sequence[torch.Tensor]], Sequence[torch.Tensor]], tuple[torch.Tensor, Parts]]"
)


def _addresses(params: Sequence[Any], buffers: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Where what a graph reads lies, beside its copies of inputs, and what is trained."""
    trained = (p.requires_grad for p in params)
    return (*(local(p).data_ptr() for p in params), *trained, *(b.data_ptr() for b in buffers.values()))


class _Recorded:
    """What recordings have in common: memory that they read, and gradients that they write."""

    def __init__(self, runner: Runner, recorder: GraphRecorder, calls: int, given: Any) -> None:
        self.runner, self.recorder = runner, recorder
        self.inputs: list[torch.Tensor] = [x.clone() for x in given]
        self.seeds = list(torch.zeros(calls, dtype=torch.int64, device=runner.device).unbind())
        self._fill_seeds()
        self.parts: Parts = {}
        #: memory of gradients -> a tensor in it, and how many are
        self._written: dict[int, tuple[torch.Tensor, int]] = {}

    def _fill_seeds(self) -> None:
        if self.runner.seed_port is not None:
            for call, seed in enumerate(self.seeds):
                seed.fill_(self.runner.clock.seed(self.runner.seed, call))

    def fill(self, given: Sequence[torch.Tensor]) -> None:
        """Copy what differs from call to call to where the graph reads it."""
        if self.inputs:
            torch._foreach_copy_(self.inputs, list(given))
        self._fill_seeds()

    def writes(self, parts: Parts) -> None:
        """Remember where the graph puts gradients."""
        self.parts = parts
        tensors = [x for x, _ in parts.values()]
        self._written = {_memory(x): (x, users_of(x)) for x in tensors}

    def given_out(self) -> Parts:
        """The gradients, as tensors of their own in the memory that the graph writes."""
        return {key: (x.detach(), value) for key, (x, value) in self.parts.items()}

    def clear(self, params: Sequence[Any]) -> None:
        """Before a replay: move gradients that parameters have out of its way.

        Raises UsageError if someone else has one, who would see it change.
        """
        for port, parameter in zip(self.runner.params, params, strict=True):
            if parameter.grad is not None and _memory(local(parameter.grad)) in self._written:
                value = self.parts["grad", port.target][1]
                parameter.grad = self.runner.gradient(local(parameter.grad).clone(), value)
        if self._in_use():
            gc.collect()
        if used := self._in_use():
            name = next(target for (_, target), (x, _) in self.parts.items() if _memory(x) in used)
            raise UsageError(
                f"the gradient of {name} of an earlier step is still in use",
                why="the CUDA graph of the step writes gradients to the same memory each time",
                hint="clone() what is to be kept, or cuda_graphs=False",
            )

    def _in_use(self) -> list[int]:
        """Memory of gradients that others have, too."""
        return [key for key, (x, count) in self._written.items() if users_of(x) > count]


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _RecordedCall(_Recorded):
    """A forward and the backward that follows it."""

    def __init__(
        self,
        runner: Runner,
        recorder: GraphRecorder,
        params: Sequence[Any],
        given: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(runner, recorder, 1, given)
        self._tangents: dict[str, torch.Tensor] = {}
        self._replay_backward: Callable[[], None] | None = None
        outputs = [r.value for r in runner.program.signature.results if r.kind == "output"]

        def run() -> dict[str, torch.Tensor]:
            env = runner.forward(params, self.inputs, buffers, self.seeds[0])
            runner.update_buffers(env, buffers)
            self._env = env
            return {value: env[value] for value in outputs}

        self._replay_forward, self._outs = recorder.record(run)

    def forward(self, params: Sequence[Any], given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of outputs, the caller's."""
        self.clear(params)
        self.fill(given)
        self._replay_forward()
        return {value: x.clone() for value, x in self._outs.items()}

    def backward(self, tangents: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], DTensor]:
        if self._replay_backward is None:
            self._tangents = {name: x.clone() for name, x in tangents.items()}
            self._replay_backward, parts = self.recorder.record(self._run_backward)
            self.writes(parts)
        for name, x in tangents.items():
            self._tangents[name].copy_(x)
        self._replay_backward()
        return self.runner.gradients(self.given_out())

    def _run_backward(self) -> Parts:
        env = self._env
        del self._env  # what backward has read may be overwritten by what it makes
        env.update(self._tangents)
        return self.runner.backward(env)


class _RecordedStep(_Recorded):
    """All microbatches of a step."""

    def __init__(
        self,
        runner: Runner,
        recorder: GraphRecorder,
        calls: int,
        given: Sequence[torch.Tensor],
        run: StepFunction,
    ) -> None:
        super().__init__(runner, recorder, calls, given)
        each = len(self.inputs) // calls
        inputs = [self.inputs[k * each : (k + 1) * each] for k in range(calls)]
        self._replay, (self._loss, parts) = recorder.record(lambda: run(inputs, self.seeds))
        self.writes(parts)

    def step(self, params: Sequence[Any], given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Parts]:
        self.clear(params)
        self.fill(given)
        self._replay()
        return self._loss.clone(), self.given_out()
