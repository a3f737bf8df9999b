"""Static verification: all ranks' programs are proved without running them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from families import family
from hypothesis import given
from hypothesis import strategies as st
from pipelines import pipeline
from planned import planned, program
from rule_samples import all_samples
from sliced import program_of
from slow_links import slow_cluster
from torch import nn

from autoshard import api
from autoshard.cluster import Mesh
from autoshard.errors import UsageError
from autoshard.interop.targets import build
from autoshard.ir import Node, Ref, TensorType
from autoshard.ir.lowered import PlacedValue
from autoshard.ir.placement import Layout, P, Partial, R, Shard, local_extent
from autoshard.program.original import original_text
from autoshard.program.store import load_program, save_program
from autoshard.rules.local import MeshShape
from autoshard.rules.registry import RULES
from autoshard.rules.states import op_states
from autoshard.search.plan.plan import Recompute
from autoshard.verify.indices import cover, held, in_units, splits_of, unit_of
from autoshard.verify.lockstep import verify
from autoshard.verify.moves import broken_moves
from autoshard.verify.order import rendezvous
from autoshard.verify.rule_check import digits_of, make_call
from autoshard.verify.scale_down import shrunk
from autoshard.verify.scaled_down_model import small_mesh, verify_twin
from autoshard.verify.states import broken_state
from autoshard.verify.static import verify_static

S0, S1 = Shard(0), Shard(1)
SAMPLES = list(all_samples())


PIPES: Sequence[tuple[str, str, str, int, bool]] = (
    ("gpt2", "dp=2,tp=2", "1f1b", 1, False),
    ("llama", "fsdp=2,tp=2", "gpipe", 1, True),
    ("gpt2", "tp=2", "zb-h1", 1, False),
    ("llama", "dp=2", "zb-v", 2, False),
    ("t5", "fsdp=2", "interleaved", 2, False),
    ("bert", "tp=2", "1f1b", 1, False),
    ("mixtral", "fsdp=2,tp=2", "1f1b", 1, True),
    ("vit", "dp=2", "breadth-first", 2, False),
)


@pytest.mark.parametrize(("name", "mesh", "schedule", "chunks", "keep"), PIPES)
def test_pipelines_are_proved(name: str, mesh: str, schedule: str, chunks: int, keep: bool) -> None:
    report = verify_static(pipeline(name, 2, mesh, schedule, 4, chunks, 0, keep))
    assert report.ok, report.findings[0]
    assert not report.uncovered
    assert report.ranks == 2 * Mesh.parse(mesh).world_size


SLICED: Sequence[tuple[str, str, int, str]] = (
    ("llama", "tp=2", 2, ""),
    ("gpt2", "dp=2,tp=2", 4, ""),
    ("llama+padding", "tp=2", 2, ""),
    ("llama", "fsdp=2", 4, "full"),
    ("mixtral", "fsdp=2", 2, ""),
)


@pytest.mark.parametrize(("name", "mesh", "slices", "again"), SLICED)
def test_slices_of_the_sequence_are_proved(name: str, mesh: str, slices: int, again: str) -> None:
    more = {"recompute": {"layers_fwd": Recompute("full", 2)}} if again else {}
    report = verify_static(program_of(name, 2, mesh, slices, 2, **more))
    assert report.ok, report.findings[0]
    assert not report.uncovered


@pytest.mark.parametrize("way", ["levels", "copy=node", "copy=node,once,gradients=node"])
def test_collectives_level_by_level_are_proved(way: str) -> None:
    """After the gather over the outer axis, the inner one holds blocks of blocks: no message for that."""
    model, inputs = family("llama").make()
    made = api.plan(
        model,
        "pp=2,fsdp=4",
        example_inputs=inputs,
        cluster=slow_cluster(nodes_of=2),
        schedule="1f1b",
        microbatches=2,
    )
    # every parameter gathered anew for every use, so that there is something to keep a copy of
    params = {k: replace(p, keep=False, late=p.stored == p.use) for k, p in made.plan.params.items()}
    made = replace(made, plan=replace(made.plan, params=params))
    report = verify_static(api.compile_analysed(made, hierarchy=way))
    assert report.ok, report.findings[0]
    assert report.ranks == 8 and not report.uncovered


def test_fewer_bits_are_noted_and_not_called_equal() -> None:
    model, inputs = family("llama").make()
    made = api.plan(model, "fsdp=4", example_inputs=inputs, cluster=slow_cluster())
    report = verify_static(api.compile_analysed(made, allow="int8-weights,int4-gradients"))
    assert report.ok
    note = next(c.note for c in report.checked if c.name == "collectives")
    assert "rounded" in note


def test_kernels_that_stand_for_chains_are_named_as_not_covered() -> None:
    report = verify_static(api.compile_analysed(planned("llama", "dp=2,tp=2"), kernels=True))
    assert report.ok and [c.name for c in report.uncovered] == ["function"]


def test_a_stored_program_is_proved_as_the_one_in_memory(tmp_path: Path) -> None:
    made = program("llama", "dp=2,tp=2")
    save_program(made, tmp_path / "p")
    read = load_program(tmp_path / "p")
    assert verify_static(read).ok
    assert read.original is not None and made.original is not None
    texts = [original_text(p.original, p.signature, p.original_notes) for p in (made, read) if p.original]
    assert texts[0] == texts[1]


def test_without_its_model_a_program_is_not_called_proved() -> None:
    report = verify_static(replace(program("llama", "dp=2,tp=2"), original=None))
    assert [c.name for c in report.uncovered] == ["placements", "function"]


# -- states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, len(SAMPLES), 7))
def test_membership_is_what_enumeration_says(number: int) -> None:
    """Every state that the rules enumerate is one; with one placement changed it is only if enumerated."""
    call = make_call(SAMPLES[number])
    rule = RULES[call.node.op](call.node, call.ins)
    for sizes in ((2,), (3,), (2, 2)):
        mesh = MeshShape(tuple("abc"[: len(sizes)]), sizes)
        parts = digits_of(rule)
        states = op_states(rule, call.ins, call.node.types, parts, sizes, lambda axis, classes: True)
        known = {(s.inputs, s.outputs) for s in states}
        for state in states[:60]:
            assert broken_state(rule, call.ins, call.node.types, state.inputs, state.outputs, mesh) is None
        for state in states[:12]:
            for inputs, outputs in _neighbours(state.inputs, state.outputs):
                told = broken_state(rule, call.ins, call.node.types, inputs, outputs, mesh)
                assert (told is None) == ((inputs, outputs) in known), (state, inputs, outputs, told)


def _neighbours(
    inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...]
) -> list[tuple[tuple[Layout, ...], tuple[Layout | None, ...]]]:
    """The same with the placement of one tensor on the first axis exchanged."""
    found = []
    for other in (R, P, S0):
        for k, layout in enumerate(inputs):
            if layout and layout[0] != other:
                changed = (*inputs[:k], (other, *layout[1:]), *inputs[k + 1 :])
                found.append((changed, outputs))
        for k, made in enumerate(outputs):
            if made and made[0] != other:
                found.append((inputs, (*outputs[:k], (other, *made[1:]), *outputs[k + 1 :])))
    return found


def test_a_partial_sum_does_not_reach_what_is_not_linear() -> None:
    type_ = TensorType((8, 4), "f32")
    node = Node("aten.relu.default", (Ref("x"),), (), ("y",), (type_,))
    rule = RULES[node.op](node, [type_])
    mesh = MeshShape(("tp",), (2,))
    told = broken_state(rule, [type_], [type_], [(P,)], [(P,)], mesh)
    assert told is not None and told[0] == "partial" and "axis tp" in told[1]
    assert broken_state(rule, [type_], [type_], [(S0,)], [(S0,)], mesh) is None


# -- indices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "splits"),
    [
        (12, ((Shard(0), 2), (Shard(0), 3))),
        (13, ((Shard(0), 4),)),
        (24, ((Shard(0, 3), 2), (Shard(0, 6), 2))),
        (24, ((Shard(0, 2, 4), 3),)),
        (24, ((Shard(0, 6), 2), (Shard(0), 3))),
    ],
)
def test_offsets_and_sizes_are_those_of_the_indices_written_out(
    size: int, splits: tuple[tuple[Shard, int], ...]
) -> None:
    assert cover(size, splits) == ""
    for at in product(*(range(n) for _, n in splits)):
        index = held(size, splits, at)
        shards = [(p, n, c) for (p, n), c in zip(splits, at, strict=True)]
        assert local_extent(size, shards) == (int(index[0]), len(index))


def test_a_split_that_leaves_a_rank_empty_is_no_cover() -> None:
    assert "holds nothing" in cover(5, ((Shard(0), 4),))
    assert "holds nothing" in cover(6, ((Shard(0, 1, 3), 4),))


# -- collectives ------------------------------------------------------------------------------------

MESH = MeshShape(("dp", "tp"), (2, 2))
TYPE = TensorType((8, 8), "f32")


def told(node: Node, before: Layout, after: Layout) -> list[str]:
    values = {"x": PlacedValue(TYPE, before), "y": PlacedValue(TYPE, after)}
    return [why for _, _, why in broken_moves(node, values, MESH)]


def comm(kind: str, *args: object, **kwargs: object) -> Node:
    return Node(f"comm.{kind}.default", (Ref("x"), *args), tuple(kwargs.items()), ("y",), (TYPE,))


def test_collectives_change_one_axis_as_they_say() -> None:
    assert told(comm("all_reduce", "tp"), (R, P), (R, R)) == []
    assert told(comm("all_gather", "tp", 1), (S0, S1), (S0, R)) == []
    assert told(comm("reduce_scatter", "dp", 0), (P, R), (S0, R)) == []
    assert told(comm("all_to_all", "tp", 0, 1), (R, S1), (R, S0)) == []
    # gathered around an axis that splits further inside: that one then holds blocks of blocks
    assert told(comm("all_gather", "dp", 0), (S0, S0), (R, Shard(0, 2))) == []
    # both axes split dim 0: what the inner one holds is a quarter
    assert told(comm("all_gather", "tp", 0), (S0, S0), (S0, R)) == []


@pytest.mark.parametrize(
    ("node", "before", "after", "why"),
    [
        (comm("all_reduce", "dp"), (R, P), (R, R), "all_reduce over tp, not all_reduce over dp"),
        (comm("all_reduce", "tp", op="max"), (R, P), (R, R), "pending is a sum"),
        (comm("all_reduce", "tp"), (R, Partial("max")), (R, R), "pending is a max"),
        (comm("all_gather", "tp", 0), (R, S1), (R, R), "cuts or joins"),
        (comm("all_gather", "dp", 0), (S0, S0), (R, S0), "other elements"),
        (comm("all_gather", "tp", 1), (S1, S0), (R, S0), "all_gather over dp, not all_gather over tp"),
        (comm("all_gather", "tp", 1), (S0, S1), (R, R), "no single collective"),
        (comm("slice", "tp", 1), (R, P), (R, S1), "that is reduce_scatter"),
        (comm("all_gather", "pp", 1), (R, S1), (R, R), "no axis"),
        (comm("all_gather", "tp"), (R, S1), (R, R), "arguments"),
    ],
)
def test_collectives_that_do_not(node: Node, before: Layout, after: Layout, why: str) -> None:
    assert any(why in line for line in told(node, before, after)), told(node, before, after)


# -- waiting ----------------------------------------------------------------------------------------


def test_groups_that_come_in_another_order_wait_forever() -> None:
    a, b = ("a", (0, 1)), ("b", (0, 1))
    assert list(rendezvous({0: [a, b], 1: [a, b]})) == []
    found = list(rendezvous({0: [a, b], 1: [b, a]}))
    assert len(found) == 1 and found[0].rule == "message"
    # a circle of three
    ab, bc, ca = ("ab", (0, 1)), ("bc", (1, 2)), ("ca", (0, 2))
    assert list(rendezvous({0: [ab, ca], 1: [bc, ab], 2: [ca, bc]}))
    assert not list(rendezvous({0: [ab, ca], 1: [ab, bc], 2: [bc, ca]}))


# -- twins ------------------------------------------------------------------------------------------


def test_a_big_config_becomes_a_small_one_with_its_ratios() -> None:
    big = {
        "model_type": "llama",
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    small = shrunk(big, layers=4)
    assert small == {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "intermediate_size": 416,
        "num_hidden_layers": 4,
        "vocab_size": 256,
    }
    assert shrunk({**big, **small}, layers=4) == {}


def test_the_twin_of_a_pipeline_runs_in_numbers(tmp_path: Path) -> None:
    """The program is too big to run here; its twin has its axes, schedule and recomputation."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_layer": 12,
                "n_head": 32,
                "n_embd": 2048,
                "vocab_size": 51200,
                "n_positions": 512,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
        )
    )
    built = build(f"hf:{config}", batch=32, seq=256)
    made = api.plan(
        built.model,
        "pp=2,dp=4,tp=4",
        example_inputs=built.inputs,
        cluster="h100-dgx",
        schedule="1f1b",
        microbatches=4,
        target=f"hf:{config}",
    )
    big = api.compile_analysed(made)
    assert verify_static(big).ok and small_mesh(big) == "pp=2,dp=2,tp=2"
    twin = verify_twin(big, big.target, steps=1)
    assert twin.ok and twin.static.ranks == 8 and "schedule 1f1b" in twin.kept
    with pytest.raises(UsageError, match="no small twin"):
        verify_twin(big, "t:mlp")


