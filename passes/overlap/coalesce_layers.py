"""Messages of several layers become one, where nothing would run beside them.

On devices that compute while they send, a layer's parameters are gathered while another layer is computed,
and small messages cost little. Where nothing hides a message (``overlap = 0``, as for ranks that share
processors), each costs what all ranks wait for one another. So gathers of parameters over one axis go out
with the first of them, and reductions that scatter gradients with the last, `BUCKET_BYTES` at a time (the
size that DistributedDataParallel uses: Li et al., VLDB 2020, section 3.2.3): at most so many bytes more are
held as by single layers, for each of the two. What is reduced once more over another axis stays with its
layer, where it is still in the processor's cache: it would only be copied again.

What only has to travel has calls of its own for this: `prefetch` makes those of gathers, this pass those of
reductions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from autoshard.ir import Call, Node, Origin
from autoshard.ir.collectives import (
    COLLECTIVES,
    TensorTransfer,
    collective,
    exact_transfer,
    kind_of,
    wheres_of,
)
from autoshard.ir.local_bytes import held_bytes
from autoshard.ir.lowered import Instruction, Lowered, StagePart, with_parts
from autoshard.ir.statements import Statement, Statements, by_part, regrouped, statements_of
from autoshard.passes.stages.part_names import parts_named
from autoshard.rules.local import MeshShape

#: the same op over the same axis on the same element type
_Key: TypeAlias = "tuple[str, str, str]"


def join_messages(lowered: Lowered, mesh: MeshShape, limit: int) -> Lowered:
    """The program with such messages together. limit: bytes, on a rank, after which one is sent."""
    full = statements_of(lowered)
    used = {value for s in full.all for value in s.uses}
    # slices of a sequence add to one value: each of them has a part with messages of its own
    several_make = {v for v, n in Counter(v for s in full.all for v in s.makes).items() if n > 1}
    pieces = {
        part: list(_pieces(statements, used, several_make)) for part, statements in by_part(full).items()
    }
    groups = [g for part in pieces.values() for g in _groups(part, full, mesh, limit)]
    several = [g for g in groups if len(g.members) > 1]
    if not several:
        return lowered
    of_value = {value: group for group in several for s in group.members for value in s.makes}
    apart: list[tuple[StagePart, Sequence[Statement]]] = []
    for part, own in pieces.items():
        apart += [(part, piece) for piece in _apart(own, of_value)] or [(part, [])]
    return parts_named(_joined(regrouped(full, apart), of_value), lowered)


@dataclass(frozen=True)
class _Piece:
    """Statements of one item of main that stay together. messages: those that travel and do nothing else:
    all of them, or none."""

    item: int
    statements: tuple[Statement, ...]
    messages: bool


@dataclass
class _Group:
    """Messages that become one. first: whether it stands where its first member stood, or its last. start:
    number of its first member. members: in order."""

    first: bool
    start: int
    bytes: int = 0
    members: list[Statement] = field(default_factory=list)


def _pieces(
    statements: Sequence[Statement], used: Collection[str], barred: Collection[str]
) -> Iterator[_Piece]:
    """What each item of main is made of: gathers alone, or ops and then reductions whose results nothing
    uses. barred: values whose messages stay as they are."""
    items: dict[int, list[Statement]] = {}
    for statement in statements:
        items.setdefault(statement.item, []).append(statement)
    for item, own in items.items():
        free = [s for s in own if not any(v in barred for v in s.makes)]
        if (
            len(free) == len(own)
            and all(exact_transfer(s.node) == "all_gather" for s in own)
            and not _chained(own)
        ):
            yield _Piece(item, tuple(own), True)
            continue
        last = [
            s
            for s in free
            if exact_transfer(s.node) == "reduce_scatter" and not any(v in used for v in s.makes)
        ]
        apart = {s.number for s in last}
        rest = [s for s in own if s.number not in apart]
        if rest:
            yield _Piece(item, tuple(rest), False)
        if last:
            yield _Piece(item, tuple(last), True)


def _chained(own: Sequence[Statement]) -> bool:
    """Whether one works on what another makes, as where a value is gathered over two axes."""
    new = {value for s in own for value in s.makes}
    return any(not new.isdisjoint(s.uses) for s in own)


def _groups(pieces: Sequence[_Piece], whole: Statements, mesh: MeshShape, limit: int) -> list[_Group]:
    """The messages of a part, in groups that may be one.

    A message goes to the first group that has room and, as a gather, stands behind all that it needs.
    """
    groups: dict[_Key, list[_Group]] = {}
    made_at: dict[str, int] = {}
    for number, (piece, statement) in enumerate((p, s) for p in pieces for s in p.statements):
        made_at.update(dict.fromkeys(statement.makes, number))
        if not piece.messages:
            continue
        first = exact_transfer(statement.node) == "all_gather"
        needs = max((made_at.get(v, -1) for v in statement.uses), default=-1) if first else -1
        nbytes = _nbytes(statement, whole, mesh)
        own = groups.setdefault(_key(statement, whole), [])
        group = next((g for g in own if g.bytes + nbytes <= limit and needs < g.start), None)
        if group is None:
            group = _Group(first, number)
            own.append(group)
        group.members.append(statement)
        group.bytes += nbytes
    return [g for own in groups.values() for g in own]


def _key(statement: Statement, whole: Statements) -> _Key:
    node = statement.node
    return kind_of(node), str(node.args[1]), whole.values[statement.makes[0]].type.dtype


def _nbytes(statement: Statement, whole: Statements, mesh: MeshShape) -> int:
    """What a message makes or is made of, whichever is whole: bytes on the first rank."""
    values = statement.makes if exact_transfer(statement.node) == "all_gather" else statement.uses
    placed = [whole.values[value] for value in values]
    return sum(held_bytes(p.type, p.layout, mesh.sizes) for p in placed)


def _apart(pieces: Sequence[_Piece], of_value: dict[str, _Group]) -> list[list[Statement]]:
    """The items of a part, reductions that are joined with others apart from theirs."""
    result: list[list[Statement]] = []
    item = -1
    for piece in pieces:
        joined = [s for s in piece.statements if s.makes[0] in of_value]
        rest = [s for s in piece.statements if s.makes[0] not in of_value]
        if rest:
            if item == piece.item:
                result[-1] += rest
            else:
                result.append(rest)
            item = piece.item
        result += [[s] for s in joined]
    return result


def _joined(lowered: Lowered, of_value: dict[str, _Group]) -> Lowered:
    """The program with the calls of a group's members replaced by one message."""
    full = statements_of(lowered)
    members: dict[int, Statement] = {s.item: s for s in full.all if s.makes and s.makes[0] in of_value}
    groups: dict[int, list[int]] = {}
    for item in sorted(members):
        groups.setdefault(id(of_value[members[item].makes[0]]), []).append(item)
    stands: dict[int, Node] = {}
    for items in groups.values():
        group = of_value[members[items[0]].makes[0]]
        stands[items[0] if group.first else items[-1]] = _message([members[k] for k in items], full)
    pieces: list[tuple[StagePart, Sequence[Instruction]]] = []
    for part in lowered.parts:
        own: list[Instruction] = []
        for k in range(part.start, part.stop):
            if k in stands:
                own.append(stands[k])
            elif k not in members:
                own.append(lowered.main[k])
        pieces.append((part, own))
    # nothing need use all that a message of several brings
    brought = {v: full.values[v] for node in stands.values() for v in node.outs}
    new = with_parts(replace(lowered, values={**lowered.values, **brought}), pieces)
    called = {i.segment for i in new.main if isinstance(i, Call)}
    return replace(new, segments={n: s for n, s in new.segments.items() if n in called})


def _message(members: Sequence[Statement], whole: Statements) -> Node:
    """All of them as one: ``a, b = comm.all_gather_bucket((x, y), axis, (where, where))``."""
    first = members[0].node
    moves = [t for s in members for t in _named(s)]
    types = [whole.values[t.out].type for t in moves]
    transfer = COLLECTIVES[first.op].transfer
    return collective(transfer, first.args[1], moves, types, Origin(), first.backward, bucket=True)


def _named(statement: Statement) -> list[TensorTransfer]:
    """The tensors of a message by their names in main."""
    rows = zip(statement.uses, statement.makes, wheres_of(statement.node), strict=True)
    return [TensorTransfer(*row) for row in rows]
