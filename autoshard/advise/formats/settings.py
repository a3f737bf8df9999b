"""What a file of a tool says of a configuration, and the configuration that it means on some GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError
from autoshard.validate.rows import Recomputed


@dataclass(frozen=True)
class Settings:
    """None: not said. shards: data ranks that divide a copy, -1 for all that are left. batch: sequences per
    step; accumulate: microbatches of a data rank in a step; seq: tokens per sequence. ignored: what the file
    says, matters, and is not simulated."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    layers_per_stage: int | None = None
    schedule: str = "1f1b"
    shards: int = -1
    replicas: int | None = None
    zero: int = 0
    micro: int | None = None
    accumulate: int | None = None
    recompute: Recomputed = "none"
    off: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    gpus: int | None = None
    ignored: tuple[str, ...] = ()

    def choice(self, gpus: int, batch: int, layers: int) -> ToolConfig:
        """Raises UsageError if its degrees do not make ``gpus`` ranks, or do not divide the batch."""
        inner = self.tensor * self.pipeline
        if gpus % inner:
            raise UsageError(
                f"tensor x pipeline = {self.tensor} x {self.pipeline} does not divide {gpus} GPUs",
                hint="--gpus with the number that the config is run on",
            )
        data = gpus // inner
        replicas, shards = self._groups(data)
        micro = self.micro
        if micro is None:
            if self.accumulate is None:
                raise UsageError(
                    "the config does not say how many sequences a microbatch of a rank has",
                    hint="--micro-batch with the number that the script has",
                )
            micro = batch // (data * self.accumulate) or 1
        if batch % (micro * data):
            raise UsageError(
                f"{batch} sequences per step are no multiple of {data} data ranks x {micro} sequences",
                hint="--global-batch with the number that the config is run with",
            )
        if self.accumulate not in (None, batch // (micro * data)):
            raise UsageError(
                f"{self.accumulate} microbatches of {micro} on {data} data ranks are not {batch} sequences",
                hint="--global-batch with the number that the config is run with",
            )
        chunks = self.chunks
        if self.layers_per_stage:
            chunks = layers // (self.pipeline * self.layers_per_stage)
        schedule = "interleaved" if self.schedule == "1f1b" and chunks > 1 else self.schedule
        return ToolConfig(
            self.tensor,
            self.pipeline,
            max(1, chunks),
            schedule,
            shards,
            replicas,
            self.zero if data > 1 else 0,
            micro,
            self.recompute,
            self.off,
        )

    def _groups(self, data: int) -> tuple[int, int]:
        """(groups that each have a copy, ranks of one)."""
        if self.zero == 0:
            return data, 1
        shards = self.shards if self.shards > 0 else data // (self.replicas or 1)
        replicas = self.replicas or data // max(1, shards)
        if replicas * shards != data:
            raise UsageError(
                f"{replicas} replicas of {shards} shards are not {data} data ranks",
                hint="--gpus with the number that the config is run on",
            )
        return replicas, shards
