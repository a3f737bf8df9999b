"""Messages across layers: how many are left, how large they get, which stay as they are, equal numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from families import family
from lockstep_check import compare_step
from planned import planned

from autoshard.api import compile_analysed
from autoshard.ir import DTYPES, Call, Node
from autoshard.ir.collectives import BUCKET_BYTES, kind_of
from autoshard.planner import lowering as emitting
from autoshard.planner.planned import Planned
from autoshard.program.program import Program
from autoshard.verify.static import verify_static


def _main(made: Program, kind: str) -> list[Node]:
    """The messages of a kind that stand outside of calls."""
    return [i for i in made.lowered.main if isinstance(i, Node) and kind_of(i) == kind]


def _sent(made: Program) -> Counter[str]:
    """How often a step sends messages of each kind."""
    found: Counter[str] = Counter()
    for item in made.lowered.main:
        nodes = made.lowered.segments[item.segment].graph.nodes if isinstance(item, Call) else [item]
        found.update(kind for n in nodes if (kind := kind_of(n)))
    return found


def _apart(plan: Planned, monkeypatch: pytest.MonkeyPatch) -> Program:
    with monkeypatch.context() as patched:
        patched.setattr(emitting, "_joined", lambda cluster, plan: 0)
        return compile_analysed(plan)


@pytest.mark.parametrize(
    ("name", "mesh", "fewer"),
    [
        ("llama", "fsdp=4", ("all_gather", "reduce_scatter")),
        ("t5", "fsdp=2", ("all_gather", "reduce_scatter")),
        ("gpt2", "dp=2,fsdp=2", ("all_gather",)),
        ("mixtral", "fsdp=4", ("all_gather", "reduce_scatter")),
    ],
)
def test_fewer_messages_and_the_same_numbers(
    name: str, mesh: str, fewer: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(name, mesh)
    made, apart = compile_analysed(plan), _apart(plan, monkeypatch)
    assert all(_sent(made)[kind] < _sent(apart)[kind] for kind in fewer)
    assert sum(_sent(made).values()) < sum(_sent(apart).values())
    assert verify_static(made).ok
    model, inputs = family(name).make()
    assert max(compare_step(made, model, inputs).values()) < 1e-4


def test_a_message_is_sent_once_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2**16
    monkeypatch.setattr(emitting, "BUCKET_BYTES", limit)
    made = compile_analysed(planned("t5", "fsdp=2"))
    for kind in ("all_gather", "reduce_scatter"):
        messages = [n for n in _main(made, kind) if len(n.outs) > 1]
        assert len(messages) > 1
        for node in messages:
            # a gather makes whole parameters, a reduction is of whole gradients
            assert sum(t.numel * DTYPES[t.dtype][1] for t in node.types) <= limit
    assert verify_static(made).ok


def test_devices_that_send_beside_computing_keep_a_message_for_each_layer() -> None:
    made = compile_analysed(planned("llama", "fsdp=4", "h100-dgx"))
    assert not _main(made, "all_gather") and not _main(made, "reduce_scatter")


@pytest.mark.parametrize("off", ["bucket", "overlap"])
def test_off_with_what_it_goes_beyond(off: str) -> None:
    made = compile_analysed(planned("llama", "fsdp=4"), **{off: False})
    assert not any(len(n.outs) > 1 for n in _main(made, "all_gather"))


def test_little_memory_means_small_messages() -> None:
    plan = planned("llama", "fsdp=4")
    cluster = plan.cluster
    assert emitting._joined(cluster, plan.plan) == BUCKET_BYTES
    assert emitting._joined(cluster, replace(plan.plan, budget=2**20)) == 2**20 // 32


def test_what_is_reduced_once_more_stays_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama", "dp=2,fsdp=2")
    made, apart = compile_analysed(plan), _apart(plan, monkeypatch)
    assert _sent(made)["reduce_scatter"] == _sent(apart)["reduce_scatter"] > 1
    assert _sent(made)["all_reduce"] == _sent(apart)["all_reduce"] >= 1
