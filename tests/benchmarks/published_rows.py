"""Published measurements of parallel training: which can be compared with a plan, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import UsageError
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.validate.machine import catalog_name
from autoshard.validate.models import Architecture
from autoshard.validate.rows import load_rows

Policy = Literal["none", "selective", "full"]

#: schedules whose order, memory and waiting are those of one that is built
_SCHEDULES = ("1F1B", "1F1B-I", "interleaved-1F1B")
_NUMBERS = ("layers", "hidden", "heads", "ffn", "vocab", "seq", "n_gpus", "t", "d", "mbs", "gbs")


@dataclass(frozen=True)
class Published:
    """One run of a plan that somebody chose by hand.

    memory: bytes of a device. mesh: of one pipeline rank, with ``fsdp`` axes where its ZeRO stage shards
    anything. batch: sequences per step; micro: per microbatch over the whole mesh. seconds: measured, of a
    step. pipe: the pipeline, without what its sends take.
    """

    id: str
    study: str
    model: Architecture
    seq: int
    cluster: str
    memory: int
    devices: int
    mesh: str
    batch: int
    micro: int
    recompute: Policy
    seconds: float
    pipe: Pipe = field(default_factory=Pipe)

    @property
    def name(self) -> str:
        """Its mesh with the pipeline, ``pp=8 interleaved x 2,tp=8``"""
        return self.mesh if self.pipe.ranks == 1 else f"{self.pipe},{self.mesh}"


@dataclass(frozen=True)
class Skipped:
    """A row that is not compared."""

    id: str
    study: str
    why: str


def read_rows(path: Path, study: str = "") -> tuple[list[Published], list[Skipped]]:
    """The runs of a file of measurements (a JSON list of objects), of one study if it is named.

    Raises UsageError if the file cannot be read as such, or has no run of the study.
    """
    raw = load_rows(path)
    runs = [r for r in raw if r.get("kind") == "run" and (not study or r.get("study") == study)]
    if not runs:
        names = sorted({str(r.get("study")) for r in raw if r.get("kind") == "run"})
        raise UsageError(f"no runs of study {study!r}", where=str(path), hint=f"known: {', '.join(names)}")
    found: list[Published] = []
    skipped: list[Skipped] = []
    for row in runs:
        why = reason_to_skip(row)
        if why:
            skipped.append(Skipped(str(row["id"]), str(row["study"]), why))
        else:
            found.append(_published(row))
    return found, skipped


def reason_to_skip(row: Mapping[str, Any]) -> str:
    """Why a run is not compared; "" if it is."""
    if not row.get("config_complete"):
        return "its configuration is not complete"
    if (row.get("cp") or 1) > 1:
        return "its context parallelism is not compared"
    if (row.get("ep") or 1) > 1 or row.get("experts"):
        return "experts of other sizes than a known config"
    if "fp8" in str(row.get("precision")):
        return "its fp8 products are not compared"
    if row.get("oom"):
        return "it ran out of memory"
    absent = [k for k in _NUMBERS if not row.get(k)]
    if absent:
        return f"no {', '.join(absent)}"
    if not _seconds(row):
        return "no step time"
    if _cluster(row) is None:
        return f"no cluster of the catalog has a {row.get('gpu')}"
    stages = row.get("p") or 1
    if row["t"] * row["d"] * stages != row["n_gpus"]:
        return "t x d x p is not its number of GPUs"
    if row["gbs"] % (row["mbs"] * row["d"]):
        return "its microbatches do not divide its batch"
    if row["d"] % (row.get("fsdp_shard") or row["d"]):
        return "its sharding group does not divide its data ranks"
    if stages > 1:
        why = _pipe_to_skip(row)
        if why:
            return why
    if _recompute(row) is None:
        return f"recomputation {row.get('recompute')!r} is not known"
    return ""


def _pipe_to_skip(row: Mapping[str, Any]) -> str:
    """Why the pipeline of a run is not compared; "" if it is."""
    schedule = row.get("schedule") or "1F1B"
    if schedule not in _SCHEDULES:
        return f"its pipeline schedule {schedule} is not compared"
    if schedule != "1F1B" and (row.get("v") or 1) == 1:
        return "how many stages a rank has is not known"
    if row["p"] * (row.get("v") or 1) > row["layers"]:
        return "it has more pipeline stages than layers"
    return ""


def _published(row: Mapping[str, Any]) -> Published:
    policy, cluster = _recompute(row), _cluster(row)
    assert policy is not None and cluster is not None
    return Published(
        str(row["id"]),
        str(row["study"]),
        _architecture(row),
        row["seq"],
        cluster,
        int(row["gpu_mem_gb"] * 2**30) if row.get("gpu_mem_gb") else 0,
        row["n_gpus"],
        _mesh(row),
        row["gbs"],
        row["mbs"] * row["d"],
        policy,
        _seconds(row),
        _pipe(row),
    )


def _architecture(row: Mapping[str, Any]) -> Architecture:
    """Llamas by the name of the model; everything else that is published here is a GPT."""
    kind: Literal["gpt2", "llama"] = "llama" if "llama" in str(row["model"]).lower() else "gpt2"
    heads = row["heads"]
    kv_heads = row.get("kv_heads") or heads
    return Architecture(
        kind, row["layers"], row["hidden"], heads, kv_heads, row["ffn"], row["vocab"], row["seq"]
    )


def _pipe(row: Mapping[str, Any]) -> Pipe:
    """Interleaved where a rank has several stages, as Megatron-LM runs them, else 1F1B."""
    ranks, chunks = row.get("p") or 1, row.get("v") or 1
    return Pipe(ranks, "interleaved" if chunks > 1 else "1f1b", chunks) if ranks > 1 else Pipe()


def _mesh(row: Mapping[str, Any]) -> str:
    """Data ranks outside, tensor ranks inside, as Megatron-LM and torchtitan lay them."""
    shard = (row.get("fsdp_shard") or row["d"]) if row.get("zero") else 1
    axes = (("dp", row["d"] // shard), ("fsdp", shard), ("tp", row["t"]))
    return ",".join(f"{name}={size}" for name, size in axes if size > 1) or "dp=1"


def _recompute(row: Mapping[str, Any]) -> Policy | None:
    """Core attention alone is nothing here: attention is one op, which keeps no scores.

    (Korthikanti et al., MLSys 2023, section 5, recompute what that op never stores.)
    """
    text = str(row.get("recompute") or "none").lower()
    if "core attention" in text or text == "none":
        return "none"
    if text.startswith("selective"):
        return "selective"
    return "full" if text.startswith("full") else None


def _seconds(row: Mapping[str, Any]) -> float:
    return float(row.get("step_time_s") or row.get("step_time_s_derived") or 0.0)


def _cluster(row: Mapping[str, Any]) -> str | None:
    return catalog_name(str(row.get("gpu")))
