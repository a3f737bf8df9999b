"""Measured runs as people write them: a JSON list of objects, checked key by key."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from autoshard.errors import UsageError
from autoshard.validate.flop import step_flop

Recomputed = Literal["none", "attention", "selective", "ops", "full"]

_TEXT: tuple[type, ...] = (str,)
_WHOLE: tuple[type, ...] = (int,)
_NUMBER: tuple[type, ...] = (int, float)
#: key -> (accepted types, in words); keys that are not here are not looked at
_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        (
            *("id", "kind", "study", "framework", "gpu", "network", "model", "arch_notes", "schedule"),
            *("recompute", "precision", "tflops_kind", "mem_kind"),
        ),
        (_TEXT, "a text"),
    ),
    **dict.fromkeys(
        (
            *("year", "n_gpus", "gpus_per_node", "nvlink_domain", "layers", "hidden", "heads", "kv_heads"),
            *("ffn", "vocab", "seq", "experts", "topk", "moe_ffn", "t", "p", "d", "v", "cp", "ep", "zero"),
            *("fsdp_shard", "mbs", "gbs", "n_microbatches"),
        ),
        (_WHOLE, "a whole number"),
    ),
    **dict.fromkeys(
        (
            *("gpu_mem_gb", "peak_tflops", "intra_bw_GBps_per_gpu", "inter_bw_GBps_per_node", "params_b"),
            *("step_time_s", "step_time_s_derived", "tflops_per_gpu", "tokens_per_s_per_gpu"),
            *("samples_per_s_per_gpu", "mem_gib"),
        ),
        (_NUMBER, "a number"),
    ),
    **dict.fromkeys(("sp", "oom", "config_complete"), ((bool,), "true or false")),
    "missing": ((list,), "a list"),
}
_DTYPES: Mapping[str, Literal["bf16", "f16", "f32"]] = MappingProxyType(
    {
        **dict.fromkeys(("bf16", "bfloat16", "fp8", "float8"), "bf16"),
        **dict.fromkeys(("fp16", "float16"), "f16"),
        **dict.fromkeys(("tf32", "fp32", "float32"), "f32"),
    }
)
_FLOAT = re.compile("|".join(_DTYPES))
#: figures that 0 makes sense for
_MAY_BE_ZERO = ("zero", "year", "experts", "topk", "moe_ffn")
_NEEDED = ("gpu", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gbs")


@dataclass(frozen=True)
class Run:
    """One measured training run.

    gpu_memory: bytes of a device; peak_flops: FLOP/s of one, in the type its products are done in; intra:
    bytes/s in one direction that a device has inside its node; inter: bytes/s in one direction of all network
    cards of a node; None where the row does not say. params: of the model, None where unknown. tensor,
    pipeline, data: degrees; chunks: pipeline stages per rank. sharded: data ranks that share one copy of what
    ZeRO divides. micro: sequences per microbatch and data rank; batch: per step. seconds: measured, of a
    step, None where only memory or its lack was. gib: measured; memory_kind: what that counts.
    """

    id: str
    study: str
    framework: str
    year: int
    gpu: str
    gpu_memory: float | None
    peak_flops: float | None
    gpus: int
    node: int | None
    nvlink: int | None
    intra: float | None
    inter: float | None
    network: str
    model: str
    notes: str
    params: float | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    tensor: int
    pipeline: int
    data: int
    chunks: int
    sequence_parallel: bool
    schedule: str
    zero: int
    sharded: int
    micro: int
    batch: int
    recompute: Recomputed
    precision: str
    seconds: float | None
    gib: float | None
    memory_kind: str
    oom: bool

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        return self.batch // (self.micro * self.data)

    @property
    def dtype(self) -> Literal["bf16", "f16", "f32"]:
        """Type of parameters while they compute: the first that its precision names, bf16 if none or fp8."""
        found = _FLOAT.search(self.precision.lower())
        return _DTYPES[found.group()] if found else "bf16"

    @property
    def fp8(self) -> bool:
        """Whether products are done in 8-bit floats."""
        return "fp8" in self.precision or "float8" in self.precision


@dataclass(frozen=True)
class Unsupported:
    """A row that is not compared, and why not, in the words of who wrote it."""

    id: str
    study: str
    reason: str


def read_rows(path: Path, studies: Sequence[str] = ()) -> list[Run | Unsupported]:
    """The rows of a file, of these studies if any are named, in its order.

    Raises UsageError if the file cannot be read, a row has a value of the wrong type, or a study has no row.
    """
    raw = load_rows(path)
    known = sorted({str(r.get("study")) for r in raw})
    for name in studies:
        if name not in known:
            raise UsageError(f"no rows of study {name!r}", where=str(path), hint=f"known: {', '.join(known)}")
    rows = [(number, r) for number, r in enumerate(raw, 1) if not studies or r.get("study") in studies]
    for number, row in rows:
        _check(row, number)
    return [_run(row, number) for number, row in rows]


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of measurements, unchecked. Raises UsageError if it is not a list of them."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("cannot read the measurements", where=str(path), why=str(error)) from error
    if not isinstance(raw, list) or not all(isinstance(r, dict) for r in raw):
        raise UsageError("the measurements are not a list of objects", where=str(path))
    return raw


def _check(row: Mapping[str, Any], number: int) -> None:
    where = f"row {row.get('id') or f'number {number}'}"
    for key, (types, words) in _KEYS.items():
        value = row.get(key)
        if value is None:
            continue
        wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if wrong:
            raise UsageError(f"{key} is {value!r}", where=where, why=f"it must be {words}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = 0 if key in _MAY_BE_ZERO else None
            if not isfinite(value) or (value <= 0 if least is None else value < least):
                raise UsageError(f"{key} is {value}", where=where, why="it must be a finite number above 0")


def _run(row: Mapping[str, Any], number: int) -> Run | Unsupported:
    name, study = str(row.get("id") or f"row {number}"), str(row.get("study") or "")
    reason = _reason(row)
    if reason:
        return Unsupported(name, study, reason)
    sizes = _Degrees(row)
    policy = _recompute(row)
    assert policy is not None
    run = Run(
        id=name,
        study=study,
        framework=str(row.get("framework") or ""),
        year=row.get("year") or 0,
        gpu=row["gpu"],
        gpu_memory=_times(row.get("gpu_mem_gb"), 2**30),
        peak_flops=_times(row.get("peak_tflops"), 1e12),
        gpus=sizes.gpus,
        node=row.get("gpus_per_node"),
        nvlink=row.get("nvlink_domain"),
        intra=_times(row.get("intra_bw_GBps_per_gpu"), 1e9),
        inter=_times(row.get("inter_bw_GBps_per_node"), 1e9),
        network=str(row.get("network") or ""),
        model=str(row.get("model") or ""),
        notes=str(row.get("arch_notes") or ""),
        params=_times(row.get("params_b"), 1e9),
        layers=row["layers"],
        hidden=row["hidden"],
        heads=row["heads"],
        kv_heads=row.get("kv_heads") or row["heads"],
        ffn=row["ffn"],
        vocab=row["vocab"],
        seq=row["seq"],
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        data=sizes.data,
        chunks=row.get("v") or 1,
        sequence_parallel=bool(row.get("sp")) and sizes.tensor > 1,
        schedule=str(row.get("schedule") or "none"),
        zero=row.get("zero") or 0,
        sharded=row.get("fsdp_shard") or sizes.data,
        micro=sizes.micro,
        batch=row["gbs"],
        recompute=policy,
        precision=str(row.get("precision") or ""),
        seconds=_seconds(row, sizes.gpus, policy),
        gib=row.get("mem_gib"),
        memory_kind=str(row.get("mem_kind") or ""),
        oom=bool(row.get("oom")),
    )
    if run.seconds is None and run.gib is None and not run.oom:
        return Unsupported(name, study, "nothing was measured: no step time, throughput, memory or oom")
    return run


class _Degrees:
    """Degrees of parallelism, those that follow from the others filled in; 0 for what does not follow."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.tensor, self.pipeline = row.get("t") or 1, row.get("p") or 1
        inner = self.tensor * self.pipeline * (row.get("cp") or 1)
        self.data = row.get("d") or (row.get("n_gpus") or 0) // inner
        self.gpus = row.get("n_gpus") or inner * self.data
        pieces = self.data * (row.get("n_microbatches") or 0)
        self.micro = row.get("mbs") or ((row.get("gbs") or 0) // pieces if pieces else 0)


def _reason(row: Mapping[str, Any]) -> str:
    """Why a row cannot be rebuilt; "" if it can."""
    kind = row.get("kind") or "run"
    if kind != "run":
        return f"its kind is {kind}, and only runs have a step"
    absent = [key for key in _NEEDED if row.get(key) is None]
    sizes = _Degrees(row)
    if not sizes.data:
        absent.append("d or n_gpus")
    if not sizes.micro:
        absent.append("mbs or n_microbatches")
    if absent:
        return f"its configuration is not complete: no {', '.join(absent)}"
    if row.get("config_complete") is False:
        missing = ", ".join(map(str, row.get("missing") or ())) or "it does not say what"
        return f"its configuration is not complete: {missing}"
    cp = row.get("cp") or 1
    if cp > 1:
        return f"context parallelism (cp={cp}) is not built"
    if (row.get("ep") or 1) > 1 or row.get("experts"):
        return "a mixture of experts: its attention and shared experts are not told by the keys of a row"
    t, p, d = sizes.tensor, sizes.pipeline, sizes.data
    if t * p * d != sizes.gpus:
        return f"t={t} x p={p} x d={d} is not n_gpus={sizes.gpus}"
    if row["gbs"] % (sizes.micro * d):
        return f"gbs={row['gbs']} is not a multiple of mbs={sizes.micro} x d={d}"
    if row["hidden"] % row["heads"] or row["heads"] % (row.get("kv_heads") or 1):
        return "its heads do not divide hidden, or its kv_heads its heads"
    if row["heads"] % t or (row.get("kv_heads") or t) % t:
        return f"its heads cannot be divided over t={t}"
    shard = row.get("fsdp_shard") or d
    if d % shard:
        return f"fsdp_shard={shard} does not divide d={d}"
    if (row.get("zero") or 0) > 3:
        return f"there is no ZeRO stage {row['zero']}"
    if p * (row.get("v") or 1) > row["layers"] + 2:
        return f"it has more pipeline stages (p={p}, v={row.get('v') or 1}) than layers"
    if _recompute(row) is None:
        return f"recomputation {row.get('recompute')!r} is not known"
    return ""


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _recompute(row: Mapping[str, Any]) -> Recomputed | None:
    """None for a word that is not known. Core attention: Korthikanti et al., MLSys 2023, section 5."""
    text = str(row.get("recompute") or "none").lower()
    if text == "none":
        return "none"
    if text.startswith("full"):
        return "full"
    if "attention" in text or text == "selective":
        return "attention"
    if "op-level" in text:
        return "ops"
    return "selective" if text.startswith("selective") else None


def _seconds(row: Mapping[str, Any], gpus: int, policy: Recomputed) -> float | None:
    """Measured seconds of a step; from throughput where nothing else is given."""
    told = row.get("step_time_s") or row.get("step_time_s_derived")
    if told:
        return float(told)
    if row.get("tokens_per_s_per_gpu"):
        return float(row["gbs"] * row["seq"] / (row["tokens_per_s_per_gpu"] * gpus))
    if row.get("samples_per_s_per_gpu"):
        return float(row["gbs"] / (row["samples_per_s_per_gpu"] * gpus))
    if row.get("tflops_per_gpu"):
        again = policy == "full" and str(row.get("tflops_kind") or "").startswith("hardware")
        return step_flop(row, again=again) / (row["tflops_per_gpu"] * 1e12 * gpus)
    return None
