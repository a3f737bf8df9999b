"""Programs that compute activations again: the same numbers, fewer bytes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BATCH, FAMILIES, Family, family
from lockstep_check import RTOL, lockstep_step, relative_error
from torch import nn

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import UsageError, VerificationError
from autoshard.ir import Call, Graph, Node, Ref, TensorType
from autoshard.ir.lowered import Lowered, LoweredSegment, PlacedValue
from autoshard.ir.min_cut_recompute import keep_least
from autoshard.ir.placement import R, Shard
from autoshard.passes.memory.recompute import recompute
from autoshard.passes.segment_parts import sliced
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.program.store import load_program, save_program
from autoshard.program.text import program_text
from autoshard.rules import attention, experts, matmul
from autoshard.rules.local import MeshShape
from autoshard.rules.registry import RULES
from autoshard.runtime.executor import RankProgram
from autoshard.runtime.microbatch import cut, full_batch
from autoshard.search.plan.plan import Recompute
from autoshard.simulate.estimate import Estimator
from autoshard.verify.lockstep import verify

CLUSTER = "cpu-gloo"
MESHES = ("dp=2,tp=2", "fsdp=4", "tp=4")
PRODUCTS = {
    op for op in (*matmul.RULES, *attention.RULES, *experts.RULES) if "mm" in op or op in attention.RULES
}


def _dropout_gpt2() -> nn.Module:
    from families import _gpt2

    return _gpt2(dropout=0.1)


def _deep_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 32}
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config)


DROPOUT = Family("gpt2-dropout", _dropout_gpt2, family("gpt2").inputs)
DEEP = Family("llama-deep", _deep_llama, family("llama").inputs)
CASES: Mapping[str, Family] = {
    DROPOUT.name: DROPOUT,
    **{f.name: f for f in FAMILIES if f.name in ("llama", "mixtral", "t5", "bert")},
}


@functools.cache
def _analysed(name: str) -> Analysis:
    model, inputs = _make(name)
    return analyse(capture(model, (), inputs))


def _make(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return (DEEP if name == DEEP.name else CASES[name]).make()


@functools.cache
def _planned(name: str, mesh: str, gathered: str = "") -> Planned:
    """gathered: whether parameters stay gathered (``kept``), do not (``again``), or as the plan says."""
    made = plan_analysed(_analysed(name), [Mesh.parse(mesh)], load_cluster(CLUSTER), reasons=False)
    if not gathered:
        return made
    keep = gathered == "kept"
    lives = {k: replace(p, keep=keep and p.stored != p.use) for k, p in made.plan.params.items()}
    return replace(made, plan=replace(made.plan, params=lives))


def _layers(planned: Planned) -> dict[str, int]:
    """Forward segments of layers and how often each is called."""
    calls = [c for c in planned.analysis.folded.calls if c.label and not c.backward]
    return {c.segment: sum(d.segment == c.segment for d in calls) for c in calls}


@functools.cache
def _program(name: str, mesh: str, policy: str = "none", calls: int = 0, gathered: str = "") -> Program:
    """calls: of every layer's segment; 0: all."""
    planned = _planned(name, mesh, gathered)
    if policy == "none":
        return compile_analysed(planned)
    layers = _layers(planned)
    chosen: dict[str, Recompute] = {
        s: Recompute(policy, min(count, calls or count))  # type: ignore[arg-type]
        for s, count in layers.items()
    }
    return compile_analysed(replace(planned, plan=replace(planned.plan, recompute=chosen)))


