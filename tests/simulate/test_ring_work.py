"""What is simulated of attention with keys that go as far as a window, beside what it does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoshard.cluster import Mesh
from autoshard.ir import Node, Ref, TensorType
from autoshard.ir.collectives import RING_ATTENTION, RING_ATTENTION_BACKWARD
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Shard
from autoshard.ir.window_hops import WindowHops
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.op_work import Ops
from autoshard.simulate.rings import alone, apart, beats, room
from autoshard.simulate.work import Attention, CollectiveWork, Work

B, H, KEYS, T, D, WAYS = 2, 8, 2, 4096, 64, 4
OPS = Ops(Mesh.parse(f"cp={WAYS}"), (0,), Behaviour())


def _ring(window: int, causal: bool, zigzag: bool, backward: bool) -> tuple[Node, dict[str, PlacedValue]]:
    def placed(shape: Sequence[int], dim: int, dtype: str = "bf16") -> PlacedValue:
        return PlacedValue(TensorType(tuple(shape), dtype), (Shard(dim, -2 if zigzag else 1),))

    rows, keys = placed((B, H, T, D), 2), placed((B, KEYS, 1, T, D), 3)
    values = {"q": rows, "k": keys, "v": keys, "o": rows, "l": placed((B, H, T), 2, "f32")}
    names, outs = ("q", "k", "v"), ("o", "l")
    if backward:
        values |= {"g": rows, "gq": rows, "gk": keys, "gv": keys}
        names, outs = ("g", "q", "k", "v", "o", "l"), ("gq", "gk", "gv")
    hops = WindowHops.over(T, WAYS, window, causal=causal, zigzag=zigzag).count
    args = (tuple(map(Ref, names)), "cp", causal, 0.125, 0.0, window, zigzag, hops)
    op = RING_ATTENTION_BACKWARD.op if backward else RING_ATTENTION.op
    return Node(op, args, (), outs, tuple(values[o].type for o in outs)), values


ORDERS = [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize(("causal", "zigzag"), ORDERS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("window", "contiguous", "halves"), [(1, 0, 0), (512, 1, 1), (1025, 1, 2), (1100, 2, 3)]
)
def test_hops_and_pairs_are_those_of_the_window(
    causal: bool, zigzag: bool, backward: bool, window: int, contiguous: int, halves: int
) -> None:
    """As many bytes as positions in reach, and as many FLOP as pairs: of a rank in the middle."""
    made = _ring(window, causal, zigzag, backward)
    found = [b.work for b in beats(*made, OPS)]
    sent = [w.nbytes for w in found if isinstance(w, CollectiveWork)]
    assert len(sent) == (halves if zigzag else contiguous) * (1 + backward)
    sides, blocks = (1 if causal else 2), (2 if zigzag else 1)
    of_position = 2 * B * KEYS * D * 2
    assert sum(sent) == of_position * (window - 1) * sides * blocks * (1 + backward)
    flop = sum(w.flop for w in found if isinstance(w, Attention))
    pairs = (window if causal else 2 * window - 1) * T / WAYS
    assert flop == pytest.approx((2.5 if backward else 1) * 4.0 * B * H * D * pairs)


def _price(work: Work) -> float:
    if isinstance(work, CollectiveWork):
        return work.nbytes * 1e-9
    return work.flop * 1e-12 if isinstance(work, Attention) else 0.0


@pytest.mark.parametrize("backward", [False, True])
def test_a_window_costs_less_than_a_round(backward: bool) -> None:
    """Fewer bytes, less time, and less memory than with all keys."""
    node, values = _ring(256, True, True, backward)
    full = Node(node.op, node.args[:4], (), node.outs, node.types)
    short, round_ = (beats(each, values, OPS) for each in (node, full))
    sent = [sum(b.work.nbytes for b in x if isinstance(b.work, CollectiveWork)) for x in (short, round_)]
    assert 0 < 4 * sent[0] < sent[1]
    # as one message, of which a rank sends all but its own part
    together = [w.nbytes for w in apart(node, values, OPS) if isinstance(w, CollectiveWork)]
    assert together == [pytest.approx(sent[0] * WAYS / (WAYS - 1))]
    assert alone(short, _price, 1.0) < alone(round_, _price, 1.0)
    assert room(node, values, OPS) < room(full, values, OPS)


def test_hops_are_beside_computing() -> None:
    """In forward all but what is longer than a rank's own keys; in backward the last way home is not."""

    def price(work: Work) -> float:
        return 1.0 if isinstance(work, CollectiveWork) else 2.0 if isinstance(work, Attention) else 0.0

    forward, backward = (beats(*_ring(512, True, False, b), OPS) for b in (False, True))
    assert alone(forward, price, 1.0) == 4.0
    assert alone(backward, price, 1.0) == 5.0
