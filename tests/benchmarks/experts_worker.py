"""Started by torchrun: steps of a mixture of experts over all ranks, beside FSDP2 and transformers' exchange.

Arguments: where to write the rows as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from benchmarks.by_hand import by_fsdp2
from benchmarks.step_worker import PLAIN, Rounds, Step, local_batch, stepper

VOCAB, EXPERTS = 1024, 16
#: (sequences, tokens of each)
BATCHES = ((8, 64), (8, 256))


def model_of() -> nn.Module:
    """A Mixtral of 4 layers of 256 with 16 experts of 512, two for each token, the same in every process."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = MixtralConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=512,
        vocab_size=VOCAB,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        **heads,
    )
    config.use_cache = False
    return MixtralForCausalLM(config)


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def ours(rows: int, length: int) -> Step:
    """The program of the planner's choice of the size of ``ep``."""
    batch = batch_of(rows, length)
    mesh = f"ep={dist.get_world_size()}"
    model = autoshard.parallelize(model_of(), mesh, example_inputs=batch, cluster="cpu-gloo")
    return stepper(model, batch, PLAIN)


def fsdp2(rows: int, length: int) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return stepper(by_fsdp2(model_of(), mesh), local_batch(batch_of(rows, length)), PLAIN)


def transformers_ep(rows: int, length: int) -> Step:
    """``DistributedConfig``: experts on all ranks, tokens exchanged by all-to-all, the rest as FSDP2."""
    import transformers
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder, plain = str(shared[0]), cast(transformers.MixtralForCausalLM, model_of())
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    how = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="all_to_all")
    load: Any = transformers.MixtralForCausalLM.from_pretrained
    model = load(folder, distributed_config=how).train()
    return stepper(model, local_batch(batch_of(rows, length)), PLAIN)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for shape in BATCHES:
        sides = {"ours": ours(*shape), "FSDP2": fsdp2(*shape), "transformers EP": transformers_ep(*shape)}
        found = Rounds.of(sides)
        rows.append(found.row(f"{shape[0]} x {shape[1]}", "ours", "FSDP2", "transformers EP"))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
