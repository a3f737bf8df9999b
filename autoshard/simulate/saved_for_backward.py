"""What the stages of a program keep of a microbatch, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TypeAlias

from autoshard.ir import DTYPES, Call, Node, TensorType, refs_of
from autoshard.ir.boundaries import ends_of
from autoshard.ir.placement import Layout
from autoshard.ir.views import VIEWS, view_roots
from autoshard.program.program import Program
from autoshard.simulate.framework_saved import Keeping, logits_of

#: bytes of a value on the rank that is priced
SizeOf: TypeAlias = Callable[[TensorType, Layout], float]
#: what names a storage, and its bytes
Storage: TypeAlias = "tuple[object, float]"


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of one microbatch on a rank.

    held: from the forward of a stage to the end of its backward. weight: the part of it that the gradients
    of weights still need. made: what backward makes, or is sent, and these need beside that.
    """

    held: float = 0.0
    weight: float = 0.0
    made: float = 0.0


@dataclass(frozen=True)
class KeptStorages:
    """The storages of `SavedBytes`."""

    held: frozenset[Storage]
    weight: frozenset[Storage]
    made: frozenset[Storage]


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that a rank holds, with Adam. activations: kept from forward to backward."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def kept_by(
    program: Program,
    stages: Sequence[int],
    size_of: SizeOf,
    keeping: Keeping | None = None,
    per_logit: float | None = None,
) -> dict[int, SavedBytes]:
    """What each of the stages of one pipeline rank keeps, each storage once.

    keeping: what kernels keep, None for what backward of the program reads. per_logit: bytes that the loss
    keeps, of the logits and all that is made of them; None likewise.

    Ports and their views are not counted: they stay where they are. What more than one of these stages
    reads in backward counts for the lowest, whose backward comes last. An expanded value is copied when it is
    reshaped (the keys and values of grouped attention).
    """
    kept = kept_storages(program, stages, size_of, keeping, per_logit)
    return {s: SavedBytes(_bytes(k.held), _bytes(k.weight), _bytes(k.made)) for s, k in kept.items()}


def kept_storages(
    program: Program,
    stages: Sequence[int],
    size_of: SizeOf,
    keeping: Keeping | None = None,
    per_logit: float | None = None,
) -> dict[int, KeptStorages]:
    """The storages that `kept_by` counts."""
    rank = _Rank(program, size_of)
    ordered = sorted(stages)
    for stage in ordered:
        rank.run(stage, ("forward",))
    forward = dict(rank.storage)
    early = set(forward.values())
    read: dict[int, set[Storage]] = {}
    late: dict[int, set[Storage]] = {}
    for stage in reversed(ordered):
        rank.run(stage, ("backward",))
        uses = rank.uses(stage, ("backward", "weight"))
        read[stage] = {forward[v] for v in uses if v in forward}
        late[stage] = {rank.storage[v] for v in rank.uses(stage, ("weight",)) if v in rank.storage}
        if keeping is not None:
            own = rank.kept(stage, read[stage], keeping.calls, per_logit)
            read[stage], after = own, late[stage] - early
            late[stage] = after | (rank.kept(stage, late[stage] & early, keeping.late, per_logit) & own)
            early |= own
    result: dict[int, KeptStorages] = {}
    counted: set[Storage] = set()
    for stage in ordered:
        own = read[stage] - counted
        counted |= own
        result[stage] = KeptStorages(
            frozenset(own), frozenset(late[stage] & own), frozenset(late[stage] - early)
        )
    return result


@dataclass(frozen=True)
class SliceStorages:
    """What a stage holds of a microbatch, its sequence in slices: after the forward of each slice, and after
    the backward of each, of which that of the last comes first."""

    forward: tuple[frozenset[Storage], ...]
    backward: tuple[frozenset[Storage], ...]

    @property
    def added(self) -> list[float]:
        """Bytes that the forward of every slice adds."""
        return [b - a for a, b in pairwise((0.0, *map(_bytes, self.forward)))]

    @property
    def freed(self) -> list[float]:
        """Bytes that the backward of every slice frees; what later ones add to counts against it."""
        return [b - a for a, b in pairwise((*map(_bytes, self.backward), _bytes(self.forward[-1])))]


