"""All ranks of a program in one process, op by op; collectives computed by their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import torch

from autoshard.cluster.mesh import Mesh
from autoshard.ir import Call, Node, Ref
from autoshard.ir.lowered import Part
from autoshard.offload import HOST_OPS
from autoshard.placement import Shard
from autoshard.program.program import Program
from autoshard.runtime.host import PlainHost, landed
from autoshard.runtime.parts import join_parts, reduce_parts, shard_tensor, take_part
from autoshard.runtime.quantised import Packing, joined, pack, sums, unpack
from autoshard.runtime.resolve import RankView, find_op, torch_dtype
from autoshard.runtime.rounding import Rounding, of_message, of_norm
from autoshard.runtime.steps import Env, PreparedSegment, Step
from autoshard.wires import BITS, NORMS, wire_gather


class Lockstep:
    """Runs every rank of a program side by side.

    Values are lists with one tensor per rank. rounding: of every quantised value that was sent so far.
    """

    def __init__(self, program: Program, device: torch.device | None = None) -> None:
        self.program = program
        self.mesh = Mesh.parse(program.mesh)
        self.device = device or torch.device("cpu")
        ranks = range(self.mesh.world_size)
        self.views = [RankView(self.mesh.names, self.mesh.sizes, self.mesh.coords(r)) for r in ranks]
        self.segments = {
            name: [PreparedSegment(s.graph, view, _unbound, self.device) for view in self.views]
            for name, s in program.lowered.segments.items()
        }
        self.rounding: list[Rounding] = []
        self.results = {r.value for r in program.signature.results}

    def shards(self, x: torch.Tensor, name: str) -> list[torch.Tensor]:
        """What each rank holds of a global tensor for an input of the program."""
        layout = self.program.lowered.values[name].layout
        return [shard_tensor(x, layout, view.sizes, view.coords).clone() for view in self.views]

    def whole(self, parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """The global tensor from the shards of all ranks; replicas are checked to be equal."""
        placed = self.program.lowered.values[name]
        index: torch.Tensor | None = None
        out = torch.zeros(placed.type.shape, dtype=parts[0].dtype)
        seen = torch.zeros(out.numel(), dtype=torch.bool)
        flat = out.reshape(-1)
        #: coordinates on the axes that split it -> the first of the parts there
        firsts: dict[tuple[int, ...], torch.Tensor] = {}
        for part, view in zip(parts, self.views, strict=True):
            values = part.detach().reshape(-1)
            split = zip(placed.layout, view.coords, strict=True)
            first = firsts.setdefault(tuple(c for p, c in split if isinstance(p, Shard)), values)
            if first is not values:
                self._same(values, first, name)
                continue
            if values.numel() == out.numel():
                flat.copy_(values)  # nothing is split
                continue
            if index is None:
                index = torch.arange(out.numel()).reshape(placed.type.shape)
            where = shard_tensor(index, placed.layout, view.sizes, view.coords).reshape(-1)
            old = seen[where]
            if old.any():
                self._same(values[old], flat[where[old]], name)
            flat[where] = values
            seen[where] = True
        return out

    @staticmethod
    def _same(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        if not torch.allclose(wanted, found, equal_nan=True, rtol=1e-5, atol=1e-6):
            raise AssertionError(f"replicas of {name} differ between ranks")

    def run(self, env: dict[str, list[Any]], backward: bool) -> None:
        """Run one half of a program of one stage on the values in ``env``, adding what it makes."""
        for part in self.program.lowered.parts:
            if (part.phase not in ("gather", "count", "forward")) == backward:
                self.run_part(env, part)

    def run_part(self, env: dict[str, list[Any]], part: Part) -> None:
        """Run one part on the values in ``env``, adding what it makes."""
        for item in self.program.lowered.of(part):
            if isinstance(item, Call):
                self._call(item, env)
            else:
                self._main_node(item, env)
            if self.program.offload:
                for out in self.results.intersection(item.outs):
                    env[out] = [landed(x) for x in env[out]]

    def _main_node(self, node: Node, env: dict[str, list[Any]]) -> None:
        if node.op.startswith("comm."):
            self._collective(node, env)
            return
        op = find_op(node.op)
        ranks = range(len(self.views))
        rows = [[env[a.name][k] if isinstance(a, Ref) else a for a in node.args] for k in ranks]
        env[node.name] = [op(*row, **dict(node.kwargs)) for row in rows]

    def _collective(self, node: Node, env: dict[str, list[Any]]) -> None:
        """A collective in main, of one value or of a bucket of them."""
        first = node.args[0]
        ranks = range(len(self.views))
        if not isinstance(first, tuple):
            env[node.name] = self._apply(node, [[env[first.name][k]] for k in ranks])
            return
        results = self._apply(node, [[[env[r.name][k] for r in first]] for k in ranks])
        for position, out in enumerate(node.outs):
            env[out] = [result[position] for result in results]

    def _call(self, call: Call, env: dict[str, list[Any]]) -> None:
        prepared = self.segments[call.segment]
        envs: list[Env] = [
            segment.start([env[a][k] for a in call.args]) for k, segment in enumerate(prepared)
        ]
        for steps in zip(*(s.steps for s in prepared), strict=True):
            self._step(steps, envs, call)
        finished = [s.finish(e) for s, e in zip(prepared, envs, strict=True)]
        for position, out in enumerate(call.outs):
            env[out] = [f[position] for f in finished]

    def _step(self, steps: Sequence[Step], envs: Sequence[Env], call: Call) -> None:
        node, site = steps[0].node, call.site
        if not node.op.startswith("comm."):
            norm = NORMS.get(node.op)
            given = [step.arguments(env, site) for step, env in zip(steps, envs, strict=True)] if norm else []
            for step, env in zip(steps, envs, strict=True):
                step.run(env, site)
            if norm is not None:
                slot = steps[0].outs[norm[0]]
                self.rounding.append(of_norm(node, given, [env[slot] for env in envs], call.segment))
            return
        inputs = [step.arguments(env, site)[:1] for step, env in zip(steps, envs, strict=True)]
        for step, env, out in zip(steps, envs, self._apply(node, inputs, call.segment), strict=True):
            step.store(env, out)

    def _apply(self, node: Node, inputs: Sequence[Sequence[Any]], segment: str = "") -> list[Any]:
        """A collective over all groups of its axis."""
        kind = node.op.split(".")[1]
        results: list[Any] = [None] * len(self.views)
        for group in self._groups(node.args[1]):
            views, given = [self.views[r] for r in group], [inputs[r][0] for r in group]
            outs = COLLECTIVES[kind](node, views, given)
            if kind in QUANTISED:
                exact = QUANTISED[kind](node, views, given)
                self.rounding += of_message(node, outs, exact, segment)
            for rank, out in zip(group, outs, strict=True):
                results[rank] = out
        return results

    def _groups(self, axes: str | tuple[str, ...]) -> list[list[int]]:
        """Ranks that differ only along some axes, in the order of their coordinates along these."""
        if isinstance(axes, str):
            return [list(group) for group in self.mesh.groups(axes)]
        numbers = [self.mesh.index(a) for a in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, view in enumerate(self.views):
            rest = tuple(c for k, c in enumerate(view.coords) if k not in numbers)
            groups.setdefault(rest, []).append(rank)
        along = {r: tuple(self.views[r].coords[k] for k in numbers) for r in range(len(self.views))}
        return [sorted(group, key=along.__getitem__) for group in groups.values()]


Collective: TypeAlias = Callable[[Node, Sequence[RankView], Sequence[Any]], list[Any]]


def _unbound(node: Node, view: RankView) -> Callable[..., Any]:
    if node.op in HOST_OPS:
        return PlainHost().of(node)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("lockstep runs collectives itself")

    return fail


def _kw(node: Node, key: str) -> int:
    value = node.kwarg(key, 1)
    assert isinstance(value, int)
    return value


def _all_reduce(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    whole = reduce_parts(xs, node.kwarg("op", "sum"))
    return [whole.clone() for _ in xs]


def _all_gather(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    whole = join_parts(xs, node.args[2], _kw(node, "outer"))
    return [whole.clone() for _ in xs]


def _part(node: Node, x: torch.Tensor, ways: int, index: int) -> torch.Tensor:
    return (
        take_part(x, node.args[2], ways, index, _kw(node, "outer"), _kw(node, "inner")).contiguous().clone()
    )


def _reduce_scatter(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    whole = reduce_parts(xs, "sum")
    return [_part(node, whole, len(xs), k) for k in range(len(xs))]


def _slice(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_part(node, x, len(xs), k) for k, x in enumerate(xs)]


def _all_to_all(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    ways = len(xs)
    split, joined = node.args[2], node.args[3]
    sent = [[take_part(x, split, ways, k, _kw(node, "split_outer")) for k in range(ways)] for x in xs]
    return [join_parts([row[k] for row in sent], joined, _kw(node, "concat_outer")) for k in range(ways)]


def _expert_mm(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """Every rank's rows with the matrices of all ranks, one after the other."""
    weight = torch.cat([weight for _, _, weight in xs])
    assert weight.shape[0] == node.args[3]
    return [torch.ops.autoshard.expert_mm(x, expert, weight, node.args[2]) for x, expert, _ in xs]


