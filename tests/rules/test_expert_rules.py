"""Rules of ops on slots of experts against the truth. What a rank holds of slots is no range of them, so that
every state is checked by what its slots stand for: pairs of an expert and a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from autoshard.ir import DTYPES, Dtype, Graph, Node, Ref, TensorType
from autoshard.ir.collectives import is_collective
from autoshard.ir.placement import Layout, Partial, R, Shard, local_shape
from autoshard.rules.local import LocalCall, MeshShape
from autoshard.rules.registry import RULES
from autoshard.rules.states import OpState, op_states
from autoshard.runtime.lockstep.in_process import Together
from autoshard.runtime.prepared_steps import PreparedSegment
from autoshard.runtime.resolve import RankView
from autoshard.runtime.shard_utils import reduce_parts, shard_tensor
from autoshard.torch_adapters.dtypes import torch_dtype
from autoshard.verify.rule_check import MESHES, comparable, digits_of

TOKENS, EACH, EXPERTS, WIDE, COLUMNS = 8, 2, 4, 6, 4
f64 = torch.float64
NAMES = {torch_dtype(name): name for name in DTYPES}
#: expert 1 has no token, two choices are none of the experts
CHOSEN = torch.tensor([[3, 0], [0, 2], [2, 3], [4, 0], [3, 2], [0, -1], [0, 3], [2, 0]])
_ops = torch.ops.autoshard
SLOTS = _ops.route(CHOSEN, EXPERTS)
#: of every row, its place among all pairs of an expert and a token
PLACES = (SLOTS >> 32) * TOKENS + (SLOTS & 0xFFFFFFFF) // EACH
FILLED = (EACH, EXPERTS)


def _real(*shape: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=f64, generator=make)


_ROWS = len(SLOTS)
#: op -> its arguments
CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("choices", (CHOSEN,)),
    ("route", (CHOSEN, EXPERTS)),
    ("dispatch", (_real(TOKENS, WIDE), CHOSEN, SLOTS)),
    ("combine", (_real(_ROWS, WIDE), CHOSEN, SLOTS)),
    ("dispatch_weights", (_real(TOKENS, EACH), CHOSEN, SLOTS)),
    ("combine_weights", (_real(_ROWS), CHOSEN, SLOTS)),
    ("expert_mm", (_real(_ROWS, WIDE), SLOTS, _real(EXPERTS, WIDE, COLUMNS), False)),
    ("expert_mm", (_real(_ROWS, WIDE), SLOTS, _real(EXPERTS, COLUMNS, WIDE), True)),
    ("expert_outer", (_real(_ROWS, WIDE), _real(_ROWS, COLUMNS), SLOTS, EXPERTS, False)),
    ("expert_outer", (_real(_ROWS, WIDE), _real(_ROWS, COLUMNS), SLOTS, EXPERTS, True)),
    ("expert_rows", (_real(EXPERTS, WIDE), SLOTS)),
    ("expert_sum", (_real(_ROWS, WIDE), SLOTS, EXPERTS)),
    ("scale_rows", (_real(_ROWS, WIDE), _real(_ROWS))),
    ("row_dropout", (_real(_ROWS, WIDE), _real(_ROWS).sigmoid(), 0.4, 0)),
    ("row_dots", (_real(_ROWS, WIDE), _real(_ROWS, WIDE) + 1)),
    ("put_columns", (_real(_ROWS, 3), WIDE, 1, 6, 2)),
]
E4, E8, f32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32


def _scaled_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of rows cast to 8 bits with one scale, scales of rows or of an expert's columns, or of blocks."""
    x, grad = _real(_ROWS, WIDE).float(), _real(_ROWS, COLUMNS).float()
    yield "amax_by_expert", (x, SLOTS, EXPERTS, E4, f32)
    by_expert = [_ops.amax_by_expert(v, SLOTS, EXPERTS, E4, f32) for v in (x, grad)]
    yield "cast_by_expert", (x, by_expert[0], E4, SLOTS)
    for along, block, kind in ((None, 0, f32), (1, 0, f32), (1, 3, E8)):
        for transposed in (False, True):
            weight = _real(EXPERTS, COLUMNS, WIDE).float()
            weight = weight if transposed else weight.mT.contiguous()
            down = along and (2 if transposed else 1)
            sx, sw = (_ops.amax_scale(v, d, block, E4, kind) for v, d in ((x, along), (weight, down)))
            qx, qw = _ops.cast_scaled(x, sx, E4), _ops.cast_scaled(weight, sw, E4)
            yield "scaled_expert_mm", (sx, sw, qx, SLOTS, qw, transposed, f32)
            if block:
                continue
            if along:
                sx, sg = by_expert
                qx, qg = (_ops.cast_by_expert(v, s, E4, SLOTS) for v, s in ((x, sx), (grad, sg)))
            else:
                sg = _ops.amax_scale(grad, None, 0, E4, f32)
                qg = _ops.cast_scaled(grad, sg, E4)
            yield "scaled_expert_outer", (sx, sg, qx, qg, SLOTS, EXPERTS, transposed, f32)


