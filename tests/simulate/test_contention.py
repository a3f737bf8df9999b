"""Messages of several axes over the same links."""

from __future__ import annotations

import pytest

from autoshard.cluster import load_cluster
from autoshard.cluster.mesh import Mesh
from autoshard.cost.collective import seconds
from autoshard.cost.link import AxisLink, LevelShare, link_of
from autoshard.simulate.contention import Message, delays, demand
from autoshard.simulate.streams import Habits, Player, SegmentCall
from autoshard.simulate.work import CollectiveWork, MemoryWork, OpTask, Sheet, Work

FULL = {"network": 1.0}


@pytest.mark.parametrize(
    ("second", "delayed"),
    [
        (Message(4.0, 2.0, 2, FULL), [2.0, 2.0]),  # the second at half its rate, all the time
        (Message(8.0, 9.0, 2, FULL), [2.0, 2.0]),  # until the first is there
        (Message(10.0, 9.0, 2, FULL), [0.0, 0.0]),
        (Message(4.0, 2.0, 2, {"network": 0.5}), [1.0, 1.0]),  # three halves are asked for
        (Message(4.0, 2.0, 2, {"nvlink": 1.0}), [0.0, 0.0]),
        (Message(4.0, 2.0, 1, FULL), [0.0, 0.0]),  # after the first, of one stream
        (Message(0.0, 10.0, 2, FULL), [10.0, 10.0]),
    ],
)
def test_two_messages(second: Message, delayed: list[float]) -> None:
    assert delays([Message(0.0, 10.0, 1, FULL), second]) == pytest.approx(delayed)


def test_links_carry_as_much_as_they_can() -> None:
    """However messages come, all of a level that is never idle take as long as one after the other."""
    messages = [Message(0.3 * k, 1.0 + 0.1 * (k % 7), k % 3, FULL) for k in range(40)]
    added = delays(messages)
    queued = dict.fromkeys(range(3), 0.0)
    for message, more in zip(messages, added, strict=True):
        queued[message.stream] = max(queued[message.stream], message.start) + message.seconds + more
    assert max(queued.values()) == pytest.approx(sum(m.seconds for m in messages))


def test_levels_that_collectives_of_an_axis_fill() -> None:
    """Of 16 H100 in two nodes: rings of eight ranks in each node go over all cards, a little faster than
    NVLink; pairs leave over one card."""
    cluster = load_cluster("h100-dgx")
    wide = link_of(cluster, Mesh.parse("fsdp=16"), 0)
    ring, pairs = demand("all_gather", 1e9, wide), demand("all_to_all", 1e9, wide)
    assert set(ring) == set(pairs) == {share.name for share in wide.crossed} and len(ring) == 2
    inside, across = (share.name for share in wide.crossed)
    assert 0.7 < ring[across] <= ring[inside] <= 1.0
    assert pairs[inside] < 0.3 < 0.9 < pairs[across] <= 1.0
    assert demand("all_gather", 64.0, wide).get(across, 0.0) < 0.1  # all latency


def test_a_gather_and_an_exchange_share_the_network() -> None:
    """A gather of 10 s, an exchange of 2 s, and 30 s of computing with what it brings."""
    tasks = (
        OpTask("w", "op", CollectiveWork("all_gather", 0, 20e9), (), (0,)),
        OpTask("x", "op", CollectiveWork("all_to_all", 1, 4e9), (), (1,)),
        OpTask("y", "op", MemoryWork(30.0), (1,), ()),
        OpTask("z", "op", MemoryWork(1.0), (0, 2), ()),
    )
    calls = [SegmentCall(Sheet(tasks, (3,)), ("p", "a"), ("z",))]
    links = [AxisLink(0.0, 1e9, 2, crossed=(LevelShare(level, 1e9, 1),)) for level in ("network", "nvlink")]

    def price(work: Work) -> float:
        messages = isinstance(work, CollectiveWork)
        return seconds(work.kind, work.nbytes, work.link(links)) if messages else work.nbytes

    def played(*on: AxisLink) -> float:
        return Player(price, (2, 2), Habits(late=True), links=on).play(calls, {"p"}, ()).seconds

    assert played(*links) == 2 + 30 + 1
    assert played(links[0], links[0]) == pytest.approx(4 + 30 + 1)