def _results(made: Program, model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    lockstep, env = lockstep_step(made, model, inputs, seed=3)
    return {
        f"{r.kind} {r.target}": lockstep.whole(env[r.value], r.value)
        for r in made.signature.results
        if not r.value.startswith("in_")
    }


@functools.cache
def _plain_results(name: str, mesh: str, gathered: str = "") -> dict[str, torch.Tensor]:
    return _results(_program(name, mesh, "none", 0, gathered), *_make(name))


def _kept(made: Program) -> float:
    return Estimator(made, load_cluster(CLUSTER)).held().activations


def _seconds(made: Program) -> float:
    return Estimator(made, load_cluster(CLUSTER)).step().compute


# two layers each: one call is half of them
@pytest.mark.parametrize(("policy", "calls"), [("selective", 0), ("full", 1)])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", list(CASES))
def test_same_numbers(name: str, mesh: str, policy: str, calls: int) -> None:
    """Bit by bit what the program without recomputation gives."""
    model, inputs = CASES[name].make()
    found = _results(_program(name, mesh, policy, calls), model, inputs)
    wanted = _plain_results(name, mesh)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_the_first_calls_run_again(calls: int, policy: str) -> None:
    """One, half and all of four layers: bytes fall with each."""
    made = _program(DEEP.name, "fsdp=4", policy, calls)
    again = [i.label for i in made.lowered.main if isinstance(i, Call) and i.segment.endswith("_recompute")]
    assert again == [f"model.layers.{k}" for k in reversed(range(calls))]
    found, wanted = _results(made, *_make(DEEP.name)), _plain_results(DEEP.name, "fsdp=4")
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    fewer = _program(DEEP.name, "fsdp=4", policy, calls // 2) if calls > 1 else _program(DEEP.name, "fsdp=4")
    assert _kept(made) < _kept(fewer)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_any_forward_segment(name: str) -> None:
    """Also those outside layers, each by another policy than the one before it."""
    planned = _planned(name, "dp=2,tp=2")
    calls = [c for c in planned.analysis.folded.calls if not c.backward]
    chosen: dict[str, Recompute] = {}
    for segment in dict.fromkeys(c.segment for c in calls):
        count = sum(c.segment == segment for c in calls)
        chosen[segment] = Recompute("full" if len(chosen) % 2 else "selective", count)
    assert "outer_fwd" in chosen
    made = compile_analysed(replace(planned, plan=replace(planned.plan, recompute=chosen)))
    found, wanted = _results(made, *_make(name)), _plain_results(name, "dp=2,tp=2")
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", [n for n in CASES if n != DROPOUT.name])
def test_equal_to_eager(name: str, policy: str) -> None:
    model, inputs = CASES[name].make()
    found = _results(_program(name, "dp=2,tp=2", policy), model, inputs)
    model.zero_grad()
    model(**inputs).loss.backward()
    for parameter, x in model.named_parameters():
        if f"grad {parameter}" in found:
            assert x.grad is not None
            assert relative_error(found[f"grad {parameter}"], x.grad) < RTOL, parameter


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize(
    ("name", "gathered"), [("llama", "kept"), ("llama", "again"), ("bert", "kept"), ("t5", "kept")]
)
def test_gathered_parameters(name: str, gathered: str, policy: str) -> None:
    """What is kept gathered is used; what is not is gathered once for the slice and the backward call."""
    model, inputs = CASES[name].make()
    made = _program(name, "fsdp=4", policy, 0, gathered)
    found = _results(made, model, inputs)
    wanted = _plain_results(name, "fsdp=4", gathered)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert _gathered_bytes(made) == _gathered_bytes(_program(name, "fsdp=4", "none", 0, gathered))


def test_keys_and_values_are_saved_before_they_are_expanded() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    kept = []
    for heads in (4, 1):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 3}
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=heads, **sizes))
        batch = dict.fromkeys(("input_ids", "labels"), torch.ones(2, 16, dtype=torch.int64))
        planned = plan_analysed(
            analyse(capture(model, (), batch)), [Mesh.parse("dp=1")], load_cluster(CLUSTER), reasons=False
        )
        kept.append(_kept(compile_analysed(planned)))
    assert kept[0] - kept[1] >= 3 * 2 * (2 * 16) * (4 - 1) * 8 * 4  # layers, keys and values, tokens, heads