CALLS += _scaled_calls()


@dataclass(frozen=True)
class _Value:
    """A tensor on one device, with its type in a program. slots: whether it has a row for each."""

    x: torch.Tensor
    type: TensorType
    slots: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> _Value:
        slots = x.shape[0] == _ROWS
        shape = (EXPERTS * TOKENS, *x.shape[1:]) if slots else tuple(x.shape)
        filled = FILLED if slots else (1, 1) if x is CHOSEN else None
        return cls(x, TensorType(shape, NAMES[x.dtype], filled), slots)


def _argument(given: Any, names: Iterator[str]) -> Any:
    """As a program has it."""
    if isinstance(given, torch.Tensor):
        return Ref(next(names))
    return Dtype(NAMES[given]) if isinstance(given, torch.dtype) else given


def test_what_the_checks_stand_on() -> None:
    assert _ROWS not in (TOKENS, EXPERTS, WIDE, COLUMNS, EACH)
    assert torch.equal(PLACES, PLACES.sort().values)


def _places(layout: Layout, view: RankView) -> torch.Tensor:
    """The places of a rank's slots, in the order of experts, then of tokens."""
    rows = tuple(p if isinstance(p, Shard) and p.dim == 0 else R for p in layout)
    return shard_tensor(torch.arange(EXPERTS * TOKENS), rows, view.sizes, view.coords)


def _rows_at(x: torch.Tensor, layout: Layout, view: RankView, places: torch.Tensor) -> torch.Tensor:
    """The rows of a rank's slots, of its columns."""
    columns = tuple(p if isinstance(p, Shard) and p.dim > 0 else R for p in layout)
    return shard_tensor(x[torch.searchsorted(PLACES, places)], columns, view.sizes, view.coords).clone()


def _with_rows(places: torch.Tensor) -> torch.Tensor:
    return places[torch.isin(places, PLACES)]


