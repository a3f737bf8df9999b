"""transformers' DistributedConfig, as JSON of its fields. Source: transformers, distributed."""

from __future__ import annotations

import json
from typing import Any

from autoshard.advise.formats.settings import Settings
from autoshard.advise.formats.values import degree, integer, json_table, on, refuse
from autoshard.advise.tool_config import ToolConfig


def write(choice: ToolConfig, batch: int, seq: int) -> str:
    """The fields of DistributedConfig, and those of TrainingArguments that go with them."""
    config: dict[str, Any] = {
        "tp_size": choice.tensor,
        "fsdp_size": choice.shards if choice.zero else 1,
        "dp_replicate_size": choice.replicas,
        "fsdp_mixed_precision": True,
    }
    training = {
        "per_device_train_batch_size": choice.micro,
        "gradient_accumulation_steps": choice.microbatches(batch),
        "gradient_checkpointing": choice.recompute == "full",
        "bf16": True,
    }
    return json.dumps({"distributed_config": config, "training_arguments": training}, indent=2) + "\n"


def recognised(text: str) -> bool:
    return "fsdp_size" in text or "tp_size" in text or "dp_replicate_size" in text


def read(text: str) -> Settings:
    """Of a JSON file with the fields, or with them under ``distributed_config``."""
    loaded = json_table(text)
    values = {**loaded, **loaded.get("distributed_config", {}), **loaded.get("training_arguments", {})}
    refuse(values, "pp_size", "ep_size", "cp_size")
    shards = integer(values, "fsdp_size", 1) or 1
    return Settings(
        tensor=degree(values, "tp_size"),
        shards=shards,
        replicas=None if shards > 1 else degree(values, "dp_replicate_size"),
        zero=3 if shards > 1 else 0,
        micro=integer(values, "per_device_train_batch_size"),
        accumulate=integer(values, "gradient_accumulation_steps"),
        recompute="full" if on(values, "gradient_checkpointing") else "none",
    )
