"""The parts of a program in time: what each phase of each stage takes, and what is exposed around a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

from autoshard.cluster.cluster import Device
from autoshard.cost.link import AxisLink
from autoshard.cost.recipe import added_bytes
from autoshard.ir import DTYPES, Call, refs_of
from autoshard.ir.lowered import Instruction, Phase, StagePart
from autoshard.passes.partition.quantize_collectives import Weights
from autoshard.program.holders import accumulated
from autoshard.program.program import Program
from autoshard.simulate.behaviour import Behaviour
from autoshard.simulate.equivalent_parts import likeness
from autoshard.simulate.framework_saved import recomputed_products
from autoshard.simulate.op_work import AGAIN
from autoshard.simulate.segment_work import Sheets
from autoshard.simulate.streams import (
    NOTHING,
    Habits,
    Played,
    Player,
    Price,
    SegmentCall,
)
from autoshard.simulate.turns import as_said, soonest_message
from autoshard.simulate.work import MemoryWork, Sheet


class Parts:
    """Plays the parts of a program on one rank of each stage.

    price: seconds of work on the device. links: of the mesh axes.
    """

    def __init__(
        self,
        program: Program,
        sheets: Sheets,
        price: Price,
        device: Device,
        behaviour: Behaviour,
        links: Sequence[AxisLink],
    ) -> None:
        self.program, self.sheets, self.behaviour = program, sheets, behaviour
        grads = (p.type.dtype for p in program.signature.ports if p.kind == "param" and p.type.is_float)
        own, wanted = next(grads, "f32"), behaviour.gradient_dtype
        self.widen = DTYPES[wanted][1] / DTYPES[own][1] if wanted else 1.0
        self.player = self._player(price, device, links)
        results = zip(program.lowered.results, program.signature.results, strict=True)
        self.gradients = frozenset(value for value, result in results if result.kind == "grad")
        ports = program.signature.ports
        copies = Weights(program.lowered, [p.name for p in ports if p.kind == "param"]).inside[""]
        #: there before computing begins, and what is gathered from it alone
        self.ports = frozenset({p.name for p in ports} | copies)
        self._alike: dict[int, Played] = {}
        self._paired: dict[tuple[int, int], tuple[Played, tuple[int, ...]]] = {}
        self._pairs_alike: dict[Hashable, tuple[Played, tuple[int, ...]]] = {}
        self._keys: dict[tuple[int, ...], int] = {}
        self._numbers: dict[Hashable, int] = {}

    def _player(self, price: Price, device: Device, links: Sequence[AxisLink]) -> Player:
        how = self.behaviour
        kernels = device.kernels
        habits = Habits(
            how.gathers_overlap,
            how.gradients_overlap,
            how.tensor_overlap,
            device.overlap,
            max(kernels.dispatch, kernels.eager) if how.eager else kernels.dispatch,
            how.late_waits,
            kernels.view,
            how.blocking_launches,
            how.exchange_overlap,
        )
        sizes, hosted = self.sheets.ops.mesh.sizes, bool(self.program.offload)
        return Player(price, sizes, habits, self.widen, hosted, links)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that spans are on."""
        links = ("to host", "from host") if self.program.offload else ()
        return ("compute", *self.sheets.ops.mesh.names, *links)

    def repriced(self, price: Price, device: Device, links: Sequence[AxisLink]) -> Parts:
        """The same work at other prices."""
        new = copy(self)
        new.__dict__.pop("all", None)
        new._alike, new._paired, new._pairs_alike = {}, {}, {}
        new.player = new._player(price, device, links)
        return new

    @cached_property
    def all(self) -> Mapping[tuple[int, Phase, int], Played]:
        """(stage, phase, slice) -> what it takes to run it once."""
        lowered = self.program.lowered
        result = {(p.stage, p.phase, p.slice): self.play(lowered.of(p)) for p in lowered.parts}
        for part in lowered.parts:
            if part.phase in ("backward", "weight"):
                result[part.stage, part.phase, part.slice] += self._summed(part)
        if self.behaviour.keeps == "ops":
            for part in lowered.parts:
                key: tuple[int, Phase, int] = (part.stage, "backward", part.slice)
                if part.phase == "forward" and key in result:
                    result[key] += self._products(part)
        if self.behaviour.full_recompute:
            for part in lowered.parts:
                if part.phase == "backward":
                    result[part.stage, "backward", part.slice] += self._rest(part)
        return result

    def of(self, stage: int, *phases: Phase, slice: int = 0) -> Played:
        """Some phases of a stage, or of a slice in it, one after the other; nothing where it has none."""
        keys = ((stage, phase, slice) for phase in phases)
        return sum((self.all[key] for key in keys if key in self.all), NOTHING)

    def paired(self, forward: int, backward: int) -> Played:
        """A forward of one stage and a backward of another microbatch that run as one.

        Raises VerificationError if the program has turns for other stops.
        """
        return self._pair(forward, backward)[0]

    def turns(self, forward: int, backward: int) -> tuple[int, ...]:
        """Which of the two goes on at each of their stops.

        As the program says, else whichever is next to send tokens among those that need not wait.
        """
        return self._pair(forward, backward)[1]

    def _pair(self, forward: int, backward: int) -> tuple[Played, tuple[int, ...]]:
        key = forward, backward
        if key not in self._paired:
            of = {(p.stage, p.phase): self.program.lowered.of(p) for p in self.program.lowered.parts}
            back = (*of[backward, "backward"], *of.get((backward, "weight"), ()))
            parts = of[forward, "forward"], back
            stages = self.program.stages
            said = None if stages is None else stages.turns.get(key)
            known = self._likeness(parts[0]), self._likeness(back), said
            if known not in self._pairs_alike:
                steps = [[self._step(i, str(k) if k else "") for i in items] for k, items in enumerate(parts)]
                gradients = self.gradients | {f"1{name}" for name in self.gradients}
                turns = soonest_message if said is None else as_said(said)
                self._pairs_alike[known] = self.player.play_together(steps, self.ports, gradients, turns)
            alone = [self.play(parts[0]), self.play(of[backward, "backward"])]
            alone += [self.play(of[backward, "weight"])] if (backward, "weight") in of else []
            # what is added to either beside its instructions
            more = self.of(forward, "forward").seconds + self.of(backward, "backward", "weight").seconds
            more -= sum(each.seconds for each in alone)
            both, taken = self._pairs_alike[known]
            self._paired[key] = (
                replace(both, seconds=both.seconds + more, compute=both.compute + more),
                taken,
            )
        return self._paired[key]

    def around(self, stage: int) -> Played:
        """What gathering once a step and reducing once a step add to it.

        Where gradients are reduced while more are computed, that is the last backward; where parameters are
        gathered before they are needed, the first forward.
        """
        # the first slice is the first forward and the last backward
        parts = [p for p in self.program.lowered.parts if p.stage == stage and p.slice == 0]
        of = {p.phase: self.program.lowered.of(p) for p in parts}
        last = of.get("weight") or of.get("backward", ())
        first = of.get("forward", ())
        reduce, gather = of.get("reduce", ()), of.get("gather", ())
        result = NOTHING
        if reduce:
            result += self._added(reduce, before=last if self.behaviour.gradients_overlap else ())
        if gather:
            result += self._added(gather, after=first if self.behaviour.gathers_overlap else ())
        return result

    def _added(
        self,
        items: Sequence[Instruction],
        before: Sequence[Instruction] = (),
        after: Sequence[Instruction] = (),
    ) -> Played:
        together, rest = self.play((*before, *items, *after)), self.play((*before, *after))
        talk = max(0.0, together.seconds - rest.seconds - (together.compute - rest.compute))
        alone = self.play(items)
        sent = alone.talk
        exposed = tuple(talk * axis / sent if sent else 0.0 for axis in alone.exposed)
        compute = together.compute - rest.compute
        return Played(compute + sum(exposed), compute, exposed, together.hidden - rest.hidden)

    def _summed(self, part: StagePart) -> Played:
        """Adding the gradients that a part makes to those of the microbatches before."""
        lowered, each = self.program.lowered, self.behaviour.sum_bytes
        if each == 0 or (each is None and self.program.microbatches == 1):
            return NOTHING
        new = {v for item in lowered.of(part) for v in item.outs}
        nbytes = 0.0
        for value in new.intersection(accumulated(self.program, part.stage)):
            placed = lowered.values[value]
            width = DTYPES[placed.type.dtype][1]
            own = added_bytes(width) if each is None else each
            nbytes += self.sheets.ops.nbytes(placed) / width * own
        seconds = self.player.price(MemoryWork(nbytes))
        return replace(NOTHING, seconds=seconds, compute=seconds)

    def _products(self, part: StagePart) -> Played:
        """The products of layers that backward recomputes."""
        seconds = 0.0
        for call in self.program.lowered.of(part):
            if isinstance(call, Call) and call.label:
                segment = self.program.lowered.segments[call.segment]
                values = segment.placed()
                repeated = [w for n in recomputed_products(segment) for w in self.sheets.ops.work(n, values)]
                seconds += sum(self.player.price(w) for w in repeated)
        return replace(NOTHING, seconds=seconds, compute=seconds)

    def _rest(self, part: StagePart) -> Played:
        """What forward does in layers that run again, beyond what backward needs of it."""
        lowered = self.program.lowered
        repeated = [i for i in lowered.of(part) if isinstance(i, Call) and AGAIN.search(i.segment)]
        labels = {i.label for i in repeated}
        forward = [
            i
            for p in lowered.parts
            if (p.stage, p.phase, p.slice) == (part.stage, "forward", part.slice)
            for i in lowered.of(p)
            if isinstance(i, Call) and i.label in labels
        ]
        if not repeated or not forward:
            return NOTHING
        full, needed = self.play(forward), self.play(repeated)
        compute = max(0.0, full.compute - needed.compute)
        exposed = tuple(max(0.0, a - b) for a, b in zip(full.exposed, needed.exposed, strict=True))
        return replace(NOTHING, seconds=compute + sum(exposed), compute=compute, exposed=exposed)

    def play(self, items: Sequence[Instruction], *, spans: bool = False) -> Played:
        """Instructions of main from idle streams on."""
        if spans:
            steps = [self._step(i) for i in items]
            return self.player.play(steps, self.ports, self.gradients, spans)
        key = self._likeness(items)
        if key not in self._alike:
            steps = [self._step(i) for i in items]
            self._alike[key] = self.player.play(steps, self.ports, self.gradients)
        return self._alike[key]

    def _likeness(self, items: Sequence[Instruction]) -> int:
        """A number that items which take equally long have in common."""
        same = tuple(map(id, items))
        result = self._keys.get(same)
        if result is None:
            values = self.program.lowered.values
            key = likeness(items, values, lambda v: (v in self.ports, v in self.gradients))
            result = self._keys[same] = self._numbers.setdefault(key, len(self._numbers))
        return result

    def sheet(self, item: Instruction) -> Sheet:
        """The tasks of an instruction."""
        return self.sheets.of(item.segment) if isinstance(item, Call) else self.sheets.of_node(item)

    def _step(self, item: Instruction, microbatch: str = "") -> SegmentCall:
        """microbatch: put before the names of what is not there from the start."""
        args = item.args if isinstance(item, Call) else tuple(dict.fromkeys(refs_of(item)))
        outs = item.outs
        if microbatch:
            args = tuple(a if a in self.ports else microbatch + a for a in args)
            outs = tuple(microbatch + out for out in outs)
        return SegmentCall(self.sheet(item), args, outs, item.backward and self.behaviour.backward_overlap)

    def beside(self, stage: int) -> float:
        """Bytes that a stage keeps for backward beside values of the program: scores of unfused attention,
        and masks of dropout."""
        how = self.behaviour
        scores = how.attention == "unfused" and not how.recomputes_scores
        total = 0.0
        lowered = self.program.lowered
        if not how.dropout and not scores:
            return 0.0
        own = [p for p in lowered.parts if p.stage == stage]
        calls = [(p.phase, i) for p in own for i in lowered.of(p) if isinstance(i, Call)]
        repeated = {i.label for _, i in calls if AGAIN.search(i.segment)}
        for phase, item in calls:
            if phase == "forward" and not (item.label and item.label in repeated):
                total += self.sheets.masks(item.segment)
                total += self.sheets.scores(item.segment) if scores else 0.0
        return total
