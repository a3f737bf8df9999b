"""Interleaved 1F1B (Megatron SC'21, section 2.2.2): several stages per rank, and a smaller bubble for it."""

from __future__ import annotations

from itertools import pairwise

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule
from autoshard.schedules.spec import PipeSize, ScheduleSpec, StepTimes


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Groups of microbatches go through all chunks of a rank in turn, one forward and one backward each.

    The paper has groups of `ranks` microbatches. Where that does not divide, there are as many groups as
    whole ones would be, as even as can be: none is smaller than `ranks`, so none leaves a gap when the
    rank turns to its next chunk, at the price of holding some more microbatches. Fewer microbatches than
    ranks are one group. With one chunk it is 1F1B.

    Raises UsageError for a size below 1.
    """
    check_sizes("interleaved", ranks, microbatches, chunks)
    rows, _ = _rows(ranks, microbatches, chunks)
    return Schedule("interleaved", microbatches, looped(ranks, chunks), rows)


def interleaved_overlap(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The same with one more forward ahead, so that every forward runs as one with the backward behind it.

    Megatron Core 2026 does so (`overlap_moe_expert_parallel_comm`). What both give is there when both are
    done: with one chunk a microbatch comes back a forward later per rank than with 1F1B, and rank r holds
    min(2 (ranks - r), microbatches). Raises UsageError for a size below 1.
    """
    name = "interleaved-overlap"
    check_sizes(name, ranks, microbatches, chunks)
    rows, paired = _rows(ranks, microbatches, chunks, more=1)
    return Schedule(name, microbatches, looped(ranks, chunks), rows, paired=paired)


def _rows(
    ranks: int, microbatches: int, chunks: int, more: int = 0
) -> tuple[tuple[tuple[Action, ...], ...], frozenset[Action]]:
    """(actions of every rank, forwards with a backward of another microbatch behind them).

    more: forwards ahead of the first backward that nothing waits for.
    """
    groups = _groups(ranks, microbatches)
    forward = [(c, m) for group in groups for c in range(chunks) for m in group]
    backward = [(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    # A rank's first backward must not come before the last chunk has its first microbatch: the largest
    # group comes first, so that this number of forwards ahead is enough for all later groups.
    ahead = (chunks - 1) * len(groups[0])
    # A chunk's results go round the ranks once more before they come back, hence two steps per rank.
    per_rank = 2 if chunks > 1 or more else 1
    rows, paired = [], set[Action]()
    for rank in range(ranks):
        warm_up = min(ahead + per_rank * (ranks - 1 - rank) + more, len(forward))
        fs = [Action("F", c * ranks + rank, m) for c, m in forward]
        bs = [Action("B", c * ranks + rank, m) for c, m in backward]
        row = fs[:warm_up]
        for f, b in zip(fs[warm_up:], bs, strict=False):
            row += [f, b]
            paired |= {f} if f.microbatch != b.microbatch else set()
        rows.append(tuple(row + bs[len(fs) - warm_up :]))
    return tuple(rows), frozenset(paired)


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Runs of consecutive microbatches, the larger ones first."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    starts = [g * size + min(g, more) for g in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def interleaved_bubble(size: PipeSize, times: StepTimes) -> float | None:
    """Megatron SC'21, section 2.2.2; with at least as many microbatches as ranks."""
    enough = size.microbatches >= size.ranks or size.chunks == 1
    return size.waits * times.total / size.chunks if enough else None


def interleaved_filling(size: PipeSize) -> float:
    """With few microbatches the first has to come down through all stages."""
    few = size.ranks - size.microbatches
    return max(size.waits / size.chunks, few + (size.microbatches - 1) / size.chunks)


def _in_flight(size: PipeSize) -> float:
    # groups no smaller than the pipeline, the largest of them ahead
    group = -(-size.microbatches // max(1, size.microbatches // size.ranks))
    most = group + (2 * size.ranks - 1 - group) / size.chunks
    return min(float(size.microbatches), most)


def _in_flight_overlapped(size: PipeSize) -> float:
    most = 2.0 * size.ranks if size.chunks == 1 else _in_flight(size) + 1 / size.chunks
    return min(float(size.microbatches), most)


INTERLEAVED = ScheduleSpec(
    "interleaved",
    interleaved,
    default_chunks=2,
    bubble=interleaved_bubble,
    filling=interleaved_filling,
    in_flight=_in_flight,
    tried=(2, 4),
    also=("1f1b-i",),
    overlapped="interleaved-overlap",
)

INTERLEAVED_OVERLAP = ScheduleSpec(
    "interleaved-overlap",
    interleaved_overlap,
    default_chunks=2,
    bubble=interleaved_bubble,
    filling=interleaved_filling,
    in_flight=_in_flight_overlapped,
)
