"""What is to be trained, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from autoshard.cluster import Cluster
from autoshard.errors import UsageError
from autoshard.interop.targets import build, is_config
from autoshard.validate.captured import Captures
from autoshard.validate.columns import divided_classes

if TYPE_CHECKING:
    from torch import nn

#: a model and its inputs, of so many sequences
Build: TypeAlias = "Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]"
#: what is trained in
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """A model's step on some GPUs of a cluster.

    target: of the model. batch: sequences per step; seq: tokens of each. memory: bytes of a device. build: a
    model and its inputs, of so many sequences. layers: how many are repeated; hidden: elements of what goes
    between them; divided: sizes of the dims that tensor parallelism divides in layers. parameters: how many
    the model has; flop: of forward and backward of a sequence.
    """

    target: str
    cluster: Cluster
    gpus: int
    batch: int
    seq: int
    memory: int
    build: Build
    captures: Captures
    layers: int
    hidden: int
    divided: tuple[int, ...]
    parameters: int
    flop: float

    @property
    def node(self) -> int:
        """Ranks of the innermost level that joins several."""
        sizes = [level.size for level in self.cluster.levels if level.size and level.size > 1]
        return min(max(sizes, default=1), self.gpus)


def work_of(target: str, cluster: Cluster, gpus: int, batch: int, seq: int, memory: int | None) -> Work:
    """The work of an ``hf:`` target, captured in bf16 on the meta device.

    Raises UsageError for other targets, for mixtures of experts and for a cluster of unlike devices.
    """
    if not is_config(target):
        raise UsageError(
            "configurations of other tools are searched for hf: targets alone",
            where=target,
            why="the model is captured at several batch sizes",
            hint="write its config.json and name it hf:path/to/config.json",
        )
    if cluster.groups:
        raise UsageError(
            "the cluster has unlike devices", where=cluster.name, why="no tool divides work by speed"
        )
    cluster.check_world_size(gpus)

    def built(sequences: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        new = build(target, batch=sequences, seq=seq)
        return new.model.to(_DTYPE), new.inputs

    return work_on(target, built, Captures(built), cluster, gpus, batch, seq, memory)


def work_on(
    target: str,
    built: Build,
    captures: Captures,
    cluster: Cluster,
    gpus: int,
    batch: int,
    seq: int,
    memory: int | None,
) -> Work:
    """The work of a model that ``built`` makes. Raises UsageError for mixtures of experts."""
    model = captures.at(1).model
    sizes = [
        (port.type.shape, port.target)
        for group in model.flow.classes.values()
        for port in group.ports
        if port.kind == "param"
    ]
    experts = [name for shape, name in sizes if len(shape) == 3 and min(shape) > 1]
    if experts:
        raise UsageError(
            "mixtures of experts have no configurations of other tools yet",
            where=experts[0],
            why="their expert parallelism is not rebuilt",
            hint="plan without --for",
        )
    classes = divided_classes(model)
    return Work(
        target,
        cluster,
        gpus,
        batch,
        seq,
        memory or int(cluster.device.memory_bytes),
        built,
        captures,
        sum(bool(call.label) and not call.backward for call in model.folded.calls),
        classes.hidden_size,
        classes.layer_sizes,
        sum(torch.Size(shape).numel() for shape, _ in sizes),
        sum(
            model.rules[call.segment, number].flops - model.rules[call.segment, number].recomputed
            for call in model.folded.calls
            for number in range(len(model.folded.segments[call.segment].nodes))
        ),
    )
