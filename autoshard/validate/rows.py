"""Measured runs as people write them: a JSON list of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from autoshard.errors import UsageError
from autoshard.ir.decode import Count, NotNegative, Number, Positive, decoded
from autoshard.validate.flop import step_flop

Recomputed = Literal["none", "attention", "selective", "ops", "full"]

#: field of a run -> key of a row, where it is another word; other keys of rows are not looked at
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        **{
            "gpu_memory": "gpu_mem_gb",
            "peak_flops": "peak_tflops",
            "gpus": "n_gpus",
            "node": "gpus_per_node",
        },
        **{"nvlink": "nvlink_domain", "intra": "intra_bw_GBps_per_gpu", "inter": "inter_bw_GBps_per_node"},
        **{"notes": "arch_notes", "params": "params_b", "tensor": "t", "pipeline": "p", "data": "d"},
        **{"chunks": "v", "context": "cp", "expert_ranks": "ep", "sequence_parallel": "sp", "micro": "mbs"},
        **{"sharded": "fsdp_shard", "batch": "gbs", "microbatches_told": "n_microbatches", "gib": "mem_gib"},
        **{"recomputed": "recompute", "seconds": "step_time_s", "memory_kind": "mem_kind"},
        **{"remarks": "notes", "expert_ffn": "moe_ffn", "shared_ffn": "shared_expert_ffn"},
        **{"dense_layers": "first_dense_layers", "latent": "mla", "expert_tensor": "etp"},
    }
)
#: what rows count them in
_UNITS = MappingProxyType(
    {"gpu_memory": 2**30, "peak_flops": 1e12, "intra": 1e9, "inter": 1e9, "params": 1e9}
)
_NEEDED = ("gpu", "layers", "hidden", "heads", "vocab", "seq", "batch")
_DTYPES: Mapping[str, Literal["bf16", "f16", "f32"]] = MappingProxyType(
    {
        **dict.fromkeys(("bf16", "bfloat16", "fp8", "float8"), "bf16"),
        **dict.fromkeys(("fp16", "float16"), "f16"),
        **dict.fromkeys(("tf32", "fp32", "float32"), "f32"),
    }
)
_FLOAT = re.compile("|".join(_DTYPES))


class LatentSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of latent attention, as configurations name them; 0 for queries that are not compressed."""

    q_lora_rank: Number = 0
    kv_lora_rank: Count = 0
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Count = 0
    v_head_dim: Count = 0


class StatedOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """What runs beside computing; None where a row does not say."""

    tp: bool | None = None
    grad_reduce: bool | None = None
    param_gather: bool | None = None
    ep_a2a: bool = False


class StatedOptimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Types of what there is per parameter, in words; "" where a row does not say."""

    moments: Literal["", "float32", "bfloat16", "float16"] = ""
    main_params: str = ""
    grads: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True, rename=_KEYS):
    """One measured training run.

    gpu_memory: bytes of a device; peak_flops: FLOP/s of one, in the type its products are done in; intra:
    bytes/s in one direction that a device has inside its node; inter: bytes/s in one direction of all network
    cards of a node; None where the row does not say. params: of the model, None where unknown. tensor,
    pipeline, data: degrees; chunks: pipeline stages per rank. sharded: data ranks that share one copy of what
    ZeRO divides. micro: sequences per microbatch and data rank; batch: per step. experts: 0 for a dense
    model; topk: of a token; expert_ffn: width of one; shared_ffn: of those that all tokens take;
    dense_layers: first layers without experts; expert_ranks: data ranks that divide them; dispatcher: of
    their tokens. cuda_graphs: what the device issues without its host. offload: what lies in host memory.
    tiling: what is computed for some tokens at a time. routing: of tokens to experts. context: ranks that
    share a sequence. seconds: measured, of a step, None where only memory or its lack was. gib: measured;
    memory_kind: what that counts. 0 and "" stand for what a row does not say.
    """

    id: str = ""
    study: str = ""
    framework: str = ""
    year: Number = 0
    gpu: str = ""
    gpu_memory: Positive | None = None
    peak_flops: Positive | None = None
    gpus: Count = 0
    node: Count | None = None
    nvlink: Count | None = None
    intra: Positive | None = None
    inter: Positive | None = None
    network: str = ""
    model: str = ""
    notes: str = ""
    remarks: str = ""
    params: Positive | None = None
    layers: Count = 0
    hidden: Count = 0
    heads: Count = 0
    kv_heads: Count = 0
    ffn: Count = 0
    vocab: Count = 0
    seq: Count = 0
    head_dim: Count = 0
    experts: Number = 0
    topk: Number = 0
    expert_ffn: Count = 0
    shared_ffn: Number = 0
    dense_layers: Number = 0
    latent: LatentSizes | None = None
    expert_ranks: Count = 1
    dispatcher: str = ""
    cuda_graphs: str = ""
    overlap: StatedOverlap = StatedOverlap()
    optimizer: StatedOptimizer = StatedOptimizer()
    offload: dict[str, Any] | None = None
    tiling: dict[str, Any] | str | None = None
    routing: str = ""
    tensor: Count = 1
    context: Count = 1
    pipeline: Count = 1
    data: Count = 0
    chunks: Count = 1
    sequence_parallel: bool = False
    schedule: str = "none"
    zero: Number = 0
    sharded: Count = 0
    micro: Count = 0
    batch: Count = 0
    recomputed: str = "none"
    precision: str = ""
    seconds: Positive | None = None
    gib: Positive | None = None
    memory_kind: str = ""
    oom: bool = False

    @property
    def recompute(self) -> Recomputed:
        """What backward recomputes, "none" for words that are not known."""
        return _recompute(self.recomputed) or "none"

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        return self.batch // (self.micro * self.data)

    @property
    def dtype(self) -> Literal["bf16", "f16", "f32"]:
        """Type of parameters while they compute: the first that its precision names, bf16 if none or fp8."""
        match = _FLOAT.search(self.precision.lower())
        return _DTYPES[match.group()] if match else "bf16"

    @property
    def fp8(self) -> bool:
        """Whether products are done in 8-bit floats."""
        return "fp8" in self.precision.lower() or "float8" in self.precision.lower()


class _Row(Run, frozen=True, kw_only=True, rename=_KEYS):
    """A run as a file has it, in GiB, TFLOP/s and GB/s, with what else it says."""

    kind: str = "run"
    config_complete: bool = True
    missing: tuple[Any, ...] = ()
    inferred: tuple[Any, ...] = ()
    microbatches_told: NotNegative = 0
    expert_tensor: Count = 1
    hybrid: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    mtp_layers: Number = 0
    step_time_s_from_tflops: Positive | None = None
    optimizer_sharding: str = ""
    step_time_s_derived: Positive | None = None
    tokens_per_s_per_gpu: Positive | None = None
    samples_per_s_per_gpu: Positive | None = None
    tflops_per_gpu: Positive | None = None
    tflops_kind: str = ""


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
    names = sorted({str(r.get("study")) for r in raw})
    for name in studies:
        if name not in names:
            raise UsageError(f"no rows of study {name!r}", where=str(path), hint=f"known: {', '.join(names)}")
    rows = [(number, r) for number, r in enumerate(raw, 1) if not studies or r.get("study") in studies]
    return [_run(row, number) for number, row in rows]


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of measurements, unchecked. Raises UsageError if it is not a list of them."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("cannot read the measurements", where=str(path), why=str(error)) from error
    if not isinstance(raw, list) or not all(isinstance(r, dict) for r in raw):
        raise UsageError("the measurements are not a list of objects", where=str(path))
    return raw


def _run(raw: Mapping[str, Any], number: int) -> Run | Unsupported:
    name = f"row {raw.get('id') or f'number {number}'}"
    told = decoded(_stated(raw), _Row, name)
    row = _filled(replace(told, id=told.id or f"row {number}"))
    reason = _reason(row)
    if not reason:
        row = replace(row, seconds=_seconds(row))
        if row.seconds is None and row.gib is None and not row.oom:
            reason = "nothing was measured: no step time, throughput, memory or oom"
    return Unsupported(row.id, row.study, reason) if reason else row


def _stated(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say something."""
    return {
        key: _stated(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if value not in (None, "")
    }


def _filled(row: _Row) -> _Row:
    """With the degrees that follow from others, 0 for what does not follow, and in bytes and FLOP."""
    inner = row.tensor * row.pipeline * row.context
    data = row.data or row.gpus // inner
    pieces = data * row.microbatches_told
    told = {name: getattr(row, name) for name in _UNITS}
    return replace(
        row,
        data=data,
        gpus=row.gpus or inner * data,
        micro=row.micro or (int(row.batch // pieces) if pieces else 0),
        kv_heads=row.kv_heads or row.heads,
        sharded=row.sharded or data * row.context,
        # gathered once a step, as by stage 2
        zero=2 if row.zero == 3 and "reshard_after_forward false" in row.optimizer_sharding else row.zero,
        sequence_parallel=row.sequence_parallel and row.tensor > 1,
        **{name: value * _UNITS[name] for name, value in told.items() if value is not None},
    )


def _reason(row: _Row) -> str:
    """Why a row cannot be rebuilt; "" if it can."""
    if row.kind != "run":
        return f"its kind is {row.kind}, and only runs have a step"
    some_dense = not row.experts or row.dense_layers
    needed = (*_NEEDED, *(("ffn",) if some_dense else ()), *(("topk", "expert_ffn") if row.experts else ()))
    absent = [_KEYS.get(name, name) for name in needed if not getattr(row, name)]
    if not row.data:
        absent.append("d or n_gpus")
    if not row.micro:
        absent.append("mbs or n_microbatches")
    if absent:
        return f"its configuration is not complete: no {', '.join(absent)}"
    if not row.config_complete:
        missing = ", ".join(map(str, row.missing)) or "it does not say what"
        return f"its configuration is not complete: {missing}"
    if reason := _not_built(row):
        return reason
    t, p, d, cp = row.tensor, row.pipeline, row.data, row.context
    if t * p * d * cp != row.gpus:
        return f"t={t} x p={p} x d={d}{f' x cp={cp}' if cp > 1 else ''} is not n_gpus={row.gpus}"
    if row.batch % (row.micro * d):
        return f"gbs={row.batch} is not a multiple of mbs={row.micro} x d={d}"
    if (row.hidden % row.heads and not (row.head_dim or row.latent)) or row.heads % row.kv_heads:
        return "its heads do not divide hidden, or its kv_heads its heads"
    if row.heads % t or row.kv_heads % t:
        return f"its heads cannot be divided over t={t}"
    if d * cp % row.sharded:
        return f"fsdp_shard={row.sharded} does not divide d={d}{f' x cp={cp}' if cp > 1 else ''}"
    if row.zero > 3:
        return f"there is no ZeRO stage {row.zero}"
    if p * row.chunks > row.layers + 2:
        return f"it has more pipeline stages (p={p}, v={row.chunks}) than layers"
    if _recompute(row.recomputed) is None:
        return f"recomputation {row.recomputed!r} is not known"
    return ""


def _not_built(row: _Row) -> str:
    """What of a model or of its training no program is rebuilt of; "" for nothing."""
    if row.hybrid is not None:
        return "a hybrid of attention and state spaces is not rebuilt"
    if row.latent is None and re.search(r"\bmla\b", f"{row.notes} {row.inferred}".lower()):
        return "its attention is latent, and no key mla says its widths"
    if row.lora is not None:
        return "it trains adapters: runs that train all parameters are rebuilt"
    if row.offload is not None and "optimizer" in row.offload:
        return "its optimizer runs on the host"
    if row.mtp_layers:
        return f"it predicts further tokens (mtp_layers={row.mtp_layers}), which is not rebuilt"
    if "fp4" in row.precision.lower():
        return f"products in {row.precision}: 16 and 8 bits have a price"
    if row.expert_tensor not in (1, row.tensor):
        return f"experts are divided over etp={row.expert_tensor} ranks, other layers over t={row.tensor}"
    if row.expert_ranks > 1 and row.data % row.expert_ranks:
        return (
            f"experts are divided over tensor ranks too: ep={row.expert_ranks} does not divide d={row.data}"
        )
    if row.experts and row.experts % row.expert_ranks:
        return f"ep={row.expert_ranks} does not divide its {row.experts} experts"
    return ""


def _recompute(words: str) -> Recomputed | None:
    """None for a word that is not known. Core attention: Korthikanti et al., MLSys 2023, section 5."""
    text = words.lower()
    if text in ("", "none"):
        return "none"
    if text.startswith("full"):
        return "full"
    if "attention" in text or text == "selective":
        return "attention"
    if "op-level" in text:
        return "ops"
    return "selective" if text.startswith("selective") else None


def _seconds(row: _Row) -> float | None:
    """Measured seconds of a step; from throughput where nothing else is given."""
    if told := row.seconds or row.step_time_s_from_tflops or row.step_time_s_derived:
        return told
    if row.tokens_per_s_per_gpu:
        return row.batch * row.seq / (row.tokens_per_s_per_gpu * row.gpus)
    if row.samples_per_s_per_gpu:
        return row.batch / (row.samples_per_s_per_gpu * row.gpus)
    if row.tflops_per_gpu and not row.experts:
        recomputes = row.recompute == "full" and row.tflops_kind.startswith("hardware")
        return step_flop(row, recompute=recomputes) / (row.tflops_per_gpu * 1e12 * row.gpus)
    return None
