"""The YAML file that ``accelerate config`` writes, for FSDP2.

Sources: accelerate, ParallelismConfig and FullyShardedDataParallelPlugin.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoshard.advise.formats.settings import Settings
from autoshard.advise.formats.values import degree, flat, integer, on, refuse
from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError


def write(choice: ToolConfig, batch: int, seq: int) -> str:
    """The file; the launcher still wants the addresses of nodes, and the script its batch sizes."""
    accumulate = choice.microbatches(batch)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if choice.zero else "MULTI_GPU",
        "mixed_precision": "bf16",
        "num_processes": choice.gpus,
    }
    if choice.zero:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": choice.zero == 3,
            "fsdp_activation_checkpointing": choice.recompute == "full",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if choice.replicas > 1 and choice.zero:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": choice.replicas,
            "parallelism_config_dp_shard_size": choice.shards,
        }
    script = (
        f"# in the script: {choice.micro} sequences of {seq} tokens per process and microbatch, "
        f"gradient_accumulation_steps={accumulate}\n"
    )
    return script + str(yaml.safe_dump(config, sort_keys=False))


def recognised(text: str) -> bool:
    return "distributed_type" in text or "fsdp_config" in text


def read(text: str) -> Settings:
    """Of a YAML file. Raises UsageError for one that is not of FSDP or plain data parallelism."""
    loaded = yaml.safe_load(text)
    if not isinstance(loaded, dict):
        raise UsageError("the config is no table of YAML")
    kind = str(loaded.get("distributed_type", "MULTI_GPU")).upper()
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU"):
        raise UsageError(
            f"distributed_type is {kind}",
            why="FSDP and MULTI_GPU are simulated",
            hint="for DeepSpeed, give its JSON",
        )
    values = {key.rpartition(".")[2]: value for key, value in flat(loaded).items()}
    tensor = degree(values, "parallelism_config_tp_size")
    refuse(values, "parallelism_config_cp_size", "parallelism_config_sp_size")
    version = integer(values, "fsdp_version", 1)
    strategy = str(values.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    reshard = values.get("fsdp_reshard_after_forward", True)
    if isinstance(reshard, str) and reshard.lower() not in ("true", "false"):
        strategy = reshard.upper()  # FSDP1's word for its strategy
        reshard = True
    keeps = not on({"reshard": reshard}, "reshard") or strategy in ("SHARD_GRAD_OP", "2")
    fsdp = kind == "FSDP" and strategy not in ("NO_SHARD", "3")
    ignored = ["fsdp_version 1: simulated as 2"] if fsdp and version == 1 else []
    if on(values, "fsdp_offload_params"):
        ignored.append("fsdp_offload_params: simulated as on the device")
    return Settings(
        tensor=tensor,
        shards=integer(values, "parallelism_config_dp_shard_size", -1) or -1,
        replicas=integer(values, "parallelism_config_dp_replicate_size"),
        zero=(2 if keeps else 3) if fsdp else 0,
        accumulate=integer(values, "gradient_accumulation_steps"),
        micro=integer(values, "per_device_train_batch_size"),
        recompute="full" if on(values, "fsdp_activation_checkpointing") else "none",
        gpus=integer(values, "num_processes"),
        ignored=tuple(ignored),
    )
