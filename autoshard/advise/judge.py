"""What a configuration is predicted to take and to hold."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.advise.tool_config import ToolConfig
from autoshard.advise.tools import Tool
from autoshard.advise.work import Work
from autoshard.errors import UsageError
from autoshard.simulate.step import StepEstimate, estimate_step
from autoshard.validate.counted import fits
from autoshard.validate.rebuild import rebuilt_run
from autoshard.validate.rows import Run


@dataclass(frozen=True)
class Judged:
    """A configuration, simulated. notes: what is not as the tool has it."""

    choice: ToolConfig
    step: StepEstimate
    fits: bool
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def peak(self) -> float:
        """Bytes of tensors on the fullest rank."""
        return self.step.fullest.peak


class Judge:
    """Simulates configurations of a tool for some work, each once."""

    def __init__(self, tool: Tool, work: Work) -> None:
        self.tool, self.work = tool, work
        self._judged: dict[ToolConfig, Judged | str] = {}

    def of(self, choice: ToolConfig) -> Judged | str:
        """What is predicted; the reason where the configuration cannot run."""
        if choice not in self._judged:
            try:
                self._judged[choice] = self._simulated(choice)
            except UsageError as error:
                self._judged[choice] = f"{error.what}{f': {error.why}' if error.why else ''}"
        return self._judged[choice]

    def _simulated(self, choice: ToolConfig) -> Judged:
        framework = self.tool.framework_of(choice)
        run = run_of(choice, self.tool, self.work)
        rebuilt = rebuilt_run(run, self.work.cluster, framework, self.work.captures)
        step = estimate_step(rebuilt.program, self.work.cluster, behaviour=rebuilt.behaviour)
        enough = fits(step.fullest.peak, self.work.memory, axes_of(choice))
        return Judged(choice, step, enough, tuple(dict.fromkeys(rebuilt.notes)))


def axes_of(choice: ToolConfig) -> int:
    """How many axes of its mesh have communicators."""
    return sum(degree > 1 for degree in (choice.tensor, choice.pipeline, choice.data))


def run_of(choice: ToolConfig, tool: Tool, work: Work) -> Run:
    """A configuration as a row of measurements has it."""
    return Run(
        id=str(choice),
        framework=tool.title,
        gpus=work.gpus,
        layers=work.layers,
        hidden=work.hidden,
        seq=work.seq,
        tensor=choice.tensor,
        pipeline=choice.pipeline,
        data=choice.data,
        chunks=choice.chunks,
        schedule=choice.schedule if choice.pipeline > 1 else "none",
        sequence_parallel=tool.sequence and choice.tensor > 1,
        zero=choice.zero,
        sharded=choice.shards,
        micro=choice.micro,
        batch=work.batch,
        recomputed="selective op-level" if choice.recompute == "ops" else choice.recompute,
        precision="bf16",
    )
