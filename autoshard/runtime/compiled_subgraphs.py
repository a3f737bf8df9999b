"""Stretches of a segment that become machine code: Inductor compiles what stands between two messages.

A subgraph is ATen ops that follow one another. Messages, copies to and from the host, random numbers and
most ops of ours stay between subgraphs, where the program has them. None waits for a message that its first
step does not wait for, so that what ran beside a message still does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tag

from autoshard.errors import UsageError, VerificationError
from autoshard.ops.scaled import MADE_OF
from autoshard.runtime.prepared_call import PreparedCall
from autoshard.runtime.resolve import torch_op
from autoshard.torch_adapters.inductor import Compiled, compile_function, forms_of

_HINT = 'codegen="interpreter" runs it op by op'
_BARRED = frozenset((Tag.nondeterministic_seeded, Tag.data_dependent_output, Tag.dynamic_output_shape))
#: what Inductor leaves to the library that eager mode calls, and what moves nothing: of these alone, none is
#: compiled
_UNFUSED = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward"),
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze"),
        *("slice", "select", "alias", "detach", "split", "split_with_sizes", "unbind"),
    )
)


@dataclass(frozen=True)
class Subgraph:
    """Steps that become one graph.

    takes: slots that they read of others. gives: slots of theirs that others read. dead: of those taken, what
    nothing reads after them.
    """

    steps: tuple[PreparedCall, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    dead: tuple[int, ...]

    def __call__(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the steps give, called one by one."""
        env: Any = dict(zip(self.takes, xs, strict=True))
        for step in self.steps:
            step.run(env, 0)
        return tuple(env[slot] for slot in self.gives)

    def compiled(
        self, xs: Sequence[torch.Tensor], kept: Path | None = None
    ) -> tuple[Compiled, Sequence[torch.Tensor]]:
        """(machine code for arguments that lie in memory as these do, what it gives for these).

        kept: see `torch_adapters.inductor.compile_function`.

        Raises UsageError where Inductor fails, VerificationError if what it makes lies elsewhere in memory.
        """
        first = self.steps[0].node
        where = f"{len(self.steps)} ops from {first.outs[0]} = {first.op} on"
        if numbers := [x for x in xs if not isinstance(x, torch.Tensor)]:
            raise UsageError(
                f"a part of the program that is to be compiled takes {numbers[0]!r}, which is no tensor",
                where=where,
                why="compiled code would have that number at every call",
                hint=_HINT,
            )
        try:
            code, forms = compile_function(self, xs, kept, {torch_op(op): fn for op, fn in MADE_OF.items()})
        except Exception as error:
            raise UsageError(
                "Inductor cannot compile a part of the program",
                where=where,
                why=f"{type(error).__name__}: {error}",
                hint=_HINT,
            ) from error
        outs = code(list(xs))
        given = forms_of(xs, outs)
        if [form[:2] for form in given] != [form[:2] for form in forms]:
            raise VerificationError(
                "Inductor gave a tensor other strides than the program's op does",
                where=where,
                hint=_HINT,
            )
        # whoever changes one tensor in place, an optimizer or a user, must not change another
        pairs = enumerate(zip(given, forms, strict=True))
        shared = tuple(k for k, (ours, plain) in pairs if ours[2] is not None and plain[2] is None)
        return (Separated(code, shared), separated(outs, shared)) if shared else (code, outs)


@dataclass(frozen=True)
class Separated:
    """Machine code that gives some outputs in memory of others, where the program's ops do not: copies."""

    code: Compiled
    shared: tuple[int, ...]

    def __call__(self, xs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return separated(self.code(xs), self.shared)


def separated(outs: Sequence[torch.Tensor], shared: Collection[int]) -> Sequence[torch.Tensor]:
    """The same tensors, those in memory of others copied."""
    return [x.clone() if k in shared else x for k, x in enumerate(outs)]


Part: TypeAlias = "Subgraph | PreparedCall"


def parts_of(
    steps: Sequence[PreparedCall],
    outputs: Collection[int],
    late: Collection[int],
    ragged: Collection[int] = (),
) -> list[Part]:
    """The steps of a segment in their order, put together to subgraphs. late: slots that messages fill.
    ragged: those of values with as many rows as the data say, which no subgraph takes or makes, as its code
    is for the sizes of its first call."""
    result: list[Part] = []
    for group, after in _groups(steps, late, frozenset(ragged)):
        if len(group) < 2 or all(_family(step) in _UNFUSED for step in group):
            result += group
            continue
        new = {slot for step in group for slot in step.outs}
        takes = {slot for step in group for slot in step.uses} - new
        gives = new & ({slot for step in after for slot in step.uses} | set(outputs))
        dead = takes & {slot for step in group for slot in step.frees}
        result.append(Subgraph(tuple(group), *(tuple(sorted(slots)) for slots in (takes, gives, dead))))
    return result


def _groups(
    steps: Sequence[PreparedCall], late: Collection[int], ragged: frozenset[int]
) -> Iterator[tuple[list[PreparedCall], Sequence[PreparedCall]]]:
    """(steps that follow one another, all steps after them)."""
    group: list[PreparedCall] = []
    waiting = set(late)
    for k, step in enumerate(steps):
        awaited = step.uses & waiting
        waiting -= awaited
        alone = not _compiles(step) or not ragged.isdisjoint(step.uses.union(step.outs))
        if group and (awaited or alone):
            yield group, steps[k:]
            group = []
        group.append(step)
        if alone:
            yield group, steps[k + 1 :]
            group = []
    if group:
        yield group, ()


def _family(step: PreparedCall) -> str:
    return step.node.op.rsplit(".", 1)[0]


def _compiles(step: PreparedCall) -> bool:
    """Whether a step can be of a subgraph: an ATen op, or one made of such, of shapes that are known, that
    changes none of its arguments and is the same at every call of its segment."""
    if step.sites or not (step.node.op in MADE_OF or step.node.op.startswith(("aten.", "prims."))):
        return False
    op = torch_op(step.node.op)
    return not op._schema.is_mutable and _BARRED.isdisjoint(op.tags)