def test_parameters_gathered_again_are_not_kept() -> None:
    kept, again = (_kept(_program("llama", "fsdp=4", "full", 0, g)) for g in ("kept", "again"))
    assert again < kept


def _gathered_bytes(made: Program) -> float:
    rows = Estimator(made, load_cluster(CLUSTER)).traffic()
    return sum(row.wire for row in rows if row.kind == "all_gather")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", list(CASES))
def test_fewer_bytes_for_more_work(name: str, mesh: str) -> None:
    none, selective, full = (_program(name, mesh, p) for p in ("none", "selective", "full"))
    assert _kept(none) > _kept(selective) >= _kept(full)
    assert _seconds(none) < _seconds(selective) < _seconds(full)
    some = _program(name, mesh, "full", 1)
    assert _kept(none) > _kept(some) >= _kept(full)


@pytest.mark.parametrize("name", list(CASES))
def test_products_run_once_if_selective(name: str) -> None:
    for policy, expected in (("selective", False), ("full", True)):
        made = _program(name, "dp=2,tp=2", policy)
        plain = _program(name, "dp=2,tp=2").lowered.segments
        joined = {n.removesuffix("_recompute"): s for n, s in made.lowered.segments.items() if n not in plain}
        assert joined
        for before, segment in joined.items():
            more = _products(segment) - _products(plain[before])
            assert bool(more) == expected, (before, more)


def _products(segment: LoweredSegment) -> Counter[str]:
    return Counter(node.op for node in segment.graph.nodes if node.op in PRODUCTS)


def test_a_rank_holds_what_the_estimate_says() -> None:
    """After forward, the storage alive on the rank beside the program's inputs is what is counted as kept."""
    name, mesh = "llama", "dp=1"
    model, inputs = CASES[name].make()
    alive = []
    for policy in ("none", "selective", "full"):
        made = _program(name, mesh, policy)
        rank = RankProgram(made, 0, {}, torch.device("cpu"))
        given = _ends(made, model, inputs)
        env = rank.start()
        env.update(given)
        rank.run(env, (0, "forward", 0))
        ends = {x.untyped_storage().data_ptr() for x in given.values()}
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in env.values()}
        alive.append(sum(n for at, n in held.items() if at not in ends))
        if policy != "none":
            # beyond it only the loss, a scalar
            assert abs(alive[-1] - _kept(made)) < 64
    none, selective, full = alive
    assert none > selective > full


