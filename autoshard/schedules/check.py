"""Is a schedule one that can run: complete, in order, and without ranks waiting for each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import itemgetter

from autoshard.errors import VerificationError
from autoshard.schedules.schedule import Action, Schedule


def check(schedule: Schedule) -> None:
    """Raises VerificationError, naming rank and action, unless the lists can be run to their ends.

    Every stage does every microbatch forward once and backward once (B, or I and W) on the rank that owns
    it, microbatches in order, and a run of the lists with what each action waits for (see
    `autoshard.schedules.schedule`) comes to an end, those that are paired as one.
    """
    _check_owners(schedule)
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.actions):
        following: dict[tuple[str, int], int] = {}
        for action in row:
            _check_place(schedule, rank, action)
            if action in seen:
                raise _wrong(schedule, rank, action, "is there twice")
            seen[action] = rank
            if action.kind == "W":
                continue
            key = ("F" if action.kind == "F" else "B", action.stage)
            expected = following.get(key, 0)
            gone = expected >= schedule.microbatches * schedule.slices
            due = action if gone else _due(schedule, action, expected)
            if gone or action != due:
                raise _wrong(schedule, rank, action, "is there again" if gone else f"comes before {due}")
            following[key] = expected + 1
    _check_complete(schedule, seen)
    _check_pairs(schedule)
    _check_runs(schedule)


def _due(schedule: Schedule, action: Action, number: int) -> Action:
    """The action of this kind and stage that comes after ``number`` others of them."""
    microbatch, part = divmod(number, schedule.slices)
    part = part if action.kind == "F" else schedule.slices - 1 - part
    return Action(action.kind, action.stage, microbatch, part)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs it holds at once: from their F to the end of B or W.

    With slices, (stage, microbatch, slice). What has arrived from another rank and waits to be used is not
    counted.
    """
    peaks = []
    for row in schedule.actions:
        held = peak = 0
        for action in row:
            if action.kind == "F":
                held += 1
                peak = max(peak, held)
            elif action.kind in "BW":
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def in_flight_of_stages(schedule: Schedule, ends: str = "BW") -> tuple[int, ...]:
    """Per stage, the most microbatches between the start of their F and the end of an action in ``ends``.

    With slices, the most slices of microbatches. ends: ``BW`` for what is held until the weight gradient,
    ``BI`` for what the input gradient frees.
    """
    now, most = [0] * schedule.stages, [0] * schedule.stages
    for row in schedule.actions:
        for action in row:
            if action.kind == "F":
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind in ends:
                now[action.stage] -= 1
    return tuple(most)


def _wrong(schedule: Schedule, rank: int, action: Action, what: str) -> VerificationError:
    return VerificationError(f"{action} {what}", where=f"schedule {schedule.name}, rank {rank}, {action}")


def _check_owners(schedule: Schedule) -> None:
    where = f"schedule {schedule.name}"
    if min(schedule.microbatches, schedule.slices) < 1 or not schedule.owner or not schedule.actions:
        raise VerificationError("a schedule needs a microbatch, a slice, a stage and a rank", where=where)
    for stage, rank in enumerate(schedule.owner):
        if not 0 <= rank < schedule.ranks:
            raise VerificationError(
                f"stage {stage} is on rank {rank}", where=where, why=f"there are {schedule.ranks} ranks"
            )


def _check_pairs(schedule: Schedule) -> None:
    paired = set(schedule.paired)
    for rank, row in enumerate(schedule.actions):
        for action, behind in zip(row, (*row[1:], None), strict=True):
            if action in paired:
                apart = behind is None or behind.kind != "B" or behind.microbatch == action.microbatch
                if action.kind != "F" or apart:
                    raise _wrong(schedule, rank, action, f"cannot run as one with {behind or 'nothing'}")
                paired.discard(action)
    for action in paired:
        raise _wrong(schedule, 0, action, "is paired, and nowhere")


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if action.kind not in ("F", "B", "I", "W"):
        raise _wrong(schedule, rank, action, "is of no known kind")
    if not 0 <= action.stage < schedule.stages:
        raise _wrong(schedule, rank, action, f"is of none of the {schedule.stages} stages")
    if not 0 <= action.microbatch < schedule.microbatches:
        raise _wrong(schedule, rank, action, f"is of none of the {schedule.microbatches} microbatches")
    if not 0 <= action.slice < schedule.slices:
        raise _wrong(schedule, rank, action, f"is of none of the {schedule.slices} slices")
    if schedule.owner[action.stage] != rank:
        owner = schedule.owner[action.stage]
        raise _wrong(schedule, rank, action, f"belongs on rank {owner}, which owns stage {action.stage}")


