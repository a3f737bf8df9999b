"""The truth about a rule: run the op whole, run it on shards in every state, recombine, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

import autoshard.ops  # noqa: F401  (registers the ops that shards call)
from autoshard.ir import DTYPES, Dtype, Graph, Node, Ref, TensorType, refs_of
from autoshard.ir.collectives import is_collective
from autoshard.ir.placement import Layout, Partial, layout_ok, local_shape
from autoshard.rules.core import Factored
from autoshard.rules.local import LocalCall, MeshShape
from autoshard.rules.states import Digit, OpState, op_states
from autoshard.rules.user import UserRule
from autoshard.runtime.lockstep.in_process import Together
from autoshard.runtime.prepared_steps import PreparedSegment, function_of
from autoshard.runtime.resolve import RankView, find_op
from autoshard.runtime.shard_utils import reduce_parts, shard_tensor

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
#: by the least precise type among inputs and output
TOLERANCES = {torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-9, torch.complex128: 1e-9}
_DTYPE_NAMES = {getattr(torch, torch_name): name for name, (torch_name, _) in DTYPES.items()}


class WrongRule(AssertionError):
    """Shards recombine to something else than the op gives on full tensors."""


@dataclass(frozen=True)
class OpSample:
    """One call of an op on concrete tensors.

    shapes_only: the op promises no values.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    shapes_only: bool = False

    def __str__(self) -> str:
        shapes = [str(tuple(x.shape)) for x in _tensors((self.args, tuple(self.kwargs.values())))]
        return f"{self.op}({', '.join(shapes)})"


@dataclass(frozen=True)
class SampleNode:
    """A sample as a node of a graph, with what it gives on full tensors."""

    node: Node
    ins: tuple[TensorType, ...]
    tensors: tuple[torch.Tensor, ...]
    outs: tuple[torch.Tensor | None, ...]
    sample: OpSample

    @property
    def names(self) -> list[str]:
        return list(refs_of(self.node))


def type_of(x: torch.Tensor) -> TensorType:
    return TensorType(tuple(x.shape), _DTYPE_NAMES[x.dtype])


