"""Why ranks did not come to the end of their step."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import walk_tb

from autoshard.auditing.findings import AuditFinding
from autoshard.auditing.rank_threads import RankEnd
from autoshard.auditing.rendezvous import Mismatch, Rendezvous
from autoshard.capture.origins import user_line_of


def stops(ends: Sequence[RankEnd], messages: Rendezvous) -> list[AuditFinding]:
    """Why ranks did not come to their end."""
    for rank, end in enumerate(ends):
        if isinstance(end.error, Mismatch):
            told = tuple(f"rank {k}: {what} at {line}" for k, what, line in end.error.calls)
            lines = tuple(dict.fromkeys(line for _, _, line in end.error.calls))
            ranks = tuple(k for k, _, _ in end.error.calls)
            return [AuditFinding("collective", end.error.why, ranks=ranks, lines=lines, details=told)]
        if end.error is not None:
            what = f"rank {rank} raised {type(end.error).__name__}: {end.error}"
            return [AuditFinding("error", what, ranks=(rank,), lines=_lines_of_error(end.error))]
    waits = [(rank, end.waits) for rank, end in enumerate(ends) if end.waits is not None]
    if not waits:
        return []
    told = tuple(f"rank {rank} waits for {w.what} at {w.line}" for rank, w in waits)
    missing = []
    for meeting, absent in messages.unfinished():
        call = next(iter(meeting.calls.values()))
        gone = [k for k in absent if ends[k].waits is None]
        where = ", ".join(map(str, absent))
        missing.append(
            f"ranks {where} never come to {call.text()} at {call.line}"
            + (" (they have ended)" if gone else "")
        )
    lines = tuple(dict.fromkeys(w.line for _, w in waits))
    what = "ranks wait for each other forever"
    return [
        AuditFinding(
            "deadlock", what, ranks=tuple(r for r, _ in waits), lines=lines, details=told + tuple(missing)
        )
    ]


def _lines_of_error(error: BaseException) -> tuple[str, ...]:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    line = user_line_of(frames[-1]) if frames else ""
    return (line,) if line else ()


def unread(messages: Rendezvous) -> list[AuditFinding]:
    """Messages that no rank received."""
    return [
        AuditFinding(
            "collective",
            f"rank {a} sends rank {b} a message that it never receives",
            ranks=(a, b),
            lines=(line,),
        )
        for a, b, line in messages.unread()
    ]