def kept_of_slices(program: Program, stage: int, slices: int, size_of: SizeOf) -> SliceStorages:
    """What the slices of a microbatch leave to later slices and to backward: values that they make, or are
    sent; keys and values, say, and going back the gradients of those, to which earlier slices add."""
    rank, lowered = _Rank(program, size_of), program.lowered
    rank.run(stage, ("forward", "backward"))
    reads: dict[tuple[str, int], set[Storage]] = {}
    has: dict[tuple[str, int], set[Storage]] = {}
    for part in lowered.of_stage.get(stage, ()):
        ends = ends_of(lowered, part)
        key: tuple[str, int] = (part.phase, part.slice)
        reads.setdefault(key, set()).update(rank.storage[v] for v in ends.uses if v in rank.storage)
        has.setdefault(key, set()).update(rank.storage[v] for v in ends.makes if v in rank.storage)
    order = [*(("forward", k) for k in range(slices)), *(("backward", k) for k in reversed(range(slices)))]
    there: set[Storage] = set()
    result: list[frozenset[Storage]] = []
    for at, key in enumerate(order):
        there |= reads.get(key, set()) | has.get(key, set())
        wanted = set[Storage]().union(*(reads.get(k, ()) for k in order[at + 1 :]))
        result.append(frozenset(s for s in there & wanted if s[1]))
    return SliceStorages(tuple(result[:slices]), tuple(result[: slices - 1 : -1]))


def kept_in_order(
    program: Program,
    stages: Sequence[int],
    stage: int,
    size_of: SizeOf,
    keeping: Keeping,
    per_logit: float | None = None,
) -> Mapping[int, float]:
    """Place in main -> bytes that kernels keep of that forward call of a stage; see `kept_by`."""
    rank = _Rank(program, size_of)
    for each in sorted(stages):
        rank.run(each, ("forward",))
    result: dict[int, float] = {}
    for what, size in rank.kept(stage, (), keeping.calls, per_logit):
        if isinstance(what, tuple):
            result[what[0]] = result.get(what[0], 0.0) + size
    return result


def storages_of(program: Program, stages: Sequence[int], size_of: SizeOf) -> dict[str, Storage]:
    """The storage of every value that the stages of one pipeline rank make or are sent; see `kept_by`."""
    rank = _Rank(program, size_of)
    ordered = sorted(stages)
    for stage in ordered:
        rank.run(stage, ("gather", "count", "forward"))
    for stage in reversed(ordered):
        rank.run(stage, ("backward", "weight"))
    for stage in ordered:
        rank.run(stage, ("reduce",))
    return rank.storage


def gathered_bytes(program: Program, stage: int, size: Callable[[str], float]) -> float:
    """Bytes of the copies of parameters that a stage gathers once and keeps for the full step.

    size: bytes of a value of main on the rank.
    """
    lowered = program.lowered
    own = lowered.of_stage.get(stage, ())
    parts = [p for p in own if p.phase == "gather"]
    used = {v for p in own if p.phase != "gather" for v in ends_of(lowered, p).uses}
    return sum(size(v) for p in parts for v in ends_of(lowered, p).makes if v in used)


def gathered_ports(program: Program, stages: Sequence[int]) -> frozenset[str]:
    """Parameters that stages gather once and keep for the full step."""
    lowered = program.lowered
    parts = [p for p in lowered.parts if p.phase == "gather" and p.stage in stages]
    ports = {p.name for p in program.signature.ports}
    return frozenset(v for p in parts for v in ends_of(lowered, p).uses if v in ports)


def _bytes(storages: Collection[Storage]) -> float:
    return float(sum(size for _, size in storages))


