"""The program of one rank of many, on one device: its computing and its memory beside what is simulated."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.cluster import Cluster, Mesh
from autoshard.program.program import Program
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.prepared_steps import PreparedItem
from autoshard.runtime.profile.device import Lead, synchronize
from autoshard.simulate.pricing import Pricer
from autoshard.simulate.step import estimate_step
from benchmarks.estimates import WITHOUT_UPDATE
from benchmarks.gpu_steps import StepCase, forget, peak, process_group, stepper
from benchmarks.local_copies import LocalCopies

RUNS = 5
#: seconds of work for the device before a step, in which the host issues most of it
AHEAD = 0.2


@dataclass(frozen=True)
class RankCase:
    """A model on a mesh; its batch is that of all ranks."""

    model: StepCase
    mesh: str

    @property
    def text(self) -> str:
        return f"hidden {self.model.hidden}, {self.mesh}, {self.model.batch} x {self.model.length:,}"


_LLAMA = StepCase(4, 4096, 32, 8, 14336, 128256, 8, 4096)
RANK_CASES = (
    RankCase(replace(_LLAMA, batch=1), "dp=1"),
    RankCase(_LLAMA, "fsdp=8"),
    RankCase(replace(_LLAMA, batch=4), "fsdp=2,tp=4"),
    RankCase(replace(_LLAMA, hidden=8192, heads=64, inner=28672, batch=2, layers=2), "tp=8"),
)
SMALL_RANK_CASES = (RankCase(StepCase(2, 64, 4, 2, 128, 128, 8, 32, torch.float32), "fsdp=4"),)


@dataclass(frozen=True)
class RankRow:
    """cells: of the table of programs. parts: rows of the table of parts."""

    cells: tuple[str, ...]
    parts: Sequence[tuple[str, ...]]


@dataclass
class _Clock:
    """Seconds of computing of every instruction of main, by its name."""

    device: torch.device
    spans: dict[str, list[tuple[float, Any]]] = field(default_factory=lambda: defaultdict(list))
    running: str = ""

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        self.running = name
        return self._span(1.0, call)

    def apart(self, call: Callable[[], Any]) -> Any:
        """A message within an instruction, whose time is taken from that."""
        return self._span(-1.0, call)

    def _span(self, sign: float, call: Callable[[], Any]) -> Any:
        spans = self.spans[self.running]
        if self.device.type != "cuda":
            start = time.perf_counter()
            out = call()
            spans.append((sign, time.perf_counter() - start))
            return out
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        out = call()
        after.record()
        spans.append((sign, (before, after)))
        return out

    def seconds(self) -> dict[str, float]:
        """Of a run, name by name; starts anew."""
        synchronize(self.device)
        found = {
            name: sum(
                sign * (s if isinstance(s, float) else s[0].elapsed_time(s[1]) * 1e-3) for sign, s in spans
            )
            for name, spans in self.spans.items()
            if name
        }
        self.spans.clear()
        return found


class _TimedItem:
    """An instruction that says how long it takes."""

    def __init__(self, item: PreparedItem, name: str, clock: _Clock) -> None:
        self._item, self._name, self._clock = item, name, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def run(self, args: list[Any]) -> Sequence[Any]:
        found: Sequence[Any] = self._clock.run(self._name, lambda: self._item.run(args))
        return found


def rank_row(
    case: RankCase, cluster: Cluster, device: torch.device, compiled_by: str = "inductor"
) -> RankRow:
    """One program, measured and simulated. compiled_by: the codegen of the last column."""
    seconds, bytes_, program = _measured(case, device, "interpreter")
    compiled, compiled_bytes, fused = _measured(case, device, compiled_by)
    simulated, calls = _simulated(program, cluster)
    chained = sum(_simulated(fused, cluster)[0].values())
    estimate = estimate_step(program, cluster, behaviour=WITHOUT_UPDATE)
    measured, expected = sum(seconds.values()), sum(simulated.values())
    held = estimate.fullest.peak
    cells = (
        case.text,
        f"{measured * 1e3:.2f} ms",
        f"{expected * 1e3:.2f} ms",
        f"{expected / measured - 1:+.0%}",
        f"{bytes_ / 2**30:.2f} GiB",
        f"{held / 2**30:.2f} GiB",
        f"{held / bytes_ - 1:+.0%}" if bytes_ else "-",
        f"{sum(compiled.values()) * 1e3:.2f} ms, {compiled_bytes / 2**30:.2f} GiB",
        f"{chained * 1e3:.2f} ms",
        f"{chained / sum(compiled.values()) - 1:+.0%}",
    )
    parts = [
        (case.text, name, str(calls[name]), f"{s * 1e3:.3f} ms", f"{simulated[name] * 1e3:.3f} ms")
        for name, s in sorted(seconds.items(), key=lambda pair: -pair[1])
        if s > measured / 50 or simulated[name] > expected / 50
    ]
    return RankRow(cells, parts)


def _name(instruction: Any) -> str:
    return getattr(instruction, "segment", None) or "main"


def _simulated(program: Program, cluster: Cluster) -> tuple[dict[str, float], Counter[str]]:
    """(seconds of computing, calls) by segment."""
    pricer, seconds, calls = Pricer(program, cluster), defaultdict[str, float](float), Counter[str]()
    for part in program.lowered.parts:
        for item in program.lowered.of(part):
            seconds[_name(item)] += pricer.priced([item]).compute
            calls[_name(item)] += 1
    return seconds, calls


def _measured(case: RankCase, device: torch.device, codegen: str) -> tuple[dict[str, float], float, Program]:
    """(seconds of computing by segment, most bytes, the program), of forward and backward."""
    shape, clock = Mesh.parse(case.mesh), _Clock(device)
    copies = patch(
        "autoshard.runtime.runner.transport_of", lambda name, device: LocalCopies(name, clock.apart)
    )
    with process_group(shape.world_size), copies:
        mesh = init_device_mesh(device.type, shape.sizes, mesh_dim_names=shape.names)
        inputs = case.model.inputs(device)
        model = autoshard.parallelize(
            case.model.model(device), mesh, example_inputs=inputs, cluster="h100-dgx", codegen=codegen
        )
        step = stepper(model, inputs)
        for _ in range(2):
            step()
        synchronize(device)
        forget()
        step()
        synchronize(device)
        most = peak(device)
        family: Any = model._autoshard_family
        runner = family.current.runner
        clock.seconds()
        _time_parts(runner.rank_program, clock)
        lead = Lead(device) if device.type == "cuda" else None
        runs = []
        for _ in range(RUNS):
            if lead is not None:
                lead.run(AHEAD)
            step()
            runs.append(clock.seconds())
        program: Program = runner.program
        del model, step, runner, family
    return {name: median(run[name] for run in runs) for name in runs[0]}, most, program


def _time_parts(rank: RankProgram, clock: _Clock) -> None:
    rank.parts = {
        key: [_TimedItem(item, _name(item.instruction), clock) for item in items]  # type: ignore[misc]
        for key, items in rank.parts.items()
    }
