"""Messages through shared memory: ranks as threads of one process, which know each other by files alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.runtime.transport.shared_memory.arena import Arena, Mapped
from autoshard.runtime.transport.shared_memory.collectives import SharedMemory
from autoshard.runtime.transport.shared_memory.peers import Neighbours, PeerError


def neighbours(ways: int, patience: float = 30.0) -> list[Neighbours]:
    """Ranks that have met, as `runtime.transport.shared_memory.handshake.meet` lets processes."""
    arenas = [Arena() for _ in range(ways)]
    pipes = {(a, b): os.pipe() for a in range(ways) for b in range(ways) if a != b}
    for _, door in pipes.values():
        os.set_blocking(door, False)
    made = []
    for rank in range(ways):
        others = [k for k in range(ways) if k != rank]
        memories = {k: Mapped(os.dup(arenas[k].mapped.fd)) for k in others}
        inlets = {k: pipes[k, rank][0] for k in others}
        outlets = {k: pipes[rank, k][1] for k in others}
        names = {k: 10 + k for k in range(ways)}
        made.append(Neighbours(rank, names, arenas[rank], memories, inlets, outlets, patience))
    return made


def together(ways: int, run: Callable[[SharedMemory], Any], patience: float = 30.0) -> list[Any]:
    ranks = [SharedMemory(near, "group") for near in neighbours(ways, patience)]
    with ThreadPoolExecutor(ways) as pool:
        return list(pool.map(run, ranks))


def memory_of(over: SharedMemory) -> int:
    return over.near._arena._end


def one(over: SharedMemory, kind: str, count: int, number: int) -> tuple[Callable[[], Any], Any]:
    """A collective that was started, and what it must give."""
    ways, rank = over.ways, over.rank
    base = torch.arange(count * ways, dtype=torch.float32) % 97 + number
    whole = [base + k for k in range(ways)]  # what each rank has
    if kind == "gather":
        return over.gather(whole[rank]), torch.cat(whole)
    if kind == "rows":
        return over.gather_rows(whole[rank], lambda rows: torch.stack(list(rows), 1)), torch.stack(whole, 1)
    if kind == "scatter":
        arriving, finish = over.scatter(whole[rank])
        return lambda: finish(arriving()), sum(whole)[rank * count : (rank + 1) * count]  # type: ignore[index]
    if kind == "all_to_all":
        return over.all_to_all(whole[rank]), torch.cat([w.view(ways, -1)[rank] for w in whole])
    if kind == "room":
        room = over.room(count * ways, base)
        assert room is not None
        return over.gather(torch.add(base, rank, out=room)), torch.cat(whole)
    arriving, finish = over.all_reduce(whole[rank], kind)
    expected = torch.stack(whole).sum(0) if kind == "sum" else whole[-1]
    return lambda: finish(arriving()), expected


KINDS = ("gather", "rows", "scatter", "all_to_all", "room", "sum", "max")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from((1, 7, 1500, 40_000)), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
)
def test_any_program_gives_what_it_must(ways: int, program: Sequence[tuple[str, int, int]]) -> None:
    def run(over: SharedMemory) -> bool:
        flying: list[tuple[Callable[[], Any], Any]] = []
        fine = True
        for number, (kind, count, late) in enumerate(program):
            flying.append(one(over, kind, count, number))
            while len(flying) > late:  # the last first, to change their order
                arriving, expected = flying.pop()
                fine = fine and torch.equal(arriving(), expected)
        return fine and all(torch.equal(arriving(), expected) for arriving, expected in flying)

    assert together(ways, run) == [True] * ways


def test_memory_is_used_again() -> None:
    """Nobody is more than a message ahead, so that two of them are all that a rank has."""

    def run(over: SharedMemory) -> int:
        for number in range(40):
            arriving, expected = one(over, "sum", 4096, number)
            assert torch.equal(arriving(), expected)
        return memory_of(over)

    for size in together(3, run):
        assert size <= 4096 + 2 * (3 * 4096 * 4)


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_results_last_while_later_messages_come_and_go(kind: str) -> None:
    """A sum stays where its message lay: it must be nobody's else until it is gone, written to or not."""
    count = 20_000  # more than each rank reduces for itself

    def run(over: SharedMemory) -> bool:
        kept = []
        for number in range(24):
            if number % over.ways == over.rank:
                time.sleep(2e-3)  # the others are ahead, and have changed their result before this one reads
            arriving, expected = one(over, kind, count, number)
            result = arriving()
            fine = torch.equal(result, expected)
            kept.append((fine, result.neg_(), -expected))
            for other in ("gather", "scatter", "sum"):
                later, wanted = one(over, other, count // 2, number)
                kept.append((torch.equal(later(), wanted), torch.zeros(1), torch.zeros(1)))
        return all(fine and torch.equal(result, expected) for fine, result, expected in kept)

    assert together(4, run) == [True] * 4


def test_the_memory_of_results_is_used_again() -> None:
    """As soon as no view of a result is left."""
    count = 20_000

    def run(over: SharedMemory) -> tuple[int, int]:
        sizes = []
        for _ in range(2):
            kept = [one(over, "sum", count, number)[0]()[5:] for number in range(6)]
            sizes.append(memory_of(over))
            del kept
        return sizes[0], sizes[1]

    message = 3 * count * 4
    for first, second in together(3, run):
        assert first >= 6 * message
        assert second <= first + message  # in which the parts of a rank go to and fro


def test_more_messages_than_a_pipe_holds() -> None:
    """A rank that is far ahead takes in what others write, and so they go on."""

    def run(over: SharedMemory) -> bool:
        flying = [one(over, "gather", 1, number) for number in range(4000)]
        return all(torch.equal(arriving(), expected) for arriving, expected in flying)

    assert together(2, run) == [True, True]


def test_halves_are_rounded_once() -> None:
    values = [torch.full((40_000,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]

    def run(over: SharedMemory) -> torch.Tensor:
        arriving, finish = over.all_reduce(values[over.rank], "sum")
        made: torch.Tensor = finish(arriving())
        return made

    for made in together(3, run):
        assert made.eq(258.0).all()  # 256 + 1 is 256 in this type


def test_a_rank_that_has_ended_is_named() -> None:
    ranks = neighbours(2)
    over = SharedMemory(ranks[0], "group")
    arriving = over.gather(torch.ones(3))
    ranks.pop()  # its files are closed with it
    with pytest.raises(PeerError, match="connection closed: rank 11 has ended"):
        arriving()
    with pytest.raises(PeerError, match="connection closed: rank 11 has ended"):
        over.gather(torch.ones(3))


def test_what_a_rank_sent_before_it_ended_arrives() -> None:
    ranks = neighbours(2)
    late = SharedMemory(ranks[0], "group")
    SharedMemory(ranks[1], "group").gather(torch.full((3,), 2.0))
    ranks.pop()
    near = late.near
    number = near.numbers([1])[1]
    assert near.look(1, number, 3, torch.float32).lies.tolist() == [2.0, 2.0, 2.0]


def test_a_rank_that_is_late_is_named() -> None:
    ranks = neighbours(2, patience=0.05)
    with pytest.raises(PeerError, match="timed out: nothing came from rank 11 for 0 s"):
        SharedMemory(ranks[0], "group").gather(torch.ones(3))()


def test_different_programs_are_noticed() -> None:
    first, second = (SharedMemory(near, "group") for near in neighbours(2))
    first.gather(torch.ones(3))
    with pytest.raises(PeerError, match=r"rank 10 sent 12 bytes where 16 are expected"):
        second.gather(torch.ones(4))()


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'product'"):
        SharedMemory(neighbours(2)[0], "group").all_reduce(torch.ones(3), "product")