# -- what it found ----------------------------------------------------------------------------------


class _Tables(nn.Module):
    """Embeddings alike but for their number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (32, 24, 16))
        self.out = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.cat([table(x[:, k]) for k, table in enumerate(self.tables)], -1)
        loss: torch.Tensor = nn.functional.cross_entropy(self.out(found), y)
        return loss


def test_tables_of_unlike_length_are_not_one_segment() -> None:
    """As one, ranks would take the rows of all of them from where those of the first lie."""
    torch.manual_seed(0)
    model = _Tables()
    batch = {"x": torch.randint(0, 16, (8, 3)), "y": torch.randint(0, 4, (8,))}
    planned = api.plan(model, "dp=2,tp=2", example_inputs=batch, pins=("tables.*.weight=tp:S(0)",))
    made = api.compile_analysed(planned)
    report = verify_static(made)
    assert report.ok, report.findings[0]
    assert verify(made, model, (), batch, steps=1).ok


# -- dims in units -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4)))
    ).filter(lambda found: 0 < len(found) < 4),
    st.sampled_from((24, 48, 96, 144, 60)),
)
def test_runs_stand_for_their_elements(found: list[tuple[int, int, int]], size: int) -> None:
    """What a rank holds of a dim is what it holds of the dim in units, each written out."""
    layout = tuple(Shard(0, outer, inner) for outer, inner, _ in found)
    sizes = tuple(ways for _, _, ways in found)
    splits = splits_of(layout, 0, sizes)
    unit = unit_of(size, [splits])
    assert size % unit == 0
    short = splits_of(in_units(layout, 0), 0, sizes) if unit > 1 else splits
    for at in product(*map(range, sizes)):
        runs = held(size // unit, short, at)
        written = (runs[:, None] * unit + np.arange(unit)).reshape(-1)
        assert np.array_equal(held(size, splits, at), written)


def test_units_are_as_long_as_they_can_be() -> None:
    layout, sizes = (Shard(0, outer=4096), Shard(0)), (8, 1024)
    assert unit_of(4096 * 4096, [splits_of(layout, 0, sizes)]) == 512
    assert unit_of(4096 * 4096, [splits_of(layout, 0, sizes)], [(2048, 8)]) == 256
    assert unit_of(10, [splits_of((Shard(0),), 0, (4,))]) == 1
