"""DeepSpeed's JSON. Source: DeepSpeed, docs, DeepSpeed Configuration JSON."""

from __future__ import annotations

import json
from typing import Any

from autoshard.advise.formats.settings import Settings
from autoshard.advise.formats.values import flat, integer, json_table, on, refuse
from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError


def write(choice: ToolConfig, batch: int, seq: int) -> str:
    """The file; activation checkpointing is the model's, and said in a key that DeepSpeed leaves alone."""
    config: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": choice.micro,
        "gradient_accumulation_steps": choice.microbatches(batch),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": choice.zero, "overlap_comm": "overlap_comm" not in choice.off},
        "gradient_checkpointing": choice.recompute == "full",
    }
    return json.dumps(config, indent=2) + "\n"


def recognised(text: str) -> bool:
    return "zero_optimization" in text or "train_micro_batch_size_per_gpu" in text


def read(text: str) -> Settings:
    """Of a JSON file. Raises UsageError for what is not one."""
    values = flat(json_table(text))
    stage = integer(values, "zero_optimization.stage", 0) or 0
    if not 0 <= stage <= 3:
        raise UsageError(f"zero_optimization.stage is {stage}", hint="0 to 3")
    refuse(values, "tensor_parallel.autotp_size")
    ignored = [
        f"{key}: simulated as on the device"
        for key in ("offload_optimizer", "offload_param")
        if str(values.get(f"zero_optimization.{key}.device", "none")) != "none"
    ]
    hpz = integer(values, "zero_optimization.zero_hpz_partition_size", 1)
    ignored += ["zero_hpz_partition_size: simulated as 1"] if hpz and hpz > 1 else []
    # on unless it is said for stage 3, off for the others
    overlap = on(values, "zero_optimization.overlap_comm", stage == 3)
    return Settings(
        zero=stage,
        micro=integer(values, "train_micro_batch_size_per_gpu"),
        accumulate=integer(values, "gradient_accumulation_steps"),
        batch=integer(values, "train_batch_size"),
        recompute="full" if on(values, "gradient_checkpointing") else "none",
        off=() if overlap else ("overlap_comm",),
        ignored=tuple(ignored),
    )
