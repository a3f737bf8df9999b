"""What parameters take of a step that nothing hides."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.cluster.axes import FSDP, TP
from autoshard.cost.collective import AxisLink
from autoshard.cost.reshard import ReshardCost
from autoshard.ir import TensorType
from autoshard.ir.placement import Layout, Partial, R, Shard
from autoshard.search.problem.exposed_collectives import (
    bare_gather,
    gather_copies,
    is_reduced,
    reduce_chains,
    reduce_copies,
)

MEANINGS = (FSDP, TP)
#: 4 ranks at 1 GB/s outside, 2 ranks at 100 GB/s inside, free copies
COST = ReshardCost((4, 2), (AxisLink(0.0, 1e9, 4), AxisLink(0.0, 1e11, 2)), 1e30)
MATRIX = TensorType((64, 64), "bf16")
SHARE = 0.25


def bare(stored: Layout, used: Layout, type_: TensorType = MATRIX) -> tuple[float, float]:
    """(seconds that stand in the way, seconds of the gather)"""
    table = COST.table(type_, [stored, used])
    row = table.seconds[table.index[stored]]
    return bare_gather(stored, used, row, table, MEANINGS), row.item(table.index[used])


def test_gathers_over_batch_axes_may_hide() -> None:
    for inner in (R, Shard(1)):
        found, whole = bare((Shard(0), inner), (R, inner))
        assert found == 0 and whole > 0


def test_gathers_over_axes_inside_layers_stand_in_the_way() -> None:
    found, whole = bare((R, Shard(0)), (R, R))
    assert found == whole > 0


def test_of_two_messages_that_inside_layers_stands_in_the_way() -> None:
    """The slow axis first, while there is less to gather: it is issued a call earlier, and hides."""
    found, whole = bare((Shard(0), Shard(1)), (R, R))
    outside = bare((Shard(0), Shard(1)), (R, Shard(1)))[1]
    assert 0 < outside < whole
    assert found == pytest.approx(whole - outside)
    # of one dim, the inner axis has to be gathered first
    found, whole = bare((Shard(0), Shard(0)), (R, R))
    assert found == bare((Shard(0), Shard(0)), (Shard(0), R))[1] and 0 < found < whole


def test_a_gradient_whose_first_message_is_shared_keeps_the_second_waiting() -> None:
    row = TensorType((64,), "bf16")
    made: list[Layout] = [(Partial(), Partial()), (Partial(), R), (R, Partial())]
    stored: list[Layout] = [(Shard(0), Shard(0)), (Shard(0), R), (R, Shard(0))]
    table = COST.table(row, [*made, *stored])
    found = reduce_chains(made, stored, table, MEANINGS, SHARE)
    assert found is not None
    first = table.seconds[table.index[made[0]], table.index[Shard(0), Partial()]]
    expected = np.zeros((3, 3))
    expected[0, 0] = first / SHARE
    assert first > 0 and found == pytest.approx(expected)
    assert reduce_chains(made, stored[1:2], table, MEANINGS, SHARE) is None
    assert reduce_chains(made, stored, table, (FSDP, FSDP), SHARE) is None


def test_copies_move_what_is_packed_and_unpacked_twice() -> None:
    assert gather_copies(2.0, 8.0, 10.0) == 2 * (2.0 + 8.0) / 10
    assert reduce_copies(8.0, 10.0) == 1.6


def test_gradients_are_sums_where_ranks_have_other_sequences() -> None:
    assert is_reduced((R, R), (4, 2), MEANINGS) and is_reduced((R, Shard(0)), (4, 2), MEANINGS)
    assert not is_reduced((R, R), (1, 2), MEANINGS)
    assert not is_reduced((Shard(0), R), (4, 2), MEANINGS)
