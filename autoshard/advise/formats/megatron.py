"""Megatron-LM's flags, and Megatron Bridge's overrides of a recipe.

Sources: Megatron-LM, megatron/training/arguments.py; Megatron Bridge, docs/training/communication-overlap.md.
"""

from __future__ import annotations

import yaml

from autoshard.advise.formats.settings import Settings
from autoshard.advise.formats.values import Table, degree, flags, flat, integer, on, refuse, words
from autoshard.advise.tool_config import ToolConfig
from autoshard.errors import UsageError

#: Megatron-LM's flag -> Megatron Bridge's key
_BRIDGE = {
    "tensor-model-parallel-size": "model.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "sequence-parallel": "model.sequence_parallel",
    "recompute-granularity": "model.recompute_granularity",
    "recompute-method": "model.recompute_method",
    "recompute-num-layers": "model.recompute_num_layers",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "seq-length": "model.seq_length",
    "use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "overlap-param-gather": "ddp.overlap_param_gather",
    "tp-comm-overlap": "comm_overlap.tp_comm_overlap",
}
_FLAG_OF = {key: flag for flag, key in _BRIDGE.items()}
_SWITCHES = ("overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap")
#: degrees that would change what is simulated
_NOT_BUILT = ("context-parallel-size", "expert-model-parallel-size")


def write(choice: ToolConfig, batch: int, seq: int) -> str:
    """Flags of Megatron-LM, one a line, and the same as overrides of a Megatron Bridge recipe."""
    flags = _flags(choice, batch, seq)
    lines = [f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items()]
    bridge = [
        f"#   {_BRIDGE[name]}={str(value).lower() if value is True else value}"
        for name, value in flags.items()
        if name in _BRIDGE
    ]
    return "\n".join((*lines, "", "# as overrides of a Megatron Bridge recipe:", *bridge, ""))


def _flags(choice: ToolConfig, batch: int, seq: int) -> dict[str, int | str | bool]:
    flags: dict[str, int | str | bool] = {
        "tensor-model-parallel-size": choice.tensor,
        "pipeline-model-parallel-size": choice.pipeline,
    }
    if choice.chunks > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = choice.chunks
    if choice.tensor > 1:
        flags["sequence-parallel"] = True
    flags |= {"micro-batch-size": choice.micro, "global-batch-size": batch, "seq-length": seq, "bf16": True}
    if choice.zero:
        flags["use-distributed-optimizer"] = True
    flags |= {name: True for name in _SWITCHES if name not in choice.off}
    if choice.recompute == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    return flags


def recognised(text: str) -> bool:
    return "tensor-model-parallel-size" in text or "tensor_model_parallel_size" in text


def read(text: str) -> Settings:
    """Of a script with flags, a file of them, a YAML file, or ``key=value`` overrides of a recipe."""
    values = _values(text)
    tensor, pipeline = (degree(values, f"{kind}-model-parallel-size") for kind in ("tensor", "pipeline"))
    refuse(values, *_NOT_BUILT)
    granularity = str(values.get("recompute-granularity") or "none")
    if granularity not in ("none", "selective", "full"):
        raise UsageError(f"recompute-granularity is {granularity!r}", hint="selective or full")
    zero = on(values, "use-distributed-optimizer")
    return Settings(
        tensor=tensor,
        pipeline=pipeline,
        chunks=degree(values, "num-virtual-stages-per-pipeline-rank"),
        layers_per_stage=integer(values, "num-layers-per-virtual-pipeline-stage"),
        zero=1 if zero else 0,
        micro=degree(values, "micro-batch-size"),
        recompute="full" if granularity == "full" else "none",
        off=tuple(name for name in _SWITCHES if not on(values, name)),
        batch=integer(values, "global-batch-size"),
        seq=integer(values, "seq-length"),
        ignored=("recompute-granularity selective: flash attention recomputes scores anyhow",)
        if granularity == "selective"
        else (),
    )


def _values(text: str) -> Table:
    if "--" not in text:
        nested = yaml.safe_load(text)
        if isinstance(nested, dict):
            return {
                _FLAG_OF.get(key, key.rpartition(".")[2].replace("_", "-")): v
                for key, v in flat(nested).items()
            }
    values = {name.replace("_", "-"): value for name, value in flags(text).items()}
    overrides = (word.lstrip("+").partition("=") for word in words(text))
    return values | {_FLAG_OF[key]: value for key, _, value in overrides if key in _FLAG_OF}
