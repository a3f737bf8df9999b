"""Which rank owns which stage, and the sizes that makers of schedules accept."""

from __future__ import annotations

from autoshard.errors import UsageError


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: a microbatch goes round the ranks `chunks` times."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Down the ranks and back up, in turns: the last stage of a pair of chunks is where its first one is."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def local_stages(owner: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, ascending."""
    return tuple(tuple(s for s, r in enumerate(owner) if r == rank) for rank in range(ranks))


def check_sizes(name: str, ranks: int, microbatches: int, chunks: int, only: int | None = None) -> None:
    """Raises UsageError for a size below 1, or for another number of chunks than the schedule can have.

    only: the number of chunks that this schedule has; None: any.
    """
    for what, size in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise UsageError(
                f"a pipeline cannot have {size} {what}",
                where=f"schedule {name}",
                hint=f"give at least 1 for {what}",
            )
    if only is not None and chunks != only:
        every = "one stage" if only == 1 else f"{only} stages"
        others = "interleaved, breadth-first and searched take any number of chunks"
        raise UsageError(
            f"{name} needs chunks={only}, not {chunks}",
            where=f"schedule {name}",
            why=f"every rank has {every} in this schedule",
            hint=others if only == 1 else f"give chunks={only}; {others}",
        )