@dataclass
class _Rank:
    """The values that a rank has, by their storage, as its parts run."""

    program: Program
    size_of: SizeOf
    storage: dict[str, Storage] = field(default_factory=dict)
    #: segment -> view -> the value that it is of
    roots: dict[str, dict[str, str]] = field(default_factory=dict)
    #: bytes of the type and layout (by identity: alike layers share them) of values of main
    sizes: dict[int, float] = field(default_factory=dict)
    #: segment -> bytes of a value inside it
    inner: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hosted = self.program.lowered.hosted
        self.storage.update((p.name, (p.name, 0.0)) for p in self.program.signature.ports)
        # gathered copies and totals belong to the step, not to a microbatch
        lowered = self.program.lowered
        gathers = [p for p in lowered.parts if p.phase in ("gather", "count")]
        self.storage.update((v, (v, 0.0)) for p in gathers for v in ends_of(lowered, p).makes)

    def uses(self, stage: int, phases: Collection[str]) -> list[str]:
        lowered = self.program.lowered
        parts = [p for p in lowered.of_stage.get(stage, ()) if p.phase in phases]
        return [v for part in parts for v in ends_of(lowered, part).uses]

    def run(self, stage: int, phases: Collection[str]) -> None:
        """Make what these parts of a stage make, after what they are sent has arrived."""
        lowered = self.program.lowered
        for part in lowered.of_stage.get(stage, ()):
            if part.phase not in phases:
                continue
            for value in ends_of(lowered, part).uses:
                self.storage.setdefault(value, self._own(value))
            for number in range(part.start, part.stop):
                item = lowered.main[number]
                new = self._call(number, item) if isinstance(item, Call) else self._node(item)
                # a value that two stages of a rank make for themselves is there once
                self.storage.update((v, s) for v, s in new.items() if v not in self.storage)

    def kept(
        self,
        stage: int,
        read: Collection[Storage],
        keeps: Mapping[int, Collection[str]],
        per_logit: float | None,
    ) -> set[Storage]:
        """What kernels keep in place of what backward of a stage reads."""
        lowered = self.program.lowered
        numbers = {
            n for p in lowered.of_stage.get(stage, ()) if p.phase == "forward" for n in range(p.start, p.stop)
        }
        result = {s for s in read if not (isinstance(s[0], tuple) and s[0][0] in numbers)}
        for number in numbers & keeps.keys():
            call = lowered.main[number]
            assert isinstance(call, Call)
            result |= set(self._kernels(number, call, keeps[number], per_logit))
        return {s for s in result if s[1]}

    def _kernels(
        self, number: int, call: Call, keeps: Collection[str], per_logit: float | None
    ) -> Iterator[Storage]:
        segment = self.program.lowered.segments[call.segment]
        types = segment.graph.types()
        given = dict(zip((n for n, _ in segment.graph.inputs), call.args, strict=True))
        logits = logits_of(segment) if per_logit is not None else None
        size = prod(types[logits].shape) if logits is not None else 0
        for name in keeps:
            if name in given:
                yield self.storage[given[name]]
            elif not (size and prod(types[name].shape) == size and types[name].is_float):
                yield (number, name), self.size_of(types[name], segment.layouts[name])
        if per_logit is not None and logits is not None:
            width = DTYPES[types[logits].dtype][1]
            yield (number, "loss"), self.size_of(types[logits], segment.layouts[logits]) * (per_logit / width)

    def _own(self, value: str) -> Storage:
        if value in self.hosted:
            return value, 0.0
        placed = self.program.lowered.values[value]
        size = self.sizes.get(id(placed))
        if size is None:
            size = self.sizes[id(placed)] = self.size_of(placed.type, placed.layout)
        return value, size

    def _node(self, node: Node) -> dict[str, Storage]:
        source = next(refs_of(node), None) if node.op in VIEWS else None
        if source is not None:
            return dict.fromkeys(node.outs, self.storage[source])
        typed = zip(node.outs, node.types, strict=True)
        return {out: self._own(out) for out, type_ in typed if type_ is not None}

    def _call(self, number: int, call: Call) -> dict[str, Storage]:
        segment = self.program.lowered.segments[call.segment]
        given = {n: arg for (n, _), arg in zip(segment.graph.inputs, call.args, strict=True)}
        if call.segment not in self.roots:
            self.roots[call.segment] = view_roots(segment)
        base, sizes = self.roots[call.segment], self.inner.setdefault(call.segment, {})
        result: dict[str, Storage] = {}
        for outer, inner in zip(call.outs, segment.graph.outputs, strict=True):
            root = base.get(inner, inner)
            if root in given:
                result[outer] = self.storage[given[root]]
                continue
            size = 0.0 if outer in self.hosted else sizes.get(root)
            if size is None:
                size = sizes[root] = self.size_of(segment.graph.types()[root], segment.layouts[root])
            result[outer] = (number, root), size
        return result
