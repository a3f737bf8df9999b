"""Ranks of a program that were given different things are named at the first call, not trained on.

Every rank hashes what must be alike: the program, the options, the weights that the model was built with, the
global batch. One reduction of the hashes per axis of the mesh says whether they are; only where they are not
are they gathered, to name the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import UsageError, VerificationError
from autoshard.program.text import program_text
from autoshard.runtime.checks.collective_watchdog import ranks_text
from autoshard.runtime.groups import all_equal, reduced

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner

#: elements of a tensor that are hashed
_SAMPLE = 1 << 12
#: a hash that agrees with every other one: what is known of a tensor is not comparable
_ANY = (1 << 62) - 1


def hash_of(*parts: object) -> int:
    """A number below 2^62 of texts; of tensors, their shape, type and some thousand elements."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, torch.Tensor):
            digest.update(repr((tuple(part.shape), part.dtype)).encode())
            flat = part.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLE)
            digest.update(flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(str(part).encode())
    return int.from_bytes(digest.digest(), "big") % _ANY


@dataclass(frozen=True)
class WeightHashes:
    """The weights that a model was built with, before they were cut: name -> hash, version of the shard."""

    hashes: Mapping[str, int]
    versions: Mapping[str, int]

    @classmethod
    def of(cls, given: Mapping[str, torch.Tensor]) -> WeightHashes:
        """Before the parameters are cut."""
        return cls({n: hash_of(p) for n, p in given.items() if p.device.type != "meta"}, {})

    def cut(self, module: nn.Module) -> WeightHashes:
        """Once they are: what changes a shard from now on (a checkpoint that is loaded) is seen."""
        return WeightHashes(self.hashes, {n: p._version for n, p in module.named_parameters()})

    def comparable(self, module: nn.Module) -> dict[str, int]:
        """Hashes of the weights that are still what they were built as; others count as alike."""
        now = dict(module.named_parameters())
        same = {n for n, v in self.versions.items() if n in now and now[n]._version == v}
        return {n: h if n in same else _ANY for n, h in self.hashes.items()}


def check_first_call(runner: Runner, module: nn.Module, built: WeightHashes, leaves: Sequence[Any]) -> None:
    """Raise on every rank if the ranks were given different things; collective over the program's ranks.

    leaves: the flattened arguments of the call. Raises UsageError for a batch, else VerificationError.
    """
    entries = dict(_entries(runner, module, built, leaves))
    # ranks whose models differ have other names: they are compared by their number, and then one by one
    count = hash_of(*entries)
    _compare(runner, {"the program": entries.pop("the program"), "names of the model's parameters": count})
    _compare(runner, entries)


def gives_parts(runner: Runner, leaves: Sequence[Any]) -> bool:
    """Whether a call gives this rank's part of the batch, not the global one."""

    def is_part(x: object, full: tuple[int, ...]) -> bool:
        return _plain(x) and x.dim() > 0 and x.shape[0] < full[0] and tuple(x.shape[1:]) == full[1:]

    batched = runner.program.signature.batch_inputs
    ports = (p for p in runner.inputs if p.target in batched)
    return any(is_part(leaves[int(p.target)], runner.step_shape(p)) for p in ports)


def parts_differ(runner: Runner, leaves: Sequence[Any]) -> bool:
    """Whether ranks give different parts of a batch, and not one alike; collective over the program's ranks.

    For a call after others with the global batch: a smaller batch may have the size of a part.
    """
    parts = [leaves[int(p.target)] for p in runner.inputs if _plain(leaves[int(p.target)])]
    return not all_equal(runner.axis_groups, hash_of(*parts), runner.device)


def any_rank(runner: Runner, here: bool) -> bool:
    """Whether something holds on some rank; collective over the program's ranks."""
    return bool(reduced(runner.axis_groups, torch.tensor(int(here), device=runner.device), "max"))


def _plain(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


def _entries(
    runner: Runner, module: nn.Module, built: WeightHashes, leaves: Sequence[Any]
) -> Iterator[tuple[str, int]]:
    program = runner.program
    yield "the program", hash_of(program.full_mesh, program_text(program), program.signature)
    yield "the seed", hash_of(runner.seed)
    yield "the version of torch", hash_of(torch.__version__)
    for port in runner.inputs:
        value = leaves[int(port.target)]
        # a rank's part of a batch is like no other's
        alike = _plain(value) and tuple(value.shape) == runner.step_shape(port)
        yield f"input {runner.input_name(port)}", hash_of(value) if alike else _ANY
    for name, value in sorted(built.comparable(module).items()):
        yield f"parameter {name}", value


def _compare(runner: Runner, entries: Mapping[str, int]) -> None:
    own = torch.tensor(list(entries.values()), dtype=torch.int64, device=runner.device)
    both = torch.cat([own, torch.where(own == _ANY, own, -own)])
    low, high = reduced(runner.axis_groups, both, "min").chunk(2)
    differ = (low != -high) & (low != _ANY)
    if not bool(differ.any()):
        return
    first = int(differ.nonzero()[0])
    raise _error(list(entries)[first], _by_rank(runner, int(own[first])))


def _by_rank(runner: Runner, own: int) -> dict[int, int]:
    """The hashes of all ranks of the program, by their rank in the world."""
    order = runner.place.order
    table = torch.zeros(len(order), dtype=torch.int64, device=runner.device)
    table[order.index(dist.get_rank())] = own
    return dict(zip(order, reduced(runner.axis_groups, table, "sum").tolist(), strict=True))


def _error(name: str, sums: Mapping[int, int]) -> Exception:
    ranks: dict[int, list[int]] = {}
    for rank, value in sums.items():
        if value != _ANY:
            ranks.setdefault(value, []).append(rank)
    groups = sorted(ranks.values(), key=len, reverse=True)
    who = "; ".join(ranks_text(g) for g in groups[:4]) + (" ..." if len(groups) > 4 else "")
    if name.startswith("input "):
        return UsageError(
            f"{name} is not the same on all ranks",
            where=f"first call; alike are: {who}",
            why="each has the shape of the global batch, of which a rank computes its own part: the rest of "
            "what a rank was given would be dropped",
            hint="give every rank the same global batch (no DistributedSampler), or "
            "parallelize(..., local_batch=True) if every rank has a batch of its own",
        )
    hints = {
        "the program": "give every rank the same model, mesh, example inputs and options",
        "names of the model's parameters": "give every rank the same model and arguments",
        "the seed": "give parallelize the same seed on every rank",
        "the version of torch": "install one version everywhere",
    }
    return VerificationError(
        f"{name} is not the same on all ranks",
        where=f"first call; alike are: {who}",
        why="every rank runs its part of one program on one model",
        hint=hints.get(
            name,
            "seed every rank alike before the model is built (torch.manual_seed), or load one checkpoint",
        ),
    )