def _tensors(arg: Any) -> Iterator[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from _tensors(item)


def make_call(sample: OpSample) -> SampleNode:
    """The sample as a node; its types are those of the real outputs."""
    results: list[torch.Tensor] = []

    def written(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            results.append(arg)
            return Ref(f"x{len(results) - 1}")
        if isinstance(arg, torch.dtype):
            return Dtype(_DTYPE_NAMES[arg])
        if isinstance(arg, list | tuple):
            return tuple(written(a) for a in arg)
        return arg

    args = tuple(written(a) for a in sample.args)
    kwargs = tuple((k, written(v)) for k, v in sample.kwargs.items())
    alone = Node(sample.op, args, kwargs, (), ())
    op = function_of(alone, RankView((), (), ()), lambda *_: find_op(sample.op), torch.device("cpu"))
    result = op(*sample.args, **sample.kwargs)
    outs = tuple(result) if isinstance(result, tuple | list) else (result,)
    types = tuple(None if o is None else type_of(o) for o in outs)
    node = Node(sample.op, args, kwargs, tuple(f"y{k}" for k in range(len(outs))), types)
    return SampleNode(node, tuple(type_of(x) for x in results), tuple(results), outs, sample)


def digits_of(rule: Factored) -> list[list[Digit]]:
    """For every factor the full one, outer and inner parts of its size, and its zigzag, each a class of its
    own."""
    result: list[list[Digit]] = []
    count = 0
    for factor, size in enumerate(rule.sizes):
        inside = [d for d in range(2, size) if size % d == 0]
        zigzag = [(-2, size // 2)] if factor in rule.zigzag and size % 2 == 0 else []
        parts = [(1, size), *((d, size // d) for d in inside), *((1, d) for d in inside), *zigzag]
        result.append([(outer, own, count + k) for k, (outer, own) in enumerate(parts)])
        count += len(parts)
    return result


def check_rule(rule: UserRule, *args: Any, **kwargs: Any) -> int:
    """Compare a user's rule with the truth on one call of its op; in how many ways the op may run.

    args, kwargs: of the call; small tensors, best with odd sizes and in double precision. Raises WrongRule
    if shards, in any way that the rule allows, recombine to something else than the op gives whole.
    """
    return check(OpSample(rule.op, args, kwargs), rule.fn)


def check(
    sample: OpSample,
    rule_fn: Callable[..., Factored],
    meshes: Sequence[tuple[int, ...]] = MESHES,
    most: int | None = None,
) -> int:
    """Compare every state of a rule on every mesh with the truth; how many states there were.

    most: states of a mesh, evenly chosen; None for all.
    """
    call = make_call(sample)
    rule = rule_fn(call.node, call.ins)
    _check_form(call, rule)
    count = 0
    for sizes in meshes:
        states = op_states(
            rule, call.ins, call.node.types, digits_of(rule), sizes, lambda axis, classes: True
        )
        for state in states[:: 1 if most is None else -(-len(states) // most)]:
            _check_state(call, rule, state, sizes)
        count += len(states)
    return count


def _check_form(call: SampleNode, rule: Factored) -> None:
    """The dims of every tensor are products of the factors, and the order of inputs is that of the uses."""
    assert len(rule.inputs) == len(call.ins), f"{call.sample}: {len(rule.inputs)} inputs in the rule"
    assert len(rule.outputs) == len(call.node.types), (
        f"{call.sample}: {len(rule.outputs)} outputs in the rule"
    )
    for dims, type_ in [
        *zip(rule.inputs, call.ins, strict=True),
        *zip(rule.outputs, call.node.types, strict=True),
    ]:
        assert (dims is None) == (type_ is None), f"{call.sample}: an output that is no tensor"
        if dims is None or type_ is None:
            continue
        assert len(dims) == len(type_.shape), f"{call.sample}: {dims} for {type_}"
        for factors, size in zip(dims, type_.shape, strict=True):
            assert not factors or prod(rule.sizes[f] for f in factors) == size, (
                f"{call.sample}: {dims} for {type_}"
            )


def _check_state(call: SampleNode, rule: Factored, state: OpState, sizes: tuple[int, ...]) -> None:
    names = tuple("abc"[: len(sizes)])
    views = [RankView(names, sizes, coords) for coords in product(*(range(n) for n in sizes))]
    node = call.node
    if rule.local is not None:
        node = rule.local(LocalCall(node, call.ins, state.inputs, state.outputs, MeshShape(names, sizes)))
    graph = Graph("sample", tuple(zip(call.names, call.ins, strict=True)), (node,), node.outs)
    shards = [
        _shards(x, layout, type_, views)
        for x, layout, type_ in zip(call.tensors, state.inputs, call.ins, strict=True)
    ]
    told = f"{call.sample} on {sizes}: {_show(state.inputs)} -> {_show(state.outputs)}"
    if is_collective(node):
        results = _exchanged(node, call.names, shards, views)
    else:
        results = [
            _run_rank(graph, view, [parts[k] for parts in shards], told) for k, view in enumerate(views)
        ]
    for position, (out, layout) in enumerate(zip(call.outs, state.outputs, strict=True)):
        if out is None:
            continue
        assert layout is not None, told
        parts = [r[position] for r in results]
        _check_output(call.sample, out, layout, parts, views, f"{told}, output {position}")


def _run_rank(graph: Graph, view: RankView, parts: list[torch.Tensor], told: str) -> tuple[Any, ...]:
    """The outputs of one rank."""
    prepared = PreparedSegment(graph, view, _no_collective, torch.device("cpu"))
    try:
        return prepared(parts, 0)
    except (RuntimeError, IndexError, ValueError) as error:
        op = graph.nodes[0].op
        raise WrongRule(f"{told}: rank {view.coords} cannot run {op}: {error}") from error


def _exchanged(
    node: Node, names: Sequence[str], shards: Sequence[Sequence[torch.Tensor]], views: Sequence[RankView]
) -> list[tuple[Any, ...]]:
    """The outputs of all ranks of an op that exchanges rows over one axis."""
    together = Together(views)
    inputs = [[shards[names.index(r)][k] for r in refs_of(node)] for k in range(len(views))]
    calls = [
        partial(ranks.of("", node, view), xs, *node.args[1:], **dict(node.kwargs))
        for ranks, view, xs in zip(together.ranks, views, inputs, strict=True)
    ]
    return [out if isinstance(out, tuple) else (out,) for out in together.run(node, calls)]


def _check_output(
    sample: OpSample,
    out: torch.Tensor,
    layout: Layout,
    parts: Sequence[torch.Tensor],
    views: Sequence[RankView],
    told: str,
) -> None:
    if not layout_ok(out.shape, layout, views[0].sizes):
        raise WrongRule(f"{told}: no layout of {tuple(out.shape)}")
    for part, view in zip(parts, views, strict=True):
        wanted = local_shape(out.shape, layout, view.sizes, view.coords)
        if tuple(part.shape) != wanted:
            raise WrongRule(f"{told}: rank {view.coords} holds {tuple(part.shape)} instead of {wanted}")
        if part.dtype != out.dtype:
            raise WrongRule(f"{told}: {part.dtype} instead of {out.dtype}")
    if sample.shapes_only:
        return
    full, out = recombine([comparable(x) for x in parts], layout, views, out.shape, told), comparable(out)
    if any(isinstance(p, Partial) and p.reduce == "lse" for p in layout):
        full, out = _plain_stats(full), _plain_stats(out)
    dtypes = {x.dtype for x in _tensors((sample.args, out))}
    tolerance = next((t for dtype, t in TOLERANCES.items() if dtype in dtypes), 0.0)
    try:
        torch.testing.assert_close(full, out, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise WrongRule(f"{told}: {error}") from error


def comparable(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as wider ones, as torch compares none."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _plain_stats(stats: torch.Tensor) -> torch.Tensor:
    """Row statistics without the freedom of how the sum of exponentials is scaled."""
    return torch.stack((stats[..., 0] + stats[..., 1].log(), stats[..., 2], stats[..., 3]), -1)


def recombine(
    parts: Sequence[torch.Tensor],
    layout: Layout,
    views: Sequence[RankView],
    shape: Sequence[int],
    told: str,
) -> torch.Tensor:
    """The global tensor from what all ranks hold; replicas must be the same bit by bit."""
    pending = [a for a, p in enumerate(layout) if isinstance(p, Partial)]
    ops = {p.reduce for p in layout if isinstance(p, Partial)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, view in enumerate(views):
        groups.setdefault(tuple(c for a, c in enumerate(view.coords) if a not in pending), []).append(rank)
    index = torch.arange(prod(shape)).reshape(tuple(shape))
    out = torch.zeros(prod(shape), dtype=parts[0].dtype)
    seen = torch.zeros(prod(shape), dtype=torch.bool)
    for ranks in groups.values():
        value = reduce_parts([parts[r] for r in ranks], next(iter(ops))) if ops else parts[ranks[0]]
        view = views[ranks[0]]
        where = shard_tensor(index, layout, view.sizes, view.coords).reshape(-1)
        flat = value.reshape(-1)
        old = seen[where]
        if not torch.equal(out[where][old].nan_to_num(), flat[old].nan_to_num()):
            raise WrongRule(f"{told}: replicas differ")
        out[where] = flat
        seen[where] = True
    if not seen.all():
        raise WrongRule(f"{told}: no rank holds some elements")
    return out.reshape(tuple(shape))


def _shards(
    x: torch.Tensor, layout: Layout, type_: TensorType, views: Sequence[RankView]
) -> list[torch.Tensor]:
    """What each rank holds of an input; terms of a partial sum are random."""
    terms = _terms(x, [n for n, p in zip(views[0].sizes, layout, strict=True) if isinstance(p, Partial)])
    result = []
    for view in views:
        pending = tuple(c for c, p in zip(view.coords, layout, strict=True) if isinstance(p, Partial))
        part = shard_tensor(terms[pending], layout, view.sizes, view.coords).clone()
        assert tuple(part.shape) == local_shape(type_.shape, layout, view.sizes, view.coords)
        result.append(part)
    return result


def _terms(x: torch.Tensor, sizes: Sequence[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """Random terms that sum to x, one for each combination of coordinates of the pending axes."""
    keys = list(product(*(range(n) for n in sizes)))
    if len(keys) == 1:
        return {keys[0]: x}
    make = torch.Generator().manual_seed(len(keys))
    if x.dtype.is_floating_point or x.dtype.is_complex:
        drawn = [torch.randn(x.shape, dtype=x.dtype, generator=make) / 4 for _ in keys[1:]]
    else:
        drawn = [torch.randint(-9, 9, x.shape, dtype=x.dtype, generator=make) for _ in keys[1:]]
    first = x - sum(drawn)
    return dict(zip(keys, [first, *drawn], strict=True))


def _show(layouts: Sequence[Layout | None]) -> str:
    return ", ".join("-" if lay is None else " ".join(map(str, lay)) for lay in layouts)


def _no_collective(node: Node, view: RankView) -> Callable[..., Any]:
    raise AssertionError("a rule must not communicate")
