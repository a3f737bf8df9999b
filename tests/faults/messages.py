"""Messages between the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autoshard.program.messages import RankAction, StageSend, moves_of
from autoshard.program.program import Program
from faults.fault import PIPES, Fault, Kind, Moves, rules


def _moves(program: Program) -> Moves:
    return tuple(tuple(row) for row in moves_of(program))


def _changed(moves: Moves, rank: int, place: int, **changes: Any) -> Moves:
    rows = [list(row) for row in moves]
    rows[rank][place] = replace(rows[rank][place], **changes)
    return tuple(tuple(row) for row in rows)


def _with_messages(
    program: Program, side: str
) -> Iterator[tuple[int, int, RankAction, tuple[StageSend, ...]]]:
    if program.stages is None:
        return
    for rank, row in enumerate(_moves(program)):
        for place, move in enumerate(row):
            messages = getattr(move, side)
            if messages:
                yield rank, place, move, messages


def drop_send(program: Program) -> Iterator[Fault]:
    """A value is not sent."""
    for rank, place, move, messages in _with_messages(program, "sends"):
        made = _changed(_moves(program), rank, place, sends=messages[1:])
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def missing_wait(program: Program) -> Iterator[Fault]:
    """An action does not wait for a value to arrive."""
    for rank, place, move, messages in _with_messages(program, "receives"):
        made = _changed(_moves(program), rank, place, receives=messages[1:])
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def double_send(program: Program) -> Iterator[Fault]:
    """A value is sent twice."""
    for rank, place, _move, messages in _with_messages(program, "sends"):
        made = _changed(_moves(program), rank, place, sends=(messages[0], *messages))
        yield Fault(program, rules("message"), tuple(m.value for m in messages), made)


def swapped_sends(program: Program) -> Iterator[Fault]:
    """Two values change places on their way: sent in another order than they are received."""
    rows = _moves(program)
    for rank, row in enumerate(rows if program.stages is not None else ()):
        places = [k for k, move in enumerate(row) if move.sends]
        for a, b in pairwise(places):
            first, second = row[a].sends, row[b].sends
            if first[0].receiver == second[0].receiver:
                made = _changed(rows, rank, a, sends=(second[0], *first[1:]))
                made = _changed(made, rank, b, sends=(first[0], *second[1:]))
                yield Fault(program, rules("message"), (first[0].value, second[0].value), made)


def wrong_receiver(program: Program) -> Iterator[Fault]:
    """A value goes to another rank, or to itself."""
    for rank, place, _move, messages in _with_messages(program, "sends"):
        other = replace(messages[0], receiver=rank)
        made = _changed(_moves(program), rank, place, sends=(other, *messages[1:]))
        yield Fault(program, rules("message"), (messages[0].value,), made)


def wrong_microbatch(program: Program) -> Iterator[Fault]:
    """A value is taken for that of another microbatch."""
    for rank, place, move, messages in _with_messages(program, "receives"):
        other = replace(messages[0], microbatch=(messages[0].microbatch + 1) % program.microbatches)
        made = _changed(_moves(program), rank, place, receives=(other, *messages[1:]))
        yield Fault(program, rules("message"), (messages[0].value, str(move.action)), made)


def late_send(program: Program) -> Iterator[Fault]:
    """A rank sends only after an action that waits for the answer: ranks wait for each other."""
    rows = _moves(program)
    for rank, place, move, messages in _with_messages(program, "sends"):
        for later in range(place + 1, len(rows[rank])):
            follower = rows[rank][later]
            back = follower.action.microbatch == move.action.microbatch and follower.action.kind in "BI"
            if back and move.action.kind == "F" and follower.receives:
                made = _changed(rows, rank, place, sends=())
                made = _changed(made, rank, later, sends=(*follower.sends, *messages))
                yield Fault(
                    program, rules("message"), (*(m.value for m in messages), str(follower.action)), made
                )
                break


KINDS: dict[str, Kind] = {
    "missing send": Kind(drop_send, PIPES),
    "missing wait": Kind(missing_wait, PIPES),
    "value sent twice": Kind(double_send, PIPES),
    "swapped sends": Kind(swapped_sends, PIPES),
    "wrong receiver": Kind(wrong_receiver, PIPES),
    "wrong microbatch": Kind(wrong_microbatch, PIPES),
    "circular wait": Kind(late_send, PIPES),
}
