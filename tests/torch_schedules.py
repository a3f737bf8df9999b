"""The orders of torch.distributed.pipelining as our schedules, to compare with.

The one file that uses private things of torch.distributed.pipelining: what a stage has to have, the lists
that its schedules keep (`pipeline_order`), and `_step_microbatches`. Tried on torch 2.13.0.

No process group is needed: the schedules get stand-ins for stages. GPipe and 1F1B are run on stand-ins that
write down what they are asked to compute, because `Schedule1F1B._get_pipeline_order` leaves out the first
forward of the last rank. The others are asked for the lists that they were built with.
"""

from __future__ import annotations

from typing import Any

from autoshard.errors import UsageError
from autoshard.schedules.placement import looped, v_shaped
from autoshard.schedules.schedule import Action, Schedule

#: our name: torch's class, and whether it takes one stage per rank
_CLASSES = {
    "gpipe": ("ScheduleGPipe", True),
    "1f1b": ("Schedule1F1B", True),
    "interleaved": ("ScheduleInterleaved1F1B", False),
    "breadth-first": ("ScheduleLoopedBFS", False),
    "interleaved-zero-bubble": ("ScheduleInterleavedZeroBubble", False),
    "zb-v": ("ScheduleZBVZeroBubble", False),
}


def torch_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """What torch's own schedule would compute, in its order.

    name: gpipe, 1f1b, interleaved, breadth-first, zb-v, or interleaved-zero-bubble (with one chunk, ZB1P).
    breadth-first goes through the backwards of a chunk from the last microbatch to the first; here they
    are numbered in the order in which they come, as `autoshard.schedules.check` wants them. Times of equal
    microbatches are the same.

    Raises UsageError for a name or size that torch has no schedule for.
    """
    import torch.distributed.pipelining.schedules as torch_schedules

    if name not in _CLASSES:
        raise UsageError(f"torch has no schedule {name!r}", why=f"it has {', '.join(_CLASSES)}")
    class_name, single = _CLASSES[name]
    if single and chunks != 1:
        raise UsageError(f"torch's {class_name} takes chunks=1, not {chunks}", where=f"schedule {name}")
    cls: Any = getattr(torch_schedules, class_name)
    owner = v_shaped(ranks, chunks) if name == "zb-v" else looped(ranks, chunks)
    try:
        if single:
            rows = [_recorded(cls, rank, ranks, microbatches) for rank in range(ranks)]
        else:
            stages = [_Stage(s, 0, ranks, len(owner)) for s, rank in enumerate(owner) if rank == 0]
            order = cls(stages, microbatches).pipeline_order
            rows = [[_action(a) for a in order[rank] if a is not None] for rank in range(ranks)]
    except ValueError as error:
        raise UsageError(
            f"torch's {class_name} refuses {microbatches} microbatches on {ranks} ranks with {chunks} stages",
            where=f"schedule {name}",
            why=str(error),
        ) from error
    if name == "breadth-first":
        rows = [[_turned(a, microbatches) for a in row] for row in rows]
    return Schedule(f"torch {name}", microbatches, owner, tuple(map(tuple, rows)))


class _Stage:
    """What torch's schedules read of a stage, and a note of what they tell it to do."""

    submod = None
    has_backward = True

    def __init__(self, stage: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank = stage, rank
        self.group_size, self.num_stages = ranks, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.told: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.told.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.told.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, scale: int) -> None:
        """Data parallelism: no part of the order."""

    def _no_transfers(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers


def _recorded(cls: Any, rank: int, ranks: int, microbatches: int) -> list[Action]:
    """What a schedule of one stage per rank does in a step."""
    stage = _Stage(rank, rank, ranks, ranks)
    schedule = cls(stage, microbatches)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.told


def _action(action: Any) -> Action:
    return Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def _turned(action: Action, microbatches: int) -> Action:
    """A backward numbered from the other end."""
    if action.kind == "F":
        return action
    return Action(action.kind, action.stage, microbatches - 1 - action.microbatch)
