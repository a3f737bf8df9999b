"""Sharding rules against the truth: whatever a rule allows, shards recombine to what the op gives whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_samples import all_samples
from rules.test_expert_rules import CALLS
from sampling import all_cases

from autoshard.ir import Node, TensorType
from autoshard.ir.placement import R, Shard
from autoshard.rules import reduction
from autoshard.rules.core import Factored, RuleFn, broadcast, opaque
from autoshard.rules.registry import RULES
from autoshard.rules.states import op_states
from autoshard.verify.rule_check import OpSample, WrongRule, check, digits_of, make_call

f64 = torch.float64
SAMPLES: dict[str, list[OpSample]] = {}
for _sample in all_samples():
    SAMPLES.setdefault(_sample.op, []).append(_sample)

#: states of a sample on a mesh, and of all samples of an op together
MOST, OF_AN_OP = 10, 80
#: ops that only run on whole tensors; everything else must be shardable in one of its samples
WHOLE = {
    "aten._pdist_backward.default",
    "aten._pdist_forward.default",
    "aten.all.default",
    "aten.any.default",
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.bincount.default",
    "aten.eye.default",
    "aten.eye.m",
    "aten.linspace.default",
    "aten.median.default",
    "aten.min.default",
    "aten.masked_scatter.default",
    "aten.masked_scatter_backward.default",
    "aten.nanmedian.default",
    "aten.norm.Scalar",
    "aten.prod.default",
    "aten.scalar_tensor.default",
    "aten.trace.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
}


#: those on slots of experts have checks of their own (`test_expert_rules`)
SAMPLED = sorted(set(RULES) - {f"autoshard.{name}.default" for name in ("route_one", *(n for n, _ in CALLS))})


def test_every_rule_has_a_sample() -> None:
    assert sorted(SAMPLES) == SAMPLED


@pytest.mark.parametrize("op", SAMPLED)
def test_rule(op: str) -> None:
    """Every state of every sample on every mesh (of many, some) gives what the op gives on whole tensors."""
    if op.startswith("transformers."):
        pytest.importorskip("transformers.integrations.moe", reason="the op is defined by transformers")
    samples = SAMPLES.get(op, [])
    most = min(MOST, OF_AN_OP // max(1, len(samples)))
    for sample in samples:
        check(sample, RULES[op], most=None if all_cases() else most)


@pytest.mark.parametrize("op", SAMPLED)
def test_rule_allows_sharding(op: str) -> None:
    """No rule falls back to replication unnoticed."""
    if op.startswith("transformers."):
        pytest.importorskip("transformers.integrations.moe", reason="the op is defined by transformers")
    most = 0
    for sample in SAMPLES.get(op, []):
        call = make_call(sample)
        rule = RULES[op](call.node, call.ins)
        states = op_states(rule, call.ins, call.node.types, digits_of(rule), (2,), lambda axis, classes: True)
        assert all(p == R for layout in states[0].inputs for p in layout), "the first state is replicated"
        most = max(most, *(s.ways for s in states))
    assert (most > 1) == (op not in WHOLE)


# -- wrong rules are caught ----------------------------------------------------------------------------


def _changed(op: str, **fields: Any) -> RuleFn:
    """The rule of an op with some of its statements exchanged for false ones."""

    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        return replace(RULES[op](node, ins), **fields)

    return rule


def _linear_pointwise(node: Node, ins: Sequence[TensorType]) -> Factored:
    return broadcast(ins, node.types, linear=((0,),))


def _free(fn: RuleFn) -> RuleFn:
    """The rule with nothing fixed."""
    return lambda node, ins: replace(fn(node, ins), fixed=frozenset())


def _free_and_summed(fn: RuleFn) -> RuleFn:
    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        found = fn(node, ins)
        every = tuple((f, "sum") for f in range(len(found.sizes)))
        return replace(found, fixed=frozenset(), reduce=every)

    return rule


def _real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(7))


WRONG: dict[str, tuple[OpSample, RuleFn]] = {
    "softmax with its dim not fixed": (
        OpSample("aten._softmax.default", (_real(5, 6), -1, False)),
        _free(RULES["aten._softmax.default"]),
    ),
    "cumsum with its dim not fixed": (
        OpSample("aten.cumsum.default", (_real(5, 6), 0)),
        _free(RULES["aten.cumsum.default"]),
    ),
    "mean as a sum": (OpSample("aten.mean.dim", (_real(5, 6), [1])), reduction.sum_),
    "maximum as a sum": (OpSample("aten.amax.default", (_real(5, 6), [1])), reduction.sum_),
    "sum as a maximum": (OpSample("aten.sum.dim_IntList", (_real(5, 6), [1])), reduction.amax),
    "gelu as linear": (OpSample("aten.gelu.default", (_real(5, 6),)), _linear_pointwise),
    "adding a number as linear": (OpSample("aten.add.Tensor", (_real(5, 6), 1.0)), _linear_pointwise),
    "add linear in one term": (OpSample("aten.add.Tensor", (_real(5, 6), _real(6))), _linear_pointwise),
    "division linear in the divisor": (
        OpSample("aten.div.Tensor", (_real(5, 6), _real(5, 6))),
        _changed("aten.div.Tensor", linear=((1,),)),
    ),
    "product linear in both at once": (
        OpSample("aten.mm.default", (_real(5, 6), _real(6, 4))),
        _changed("aten.mm.default", linear=((0, 1),)),
    ),
    "product without its sum": (
        OpSample("aten.mm.default", (_real(5, 6), _real(6, 4))),
        _changed("aten.mm.default", reduce=((1, "max"),)),
    ),
    "layer norm over a split dim": (
        OpSample("aten.native_layer_norm.default", (_real(4, 6), [6], None, None, 1e-5)),
        _free_and_summed(RULES["aten.native_layer_norm.default"]),
    ),
    "reshape to the global shape": (
        OpSample("aten.reshape.default", (_real(4, 6), [24])),
        _changed("aten.reshape.default", local=None),
    ),
    "look-up in a part of a table as if it were whole": (
        OpSample("aten.embedding.default", (_real(6, 4), torch.tensor([0, 5, 3]))),
        _changed("aten.embedding.default", local=None),
    ),
    "dropout with the same mask on every shard": (
        OpSample("autoshard.dropout.default", (_real(6, 8), 0.5, torch.tensor(1), 0, [0, 0], [6, 8])),
        _changed("autoshard.dropout.default", local=None),
    ),
    "dropout of strided shards": (
        OpSample("autoshard.dropout.default", (_real(6, 8), 0.5, torch.tensor(1), 0, [0, 0], [6, 8])),
        _changed("autoshard.dropout.default", contiguous=frozenset()),
    ),
    "squeeze of whatever has size 1 on a shard": (
        OpSample("aten.squeeze.default", (_real(4, 1),)),
        _changed("aten.squeeze.default", local=None),
    ),
    "transpose that moves nothing": (
        OpSample("aten.t.default", (_real(6, 6),)),
        _changed("aten.t.default", outputs=(((0,), (1,)),)),
    ),
    "causal attention split by query rows": (
        OpSample("autoshard.sdpa.default", (*(_real(2, 2, 6, 4) for _ in range(3)), None, True, 0.5)),
        _free_and_summed(RULES["autoshard.sdpa.default"]),
    ),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_rules_are_caught(name: str) -> None:
    sample, rule = WRONG[name]
    with pytest.raises(WrongRule):
        check(sample, rule)


def test_replicated_outputs_must_be_equal_on_all_ranks() -> None:
    def rule(node: Node, ins: Sequence[TensorType]) -> Factored:
        return replace(RULES["aten.zeros_like.default"](node, ins), outputs=(((), ()),), reduce=((0, "sum"),))

    with pytest.raises(AssertionError):
        check(OpSample("aten.zeros_like.default", (_real(5, 6),)), rule)


# -- states --------------------------------------------------------------------------------------------


def test_nested_uneven_splits_keep_to_rows() -> None:
    """6 rows on 2 x 2 ranks are 2, 1, 2, 1, which a flattened dim of 24 elements cannot say."""
    call = make_call(OpSample("aten.reshape.default", (_real(6, 4), [24])))
    rule = RULES["aten.reshape.default"](call.node, call.ins)
    nested = (Shard(0), Shard(0))

    def inputs(rule: Factored, types: Sequence[TensorType], outs: Sequence[TensorType | None]) -> list[Any]:
        digits = digits_of(rule)
        return [s.inputs[0] for s in op_states(rule, types, outs, digits, (2, 2), lambda axis, classes: True)]

    assert nested not in inputs(rule, call.ins, call.node.types)
    same = make_call(OpSample("aten.tanh.default", (_real(6, 4),)))
    rule = RULES["aten.tanh.default"](same.node, same.ins)
    assert nested in inputs(rule, same.ins, same.node.types)


def test_an_opaque_call_has_one_state() -> None:
    types = [TensorType((4, 6), "f32")]
    rule = opaque(types, types)
    states = op_states(rule, types, types, digits_of(rule), (2, 2), lambda axis, classes: True)
    assert [(s.inputs, s.outputs, s.ways) for s in states] == [(((R, R),), ((R, R),), 1)]


# -- drawn shapes --------------------------------------------------------------------------------------

MESHES = ((2,), (3,), (2, 2))
dims = st.sampled_from([1, 2, 3, 4, 5, 6, 8])
shapes = st.lists(dims, min_size=1, max_size=3).map(tuple)
drawn = settings(max_examples=100 if all_cases() else 15)


def _verify(op: str, *args: Any) -> None:
    check(OpSample(op, args), RULES[op], MESHES)


@st.composite
def factorings(draw: st.DrawFn, n: int) -> list[int]:
    """A shape with n elements."""
    shape = []
    while n > 1:
        shape.append(draw(st.sampled_from([d for d in range(2, n + 1) if n % d == 0])))
        n //= shape[-1]
    for _ in range(draw(st.integers(0, 1))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


@drawn
@given(st.data())
def test_reshapes(data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([6, 12, 16, 18, 20, 24]))
    source, target = data.draw(factorings(n)), data.draw(factorings(n))
    _verify("aten.reshape.default", _real(*source), target)


@drawn
@given(shapes, st.data())
def test_permutations(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    _verify("aten.permute.default", _real(*shape), order)


@drawn
@given(shapes, st.data())
def test_broadcasts(shape: tuple[int, ...], data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(["aten.add.Tensor", "aten.mul.Tensor", "aten.maximum.default"]))

    def thinned() -> list[int]:
        keep = shape[data.draw(st.integers(0, len(shape) - 1)) :]
        return [n if data.draw(st.booleans()) else 1 for n in keep]

    _verify(op, _real(*thinned()), _real(*thinned()))


@drawn
@given(shapes, st.data())
def test_reductions(shape: tuple[int, ...], data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(["aten.sum.dim_IntList", "aten.amax.default", "aten.logsumexp.default"]))
    over = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    _verify(op, _real(*shape), over, data.draw(st.booleans()))


@drawn
@given(dims, dims, dims, dims)
def test_products(b: int, m: int, k: int, n: int) -> None:
    _verify("aten.mm.default", _real(m, k), _real(k, n))
    _verify("aten.bmm.default", _real(b, m, k), _real(b, k, n))


@drawn
@given(shapes, st.data())
def test_splits_and_their_inverse(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    count = data.draw(st.integers(1, 3))
    equal = data.draw(st.booleans())
    sizes = [shape[dim] if equal else data.draw(dims) for _ in range(count)]

    def part(n: int) -> torch.Tensor:
        at = dim % len(shape)
        return _real(*shape[:at], n, *shape[at + 1 :])

    parts = [part(n) for n in sizes]
    _verify("aten.cat.default", parts, dim)
    _verify("aten.split_with_sizes.default", torch.cat(parts, dim), sizes, dim)
    _verify("aten.split.Tensor", torch.cat(parts, dim), sizes[0], dim)


@drawn
@given(shapes, st.data())
def test_indexing(shape: tuple[int, ...], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 2))
    common = data.draw(st.lists(dims, min_size=rank, max_size=rank))
    chosen = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)).filter(any))
    indices: list[torch.Tensor | None] = []
    for n, used in zip(shape, chosen, strict=True):
        if not used:
            indices.append(None)
            continue
        own = [c if data.draw(st.booleans()) else 1 for c in common][data.draw(st.integers(0, rank)) :]
        indices.append(torch.randint(0, n, own, generator=torch.Generator().manual_seed(n)))
    x = _real(*shape)
    _verify("aten.index.Tensor", x, indices)
    values = _real(*torch.ops.aten.index.Tensor(x, indices).shape)
    _verify("aten.index_put.default", x, indices, values, True)


@drawn
@given(shapes, st.data())
def test_expansions(shape: tuple[int, ...], data: st.DataObject) -> None:
    lead = data.draw(st.lists(dims, max_size=2))
    thin = [n if data.draw(st.booleans()) else 1 for n in shape]
    _verify("aten.expand.default", _real(*thin), [*lead, *shape])
    times = [*(data.draw(st.integers(1, 3)) for _ in lead), *(data.draw(st.integers(1, 3)) for _ in shape)]
    _verify("aten.repeat.default", _real(*thin), times)
