"""A configuration of a tool, in the words that all of them have."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.validate.rows import Recomputed


@dataclass(frozen=True)
class ToolConfig:
    """Degrees and flags.

    tensor, pipeline: degrees. chunks: stages per pipeline rank. shards: data ranks that divide one copy of
    what ZeRO divides; replicas: how many such groups. micro: sequences per microbatch and data rank.
    recompute: what backward recomputes. off: switches of the tool that are off.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    shards: int = 1
    replicas: int = 1
    zero: int = 0
    micro: int = 1
    recompute: Recomputed = "none"
    off: tuple[str, ...] = ()

    @property
    def data(self) -> int:
        return self.shards * self.replicas

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    def microbatches(self, batch: int) -> int:
        """Of a step of so many sequences."""
        return batch // (self.micro * self.data)

    def __str__(self) -> str:
        degrees = {
            "tp": self.tensor,
            "pp": self.pipeline,
            "replicas": self.replicas,
            "fsdp" if self.zero == 3 else "dp": self.shards,
        }
        words = [f"{name}={n}" for name, n in degrees.items() if n > 1]
        if self.pipeline > 1:
            words.append(self.schedule if self.chunks == 1 else f"{self.schedule} x {self.chunks}")
        words += [f"zero={self.zero}", f"microbatch={self.micro}"]
        words += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        return " ".join((*words, *(f"no {name}" for name in self.off)))
