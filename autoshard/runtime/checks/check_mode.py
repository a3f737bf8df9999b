"""Checks while a program runs, where ``AUTOSHARD_CHECK=N`` is set: what must be equal is compared.

Parameters and buffers that several ranks hold alike must be alike to the last bit: every N steps a checksum
of 64 bits of each is exchanged, and the first tensor that differs is named with its ranks. Beside that, every
rank tells the others which collective it waits in (`autoshard.runtime.checks.collective_watchdog`), so that
the error of one says where all are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.cluster.mesh import Mesh
from autoshard.errors import CollectiveError, UsageError, VerificationError
from autoshard.ir.placement import Layout, R, Shard
from autoshard.program.program import Program
from autoshard.runtime.checks.collective_watchdog import Watch, ranks_text, watch_here

if TYPE_CHECKING:
    from autoshard.runtime.runner import Runner

VARIABLE = "AUTOSHARD_CHECK"
#: elements of a tensor that are summed at once
_PIECE = 1 << 22
#: odd, so that a change of any single word changes the sum
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
#: what the messages of torch.distributed's errors say where a peer is late or gone
_SIGNS = ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl", "process group")


def period() -> int:
    """Every how many steps to check, 0 for never. Raises UsageError if the variable is no number."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text or text == "0":
        return 0
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{VARIABLE} is {text!r}", hint="give a number of steps: 1 to check every step")
    return int(text)


