"""How each tool is used, as its documentation says; a script of `peers_rows` calls what it needs of a `Tool`.

Data-parallel tools get their rows by the sampler that their documentation names, and report the mean of the
ranks' losses. Tools in which all ranks read the same batch get all rows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers.distributed import (
    DistributedConfig,
    load_optimizer_distributed,
    save_optimizer_distributed,
)

import autoshard
from autoshard.interop import trainer as parallel_trainer
from benchmarks.peers_models import ROWS, build, layers_of

Change = Callable[[Any], Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]
FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


class NotOffered(Exception):
    """The tool's documentation has no such thing."""


def no_optimizer(model: nn.Module) -> Any:
    return None


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


class Tool:
    """One plain process; what the others do otherwise, they say. dp: ranks that read rows of their own."""

    dp, dp_rank = 1, 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, precision: str = "no", accumulation: int = 1) -> None:
        """A script begins."""
        self.precision = precision

    def model(self, kind: str, change: Change) -> nn.Module:
        return change(build(kind))

    def start(self, model: nn.Module, make: Make, example: Any) -> tuple[nn.Module, Any]:
        """The model as the tool wants it, and its optimizer."""
        if type(self) is Tool:
            self.first = self.weights(model)
        return model, make(model)

    def loader(self, data: Any, collate: Any) -> Any:
        return DataLoader(data, batch_size=ROWS, collate_fn=collate)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")

    def accumulate(self, model: Any, steps: int, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Any, steps: int = 1) -> None:
        (loss / steps).backward()

    def token_loss(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """The mean over the labels of the global batch."""
        return model(**batch).loss

    def clip(self, model: nn.Module, limit: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)

    def mean(self, x: Any) -> float:
        """A loss of the global batch."""
        return float(full(x.detach()))

    def total(self, x: int) -> int:
        return x

    def generate(self, model: Any, ids: torch.Tensor, **more: Any) -> list[list[int]]:
        return list(model.generate(ids, **more).tolist())

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        return {name: full(p.detach()).clone() for name, p in model.named_parameters()}

    def save(self, model: nn.Module, optimizer: Any) -> None:
        torch.save((model.state_dict(), optimizer.state_dict()), self.folder / "state.pt")

    def resume(self, model: nn.Module, optimizer: Any) -> None:
        weights, moments = torch.load(self.folder / "state.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)

    def save_pretrained(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)

    def load(self, folder: Path, make: Make, example: Any) -> tuple[nn.Module, Any]:
        return Tool.start(self, transformers.LlamaForCausalLM.from_pretrained(folder), make, example)

    def trainer(self, rows: list[Any], args: dict[str, Any], change: Change) -> Any:
        args["per_device_train_batch_size"] = args["per_device_eval_batch_size"] = ROWS // self.dp
        model, _ = Tool.start(self, self.model("Llama", change), no_optimizer, None)
        arguments = transformers.TrainingArguments(**args)
        return transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16])


class Autoshard(Tool):
    """README.md: `parallelize` before the optimizer; all ranks read the same batch."""

    def __init__(self, folder: Path, mesh: str) -> None:
        super().__init__(folder)
        size = dist.get_world_size()
        self.mesh = mesh if size == 4 else {"fsdp=4": "fsdp=2", "dp=2,tp=2": "tp=2"}[mesh]

    def start(self, model: nn.Module, make: Make, example: Any) -> tuple[nn.Module, Any]:
        model = autoshard.parallelize(model, self.mesh, example_inputs=example)
        return model, make(model)

    def clip(self, model: nn.Module, limit: float) -> Any:
        return autoshard.clip_grad_norm_(model.parameters(), limit)

    def save(self, model: nn.Module, optimizer: Any) -> None:
        autoshard.Checkpoints(self.folder / "state", model, optimizer).save(2)

    def resume(self, model: nn.Module, optimizer: Any) -> None:
        autoshard.Checkpoints(self.folder / "state", model, optimizer).load()

    def load(self, folder: Path, make: Make, example: Any) -> tuple[nn.Module, Any]:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
        model, optimizer = self.start(model, make, example)
        autoshard.load_weights(model, folder)
        return model, optimizer

    def trainer(self, rows: list[Any], args: dict[str, Any], change: Change) -> Any:
        args["per_device_train_batch_size"] = args["per_device_eval_batch_size"] = ROWS
        example = {k: torch.stack([row[k] for row in rows[:ROWS]]) for k in rows[0]}
        model, _ = self.start(self.model("Llama", change), no_optimizer, example)
        arguments = transformers.TrainingArguments(**args)
        return parallel_trainer.Trainer(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16]
        )


