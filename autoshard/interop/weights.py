"""Weights of a parallel model from a checkpoint, of which each rank reads its parts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.errors import UsageError
from autoshard.interop.checkpoint_files import tensors_of
from autoshard.interop.first_values import first_values
from autoshard.interop.hf_weights import conversions
from autoshard.runtime.checks.agreement import any_rank
from autoshard.runtime.compile_once import CompilingRanks
from autoshard.runtime.module import ParallelModule
from autoshard.runtime.weights import fill


class LoadedWeights(NamedTuple):
    """Names, as `torch.nn.Module.load_state_dict` gives them.

    missing_keys: parameters and persistent buffers of the model that the checkpoint does not have.
    unexpected_keys: of the checkpoint, that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None,
    *,
    broadcast: bool = False,
    strict: bool = True,
) -> LoadedWeights:
    """Give a parallel model its weights. Call it on all ranks.

    A rank reads its parts of each tensor and keeps no other: it needs memory for its parts and one tensor.
    Names and forms of transformers' checkpoints are converted as `from_pretrained` does; values get the type
    of the model's parameters.

    Args:
        model: one that `parallelize` or `load` gave, mostly of a model on the meta device. Parameters that
            have values get others.
        source: a folder with ``model.safetensors`` or ``model.safetensors.index.json`` (or
            ``pytorch_model.bin``, with or without an index), one such file, or a state dict of full tensors.
        broadcast: the first rank alone reads, and sends each tensor to the others, whose source is ignored.
        strict: whether a missing or an unexpected name is an error. If not, what is missing and has no values
            gets those that `from_pretrained` draws for it (a new head), or ``reset_parameters``, from torch's
            random numbers of the first rank; every rank needs memory for all of it. What no such code
            initialises stays without values, and a call says so.

    Raises UsageError, on all ranks, where a file cannot be read, a shape differs, or names do (with strict),
    before any value changes.
    """
    if not isinstance(model, ParallelModule):
        raise UsageError(
            f"the model is a {type(model).__name__}, which is not parallel",
            hint="model = autoshard.parallelize(model, mesh, example_inputs=batch) first",
        )
    runner = model._autoshard
    ranks = CompilingRanks(tuple(runner.axis_groups), runner.device)
    problem: Exception | None = None
    checkpoint: _Checkpoint | None = None
    if ranks.first or not broadcast:
        try:
            checkpoint = _Checkpoint(model, source)
            checkpoint.check(strict)
        except (OSError, ValueError, UsageError) as error:
            problem = error
    if any_rank(runner, problem is not None):
        raise _refusal(problem, source) from problem
    differ = None if checkpoint is None else checkpoint.differences
    if broadcast:
        differ = LoadedWeights(*json.loads(ranks.from_first(json.dumps(differ).encode())))
        values = _received(ranks, checkpoint)
    else:
        assert checkpoint is not None
        values = checkpoint.values()
    assert differ is not None
    drawn = first_values(model, differ.missing_keys, ranks) if differ.missing_keys else {}
    fill(model, chain(values, drawn.items()))
    return differ


def _refusal(problem: Exception | None, source: object) -> UsageError:
    if isinstance(problem, UsageError):
        return problem
    if problem is None:
        return UsageError("another rank cannot read the weights", hint="its message says why")
    what = f"the weights in {source} cannot be read"
    return UsageError(what, why=str(problem), hint="give a folder of safetensors")


def _received(ranks: CompilingRanks, checkpoint: _Checkpoint | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the first rank reads, one by one; collective."""
    values = iter(()) if checkpoint is None else checkpoint.values(all_ranks=True)
    while True:
        name, x = next(values, ("", torch.empty(0)))
        header = json.dumps([name, list(x.shape), str(x.dtype).removeprefix("torch.")])
        name, shape, dtype = json.loads(ranks.from_first(header.encode()))
        if not name:
            return
        sent = x.to(ranks.device).contiguous()
        if not ranks.first:
            sent = torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
        yield name, ranks.tensor_from_first(sent)


class _Checkpoint:
    """The tensors of a checkpoint as the weights of a model."""

    def __init__(self, model: ParallelModule, source: Any) -> None:
        self.model = model
        self.tensors = tensors_of(source)
        signature = model._autoshard.program.signature
        #: of all pipeline ranks
        ports = {p.target: p.type.shape for p in signature.ports if p.kind in ("param", "buffer")}
        self.tied = dict(signature.tied)
        unsaved = set[str]()
        for prefix, module in model.named_modules():
            unsaved |= {f"{prefix}.{key}".lstrip(".") for key in module._non_persistent_buffers_set}
        shapes = {**{n: tuple(x.shape) for n, x in self._here()}, **ports}
        shapes |= {alias: shapes[owner] for alias, owner in self.tied.items() if owner in shapes}
        self.shapes = {n: shape for n, shape in shapes.items() if n not in unsaved}
        self.conversions = conversions(model, self.shapes, self.tensors)

    def _here(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has."""
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    @property
    def differences(self) -> LoadedWeights:
        """Of names. A tied weight is there under any of its names."""
        there = {self.tied.get(t, t) for each in self.conversions for t in self._targets(each)}
        missing = sorted({self.tied.get(n, n) for n in self.shapes} - there)
        return LoadedWeights(missing, sorted(n for n in self.conversions if n not in self.shapes))

    def _targets(self, first: str) -> list[str]:
        return self.conversions[first].targets(first)

    def check(self, strict: bool) -> None:
        """UsageError where names differ, or shapes do."""
        missing, unexpected = self.differences
        for what, names in (("no", missing), ("an unknown", unexpected)):
            if strict and names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise UsageError(
                    f"the checkpoint has {what} {', '.join(names[:3])}{more}",
                    why="a name of the model and of the checkpoint differ",
                    hint="strict=False takes what there is, and returns the names",
                )
        for target, each in self.conversions.items():
            if each.transform is None and target in self.shapes:
                self._check_shape(target, self.tensors.shape(each.sources[0]))

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self.shapes[name] != shape:
            raise UsageError(
                f"{name} has shape {list(shape)} in the checkpoint",
                why=f"the model has {list(self.shapes[name])}",
                hint="build the model from the checkpoint's config",
            )

    def values(self, all_ranks: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, tensor: one at a time. all_ranks: also those that only other pipeline ranks have."""
        here = self.shapes if all_ranks else {**dict(self._here()), **dict(self.tied)}
        for target, each in self.conversions.items():
            if target in self.shapes and any(t in here for t in each.targets(target)):
                for name, x in each.convert(self.model, target, self.tensors.read):
                    self._check_shape(name, tuple(x.shape))
                    yield name, x