def checksum(x: torch.Tensor) -> int:
    """64 bits of the bytes of a tensor, on any device; a change of any one bit changes them.

    The bytes as words of 64 bits, each times an odd number of its place, are added up modulo 2 to the 64th.
    """
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, raw.numel(), 8 * _PIECE):
        piece = raw[start : start + 8 * _PIECE]
        if piece.numel() % 8:
            piece = torch.nn.functional.pad(piece, (0, 8 - piece.numel() % 8))
        words = (
            piece.view(torch.int64) if piece.storage_offset() % 8 == 0 else piece.clone().view(torch.int64)
        )
        places = torch.arange(start // 8, start // 8 + words.numel(), device=x.device)
        total += (words * (2 * places * _MIX + 1)).sum()
    return int(total)


class Guard:
    """The checks of one rank. every: how many steps lie between two of them."""

    def __init__(self, program: Program, order: Sequence[int], every: int, watch: Watch) -> None:
        self.program, self.order, self.every, self.watch = program, tuple(order), every, watch
        self.steps = 0
        ports = [p for p in program.signature.ports if p.kind in ("param", "buffer")]
        self.names = [(p.kind, p.target) for p in ports]
        self.classes = [self._classes(p.kind, program.lowered.values[p.name].layout) for p in ports]
        values = program.lowered.values
        #: outputs that are one number, the same on every rank: losses
        self.scalars = [
            r
            for r in program.signature.results
            if r.kind == "output"
            and not values[r.value].type.shape
            and all(p == R for p in values[r.value].layout)
        ]

    @classmethod
    def here(cls, program: Program, order: Sequence[int]) -> Guard | None:
        """The guard of this rank if the variable is set. order: the rank of the world at every place."""
        every = period()
        return cls(program, order, every, watch_here(order)) if every else None

    def _classes(self, kind: str, layout: Layout) -> list[tuple[int, ...]]:
        """Of every place of the mesh, a key that places have in common which must hold the same.

        A buffer is whole on every rank, however the program reads it.
        """
        full = Mesh.parse(self.program.full_mesh)
        at = self.program.stages.position if self.program.stages is not None else None
        split = [kind == "param" and isinstance(p, Shard) for p in layout]
        result = []
        for place in range(full.world_size):
            coords = [c for k, c in enumerate(full.coords(place)) if k != at]
            result.append(tuple(c for c, s in zip(coords, split, strict=True) if s))
        return result

    # -- replicas ----------------------------------------------------------------------------------

    def step(self, module: nn.Module) -> None:
        """A step begins: compare replicas if it is time. Every rank must come here.

        Raises VerificationError, on every rank, if ranks that must hold the same do not.
        """
        self.watch.begin_step(self.steps)
        if self.steps % self.every == 0:
            self.compare(module)
        self.steps += 1

    def after_forward(self, values: Mapping[str, torch.Tensor]) -> None:
        """Forward of a single stage has run: compare the losses, if it is a step that is checked."""
        if self.scalars and (self.steps - 1) % self.every == 0:
            own = [(1, checksum(values[r.value])) for r in self.scalars]
            names = [("output", r.target) for r in self.scalars]
            same: list[tuple[int, ...]] = [()] * len(self.order)
            self._compare(names, [same] * len(names), own)

    def compare(self, module: nn.Module) -> None:
        """Exchange the checksums of all parameters and buffers, and compare what must be equal."""
        self._compare(self.names, self.classes, self._own(module))

    def _compare(
        self,
        names: Sequence[tuple[str, str]],
        classes_of: Sequence[Sequence[tuple[int, ...]]],
        own: list[tuple[int, int]],
    ) -> None:
        rows = self._exchanged(own)
        for number, ((kind, target), classes) in enumerate(zip(names, classes_of, strict=True)):
            held: dict[tuple[int, ...], dict[int, int]] = {}
            for place, key in enumerate(classes):
                here, result = rows[place][number]
                if here:
                    held.setdefault(key, {})[self.order[place]] = result
            for sums in held.values():
                if len(set(sums.values())) > 1:
                    raise _differ(kind, target, sums, self.steps)

    def _own(self, module: nn.Module) -> list[tuple[int, int]]:
        """(whether this rank holds it, its checksum) of every parameter and buffer of the program."""
        values: dict[tuple[str, str], torch.Tensor | None] = {}
        values |= {("param", n): p for n, p in module.named_parameters(remove_duplicate=False)}
        values |= {("buffer", n): b for n, b in module.named_buffers(remove_duplicate=False)}
        result = []
        for key in self.names:
            x = values.get(key)
            local = x.to_local() if isinstance(x, DTensor) else x
            result.append((0, 0) if local is None else (1, checksum(local)))
        return result

    def _exchanged(self, own: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The rows of all places of the mesh."""
        world = dist.get_world_size()
        if len(self.order) != world:
            raise UsageError(
                f"{VARIABLE} is set, and the model runs on {len(self.order)} of {world} ranks",
                hint=f"unset {VARIABLE}",
            )
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        given = torch.tensor(own, dtype=torch.int64, device=device).reshape(-1)
        rows = [torch.empty_like(given) for _ in self.order]
        with collective("the comparison of replicas", self.watch):
            dist.all_gather(rows, given)
        by_rank = [[(int(a), int(b)) for a, b in row.reshape(-1, 2).tolist()] for row in rows]
        return [by_rank[rank] for rank in self.order]


def _differ(kind: str, target: str, sums: Mapping[int, int], step: int) -> VerificationError:
    counts = Counter(sums.values()).most_common()
    groups = [sorted(rank for rank, result in sums.items() if result == value) for value, _ in counts]
    texts = [
        f"{ranks_text(ranks)} {'have' if len(ranks) > 1 else 'has'} {value & (2**64 - 1):016x}"
        for ranks, (value, _) in zip(groups, counts, strict=True)
    ]
    named = "parameter" if kind == "param" else kind
    odd = [rank for ranks in groups[1:] for rank in ranks]
    who = ranks_text(odd) if len(groups[0]) > len(odd) else ranks_text(list(sums))
    return VerificationError(
        f"{named} {target} is not the same on ranks that should hold the same: {who}",
        where=f"before step {step}, checksums of 64 bits",
        why="; ".join(texts),
        hint="ranks began with different weights (seed them alike), or one was changed outside the program, "
        "or a device made an error",
    )


# -- collectives that fail -----------------------------------------------------------------------------


@contextmanager
def collective(name: str, watch: Watch | None) -> Iterator[None]:
    """Around a collective: an error of torch.distributed becomes one that says which it was."""
    with nullcontext() if watch is None else watch.inside(name):
        try:
            yield
        except RuntimeError as error:
            if not is_failure(error):
                raise
            raise failure(name, error, watch) from error


def is_failure(error: BaseException) -> bool:
    """Whether an error is one of communication: a peer that is late or gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS)


def failure(name: str, error: BaseException, watch: Watch | None) -> CollectiveError:
    """The error of a collective of the program, with what every rank does if that is known."""
    said = " ".join(str(error).split())[:300]
    late = "timed out" if "time" in said.lower() else "failed"
    lines = [f"torch.distributed says: {said}"]
    hint = f"set {VARIABLE}=1 to be told where every rank is"
    if watch is not None:
        lines = [*watch.report(), *lines]
        hint = "look at the ranks that wait in no collective, or in another one: what do they do there?"
    return CollectiveError(
        f"{name} {late} on rank {dist.get_rank()}", why="\n         ".join(lines), hint=hint
    )


def guard_of(runner: Runner) -> Guard | None:
    """See `Guard.here`."""
    return Guard.here(runner.program, runner.place.order)
