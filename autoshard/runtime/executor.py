"""One rank's program on torch.distributed, part by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from autoshard.cluster.mesh import Mesh
from autoshard.errors import VerificationError
from autoshard.ir import Call, Node, Port
from autoshard.ir.boundaries import ends_of
from autoshard.ir.lowered import Instruction, Phase, StagePart, uses_of
from autoshard.ir.offload import HOST_OPS
from autoshard.program.collectives import collectives_of
from autoshard.program.manifest import RECOMPILE
from autoshard.program.program import Program
from autoshard.runtime.checks.collective_watchdog import Watch
from autoshard.runtime.collectives import GroupCollectives
from autoshard.runtime.debugging.held_memory import is_out_of_memory, note_held
from autoshard.runtime.debugging.nan_trace import NanTrace
from autoshard.runtime.debugging.op_places import OpPlaces
from autoshard.runtime.debugging.ranges import Ranges
from autoshard.runtime.host import host_for, landed
from autoshard.runtime.pending import Issue, all_arrived, arrived
from autoshard.runtime.prepared_call import PreparedCall
from autoshard.runtime.prepared_steps import PreparedItem, PreparedSegment, function_of
from autoshard.runtime.resolve import RankView
from autoshard.runtime.transport.transport import Transport
from autoshard.torch_adapters.profiler import is_profiling

#: (stage, phase, slice)
PartKey: TypeAlias = "tuple[int, Phase, int]"
#: phases behind the loss
BEHIND: frozenset[Phase] = frozenset(("backward", "weight"))


class Values(dict[str, Any]):
    """The values of one microbatch on a rank. left: value -> how many uses by parts are still to come.

    nans: follows NaNs among them, where that is asked for.
    """

    nans: NanTrace | None = None

    def __init__(self, left: Mapping[str, int]) -> None:
        super().__init__()
        self.left = dict(left)

    def used(self, value: str) -> None:
        """One of the uses of a value is over; after the last it is dropped, unless it is a result."""
        if value in self.left:
            self.left[value] -= 1
            if not self.left[value]:
                self.pop(value, None)


class RankProgram:
    """A program bound to one rank of a stage's mesh.

    transports: of the axes, for this rank. stages: those that the rank runs.
    sent: values that are sent to other ranks, which counts as one more use. Results are never dropped here.
    watch: told of every call and collective, None in a plain run.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        transports: Mapping[str, Transport],
        device: torch.device,
        stages: Collection[int] = (0,),
        sent: Collection[str] = (),
        watch: Watch | None = None,
    ) -> None:
        self.program = program
        self.mesh = Mesh.parse(program.mesh)
        self.view = RankView(self.mesh.names, self.mesh.sizes, self.mesh.coords(rank))
        self.device = device
        self.compiles = program.codegen == "inductor" or (not program.codegen and device.type == "cuda")
        self.kept = Path(program.code_cache) if program.code_cache else None
        self.watch = watch
        self.collectives = GroupCollectives(transports, collectives_of(program), watch)
        self.host = host_for(device)
        lowered = program.lowered
        parts = [p for p in lowered.parts if p.stage in stages]
        called = {i.segment for p in parts for i in lowered.of(p) if isinstance(i, Call)}
        paired = program.stages is not None and bool(program.stages.schedule.paired)
        self.segments = {
            name: PreparedSegment(
                s.graph, self.view, partial(self._bound, name), device, self.compiles, self.kept, paired
            )
            for name, s in lowered.segments.items()
            if name in called
        }
        self.keep = {r.value for r in program.signature.results}
        shared = Counter(v for p in parts for v in ends_of(lowered, p).uses)
        shared.update(sent)
        self.parts = {(p.stage, p.phase, p.slice): self._prepare(p, shared) for p in parts}
        #: part -> what may still be on its way when its last op has run
        self.pending = {key: self._pending(items) for key, items in self.parts.items()}
        #: part -> results that it may have put into host memory
        self.stored = {
            key: tuple(o for item in items for o in item.outs if o in self.keep) if program.offload else ()
            for key, items in self.parts.items()
        }
        self.left = {v: n for v, n in shared.items() if v not in self.keep}
        self.places = OpPlaces(program)

    def _prepare(self, part: StagePart, shared: Mapping[str, int]) -> list[PreparedItem]:
        """The items of a part, each with the values that are dead after it."""
        items = self.program.lowered.of(part)
        ends = ends_of(self.program.lowered, part)
        # what enters may be used by other parts, too: it is counted there where this part uses it last
        entering = {v for v in ends.uses if v not in self.keep}
        keep = self.keep | {v for v in ends.makes if v in shared}
        prepared: list[PreparedItem] = []
        for item in reversed(items):
            last = (set(uses_of(item)) | set(item.outs)) - keep
            keep |= set(uses_of(item))
            prepared.append(self._item(item, sorted(last - entering), sorted(last & entering)))
        return prepared[::-1]

    def _pending(self, items: Sequence[PreparedItem]) -> tuple[str, ...]:
        """What collectives make, in main or at the end of a segment."""
        result: list[str] = []
        for item in items:
            if isinstance(item.body, PreparedSegment):
                ends = zip(item.outs, item.body.outputs, strict=True)
                result += [out for out, slot in ends if slot in item.body.late]
            elif isinstance(item.body.fn, Issue):
                result += item.outs
        return tuple(result)

    def _item(self, item: Instruction, dead: Sequence[str], counted: Sequence[str]) -> PreparedItem:
        if isinstance(item, Call):
            body = self.segments[item.segment]
            return PreparedItem(item, item.args, body, dead, counted)
        assert isinstance(item, Node)
        uses = uses_of(item)
        slots = {n: k for k, n in enumerate([*uses, *item.outs])}
        fn = function_of(item, self.view, partial(self._bound, ""), self.device, self.compiles, self.kept)
        step = PreparedCall(item, self.view, slots, fn)
        return PreparedItem(item, uses, step, dead, counted)

    def _bound(self, segment: str, node: Node, view: RankView) -> Any:
        """What runs a ``comm`` or ``host`` node."""
        return self.host.of(node) if node.op in HOST_OPS else self.collectives.of(segment, node, view)

    def made_by(self, key: PartKey) -> tuple[str, ...]:
        """What a part makes that other parts use."""
        outs = [o for item in self.parts.get(key, ()) for o in item.outs]
        return tuple(o for o in outs if o in self.left)

    def start(self) -> Values:
        """Room for the values of a microbatch."""
        return Values(self.left)

    def kept_ports(self) -> tuple[Port, ...]:
        """Parameters and inputs that the backward half reads as they were given."""
        lowered = self.program.lowered
        used = {v for p in lowered.parts if p.phase in BEHIND for v in ends_of(lowered, p).uses}
        ports = self.program.signature.ports
        return tuple(p for p in ports if p.name in used and p.kind in ("param", "input"))

    @cached_property
    def returned_only(self) -> frozenset[str]:
        """Outputs that backward does not read: once the user has them, nothing here need hold them."""
        lowered, results = self.program.lowered, self.program.signature.results
        read = {v for p in lowered.parts if p.phase in BEHIND for v in ends_of(lowered, p).uses}
        return frozenset(r.value for r in results if r.kind == "output") - read

    def run(self, env: Values, key: PartKey) -> None:
        """Run one part on the rank's values, dropping what is dead and adding what is made."""
        for _ in self._stopping(env, key):
            pass

    def run_together(self, parts: Sequence[tuple[Values, Sequence[PartKey]]], turns: Iterable[int]) -> None:
        """Run parts of several microbatches, each from stop to stop where it is its turn (`rules.stops`).

        All ranks take the same turns, so that they issue messages in the same order.
        """
        going = [chain.from_iterable(map(partial(self._stopping, env), keys)) for env, keys in parts]
        for turn in turns:
            next(going[turn], None)
        for rest in going:  # of turns that were counted for other stops
            for _ in rest:
                raise VerificationError("the turns of a pair end before its parts do", hint=RECOMPILE)

    def _stopping(self, env: Values, key: PartKey) -> Iterator[None]:
        look = env.nans or (Ranges(self.places, self.compiles) if is_profiling() else None)
        for item in self.parts.get(key, ()):
            if isinstance(item.body, PreparedSegment):
                yield
            args = all_arrived([env[a] for a in item.args]) if look is None else look.arrived(env, item.args)
            if self.watch is not None:
                self.watch.at.layer = item.label
            try:
                # the call alone holds what nothing else needs, and lets go of it after its last use
                for name in item.moved:
                    env.pop(name, None)
                for name in item.counted:
                    env.used(name)
                results = yield from item.run(args) if look is None else look.run(item, args)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    note_held(error, self.places, env, item)
                raise
            env.update(zip(item.outs, results, strict=True))
            del args, results
            for name in item.dead:
                env.pop(name, None)
        for name in self.pending.get(key, ()):
            if name in env:
                env[name] = arrived(env[name]) if look is None else look.arrived(env, [name])[0]
        for name in self.stored.get(key, ()):
            env[name] = landed(env[name])
        self.host.settle()
