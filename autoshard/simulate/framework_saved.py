"""What the kernels of a framework keep of a forward call, where that is not what the program keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.ir import Call, Node, refs_of
from autoshard.ir.collectives import is_collective, transfer_of
from autoshard.ir.lowered import LoweredSegment, Phase, uses_of
from autoshard.ir.min_cut_recompute import keep_least
from autoshard.ir.views import VIEWS
from autoshard.program.program import Program
from autoshard.rules import attention
from autoshard.rules.chains import CHAINED
from autoshard.rules.stops import PRODUCTS
from autoshard.simulate.behaviour import Keeps
from autoshard.simulate.op_work import AGAIN

_LOSS = "autoshard.xent_"


@dataclass(frozen=True)
class SavedValues:
    """Values inside a forward segment, views as what they look at.

    read: that backward reads. handed: that other forward calls take, and so are there anyway. free:
    parameters and gathered copies of them.
    """

    read: frozenset[str]
    handed: frozenset[str]
    free: frozenset[str]


class Keeping:
    """Per forward call of a program (or one that backward runs again) what it keeps."""

    def __init__(self, program: Program, keeps: Keeps) -> None:
        self.program, self.keeps = program, keeps
        self._known: dict[tuple[str, SavedValues], frozenset[str]] = {}

    @cached_property
    def calls(self) -> Mapping[int, frozenset[str]]:
        """Place in main -> values inside the segment that the call keeps, inputs among them."""
        return self._calls(("backward", "weight", "reduce"))

    @cached_property
    def late(self) -> Mapping[int, frozenset[str]]:
        """The same, of what the gradients of weights read, where they are apart."""
        late: tuple[Phase, ...] = ("weight",)
        return self._calls(late)

    @cached_property
    def dropped(self) -> Mapping[str, frozenset[str]]:
        """Segment -> values that the program hands from forward to backward and no call of it keeps.

        Of forward segments what they make, of backward ones what they take.
        """
        lowered = self.program.lowered
        new: dict[str, set[str]] = {}
        gone: set[str] = set()
        kept_somewhere: dict[str, set[str]] = {}
        for number, keeps in self.calls.items():
            call = lowered.main[number]
            assert isinstance(call, Call)
            read = self._read[number]
            new.setdefault(call.segment, set()).update(read)
            kept_somewhere.setdefault(call.segment, set()).update(keeps)
        result = {name: frozenset(read - kept_somewhere[name]) for name, read in new.items()}
        for number in self.calls:
            call = lowered.main[number]
            assert isinstance(call, Call)
            segment = lowered.segments[call.segment]
            base = _Looks(segment.graph.nodes)
            outs = zip(call.outs, segment.graph.outputs, strict=True)
            gone.update(outer for outer, inner in outs if base.of(inner) in result[call.segment])
        taken: dict[str, set[str]] = {}
        for item in lowered.main:
            if isinstance(item, Call) and item.segment not in result:
                inputs = [name for name, _ in lowered.segments[item.segment].graph.inputs]
                unread = {i for i, a in zip(inputs, item.args, strict=True) if a in gone}
                taken.setdefault(item.segment, unread).intersection_update(unread)
        return {**result, **{name: frozenset(names) for name, names in taken.items()}}

    # -- calls -----------------------------------------------------------------------------------------

    @cached_property
    def _phases(self) -> Mapping[int, Phase]:
        return {k: p.phase for p in self.program.lowered.parts for k in range(p.start, p.stop)}

    @cached_property
    def _users(self) -> Mapping[str, tuple[int, ...]]:
        result: dict[str, list[int]] = {}
        for number, item in enumerate(self.program.lowered.main):
            for value in uses_of(item):
                result.setdefault(value, []).append(number)
        return {value: tuple(users) for value, users in result.items()}

    def _is_forward(self, number: int) -> bool:
        item = self.program.lowered.main[number]
        repeated = isinstance(item, Call) and bool(AGAIN.search(item.segment))
        return repeated or self._phases.get(number) == "forward"

    @cached_property
    def _read(self) -> Mapping[int, frozenset[str]]:
        """Forward call -> what backward reads of it, inside."""
        return {number: self._wanted(number, ("backward", "weight", "reduce")).read for number in self.calls}

    def _calls(self, phases: Collection[Phase]) -> Mapping[int, frozenset[str]]:
        result: dict[int, frozenset[str]] = {}
        for number, item in enumerate(self.program.lowered.main):
            if not isinstance(item, Call) or not self._is_forward(number):
                continue
            wanted = self._wanted(number, phases)
            if wanted.read:
                key = (item.segment, wanted)
                if key not in self._known:
                    segment = self.program.lowered.segments[item.segment]
                    repeated = AGAIN.search(item.segment) and self.keeps == "ops"
                    self._known[key] = kept_values(segment, wanted, "kernels" if repeated else self.keeps)
                result[number] = self._known[key]
        return result

    def _wanted(self, number: int, phases: Collection[Phase]) -> SavedValues:
        lowered = self.program.lowered
        call = lowered.main[number]
        assert isinstance(call, Call)
        segment = lowered.segments[call.segment]
        looks = _Looks(segment.graph.nodes)
        results, repeated = set(lowered.results), bool(AGAIN.search(call.segment))
        read: set[str] = set()
        handed: set[str] = set()
        for outer, inner in zip(call.outs, segment.graph.outputs, strict=True):
            for user in self._users.get(outer, ()):
                if self._is_forward(user) and (repeated or self._phases.get(user) == "forward"):
                    handed.add(looks.of(inner))
                elif self._phases.get(user) in phases:
                    read.add(looks.of(inner))
                    if isinstance(lowered.main[user], Node):
                        handed.add(looks.of(inner))
            if outer in results:
                handed.add(looks.of(inner))
        ports = {p.name for p in self.program.signature.ports}
        inputs = [name for name, _ in segment.graph.inputs]
        free = {name for name, arg in zip(inputs, call.args, strict=True) if arg in ports}
        for node in segment.graph.nodes:
            if is_collective(node) and all(looks.of(r) in free for r in refs_of(node)):
                free.update(node.outs)
        return SavedValues(frozenset(read), frozenset(handed), frozenset(free))


class _Looks:
    """What the views of a segment look at, copies of expanded values among them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.base: dict[str, str] = {}
        for node in nodes:
            source = next(refs_of(node), None) if node.op in VIEWS else None
            if source is not None:
                self.base.update(dict.fromkeys(node.outs, self.of(source)))

    def of(self, value: str) -> str:
        return self.base.get(value, value)


