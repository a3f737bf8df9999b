"""What a model returns for the batch of a full step: outputs of all microbatches, from the stages that make
them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import UsageError
from autoshard.runtime.checks.check_mode import collective
from autoshard.torch_adapters.dtypes import torch_dtype

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner
    from autoshard.runtime.stepper import Stepper


def step_outputs(stepper: Stepper, module: nn.Module, leaves: Sequence[Any], ignore: Collection[str]) -> Any:
    """The output, of plain tensors on all ranks; collective.

    leaves: the flattened arguments. ignore: names in the output of what is left empty.
    """
    runner, program = stepper.runner, stepper.program
    values = {int(r.target): r.value for r in program.signature.results if r.kind == "output"}
    left = _left_out(runner, ignore)
    loss_value, loss_position = stepper.loss_output
    wanted = [v for k, v in values.items() if k not in left and v != loss_value]
    sizes = {p.type.shape[0] for p in runner.inputs if p.target in program.signature.batch_inputs}
    for k, value in values.items():
        shape = program.lowered.values[value].type.shape
        if value in wanted and program.microbatches > 1 and shape[:1] not in {(n,) for n in sizes}:
            raise UsageError(
                f"output {k} of the model has shape {list(shape)}, without the batch",
                why=f"a step is {program.microbatches} microbatches, and each has such an output",
                hint="leave it out by its name, or return it for each sequence",
            )
    loss, parts = stepper.evaluate(module, leaves, wanted)
    result = {
        k: loss if str(k) == loss_position else torch.empty(0) if k in left else _whole(stepper, v, parts)
        for k, v in values.items()
    }
    return runner.returned([result[k] for k in sorted(result)])


def _left_out(runner: Runner, names: Collection[str]) -> set[int]:
    """Positions of the tensors that an output has under some names."""
    tensors = [k for k, (kind, _) in enumerate(runner.program.signature.out_leaves) if kind == "tensor"]
    places = pytree.tree_unflatten(list(range(len(runner.program.signature.out_leaves))), runner.out_spec)
    named = places if isinstance(places, Mapping) else getattr(places, "__dict__", {})
    return {k for name in names for k in pytree.tree_leaves(named.get(name)) if k in tensors}


def _whole(stepper: Stepper, value: str, parts: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
    """An output of the full batch, from the stage that makes it."""
    program, device = stepper.program, stepper.runner.device
    type_ = program.lowered.values[value].type
    shape = type_.shape
    if value in parts:
        full = torch.cat(list(parts[value])) if shape else parts[value][0]
    else:
        rows = (shape[0] * program.microbatches, *shape[1:]) if shape else ()
        full = torch.empty(rows, dtype=torch_dtype(type_.dtype), device=device)
    if stepper.pipe is not None:
        source = stepper.source_of(value)
        with collective(f"an output from rank {source}", stepper.watch):
            dist.broadcast(full.contiguous(), source, group=stepper.pipe)
    return full