def _expert_outer(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """The gradient of all matrices from all rows, cut into what each rank holds."""
    x, grad, expert = (torch.cat(column) for column in zip(*xs, strict=True))
    transposed, count = node.args[2:]
    whole = torch.ops.autoshard.expert_outer(x, grad, expert, count, transposed)
    return [take_part(whole, 0, len(xs), k, 1, 1).contiguous().clone() for k in range(len(xs))]


def _all_gather_mm(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """The gather, then the products."""
    found = []
    for whole, (_, *weights) in zip(_all_gather(node, views, [x[0] for x in xs]), xs, strict=True):
        found.append([whole, *(torch.mm(whole.flatten(0, -2), weight) for weight in weights)])
    return found


def _mm_reduce_scatter(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """The products and their sum, then the reduce-scatter."""
    dim = node.args[2]
    sums = []
    for view, factors in zip(views, xs, strict=True):
        total = torch.mm(factors[0], factors[1])
        for left, right in zip(factors[2::2], factors[3::2], strict=True):
            total = total + torch.mm(left, right)
        part = view.value(node.args[3])
        sums.append(total.view([n * len(xs) if d == dim else n for d, n in enumerate(part)]))
    return _reduce_scatter(node, views, sums)


def _bucket(one: Collective) -> Collective:
    """A collective of several tensors is that collective of each."""

    def run(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
        wheres = node.args[2] if len(node.args) > 2 else [None] * len(xs[0])
        columns = []
        for k, where in enumerate(wheres):
            kwargs = node.kwargs
            args: tuple[Any, ...] = node.args[:2]
            if where is not None:
                args = (*args, where[0])
                kwargs = (("outer", where[1]), ("inner", where[2]))
            columns.append(one(replace(node, args=args, kwargs=kwargs), views, [x[k] for x in xs]))
        return [[column[r] for column in columns] for r in range(len(xs))]

    return run


def _all_gather_q(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """Every rank's parts through one buffer each, and joined."""
    _, _, wheres, bits, group = node.args
    how = Packing.of([max(x[t].numel() for x in xs) for t in range(len(wheres))], bits, group, xs[0][0].dtype)
    wires = torch.cat([pack([x], how) for x in xs])
    outs = []
    for t, (rows, (dim, outer, _, _)) in enumerate(zip(unpack(wires, how), wheres, strict=True)):
        outs.append(joined(rows, [x[t].shape for x in xs], dim, outer))
    return [[out.clone() for out in outs] for _ in xs]


def _reduce_scatter_q(node: Node, views: Sequence[RankView], xs: Sequence[Any]) -> list[Any]:
    """Every rank's parts through one buffer per receiver, which adds up what it gets."""
    _, _, wheres, bits, group = node.args
    ways = len(xs)
    cut = [
        [
            [
                take_part(x, dim, ways, k, outer, inner)
                for x, (dim, outer, inner, _) in zip(row, wheres, strict=True)
            ]
            for k in range(ways)
        ]
        for row in xs
    ]
    numels = [max(row[t].numel() for row in cut[0]) for t in range(len(wheres))]
    how = Packing.of(numels, bits, group, xs[0][0].dtype)
    sent = [pack(rows, how) for rows in cut]
    found = []
    for k in range(ways):
        got = sums(torch.stack([wires[k] for wires in sent]), how)
        found.append([x[: like.numel()].view(like.shape) for x, like in zip(got, cut[0][k], strict=True)])
    return found


def _all_gather_wire(node: Node, views: Sequence[RankView], xs: Sequence[torch.Tensor]) -> list[Any]:
    """Every rank's rows out of its wire, and joined."""
    said = wire_gather(node)
    assert said is not None
    how = Packing.of([prod(said.shape)], (BITS,), said.group, torch_dtype(said.dtype))
    (rows,) = unpack(torch.stack(list(xs)), how)
    dim, outer, _, _ = said.where
    whole = joined(rows, [said.shape] * len(xs), dim, outer)
    return [whole.clone() for _ in xs]


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "slice": _slice,
    "all_to_all": _all_to_all,
    "expert_mm": _expert_mm,
    "expert_outer": _expert_outer,
    "all_gather_mm": _all_gather_mm,
    "mm_reduce_scatter": _mm_reduce_scatter,
    "all_reduce_bucket": _bucket(_all_reduce),
    "all_gather_bucket": _bucket(_all_gather),
    "reduce_scatter_bucket": _bucket(_reduce_scatter),
    "all_gather_q_bucket": _all_gather_q,
    "reduce_scatter_q_bucket": _reduce_scatter_q,
    "all_gather_wire": _all_gather_wire,
}
#: buckets with less precision -> what they would give with all of it
QUANTISED: dict[str, Collective] = {
    "all_gather_q_bucket": COLLECTIVES["all_gather_bucket"],
    "reduce_scatter_q_bucket": COLLECTIVES["reduce_scatter_bucket"],
}
