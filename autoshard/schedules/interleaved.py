"""Interleaved 1F1B (Megatron SC'21, section 2.2.2): several stages per rank, and a smaller bubble for it."""

from __future__ import annotations

from itertools import pairwise

from autoshard.schedules.placement import check_sizes, looped
from autoshard.schedules.schedule import Action, Schedule


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Groups of microbatches go through all chunks of a rank in turn, one forward and one backward each.

    The paper has groups of `ranks` microbatches. Where that does not divide, there are as many groups as
    whole ones would be, as even as can be: none is smaller than `ranks`, so none leaves a gap when the
    rank turns to its next chunk, at the price of holding some more microbatches. Fewer microbatches than
    ranks are one group. With one chunk it is 1F1B.

    Raises UsageError for a size below 1.
    """
    check_sizes("interleaved", ranks, microbatches, chunks)
    groups = _groups(ranks, microbatches)
    forward = [(c, m) for group in groups for c in range(chunks) for m in group]
    backward = [(c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    # A rank's first backward must not come before the last chunk has its first microbatch: the largest
    # group comes first, so that this number of forwards ahead is enough for all later groups.
    ahead = (chunks - 1) * len(groups[0])
    # A chunk's results go round the ranks once more before they come back, hence two steps per rank.
    per_rank = 2 if chunks > 1 else 1
    rows = []
    for rank in range(ranks):
        warm_up = min(ahead + per_rank * (ranks - 1 - rank), len(forward))
        fs = [Action("F", c * ranks + rank, m) for c, m in forward]
        bs = [Action("B", c * ranks + rank, m) for c, m in backward]
        row = fs[:warm_up]
        for f, b in zip(fs[warm_up:], bs, strict=False):
            row += [f, b]
        rows.append(tuple(row + bs[len(fs) - warm_up :]))
    return Schedule("interleaved", microbatches, looped(ranks, chunks), tuple(rows))


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Runs of consecutive microbatches, the larger ones first."""
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    starts = [g * size + min(g, more) for g in range(count + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