def _ends(made: Program, model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    leaves = list(inputs.values())
    return {
        p.name: made.constants[p.target]  # type: ignore[misc]
        if p.kind == "const"
        else leaves[int(p.target)]
        if p.kind == "input"
        else torch.ones(p.type.shape)
        if p.kind == "tangent"
        else state[p.target].detach()
        for p in made.signature.ports
    }


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", list(CASES))
def test_print_parse_print_is_the_identity(name: str, policy: str, tmp_path: Path) -> None:
    for number, calls in enumerate((0, 1)):
        made = _program(name, "dp=2,tp=2", policy, calls)
        save_program(made, tmp_path / str(number))
        assert program_text(load_program(tmp_path / str(number))) == program_text(made)


def test_verify_accepts_it() -> None:
    model, inputs = CASES["llama"].make()
    for policy in ("selective", "full"):
        assert verify(_program("llama", "fsdp=4", policy), model, (), inputs, steps=2).ok


@pytest.mark.parametrize(
    ("segment", "choice", "why"),
    [
        ("attic_fwd", Recompute("full", 1), "no such segment"),
        ("layers_bwd", Recompute("full", 1), "no segment of the forward half"),
        ("layers_fwd", Recompute("full", 3), "called 2 times"),
        ("layers_fwd", Recompute("some", 1), "neither"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_that_does_not_fit_is_refused(segment: str, choice: Recompute, why: str) -> None:
    planned = _planned("llama", "tp=4")
    with pytest.raises(VerificationError, match=why):
        compile_analysed(replace(planned, plan=replace(planned.plan, recompute={segment: choice})))


def test_a_parameter_gathered_in_main_is_not_kept_for_it() -> None:
    """It is gathered a second time, in backward."""
    whole, split = TensorType((4,), "f32"), (Shard(0),)
    gather = Node("comm.all_gather.default", (Ref("p"), "fsdp", 0), (), ("w_a",), (whole,))
    body = (
        Node("aten.mul.Tensor", (Ref("x"), Ref("w")), (), ("y",), (whole,)),
        Node("aten.exp.default", (Ref("y"),), (), ("z",), (whole,)),
    )
    forward = Graph("f", (("x", whole), ("w", whole)), body, ("y", "z"))
    product = Node("aten.mul.Tensor", (Ref("g"), Ref("y")), (), ("d",), (whole,), backward=True)
    backward = Graph("b", (("g", whole), ("y", whole)), (product,), ("d",))
    main = (
        gather,
        Call("f", ("x", "w_a"), ("m_y", "m_z"), "layer.0", False),
        Call("b", ("g", "m_y"), ("m_d",), "layer.0", True),
    )
    segments = {g.name: LoweredSegment(g, dict.fromkeys(g.types(), (R,)), {}) for g in (forward, backward)}
    values = {
        n: PlacedValue(whole, split if n == "p" else (R,))
        for n in ("p", "x", "g", "w_a", "m_y", "m_z", "m_d")
    }
    lowered = Lowered(segments, main, values, ("m_z", "m_d"))
    made = recompute(lowered, {"f": Recompute("full", 1)}, RULES, MeshShape(("fsdp",), (2,)))
    first, call, second, again, last = made.main
    assert first == gather
    assert isinstance(call, Call) and call.outs == ("m_z",)
    assert second == replace(gather, outs=second.outs, backward=True) and second.outs != gather.outs
    assert isinstance(again, Call) and again.args == ("x", *second.outs) and again.backward
    assert isinstance(last, Call) and last.args == ("g", *again.outs)
    assert made.values.keys() == {"p", "x", "g"} | {out for item in made.main for out in item.outs}


def test_one_of_two_outputs_may_be_given() -> None:
    """The op then runs for the other, and its own copy of the first goes by another name."""
    whole = TensorType((4,), "f32")
    top = Node("aten.sort.default", (Ref("x"),), (), ("a", "b"), (whole, whole))
    both = Node("aten.add.Tensor", (Ref("a"), Ref("b")), (), ("c",), (whole,))
    graph = Graph("f", (("x", whole),), (top, both), ("c",))
    part = sliced(
        LoweredSegment(graph, dict.fromkeys(graph.types(), (R,)), {}), "g", ("c",), ("a",), backward=True
    )
    assert [name for name, _ in part.graph.inputs] == ["x", "a"]
    assert part.graph.nodes[0].outs == ("a_again", "b")
    assert part.layouts.keys() == {"x", "a", "a_again", "b", "c"} == part.graph.types().keys()


def test_the_smallest_cut_is_kept() -> None:
    """Before the op that widens, behind the one that narrows, and never behind a dear one."""
    wide, narrow = TensorType((8,), "f32"), TensorType((2,), "f32")
    nodes = (
        Node("dear", (Ref("x"),), (), ("product",), (narrow,)),
        Node("widen", (Ref("product"),), (), ("wide",), (wide,)),
        Node("dear", (Ref("wide"),), (), ("second",), (wide,)),
        Node("narrow", (Ref("second"),), (), ("end",), (narrow,)),
    )
    graph = Graph("f", (("x", wide),), nodes, ("wide", "end"))
    nbytes = {name: type_.nbytes for name, type_ in graph.types().items()}
    found = keep_least(graph, ("wide", "end"), {"product", "second"}, (), nbytes)
    assert found == {"product", "end"}


# -- microbatches ------------------------------------------------------------------------------------------


def _without_ignored(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every microbatch has as many labels as any other."""
    return {**inputs, "labels": inputs["labels"].clamp(min=3)}


@functools.cache
def _in_pieces(count: int, policy: str = "") -> Program:
    """A llama whose step is ``count`` microbatches."""
    model, inputs = family("llama").make()
    piece = {k: x[: BATCH // count] for k, x in inputs.items()}
    planned = plan_analysed(
        analyse(capture(model, (), piece)), [Mesh.parse("dp=2,tp=2")], load_cluster(CLUSTER)
    )
    planned = replace(planned, source=Source(model, (), piece))
    chosen = {"layers_fwd": Recompute(policy, 2)} if policy else {}  # type: ignore[arg-type]
    return compile_analysed(
        replace(planned, plan=replace(planned.plan, microbatches=count, recompute=chosen))
    )


@pytest.mark.parametrize(("count", "policy"), [(2, ""), (4, ""), (2, "full")])
def test_microbatches_add_up_to_the_whole_batch(count: int, policy: str) -> None:
    model, inputs = family("llama").make()
    inputs = _without_ignored(inputs)
    made = _in_pieces(count, policy)
    losses: list[torch.Tensor] = []
    grads: dict[str, torch.Tensor] = {}
    for args, kwargs in cut(made, list(inputs.values())):
        assert not args
        found = _results(made, model, kwargs)
        losses.append(next(x for k, x in found.items() if k.startswith("output") and x.dim() == 0))
        for key, x in found.items():
            if key.startswith("grad"):
                grads[key] = grads.get(key, torch.zeros(())) + x / count
    assert len(losses) == count
    loss = model(**inputs).loss
    loss.backward()
    assert relative_error(torch.stack(losses).mean(), loss.detach()) < RTOL
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(grads[f"grad {name}"], parameter.grad) < RTOL, name


def test_verify_runs_all_microbatches() -> None:
    model, inputs = family("llama").make()
    found = verify(_in_pieces(2), model, (), inputs, steps=1)
    assert found.ok and {c.name for c in found.checks if c.kind == "output"} == {"0", "1"}
    one = verify(_in_pieces(2), model, (), {k: x[:4] for k, x in inputs.items()}, steps=1)
    assert one.ok and {c.name for c in one.checks if c.kind == "output"} == {"0", "1"}


def test_microbatches_are_stored(tmp_path: Path) -> None:
    made = _in_pieces(4)
    read = load_program(save_program(made, tmp_path / "p"))
    assert read.microbatches == 4
    assert read.signature.batch_inputs == made.signature.batch_inputs != ()
    manifest = tmp_path / "p" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"microbatches": 4', '"microbatches": 0'))
    with pytest.raises(VerificationError, match="microbatches"):
        load_program(tmp_path / "p")


def test_batches_of_another_size_are_refused() -> None:
    made = _in_pieces(4)
    _, inputs = family("llama").make()
    for wrong in (3, 6, 12):
        with pytest.raises(UsageError, match="4 microbatches of 2 sequences, 8 in all"):
            cut(made, [x.repeat(2, 1)[:wrong] for x in inputs.values()])
    nothing = replace(made, signature=replace(made.signature, batch_inputs=()))
    with pytest.raises(UsageError, match="no input of the model has a batch"):
        cut(nothing, list(inputs.values()))


def test_an_example_of_one_microbatch_is_repeated() -> None:
    made = _in_pieces(4)
    _, inputs = family("llama").make()
    args, kwargs = full_batch(made, ((), {k: x[:2] for k, x in inputs.items()}))
    assert not args
    assert all(torch.equal(kwargs[k], torch.cat([x[:2]] * 4)) for k, x in inputs.items())
    assert full_batch(made, ((), inputs)) == ((), inputs)