class Fsdp2(Tool):
    """docs.pytorch.org, "Getting started with FSDP2": layers, then the root; the optimizer afterwards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dp, self.dp_rank = dist.get_world_size(), dist.get_rank()

    def start(self, model: nn.Module, make: Make, example: Any) -> tuple[nn.Module, Any]:
        for layer in layers_of(model):
            fully_shard(layer)
        fully_shard(model)
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        return model, make(model)

    def loader(self, data: Any, collate: Any) -> Any:
        sampler: Any = DistributedSampler(data, self.dp, self.dp_rank, shuffle=False)
        return DataLoader(data, ROWS // self.dp, sampler=sampler, collate_fn=collate)

    def weights(self, model: Any) -> dict[str, torch.Tensor]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a call without backward
        return super().weights(model)

    def accumulate(self, model: Any, steps: int, last: bool) -> AbstractContextManager[Any]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def token_loss(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        count = self.total(int((batch["labels"][:, 1:] != -100).sum()))
        return model(**batch, num_items_in_batch=count).loss * self.dp

    def mean(self, x: Any) -> float:
        return self._summed(float(full(x.detach()))) / dist.get_world_size()

    def total(self, x: int) -> int:
        return int(self._summed(x)) * self.dp // dist.get_world_size()

    def _summed(self, x: float) -> float:
        found = torch.tensor(x, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    def generate(self, model: Any, ids: torch.Tensor, **more: Any) -> list[list[int]]:
        here = model.generate(ids[self.dp_rank :: self.dp], **more).tolist()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self.dp_rank, here))
        found = dict(every)
        return [found[k % self.dp][k // self.dp] for k in range(len(ids))]

    def save(self, model: nn.Module, optimizer: Any) -> None:
        weights, moments = states.get_state_dict(model, optimizer)
        dcp.state_dict_saver.save(
            {"model": weights, "optimizer": moments}, checkpoint_id=self.folder / "state"
        )

    def resume(self, model: nn.Module, optimizer: Any) -> None:
        weights, moments = states.get_state_dict(model, optimizer)
        dcp.state_dict_loader.load(
            {"model": weights, "optimizer": moments}, checkpoint_id=self.folder / "state"
        )
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    def save_pretrained(self, model: Any, folder: Path) -> None:
        weights = states.get_model_state_dict(model, options=FULL)
        if dist.get_rank() == 0:
            model.save_pretrained(folder, state_dict=weights)

    def load(self, folder: Path, make: Make, example: Any) -> tuple[nn.Module, Any]:
        with init_empty_weights():  # buffers keep their values
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folder))
        model, _ = self.start(model, no_optimizer, example)
        meta, read = model.state_dict(), load_file(folder / "model.safetensors")
        state = {
            name: nn.Parameter(distribute_tensor(x, meta[name].device_mesh, meta[name].placements))
            for name, x in read.items()
        }
        model.load_state_dict(state, assign=True)
        return model, make(model)

    def trainer(self, rows: list[Any], args: dict[str, Any], change: Change) -> Any:
        raise NotOffered


def accelerate_on_cpus() -> None:
    """Accelerate has FSDP and meshes for accelerators alone, and DDP on CPUs: it is told otherwise."""
    plain = AcceleratorState.__init__

    @functools.wraps(plain)
    def init(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
        elif state.distributed_type == DistributedType.MULTI_CPU and kwargs.get("parallelism_config"):
            state.distributed_type = DistributedType.MULTI_GPU
        PartialState._shared_state["distributed_type"] = state.distributed_type  # as `plain` does

    AcceleratorState.__init__ = init


class Accelerate(Fsdp2):
    """huggingface.co/docs/accelerate, FSDP2: all of the script goes through `prepare`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        accelerate_on_cpus()

    def begin(self, precision: str = "no", accumulation: int = 1) -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.precision = precision
        # as `accelerate launch` sets them from its configuration file
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", ACCELERATE_USE_CPU="true")
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin
        )

    def start(self, model: nn.Module, make: Make, example: Any) -> tuple[nn.Module, Any]:
        names = {type(layer).__name__ for layer in layers_of(model)}
        self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(names)
        prepared = self.accelerator.prepare(model, make(model))
        if hasattr(model, "generate"):
            register_fsdp_forward_method(prepared[0], "generate")  # as transformers' Trainer does
        return prepared

    def loader(self, data: Any, collate: Any) -> Any:
        return self.accelerator.prepare(DataLoader(data, ROWS // self.dp, collate_fn=collate))

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # `mixed_precision` does it

    def accumulate(self, model: Any, steps: int, last: bool) -> AbstractContextManager[Any]:
        return self.accelerator.accumulate(model)

    def backward(self, loss: Any, steps: int = 1) -> None:
        self.accelerator.backward(loss)

    def clip(self, model: nn.Module, limit: float) -> Any:
        return self.accelerator.clip_grad_norm_(model.parameters(), limit)

    def save(self, model: nn.Module, optimizer: Any) -> None:
        self.accelerator.save_state(str(self.folder / "state"))

    def resume(self, model: nn.Module, optimizer: Any) -> None:
        self.accelerator.load_state(str(self.folder / "state"))

    def save_pretrained(self, model: Any, folder: Path) -> None:
        self.accelerator.unwrap_model(model).save_pretrained(
            folder,
            is_main_process=self.accelerator.is_main_process,
            save_function=self.accelerator.save,
            state_dict=self.accelerator.get_state_dict(model),
        )

    def load(self, folder: Path, make: Make, example: Any) -> tuple[nn.Module, Any]:
        self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = True
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"
        return self.start(model, make, example)

    def trainer(self, rows: list[Any], args: dict[str, Any], change: Change) -> Any:
        AcceleratorState._reset_state(True)  # Trainer makes its own Accelerator
        return Tool.trainer(self, rows, args | {"fsdp": True, "fsdp_config": {"version": 2}}, change)


class Transformers(Fsdp2):
    """huggingface.co/docs/transformers: `from_pretrained(..., distributed_config=DistributedConfig(...))`."""

    def __init__(self, folder: Path, fsdp: int, tp: int) -> None:
        super().__init__(folder)
        accelerate_on_cpus()
        size = dist.get_world_size()
        self.fsdp, self.tp = (fsdp, tp) if size == 4 else (2 // tp, tp)
        self.dp, self.dp_rank = self.fsdp, dist.get_rank() // self.tp

    def model(self, kind: str, change: Change) -> nn.Module:
        folder = self.folder / kind
        plain = build(kind)
        if dist.get_rank() == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        return change(self._read(folder, type(plain)))

    def _read(self, folder: Path, kind: Any) -> nn.Module:
        config = DistributedConfig(fsdp_size=self.fsdp, tp_size=self.tp)
        model: nn.Module = kind.from_pretrained(folder, distributed_config=config)
        return model.train()

    def start(self, model: nn.Module, make: Make, example: Any) -> tuple[nn.Module, Any]:
        return model, make(model)

    def accumulate(self, model: Any, steps: int, last: bool) -> AbstractContextManager[Any]:
        return super().accumulate(model, steps, last) if self.fsdp > 1 else nullcontext()

    def save(self, model: Any, optimizer: Any) -> None:
        model.save_pretrained(self.folder / "state", distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, str(self.folder / "moments"))

    def resume(self, model: Any, optimizer: Any) -> None:
        read = self._read(self.folder / "state", type(model))
        model.load_state_dict(read.state_dict())
        load_optimizer_distributed(model, optimizer, str(self.folder / "moments"))

    def save_pretrained(self, model: Any, folder: Path) -> None:
        Tool.save_pretrained(self, model, folder)

    def load(self, folder: Path, make: Make, example: Any) -> tuple[nn.Module, Any]:
        model = self._read(folder, transformers.LlamaForCausalLM)
        return model, make(model)

    def trainer(self, rows: list[Any], args: dict[str, Any], change: Change) -> Any:
        return Tool.trainer(self, rows, args, change)


#: column of the table -> how the tool is made
TOOLS: dict[str, Callable[[Path], Tool]] = {
    "one process": Tool,
    "autoshard fsdp=4": lambda folder: Autoshard(folder, "fsdp=4"),
    "autoshard dp=2,tp=2": lambda folder: Autoshard(folder, "dp=2,tp=2"),
    "FSDP2": Fsdp2,
    "Accelerate FSDP2": Accelerate,
    "transformers fsdp=4": lambda folder: Transformers(folder, 4, 1),
    "transformers fsdp=2,tp=2": lambda folder: Transformers(folder, 2, 2),
}
