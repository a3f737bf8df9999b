"""One of four gloo processes: exported texts applied with torch alone, against eager; see test_export.py."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import family
from leaving import leave
from python_files import module_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

STEPS = 2  # gradients are added up over so many backward passes


def llama_wide() -> nn.Module:
    """Weights that are big beside the activations, so that they are divided."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=64,
            intermediate_size=176,
            vocab_size=512,
            max_position_embeddings=32,
        )
    )


def opt() -> nn.Module:
    """A GPT-2 with linear layers, biases and learned positions."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            num_hidden_layers=3,
            num_attention_heads=4,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=256,
            vocab_size=256,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            tie_word_embeddings=False,
        )
    )


#: models of these tests alone: name -> (model, vocabulary)
OWN: dict[str, tuple[Callable[[], nn.Module], int]] = {"llama-wide": (llama_wide, 512), "opt": (opt, 256)}


def make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and a global batch in which every item counts, the same in every process."""
    if name not in OWN:
        model, inputs = family(name).make()
        return model, {**inputs, "labels": inputs["labels"].clamp(min=0)}
    build, vocabulary = OWN[name]
    torch.manual_seed(0)
    model = build().train()
    ids = torch.randint(3, vocabulary, (4, 6))
    return model, {"input_ids": ids, "labels": torch.randint(3, vocabulary, (4, 6))}


def mesh_for(text: str) -> DeviceMesh:
    """The mesh of a plan; a smaller one is made twice, each half of the processes having its own."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    ranks = 1
    for size in sizes.values():
        ranks *= size
    whole = init_device_mesh(
        "cpu", (dist.get_world_size() // ranks, *sizes.values()), mesh_dim_names=("copy", *sizes)
    )
    return whole[tuple(sizes)]


def applied(path: str, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What a person does with the file; JSON is given to transformers."""
    if path.endswith(".json"):
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model.tp_plan = json.loads(Path(path).read_text())
        wanted = model._expand_parallel_plan(model.tp_plan)
        known = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
        # from_pretrained divides modules before it ties their weights; here they are tied
        assert {style for name, style in wanted.items() if name not in known} <= {"replicate"}
        wanted = {name: style for name, style in wanted.items() if name in known}
        split: nn.Module = apply_tensor_parallelism(model, mesh, wanted)
        return split
    result: nn.Module = module_of(Path(path), "exported").apply(model, mesh)
    return result


def part_of(inputs: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """A rank's part of the batch: split along dp and fsdp, dp outermost."""
    index, ways = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name in ("dp", "fsdp"):
            axis = mesh[name]
            index, ways = index * axis.size() + axis.get_local_rank(), ways * axis.size()
    return {k: v.chunk(ways)[index] for k, v in inputs.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of one case: the worst relative error, and what was divided."""
    model, inputs = make(case["model"])
    for module in model.modules():  # a layer that runs again in backward would fill its cache twice
        if hasattr(module, "config"):
            module.config.use_cache = False
    eager = copy.deepcopy(model)
    expected = eager(**inputs).loss
    (expected * STEPS).backward()
    mesh = mesh_for(case["mesh"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be resolved.*")
        parallel = applied(case["file"], model, mesh)
    mine = part_of(inputs, mesh)
    losses = torch.zeros(())
    for _ in range(STEPS):
        loss = parallel(**mine).loss
        loss.backward()
        losses += whole(loss.detach()) / STEPS
    dist.all_reduce(losses)
    worst, at = float(abs(losses / dist.get_world_size() - expected)), "loss"
    named = {name.removeprefix("module."): p for name, p in parallel.named_parameters()}
    wanted = dict(eager.named_parameters())
    assert set(named) == set(wanted), set(named) ^ set(wanted)
    top = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
    for name, param in wanted.items():  # a bias of keys has no gradient but rounding errors
        assert param.grad is not None and named[name].grad is not None, name
        error = float(
            (whole(named[name].grad) - param.grad).abs().max() / max(top / 1000, param.grad.abs().max())
        )
        worst, at = max((worst, at), (error, name))
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in named.values())
    return {**case, "error": worst, "at": at, "share": local / sum(p.numel() for p in wanted.values())}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            rows.append(run(case))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(rows))
    leave()


if __name__ == "__main__":
    main()
