"""torchtitan's TOML, and the flags of its releases since it has Python configs.

Source: torchtitan, torchtitan/config.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from autoshard.advise.formats.settings import Settings
from autoshard.advise.formats.values import degree, flags, flat, integer, on, refuse
from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError
from autoshard.validate.rows import Recomputed

#: schedule here -> there
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
_SCHEDULE_OF = {name.lower(): ours for ours, name in _SCHEDULES.items()}
_MODES: Mapping[str, Recomputed] = {"none": "none", "full": "full", "selective": "ops"}
_NOT_BUILT = ("context_parallel_degree", "expert_parallel_degree")


def write(choice: ToolConfig, batch: int, seq: int) -> str:
    """A TOML file; as comments, the flags that releases with Python configs have."""
    tables = _tables(choice, batch, seq)
    lines: list[str] = []
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    flags = [
        f"#   --{name}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for name, table in tables.items()
        for key, value in table.items()
        if name in ("parallelism", "compile") and key != "pipeline_parallel_microbatch_size"
    ]
    flags += [
        f"#   --training.num_tokens_per_microbatch_per_dp_rank={choice.micro * seq}",
        f"#   --training.num_tokens_per_train_step={batch * seq}",
        f"#   --training.max_context_length={seq}",
    ]
    if choice.pipeline > 1:
        flags.append(f"#   --parallelism.num_pp_microbatches={choice.microbatches(batch)}")
    return "\n".join((*lines[1:], "", "# as flags, where configs are Python:", *flags, ""))


def _tables(choice: ToolConfig, batch: int, seq: int) -> dict[str, dict[str, Any]]:
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": choice.replicas,
        "data_parallel_shard_degree": choice.shards,
        "fsdp_reshard_after_forward": "always" if choice.zero == 3 else "never",
        "tensor_parallel_degree": choice.tensor,
        "pipeline_parallel_degree": choice.pipeline,
    }
    local = choice.micro
    if choice.pipeline > 1:
        local = batch // choice.data
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES[choice.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = choice.micro
    mode = {"none": "none", "full": "full", "ops": "selective"}[choice.recompute]
    checkpoint = {"mode": mode} | ({"selective_ac_option": "op"} if mode == "selective" else {})
    return {
        "training": {"local_batch_size": local, "global_batch_size": batch, "seq_len": seq},
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
        "compile": {
            "enable": "compile" not in choice.off,
            "enable_async_tensor_parallel": "async-tp" not in choice.off,
        },
    }


def recognised(text: str) -> bool:
    return "tensor_parallel_degree" in text or "data_parallel_shard_degree" in text


def read(text: str) -> Settings:
    """Of a TOML file, or of a script with flags."""
    values = _values(text)
    p = {key.removeprefix("parallelism."): value for key, value in values.items()}
    refuse(p, *_NOT_BUILT)
    pipeline, replicas = degree(p, "pipeline_parallel_degree"), degree(p, "data_parallel_replicate_degree")
    schedule = str(p.get("pipeline_parallel_schedule", "1F1B"))
    if pipeline > 1 and schedule.lower() not in _SCHEDULE_OF:
        raise UsageError(
            f"pipeline_parallel_schedule is {schedule!r}", hint=f"known: {', '.join(_SCHEDULES.values())}"
        )
    ours = _SCHEDULE_OF.get(schedule.lower(), "1f1b")
    shards = integer(p, "data_parallel_shard_degree", -1) or -1
    policy = str(p.get("fsdp_reshard_after_forward", "default"))
    keeps = policy == "never" or (policy == "default" and pipeline > 1)
    mode = str(values.get("activation_checkpoint.mode", "selective"))
    option = str(values.get("activation_checkpoint.selective_ac_option", "op"))
    if mode not in _MODES:
        raise UsageError(f"activation_checkpoint.mode is {mode!r}", hint="none, selective or full")
    off: tuple[str, ...] = () if on(values, "compile.enable") else ("compile",)
    off += (
        ()
        if on(values, "compile.enable_async_tensor_parallel") or on(p, "enable_async_tensor_parallel")
        else ("async-tp",)
    )
    local = degree(values, "training.local_batch_size")
    batch = integer(values, "training.global_batch_size", -1) or -1
    return Settings(
        tensor=degree(p, "tensor_parallel_degree"),
        pipeline=pipeline,
        chunks=1 if ours == "1f1b" else 2,
        layers_per_stage=integer(p, "pipeline_parallel_layers_per_stage"),
        schedule=ours,
        shards=shards,
        replicas=replicas,
        zero=0 if shards == 1 else 2 if keeps else 3,
        micro=degree(p, "pipeline_parallel_microbatch_size") if pipeline > 1 else local,
        recompute=_MODES[mode],
        off=off,
        batch=None if batch < 1 else batch,
        seq=integer(values, "training.seq_len"),
        ignored=(f"selective_ac_option {option!r}: simulated as 'op'",)
        if mode == "selective" and option != "op"
        else (),
    )


def _values(text: str) -> dict[str, Any]:
    if "[parallelism]" in text:
        try:
            return flat(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UsageError("the config is no TOML", why=str(error)) from None
    return flags(text)
