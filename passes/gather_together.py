"""What a step gathers once travels in large messages across layers.

Where nothing hides a message, what it costs beside its bytes is paid for each: the gathers of the part
``gather`` (`gather_once`) over one axis share messages, `BUCKET_BYTES` at a time, as the reductions at the
end of a step do (`defer_reductions`). What is gathered over two axes goes out in two rounds. A step of one
microbatch has no use for a part of its own: there they stand at the begin of ``forward``, and what they make
is dropped where it is used last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autoshard.ir import Call, Node, Origin, Ref
from autoshard.ir.comm import BUCKET_BYTES
from autoshard.ir.lowered import Instruction, Lowered, Part, Placed, with_parts
from autoshard.ir.statements import Statement, Statements, statements_of

#: a part and what it runs
_Piece: TypeAlias = "tuple[Part, Sequence[Instruction]]"
_ONE, _SEVERAL = "comm.all_gather.default", "comm.all_gather_bucket.default"


def gather_together(lowered: Lowered, *, once: bool) -> Lowered:
    """The program with the gathers of every part ``gather`` in as few messages as they may be.

    once: whether the forward of every stage runs only once a step.
    """
    if not any(part.phase == "gather" for part in lowered.parts):
        return lowered
    whole = statements_of(lowered)
    of_item: dict[int, list[Statement]] = {}
    for statement in whole.all:
        of_item.setdefault(statement.item, []).append(statement)
    values: dict[str, Placed] = dict(lowered.values)
    pieces: list[_Piece] = []
    for part in lowered.parts:
        items = range(part.start, part.stop)
        alone: list[int] = []
        behind: set[str] = set()
        for k in items if part.phase == "gather" else ():
            statements = of_item.get(k, [])
            if _only_gathers(statements) and not any(behind.intersection(s.uses) for s in statements):
                alone.append(k)
            else:
                behind.update(o for s in statements for o in s.makes)
        gathers = [g for k in alone for s in of_item[k] for g in _gathers(s, whole)]
        values.update({g.out: whole.values[g.out] for g in gathers})
        rest = [lowered.main[k] for k in items if k not in alone]
        pieces.append((part, [*_messages(gathers, values), *rest]))
    if once:
        pieces = _in_forward(pieces)
    made = with_parts(replace(lowered, values=values), pieces)
    called = {i.segment for i in made.main if isinstance(i, Call)}
    return replace(made, segments={n: s for n, s in made.segments.items() if n in called})


def _in_forward(pieces: Sequence[_Piece]) -> list[_Piece]:
    """What is gathered for a stage at the begin of its forward."""
    gathered = {part.stage: items for part, items in pieces if part.phase == "gather"}
    return [
        (part, [*gathered.get(part.stage, ()), *items] if part.phase == "forward" else items)
        for part, items in pieces
        if part.phase != "gather"
    ]


@dataclass(frozen=True)
class _Gather:
    """Of one value over an axis. where: (dim, outer, inner, size)."""

    source: str
    out: str
    axis: str
    where: tuple[object, ...]


def _only_gathers(statements: Sequence[Statement]) -> bool:
    return bool(statements) and all(s.node.op in (_ONE, _SEVERAL) for s in statements)


def _gathers(statement: Statement, whole: Statements) -> list[_Gather]:
    """Those of a message."""
    node = statement.node
    if node.op == _SEVERAL:
        wheres = [tuple(where) for where in node.args[2]]
    else:
        wheres = [
            (node.args[2], *(node.kwarg(k, d) for k, d in (("outer", 1), ("inner", 1), ("size", None))))
        ]
    rows = zip(statement.uses, statement.makes, wheres, strict=True)
    return [_Gather(source, out, str(node.args[1]), where) for source, out, where in rows]


def _messages(gathers: Sequence[_Gather], values: dict[str, Placed]) -> list[Node]:
    """Rounds of what nothing has to be gathered for any more."""
    found: list[Node] = []
    left = list(gathers)
    while left:
        waiting = {g.out for g in left}
        ready = [g for g in left if g.source not in waiting]
        buckets: dict[tuple[str, str], list[_Gather]] = {}
        for gather in ready:
            key = gather.axis, values[gather.out].type.dtype
            bucket = buckets.setdefault(key, [])
            bucket.append(gather)
            if sum(values[g.out].type.nbytes for g in bucket) >= BUCKET_BYTES:
                found.append(_message(buckets.pop(key), values))
        found += [_message(bucket, values) for bucket in buckets.values()]
        left = [g for g in left if g.source in waiting]
    return found


def _message(bucket: Sequence[_Gather], values: dict[str, Placed]) -> Node:
    sources, wheres = tuple(Ref(g.source) for g in bucket), tuple(g.where for g in bucket)
    outs = tuple(g.out for g in bucket)
    types = tuple(values[out].type for out in outs)
    return Node(_SEVERAL, (sources, bucket[0].axis, wheres), (), outs, types, Origin(), False)