def _codes(layout: Layout, view: RankView) -> torch.Tensor:
    """The slots of a rank that sees the tokens of its slots and no others."""
    held = _places(layout, view)
    rows = _with_rows(held)
    tokens = held[held // TOKENS == held[0] // TOKENS] % TOKENS
    at = {int(token): k for k, token in enumerate(tokens)}
    found = []
    for place in rows.tolist():
        expert, token = divmod(place, TOKENS)
        choice = int((CHOSEN[token] == expert).nonzero()[0])
        found.append(((expert - int(held[0]) // TOKENS) << 32) | (at[token] * EACH + choice))
    return torch.tensor(found, dtype=torch.int64)


def _terms(x: torch.Tensor, layout: Layout, view: RankView) -> torch.Tensor:
    """The terms of a sum that is pending: all of it on the first rank."""
    pending = [c for c, p in zip(view.coords, layout, strict=True) if isinstance(p, Partial)]
    return x if not any(pending) else torch.zeros_like(x)


def _part(value: _Value, layout: Layout, view: RankView, places: torch.Tensor) -> torch.Tensor:
    """What a rank holds. places: of its slots."""
    x = _terms(value.x, layout, view)
    if value.slots:
        return _rows_at(x, layout, view, places)
    return shard_tensor(x, layout, view.sizes, view.coords).clone()


@pytest.mark.parametrize(("name", "args"), CALLS, ids=[f"{n}-{k}" for k, (n, _) in enumerate(CALLS)])
def test_every_state_gives_the_op(name: str, args: tuple[Any, ...]) -> None:
    op = f"autoshard.{name}.default"
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    ins = [_Value.of(x) for x in tensors]
    out = _Value.of(getattr(_ops, name)(*args))
    if name == "choices":
        out = replace(out, type=replace(out.type, filled=(1, 1)))
    names = iter("xyzwv")
    node = Node(
        op,
        tuple(_argument(a, names) for a in args),
        (),
        ("out",),
        (out.type,),
    )
    rule = RULES[op](node, [v.type for v in ins])
    exchanged, divided = 0, 0
    digits = digits_of(rule)
    if name in (
        "put_columns",
        "scale_rows",
        "row_dropout",
        "row_dots",
    ):  # of slots in one dim, an axis splits experts or tokens
        digits[0] = [d for d in digits[0] if d[:2] == (1, EXPERTS) or d[0] % EXPERTS == 0]
    for sizes in MESHES:
        states = op_states(rule, [v.type for v in ins], [out.type], digits, sizes, lambda axis, classes: True)
        for state in states:
            exchanged += _check(node, ins, out, rule.local, state, sizes)
            divided += state.ways > 1
    assert divided
    assert bool(exchanged) == bool(rule.exchange)


def test_the_slots_of_one_expert_are_those_of_the_tokens_of_a_rank() -> None:
    chosen = torch.where(CHOSEN == 0, 0, -1)
    made, given = TensorType((TOKENS,), "i64", FILLED), TensorType((TOKENS, EACH), "i64", (1, 1))
    node = Node("autoshard.route_one.default", (Ref("x"), EXPERTS), (), ("out",), (made,))
    rule = RULES[node.op](node, [given])
    divided = 0
    for sizes in MESHES:
        for state in op_states(rule, [given], [made], digits_of(rule), sizes, lambda axis, classes: True):
            for coords in product(*map(range, sizes)):
                part = shard_tensor(chosen, state.inputs[0], sizes, coords)
                tokens = shard_tensor(torch.arange(TOKENS), state.outputs[0], sizes, coords)
                slots = _ops.route_one(part.clone(), EXPERTS)
                assert tokens[slots // EACH].tolist() == [t for t in tokens.tolist() if 0 in CHOSEN[t]]
            divided += state.ways > 1
    assert divided


def _check(
    node: Node, ins: Sequence[_Value], out: _Value, local: Any, state: OpState, sizes: tuple[int, ...]
) -> bool:
    names = tuple("abc"[: len(sizes)])
    views = [RankView(names, sizes, coords) for coords in product(*map(range, sizes))]
    told = f"{node.op} on {sizes}: {state.inputs} -> {state.outputs}"
    types = tuple(v.type for v in ins)
    if local is not None:
        node = local(LocalCall(node, types, state.inputs, state.outputs, MeshShape(names, sizes)))
    together = Together(views)
    codes, places = _slots(node, ins, out.slots, state, views, together)
    parts = [
        [
            codes[k] if value.x is SLOTS else _part(value, layout, view, places[k])
            for value, layout in zip(ins, state.inputs, strict=True)
        ]
        for k, view in enumerate(views)
    ]
    layout = state.outputs[0]
    assert layout is not None
    if is_collective(node):
        calls = [
            partial(ranks.of("", node, view), xs, *node.args[1:])
            for ranks, view, xs in zip(together.ranks, views, parts, strict=True)
        ]
        made = together.run(node, calls)
    else:
        inputs = tuple((f"{n}", t) for n, t in zip("xyzwv", types, strict=False))
        graph = Graph("sample", inputs, (node,), node.outs)
        runs = [PreparedSegment(graph, view, partial, torch.device("cpu")) for view in views]
        made = [run(xs, 0)[0] for run, xs in zip(runs, parts, strict=True)]
    if "route" in node.op:
        for found, wanted in zip(made, codes, strict=True):
            assert torch.equal(found, wanted), told
        return is_collective(node)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, view in enumerate(views):
        key = tuple(c for c, p in zip(view.coords, layout, strict=True) if not isinstance(p, Partial))
        groups.setdefault(key, []).append(rank)
    for ranks in groups.values():
        how = next((p.reduce for p in layout if isinstance(p, Partial)), "sum")
        found = reduce_parts([made[r] for r in ranks], how) if len(ranks) > 1 else made[ranks[0]]
        if out.slots:
            wanted = _rows_at(out.x, layout, views[ranks[0]], places[ranks[0]])
        else:
            wanted = shard_tensor(out.x, layout, sizes, views[ranks[0]].coords)
            assert tuple(found.shape) == local_shape(out.x.shape, layout, sizes, views[ranks[0]].coords)
        torch.testing.assert_close(comparable(found), comparable(wanted), msg=lambda text: f"{told}: {text}")
    return is_collective(node)


def _without(coords: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*coords[:axis], *coords[axis + 1 :])


def _slots(
    node: Node,
    ins: Sequence[_Value],
    slots_made: bool,
    state: OpState,
    views: Sequence[RankView],
    together: Together,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(slots of every rank, their places in the order of its rows)."""
    laid = [*zip(ins, state.inputs, strict=True)]
    made = state.outputs[0]
    assert made is not None
    layout = next((lay for value, lay in laid if value.slots), made if slots_made else None)
    if layout is None:
        return [SLOTS] * len(views), [PLACES] * len(views)
    if not is_collective(node):
        return (
            [_codes(layout, view) for view in views],
            [_with_rows(_places(layout, view)) for view in views],
        )
    axis = node.args[1]
    tokens = next(lay for value, lay in laid if value.x is CHOSEN)
    chosen = [shard_tensor(CHOSEN, tokens, view.sizes, view.coords) for view in views]
    numbers = [
        shard_tensor(torch.arange(TOKENS)[:, None], tokens, view.sizes, view.coords).clone() for view in views
    ]
    ranks = list(zip(together.ranks, views, strict=True))
    route = replace(node, op="comm.expert_route.default")
    routed = [
        partial(each.of("", route, view), [chosen[k]], axis, EXPERTS) for k, (each, view) in enumerate(ranks)
    ]
    codes = together.run(route, routed)
    dispatch = replace(node, op="comm.expert_dispatch.default")
    sent = [
        partial(each.of("", dispatch, view), [numbers[k], chosen[k], codes[k]], axis, EXPERTS)
        for k, (each, view) in enumerate(ranks)
    ]
    came = together.run(dispatch, sent)
    places = []
    at = views[0].names.index(axis)
    for code, token, view in zip(codes, came, views, strict=True):
        held = _places(layout, view)
        found = ((code >> 32) + held[0] // TOKENS) * TOKENS + token[:, 0]
        # of the tokens of all ranks of the axis, those that chose an expert of the rank
        group = [k for k, v in enumerate(views) if _without(v.coords, at) == _without(view.coords, at)]
        seen = torch.cat([numbers[k][:, 0] for k in group])
        pairs = (held // TOKENS).unique()[:, None] * TOKENS + seen
        assert torch.equal(found.sort().values, _with_rows(pairs.flatten().sort().values))
        places.append(found)
    return codes, places