def _check_complete(schedule: Schedule, seen: dict[Action, int]) -> None:
    for stage, rank in enumerate(schedule.owner):
        for m, part in product(range(schedule.microbatches), range(schedule.slices)):
            f, b, i, w = (Action(kind, stage, m, part) for kind in ("F", "B", "I", "W"))
            if f not in seen:
                raise _wrong(schedule, rank, f, "is missing")
            if b in seen and (i in seen or w in seen):
                raise _wrong(schedule, rank, b, f"is there beside {i if i in seen else w}")
            if b not in seen and i not in seen:
                raise _wrong(schedule, rank, i if w in seen else b, "is missing")
            if i in seen and w not in seen:
                raise _wrong(schedule, rank, w, "is missing")


def _check_runs(schedule: Schedule) -> None:
    """Run the lists with a queue of ranks that may go on; a rank that cannot waits for one action."""
    m, last = schedule.microbatches * schedule.slices, schedule.stages - 1
    behind = schedule.slices - 1
    forward, backward = bytearray(schedule.stages * m), bytearray(schedule.stages * m)
    split = bytearray(schedule.stages * m)
    at = [0] * schedule.ranks
    queue, waiting = list(range(schedule.ranks)), dict[int, Action]()

    def ready(action: Action) -> bool:
        here = action.stage * m + schedule.unit(action)
        if action.kind == "F":
            return not action.stage or bool(forward[here - m])
        if action.kind == "W":
            return bool(split[here])
        full = forward[here - action.slice + behind]
        return bool(full and (action.stage == last or backward[here + m]))

    while queue:
        rank = queue.pop()
        turns = schedule.turns[rank]
        while at[rank] < len(turns):
            turn = turns[at[rank]]
            missing = next((action for action in turn if not ready(action)), None)
            if missing is not None:
                waiting[rank] = missing
                break
            at[rank] += 1
            for action in turn:
                here, wakes = action.stage * m + schedule.unit(action), -1
                if action.kind == "F":
                    forward[here] = 1
                    wakes = action.stage + 1 if action.stage < last else -1
                elif action.kind != "W":
                    backward[here] = 1
                    split[here] = action.kind == "I"
                    wakes = action.stage - 1
                if wakes >= 0 and waiting.pop(schedule.owner[wakes], None) is not None:
                    queue.append(schedule.owner[wakes])
    if not waiting:
        return
    stuck = sorted(waiting.items(), key=itemgetter(0))
    # Whoever waits for its own rank waits for something later in its list, and the others for that.
    rank, action = min(stuck, key=lambda s: schedule.owner[_missing(schedule, s[1], forward)[0]] != s[0])
    needed = _missing(schedule, action, forward)[1]
    raise _wrong(schedule, rank, action, f"waits for {needed}, which never comes")


def _missing(schedule: Schedule, action: Action, forward: bytearray) -> tuple[int, str]:
    """What an action that cannot run waits for: its stage, and its name."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return stage - 1, str(replace(action, stage=stage - 1))
    if action.kind == "W":
        return stage, str(replace(action, kind="I"))
    last = Action("F", stage, microbatch, schedule.slices - 1)
    if not forward[stage * schedule.microbatches * schedule.slices + schedule.unit(last)]:
        return stage, str(last)
    part = f", slice {action.slice}" if schedule.slices > 1 else ""
    return stage + 1, f"the backward of stage {stage + 1}, microbatch {microbatch}{part}"
