"""A program is compiled by one rank, or read from the cache; the others receive its text.

``AUTOSHARD_CACHE=FOLDER`` keeps programs on disk, under a hash of all that they were compiled from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard import errors
from autoshard.capture.size_conditions import SizeConditions, SizedDims
from autoshard.errors import AutoshardError, UsageError, VerificationError
from autoshard.program.program import Program
from autoshard.program.store import load_program, packed, save_program, unpacked
from autoshard.rules.user import Rules
from autoshard.runtime.debugging.dump import dump_folder
from autoshard.runtime.groups import all_equal, device_here, world_device_type
from autoshard.runtime.said import say_once

T = TypeVar("T")
#: a folder that programs are kept in
VARIABLE = "AUTOSHARD_CACHE"
#: in place of a program that cannot be
_NONE = ".none"


@dataclass(frozen=True)
class CompilingRanks:
    """The ranks that compile together. groups: one per axis of their mesh; none for a single process."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @classmethod
    def of(cls, given: DeviceMesh | None) -> CompilingRanks:
        """Those of a DeviceMesh, or all of the world, if there is one."""
        if given is not None:
            groups = tuple(map(given.get_group, range(given.ndim)))
            return cls(groups, device_here(given.device_type))
        if not dist.is_initialized():
            return cls.alone()
        assert dist.group.WORLD is not None
        return cls((dist.group.WORLD,), device_here(world_device_type()))

    @classmethod
    def alone(cls) -> CompilingRanks:
        """A rank that compiles by itself."""
        return cls((), torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this rank stands first along every axis."""
        return all(dist.get_rank(group) == 0 for group in self.groups)

    def alike(self, key: str) -> bool:
        """Whether all ranks have the same key; collective."""
        return all_equal(self.groups, int(key[:15], 16) if key else -1, self.device)

    def from_first(self, data: bytes) -> bytes:
        """What the first rank gives; collective."""
        for group in self.groups:
            source = dist.get_global_rank(group, 0)
            size = torch.tensor(len(data), dtype=torch.int64, device=self.device)
            dist.broadcast(size, source, group=group)
            sent = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8).to(self.device)
            if dist.get_rank(group) != 0:
                sent = torch.empty(max(1, int(size)), dtype=torch.uint8, device=self.device)
            dist.broadcast(sent, source, group=group)
            data = sent[: int(size)].cpu().numpy().tobytes()
        return data

    def tensor_from_first(self, x: torch.Tensor) -> torch.Tensor:
        """The values that the first rank has in a tensor of one shape on all, in place; collective."""
        for group in self.groups:
            dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
        return x


@dataclass(frozen=True)
class SharedConditions:
    """Conditions on sizes of which the first rank knows more than the dims of the sizes that vary."""

    dims: SizedDims
    here: SizeConditions | None
    ranks: CompilingRanks

    @classmethod
    def of(cls, ranks: CompilingRanks, find: Callable[[], SizeConditions | None]) -> SharedConditions | None:
        """What the first rank finds; collective. None where nothing is known."""
        here = find() if ranks.first else None
        dims = ranks.from_first(json.dumps(None if here is None else here.dims).encode())
        rows = json.loads(dims)
        if rows is None:
            return None
        return cls(tuple(tuple((p, d) for p, d in row) for row in rows), here, ranks)

    def hold(self, shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether arguments of these shapes take the same way through the model's code; collective."""
        holds = self.here is not None and self.here.hold(shapes)
        return self.ranks.from_first(b"1" if holds else b"0") == b"1"


@dataclass(frozen=True)
class CompiledOnce(Generic[T]):
    """program: None where none can be compiled. here: what compiling it left, None where that ran on another
    rank, or in another process. shared: whether one rank compiled for all."""

    program: Program | None
    here: T | None = None
    shared: bool = True


def compile_once(
    compile_here: Callable[[], tuple[Program, T] | None], key: str, ranks: CompilingRanks, rules: Rules = None
) -> CompiledOnce[T]:
    """Compile a program on the first rank, for all; collective. key: of what it is compiled from, see
    `capture.python_state.model_key`; "" where it has none.

    Where the ranks' keys differ, or a graph depends on objects of the process, every rank compiles.
    Raises on all ranks what the first one raises.
    """
    alike = ranks.alike(key)
    if not key or not alike:
        return replace(_here(compile_here), shared=False)
    sent = b""
    result: CompiledOnce[T] = CompiledOnce(None)
    failure: Exception | None = None
    if ranks.first:
        try:
            result = _cached(compile_here, key, rules)
            sent = _message(result.program, others=bool(ranks.groups))
        except Exception as error:
            told = _told(error)
            # what others raise, this rank raises too; a mistake of the compiler's with its traceback
            failure = told if isinstance(error, AutoshardError) else error
            sent = _failed(told)
    sent = ranks.from_first(sent)
    if failure is not None:
        raise failure
    if sent[:1] == b"L":
        return replace(result if ranks.first else _here(compile_here), shared=False)
    # what a program does must not depend on what its text does not say: all ranks run the same
    program = _received(sent, rules) if ranks.groups else result.program
    return CompiledOnce(program, result.here)


def _here(compile_here: Callable[[], tuple[Program, T] | None]) -> CompiledOnce[T]:
    new = compile_here()
    return CompiledOnce(None) if new is None else CompiledOnce(*new)


def _message(program: Program | None, others: bool) -> bytes:
    if program is None:
        return b"N"
    if program.state.local:
        return b"L"
    return b"P" + packed(_to_run(program)) if others else b""


def _to_run(program: Program) -> Program:
    """A program without what is for readers and for proofs alone, unless those are to have it."""
    return (
        program if dump_folder() is not None else replace(program, dumps={}, original=None, original_notes={})
    )


def _told(error: Exception) -> AutoshardError:
    """An error as other ranks raise it: of the class in `autoshard.errors` that it is of."""
    if not isinstance(error, AutoshardError):
        return VerificationError(f"the rank that compiles failed: {type(error).__name__}: {error}")
    kind = next(k for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)
    if type(error) is kind:
        return error
    return kind(error.what, where=error.where, why=error.why, hint=error.hint)


def _failed(error: AutoshardError) -> bytes:
    parts = {name: getattr(error, name) for name in ("what", "where", "why", "hint")}
    return b"E" + json.dumps({"kind": type(error).__name__, **parts}).encode()


def _received(sent: bytes, rules: Rules) -> Program | None:
    kind, data = sent[:1], sent[1:]
    if kind == b"N":
        return None
    if kind == b"P":
        return unpacked(data, rules)
    parts = json.loads(data)
    raise getattr(errors, parts.pop("kind"))(parts.pop("what"), **parts)


def _cached(compile_here: Callable[[], tuple[Program, T] | None], key: str, rules: Rules) -> CompiledOnce[T]:
    folder = _folder(key)
    if folder is not None and folder.is_dir():
        try:
            return CompiledOnce(load_program(folder, rules=rules))
        except VerificationError as error:
            say_once(f"the program in {folder} is not used: {error.what}")
    if folder is not None and folder.with_suffix(_NONE).is_file():
        return CompiledOnce(None)
    new = _here(compile_here)
    if folder is not None and (new.program is None or not new.program.state.local):
        try:
            if new.program is not None:
                save_program(_to_run(new.program), folder, overwrite=True)
            else:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.with_suffix(_NONE).touch()
        except (OSError, UsageError) as error:
            # another job may have written it in the meantime
            if not (folder / "manifest.json").is_file():
                say_once(f"the program is not kept in {folder}: {error}")
    return new


def _folder(key: str) -> Path | None:
    """Where the program of a key is kept, None without a cache."""
    root = os.environ.get(VARIABLE, "")
    return Path(root) / key[:2] / key if root else None
