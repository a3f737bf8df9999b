"""All ranks of a program in one process, op by op, with the collectives that each of them really runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from autoshard.cluster.mesh import Mesh
from autoshard.errors import CollectiveError, VerificationError
from autoshard.ir import Call, Node
from autoshard.ir.collectives import DISPATCHES, axes_of, is_collective, sent_bits
from autoshard.ir.lowered import StagePart, uses_of
from autoshard.ir.offload import HOST_OPS
from autoshard.ir.placement import Shard
from autoshard.program.program import Program
from autoshard.runtime.host import PlainHost, landed
from autoshard.runtime.lockstep.in_process import Together, groups_of
from autoshard.runtime.lockstep.rounding import (
    Rounding,
    exact_message,
    of_message,
    of_op,
    of_tokens,
    rounded_output,
)
from autoshard.runtime.prepared_call import Env, PreparedCall
from autoshard.runtime.prepared_steps import PreparedSegment, function_of
from autoshard.runtime.resolve import RankView
from autoshard.runtime.shard_utils import shard_tensor


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
        self.together = Together(self.views)
        self.segments = {
            name: [
                PreparedSegment(s.graph, view, partial(self._bound, k, name), self.device)
                for k, view in enumerate(self.views)
            ]
            for name, s in program.lowered.segments.items()
        }
        #: of the nodes in main, by name
        # by the node: stages may call nodes of their own alike
        self.steps: dict[Node, list[PreparedCall]] = {}
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
    def _same(result: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        if not torch.allclose(wanted, result, equal_nan=True, rtol=1e-5, atol=1e-6):
            raise AssertionError(f"replicas of {name} differ between ranks")

    def run(self, env: dict[str, list[Any]], backward: bool) -> None:
        """Run one half of a program of one stage on the values in ``env``, adding what it makes."""
        for part in self.program.lowered.parts:
            if (part.phase not in ("gather", "count", "forward")) == backward:
                self.run_part(env, part)

    def run_part(self, env: dict[str, list[Any]], part: StagePart) -> None:
        """Run one part on the values in ``env``, adding what it makes."""
        for item in self.program.lowered.of(part):
            if isinstance(item, Call):
                self._call(item, env)
            else:
                self._main_node(item, env)
            if self.program.offload:
                for out in self.results.intersection(item.outs):
                    env[out] = [landed(x) for x in env[out]]

    def _bound(self, rank: int, segment: str, node: Node, view: RankView) -> Callable[..., Any]:
        """What runs a ``comm`` or ``host`` node on a rank."""
        return (
            PlainHost().of(node) if node.op in HOST_OPS else self.together.ranks[rank].of(segment, node, view)
        )

    def _main_node(self, node: Node, env: dict[str, list[Any]]) -> None:
        uses = uses_of(node)
        if node not in self.steps:
            slots = {name: k for k, name in enumerate([*uses, *node.outs])}
            self.steps[node] = [
                PreparedCall(
                    node, view, slots, function_of(node, view, partial(self._bound, k, ""), self.device)
                )
                for k, view in enumerate(self.views)
            ]
        envs: list[Env] = [
            [*(env[v][k] for v in uses), *([None] * len(node.outs))] for k in range(len(self.views))
        ]
        self._step(self.steps[node], envs, 0, "")
        for position, out in enumerate(node.outs, len(uses)):
            env[out] = [values[position] for values in envs]

    def _call(self, call: Call, env: dict[str, list[Any]]) -> None:
        prepared = self.segments[call.segment]
        envs: list[Env] = [
            segment.start([env[a][k] for a in call.args]) for k, segment in enumerate(prepared)
        ]
        for steps in zip(*(s.steps for s in prepared), strict=True):
            self._step(steps, envs, call.site, call.segment)
        finished = [s.finish(e) for s, e in zip(prepared, envs, strict=True)]
        for position, out in enumerate(call.outs):
            env[out] = [f[position] for f in finished]

    def _step(self, steps: Sequence[PreparedCall], envs: Sequence[Env], site: int, segment: str) -> None:
        """One op on all ranks."""
        node = steps[0].node
        rounded = rounded_output(node)
        measured = rounded is not None or any(sent_bits(node))
        given = [step.arguments(env, site) for step, env in zip(steps, envs, strict=True)] if measured else []
        if not is_collective(node):
            for step, env in zip(steps, envs, strict=True):
                with _refused(node):
                    step.run(env, site)
            if rounded is not None:
                slot = steps[0].outs[rounded]
                self.rounding.append(of_op(node, given, [env[slot] for env in envs], segment))
            return
        calls = [partial(step.call, env, site) for step, env in zip(steps, envs, strict=True)]
        with _refused(node):
            results = self.together.run(node, calls)
        for step, env, result in zip(steps, envs, results, strict=True):
            step.store(env, result)
        if given and node.op in DISPATCHES:
            self.rounding.append(of_tokens(node, given, segment))
        elif given and isinstance(node.args[0], tuple):
            for group in groups_of(self.views, axes_of(node)):
                exact = exact_message(node, [given[r][0] for r in group])
                self.rounding += of_message(node, [results[r] for r in group], exact, segment)


@contextmanager
def _refused(node: Node) -> Iterator[None]:
    """VerificationError for an op that cannot run on what the ranks hold."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError, TypeError, CollectiveError) as error:
        raise VerificationError(
            f"{node.op}, which makes {', '.join(node.outs)}, cannot run on the shards that ranks hold",
            where=node.origin.source or node.origin.fqn,
            why=f"{type(error).__name__}: {error}",
            hint="this is a mistake in the program: please report it with its folder",
        ) from error