def logits_of(segment: LoweredSegment) -> str | None:
    """What the loss in a segment reads, None where there is no loss."""
    looks = _Looks(segment.graph.nodes)
    for node in segment.graph.nodes:
        if node.op.startswith(_LOSS) and "finish" not in node.op:
            refs = list(refs_of(node))
            return looks.of(refs[1] if "backward" in node.op else refs[0])
    return None


def kept_values(segment: LoweredSegment, wanted: SavedValues, keeps: Keeps) -> frozenset[str]:
    """The values of a forward segment that are kept, inputs of it among them; never views or parameters."""
    nodes = segment.graph.nodes
    looks = _Looks(nodes)
    makers = {out: node for node in nodes for out in node.outs if out not in looks.base}
    read = wanted.read - wanted.free
    if keeps == "program":
        return read
    if keeps == "compiled":
        return _least(segment, wanted, makers, looks)
    stops = _saved(nodes) if keeps == "ops" else _fed(nodes, looks)
    result: set[str] = set()
    seen: set[str] = set()
    waiting = sorted(read)
    while waiting:
        value = waiting.pop()
        if value in seen or value in wanted.free:
            continue
        seen.add(value)
        maker = makers.get(value)
        chained = maker is not None and (keeps == "ops" or maker.op in CHAINED)
        if maker is None or not chained or value in stops or value in wanted.handed:
            result.add(value)
        else:
            waiting += [looks.of(name) for name in refs_of(maker)]
    return frozenset(result)


def _saved(nodes: Iterable[Node]) -> frozenset[str]:
    result: set[str] = set()
    products = 0
    for node in nodes:
        if node.op in attention.RULES or transfer_of(node) == "reduce_scatter":
            result.update(node.outs)
        elif node.op in PRODUCTS:
            products += 1
            result.update(node.outs if products % 2 else ())
    return frozenset(result)


def recomputed_products(segment: LoweredSegment) -> list[Node]:
    """Products of a layer whose results are not kept by the rule ``ops``."""
    products = [n for n in segment.graph.nodes if n.op in PRODUCTS and n.op not in attention.RULES]
    return products[1::2]


def _fed(nodes: Iterable[Node], looks: _Looks) -> frozenset[str]:
    """What products and attention take, also through messages."""
    heavy = [n for n in nodes if n.op in PRODUCTS or is_collective(n)]
    return frozenset(looks.of(name) for node in heavy for name in refs_of(node))


def _least(
    segment: LoweredSegment, wanted: SavedValues, makers: Mapping[str, Node], looks: _Looks
) -> frozenset[str]:
    types = segment.graph.types()
    dear = {out for out, node in makers.items() if node.op not in CHAINED} | wanted.handed
    sizes = {name: 0 if name in wanted.free else t.nbytes for name, t in types.items()}
    result = keep_least(segment.graph, wanted.read - wanted.free, dear, looks.base.keys(), sizes)
    return frozenset(looks.of(v) for v in result) - wanted.free
