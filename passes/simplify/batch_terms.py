"""What of a model adds up over the microbatches of a step, so that their losses make that of the full batch.

Microbatches are one more way to split the batch, and every value is, over them, one of these:

- *same*: it does not depend on the batch;
- *split*: it has a batch dim, of which every microbatch has its part;
- *rows*: the numbers of a microbatch's samples, 0, 1, ..., by which its own samples are looked up;
- *part*: a sum over the batch, of which every microbatch has one term;
- *own*: what is no sum (the square of one, statistics of a batch norm): every microbatch has one of its own,
  as if its samples were all, and what depends on it is not quite what the full batch would give.

A step adds up the losses of its microbatches, and their gradients. For that to be the full batch's,

- a divisor that only depends on inputs (how many labels count) must be that of all microbatches: a *total*;
- a number that Python took from the batch (what a mean divides by) must be that of the full batch;
- what is the same in every microbatch (a penalty on weights), or its own, is divided by their number before
  it is added to parts, and
- a part that is taken as if it were the sum, in something that is not linear in it, is multiplied by it.

All of it holds in backward as in forward. If ``m`` microbatches have parts ``p``, ``f(m p) / m`` stands for
``f`` of their sum; its derivative is ``f'(m p) p'``, which is what backward computes when it is given ``m p``
for the sum: nothing in it has to be divided.

Which dims and numbers follow the batch is seen by comparing two captures with different batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, log
from typing import Literal, NamedTuple, TypeAlias

import torch

from autoshard.ir import Call, Folded, Graph, Node, Port, Ref, refs_of
from autoshard.ir.flow import Place
from autoshard.ir.scaled import LARGEST
from autoshard.ir.views import CASTS
from autoshard.rules.core import Factored

Kind: TypeAlias = Literal["same", "split", "rows", "part", "own"]
#: rules of all nodes, by (segment, number)
RulesOf: TypeAlias = Mapping[tuple[str, int], Factored]

#: op -> the power of its second argument in what it makes
_POWERS = {
    "aten.mul.Tensor": 1,
    "aten.mul.Scalar": 1,
    "aten.div.Tensor": -1,
    "aten.div.Scalar": -1,
}
_FULL = "aten.full.default"
#: numbers of samples, and what gives them back
_ROWS = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
_SAME = ("aten.clone.default", "aten._to_copy.default", "aten.alias.default", "aten.lift_fresh_copy.default")
#: what looks rows up, or puts them: (a tensor, an index for each of its first dims, ...)
_LOOKUPS = (
    "aten.index.Tensor",
    "aten._unsafe_index.Tensor",
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
)
#: sums of two, where a number may stand for one
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar")
#: what gives every sample the same, of what does not depend on the batch
_TO_ALL = frozenset(("aten.empty.memory_format",)) | frozenset(
    f"aten.{name}.default"
    for name in """
    zeros ones full zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    expand repeat scalar_tensor
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
#: told how many samples there are, of which each is computed by itself
_SIZED = ("aten.native_group_norm.default", "aten.native_group_norm_backward.default")
_FOLLOWS = "a number in it follows the size of the batch"


class Of(NamedTuple):
    """A value over the microbatches. given: whether inputs and buffers alone, and no total, make it.

    place: where it is made. real: whether it is of a floating type, which others cannot be divided in.
    """

    kind: Kind
    given: bool
    place: Place
    real: bool = True


@dataclass(frozen=True)
class BatchTerms:
    """What is to be changed in a graph of one microbatch; values and nodes by (segment, name).

    totals: to be added up over all microbatches before the step. scaled: value -> power of the number of
    microbatches that it is divided by. shares: (segment, node, place of its use) -> the same of that use.
    results: numbers of results to be divided by it. sums: outputs that are parts, by position. tangent: of
    the loss, to be divided by it, "" for none. notes: what is computed for every microbatch alone.
    """

    totals: frozenset[Place] = frozenset()
    scaled: Mapping[Place, int] = field(default_factory=dict)
    shares: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    results: frozenset[int] = frozenset()
    sums: tuple[str, ...] = ()
    tangent: str = ""
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.totals or self.scaled or self.shares or self.results or self.tangent)


NO_TERMS = BatchTerms()


@dataclass(frozen=True)
class CapturedSample:
    """A model captured with some batch, as the search sees it."""

    folded: Folded
    rules: RulesOf
    batch: int


def batch_terms(one: CapturedSample, other: CapturedSample, loss: int | None) -> BatchTerms:
    """What adds up in ``one``, a microbatch; other: the same model with another batch, both of more than one.

    loss: position of the output that is trained, None if there is none.
    """
    if not _alike(one.folded, other.folded):
        return averaged(one.folded, loss, "the model's graph depends on the size of the batch")
    terms, adds = _Following(one.folded, _Compared(one, other), loss).found()
    return terms if adds else averaged(one.folded, loss, *terms.notes)


def averaged(folded: Folded, loss: int | None, *notes: str) -> BatchTerms:
    """The mean of the microbatches' losses, with all else left as it is."""
    numbers = [
        n
        for n, r in enumerate(folded.joint.results)
        if loss is not None and r.kind == "output" and r.target == str(loss)
    ]
    tangents = [p.name for p in folded.joint.ports if p.kind == "tangent" and p.target == str(loss)]
    sums = (str(loss),) if numbers else ()
    return BatchTerms(
        results=frozenset(numbers),
        tangent=next(iter(tangents), ""),
        sums=sums,
        notes=tuple(dict.fromkeys(notes)),
    )


def _alike(a: Folded, b: Folded) -> bool:
    """Whether two captures differ in sizes and numbers alone."""
    if list(a.segments) != list(b.segments) or len(a.calls) != len(b.calls):
        return False
    same = all(x.segment == y.segment and x.args == y.args for x, y in zip(a.calls, b.calls, strict=True))
    return same and all(_alike_graphs(g, b.segments[name]) for name, g in a.segments.items())


def _alike_graphs(a: Graph, b: Graph) -> bool:
    return len(a.nodes) == len(b.nodes) and all(
        x.op == y.op and x.outs == y.outs and list(refs_of(x)) == list(refs_of(y))
        for x, y in zip(a.nodes, b.nodes, strict=True)
    )


class _Compared:
    """What follows the batch in each node of each segment."""

    def __init__(self, one: CapturedSample, other: CapturedSample) -> None:
        self.one, self.rate = one, other.batch / one.batch
        #: values that have a batch dim -> which they are
        self.wide: dict[Place, tuple[int, ...]] = {}
        #: (segment, number) -> factors that follow the batch
        self.factors: dict[tuple[str, int], frozenset[int] | None] = {}
        #: value -> power of the batch in it, from numbers that follow the batch
        self.powers: dict[Place, int] = {}
        #: (segment, number) of sums with a number that is in proportion to the batch
        self.shares: set[tuple[str, int]] = set()
        #: (segment, number) of other numbers that follow the batch
        self.strange: set[tuple[str, int]] = set()
        #: constants of Python that follow it: those in proportion to it, and others
        self.counts, self.constants = _unlike_constants(one.folded, other.folded, self.rate)
        for name, graph in one.folded.segments.items():
            self._segment(name, graph, other.folded.segments[name], other.rules)
        self.ports = {
            p.name: p.type.shape != q.type.shape
            for p, q in zip(one.folded.joint.ports, other.folded.joint.ports, strict=True)
        }

    def _segment(self, name: str, a: Graph, b: Graph, rules: RulesOf) -> None:
        types = b.types()
        for value, type_ in a.types().items():
            pairs = enumerate(zip(type_.shape, types[value].shape, strict=True))
            dims = tuple(d for d, (m, n) in pairs if m != n)
            if dims:
                self.wide[name, value] = dims
        for number, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=True)):
            key = name, number
            mine, theirs = self.one.rules[key].sizes, rules[key].sizes
            differ = [k for k, (m, n) in enumerate(zip(mine, theirs, strict=False)) if m != n]
            self.factors[key] = frozenset(differ) if len(mine) == len(theirs) else None
            self._numbers(key, x, y)

    def _numbers(self, key: tuple[str, int], x: Node, y: Node) -> None:
        if x.args == y.args and x.kwargs == y.kwargs:
            return
        pairs = [(p, q) for p, q in zip(x.args, y.args, strict=False) if _is_number(p) and p != q]
        if any(_is_number(p) and p != dict(y.kwargs).get(k) for k, p in x.kwargs):
            self.strange.add(key)  # alpha, beta
        computes = self.one.rules[key].kind == "pointwise" or x.op in (_FULL, "aten.scalar_tensor.default")
        if not computes or x.op in _SIZED:
            return  # sizes and places
        power = 1 if x.op == _FULL else _POWERS.get(x.op)
        if x.types[0] is None or not (x.types[0].is_float or x.op == _FULL):
            power = None
        exponents = [log(q / p, self.rate) if p * q > 0 else 0.5 for p, q in pairs]
        if power is not None and all(isclose(e, round(e), abs_tol=1e-6) for e in exponents):
            if exponents:
                self.powers[key[0], x.name] = power * round(exponents[-1])
        elif x.op in _SUMS and len(exponents) == 1 and isclose(exponents[0], 1, abs_tol=1e-6):
            self.shares.add(key)
        elif pairs:
            self.strange.add(key)


def _unlike_constants(one: Folded, other: Folded, rate: float) -> tuple[frozenset[str], frozenset[str]]:
    """Ports of constants in proportion to the batch, and of others that are not alike for all samples
    of one batch, or for two batches."""
    counts, result = set[str](), set[str]()
    for a, b in zip(one.joint.ports, other.joint.ports, strict=True):
        if a.kind == "const":
            p, q = one.joint.constants[a.target], other.joint.constants[b.target]
            if not isinstance(p, torch.Tensor) or not isinstance(q, torch.Tensor):
                continue
            for d in range(p.dim()) if p.dim() == q.dim() and p.numel() and q.numel() else ():
                if p.shape[d] != q.shape[d]:  # by sample: the first stands for all
                    p, q = (x.narrow(d, 0, 1) if bool((x == x.narrow(d, 0, 1)).all()) else x for x in (p, q))
            if p.shape == q.shape and torch.equal(p, q):
                continue
            same = p.shape == q.shape and p.dtype != torch.bool and bool(p.all())
            (counts if same and torch.allclose(q.double(), p.double() * rate) else result).add(a.name)
    return frozenset(counts), frozenset(result)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _counts_samples(node: Node) -> bool:
    """Whether it gives 0, 1, ..."""
    if node.op not in _ROWS:
        return False
    start = node.args[0] if len(node.args) > 1 else 0
    return start == 0 and (node.args[2] if len(node.args) > 2 else 1) == 1


class _AgainError(Exception):
    """One more total is known."""


class _Following:
    """Follows the values of a model, call by call."""

    def __init__(self, folded: Folded, seen: _Compared, loss: int | None) -> None:
        self.folded, self.seen, self.loss = folded, seen, loss
        self.counts = folded.counts()
        self.updated = {r.target for r in folded.joint.results if r.kind == "buffer"}
        self.totals: set[Place] = set()
        #: what was thought to be a total, and is none in another call
        self.never: set[Place] = set()
        #: the user's line -> what is computed there
        self.notes: dict[str, str] = {}
        #: (segment, node, place of its use), power -> in how many calls
        self.shares: Counter[tuple[tuple[str, str, int], int]] = Counter()

    def found(self) -> tuple[BatchTerms, bool]:
        """What is to be changed, and whether that makes the loss a sum over microbatches."""
        while True:
            self.notes.clear()
            self.shares.clear()
            try:
                return self._once()
            except _AgainError:
                continue

    def _once(self) -> tuple[BatchTerms, bool]:
        joint = self.folded.joint
        env = {p.name: self._port(p) for p in joint.ports}
        for call in self.folded.calls:
            self._call(call, env)
        results: set[int] = set()
        adds = True
        for number, result in enumerate(joint.results):
            trained = result.kind == "output" and result.target == str(self.loss)
            if trained or result.kind == "grad":
                kind = env[result.value].kind
                if kind in ("split", "rows"):
                    adds = False
                    self.notes[result.value] = f"{result.kind} {result.target} (a part for each sample)"
                results |= {number} if kind in ("same", "own") else set()
        for (segment, node, _), _ in [s for s, n in self.shares.items() if n != self.counts[s[0][0]]]:
            adds = False
            self.notes[segment] = f"{node} of {segment} (layers that are alike do not use it alike)"
        outputs = {r.target: env[r.value].kind for r in joint.results if r.kind == "output"}
        sums = [t for t, kind in outputs.items() if kind == "part" or t == str(self.loss)]
        scaled = {place: -power for place, power in self.seen.powers.items() if power}
        if self.updated:
            self.notes.setdefault("", f"running statistics ({min(self.updated)}), which each of them updates")
        terms = BatchTerms(
            frozenset(self.totals),
            scaled,
            {place: power for place, power in self.shares},
            frozenset(results),
            tuple(sums),
            notes=tuple(self.notes.values()),
        )
        return terms, adds

    def _port(self, port: Port) -> Of:
        # a gradient that comes in is the same for all microbatches, or that of the samples of each
        given = port.kind in ("input", "const", "buffer") and port.target not in (*self.updated, "seed")
        kind: Kind = "split" if self.seen.ports[port.name] else "same"
        if port.name in self.seen.constants:
            where = next(self._uses(port.name), "")
            self.notes[port.name] = f"a tensor that Python makes of the size of the batch, used at {where}"
            kind = "own" if kind == "same" else kind
        return Of(kind, given, ("", port.name), port.type.is_float)

    def _uses(self, value: str) -> Iterator[str]:
        """The user's lines at which a value of main is used."""
        for call in self.folded.calls:
            graph = self.folded.segments[call.segment]
            names = {inner for (inner, _), a in zip(graph.inputs, call.args, strict=True) if a == value}
            for node in graph.nodes if names else ():
                if not names.isdisjoint(refs_of(node)):
                    yield node.origin.source or node.origin.fqn

    def _call(self, call: Call, env: dict[str, Of]) -> None:
        graph = self.folded.segments[call.segment]
        own = {inner: env[a] for (inner, _), a in zip(graph.inputs, call.args, strict=True)}
        for number, node in enumerate(graph.nodes):
            takes = [own[r] for r in refs_of(node)]
            kinds = self._kinds((call.segment, number), node, takes)
            given = all(t.given and not self.seen.powers.get(t.place) for t in takes)
            for out, type_, kind in zip(node.outs, node.types, kinds, strict=True):
                real = type_ is not None and type_.is_float
                own[out] = self._made(Of(kind, given, (call.segment, out), real))
        env.update({out: own[inner] for out, inner in zip(call.outs, graph.outputs, strict=True)})

    def _made(self, of: Of) -> Of:
        if of.place not in self.totals:
            return of
        if of.kind == "part" and of.given:
            return Of("same", False, of.place, of.real)
        self.totals.discard(of.place)
        self.never.add(of.place)
        raise _AgainError

    def _may_total(self, of: Of) -> bool:
        return of.given and of.place not in self.never

    def _total(self, values: Sequence[Of]) -> bool:
        """Make totals of these parts, if all of them can be and there are any."""
        if not values or not all(map(self._may_total, values)):
            return False
        self.totals.update(v.place for v in values)
        return True

    # -- one node ----------------------------------------------------------------------------------

    def _kinds(self, key: tuple[str, int], node: Node, takes: Sequence[Of]) -> list[Kind]:
        takes = [self._counted(key, node, k, t) for k, t in enumerate(takes)]
        if key in self.seen.shares and [t.kind for t in takes] == ["part"]:
            return ["part"]  # of each microbatch's own number
        strange = key in self.seen.strange or key in self.seen.shares
        if strange:
            self._no_totals(takes)
            self._as_sums(key, node, takes, _FOLLOWS)
            self._note(node, _FOLLOWS)
        wide = [(key[0], out) in self.seen.wide for out in node.outs]
        if any(wide) or any(t.kind in ("split", "rows") for t in takes):
            self._as_sums(key, node, takes, "it uses a sum over the batch beside the samples of it")
            return [self._with_samples(key, node, w, takes) for w in wide]
        kind: Kind = "own" if strange or any(t.kind == "own" for t in takes) else "same"
        if any(t.kind == "part" for t in takes) and not strange:
            kind = self._of_parts(key, node, takes)
        return [kind] * len(wide)

    def _counted(self, key: tuple[str, int], node: Node, place: int, of: Of) -> Of:
        """A number of Python in proportion to the batch is that of the full one where it is used."""
        if of.place[0] or of.place[1] not in self.seen.counts:
            return of
        self.shares[(key[0], node.name, place), -1] += 1
        return of._replace(given=False)

    def _no_totals(self, takes: Sequence[Of]) -> None:
        """A number of each microbatch goes with its own part of a sum, not with all of it."""
        if totals := {t.place for t in takes} & self.totals:
            self.totals -= totals
            self.never |= totals
            raise _AgainError

    def _as_sums(self, key: tuple[str, int], node: Node, takes: Sequence[Of], why: str) -> None:
        """Take parts as the sums that they are parts of: totals, or each multiplied."""
        parts = [k for k, t in enumerate(takes) if t.kind == "part"]
        if self._total([takes[k] for k in parts if self._may_total(takes[k])]):
            raise _AgainError
        self.shares.update(((key[0], node.name, k), -1) for k in parts if takes[k].real)
        if parts:
            self._note(node, why)

    def _with_samples(self, key: tuple[str, int], node: Node, wide: bool, takes: Sequence[Of]) -> Kind:
        """What an op makes that takes samples, or hands something out to all of them."""
        rule, batch = self.seen.one.rules[key], self.seen.factors[key]
        rows = bool(takes) and all(t.kind == "rows" for t in takes)
        if wide and (_counts_samples(node) or (rows and (rule.kind == "view" or node.op in _SAME))):
            return "rows"
        if not any(t.kind in ("split", "rows") for t in takes):
            if node.op not in _TO_ALL and not any(t.place[1] == "seed" for t in takes):
                self._note(node, "what it gives a sample depends on the sample's number")
            return "split"
        if wide and self._looks_up(key, node, takes):
            return "split"
        apart = batch is not None and len(batch) == 1 and not batch & rule.fixed
        if wide and any(t.kind == "rows" for t in takes):
            self._note(node, "it computes with the numbers of samples")
            return "split"
        if wide:
            if not apart:
                self._note(node, "it mixes the samples of the batch")
            return "split"
        sums = apart and batch is not None and dict(rule.reduce).get(next(iter(batch))) == "sum"
        if sums:
            return "part"
        self._note(node, "it is no sum over the samples of the batch")
        return "own"

    def _looks_up(self, key: tuple[str, int], node: Node, takes: Sequence[Of]) -> bool:
        """Whether samples are looked up, or put, by their own numbers."""
        if node.op not in _LOOKUPS or not isinstance(node.args[0], Ref):
            return False
        of = dict(zip(refs_of(node), takes, strict=True))
        dims = self.seen.wide.get((key[0], node.args[0].name), ())
        indices = dict(enumerate(node.args[1]))
        chosen = [indices.get(d) for d in dims]
        return bool(dims) and all(isinstance(i, Ref) and of[i.name].kind == "rows" for i in chosen)

    def _of_parts(self, key: tuple[str, int], node: Node, takes: Sequence[Of]) -> Kind:
        """What an op makes of sums over the batch."""
        parts = [k for k, t in enumerate(takes) if t.kind == "part"]
        for group in self.seen.one.rules[key].linear:
            outside = [takes[k] for k in parts if k not in group]
            if not set(parts) & set(group):
                continue
            if self._total(outside):
                raise _AgainError
            single = [k for k in group if takes[k].kind != "part"]
            if not outside and all(takes[k].real for k in single):
                self.shares.update(((key[0], node.name, k), 1) for k in single)
                return "part"
        if node.op in _SUMS and len(takes) == 1 and any(_is_number(a) and a == 0 for a in node.args):
            return "part"
        if node.op in CASTS and not takes[0].real:
            return "part"  # numbers that are counted
        self._as_sums(key, node, takes, "it is not linear in a sum over the batch")
        # of totals alone it is the same for all
        return "own"

    def _note(self, node: Node, why: str) -> None:
        """Once for a line of the user's, and once for all scales of products."""
        if node.op in LARGEST:
            self.notes.setdefault("scales", "the scales of operands of products in 8 or 4 bits")
            return
        where = node.origin.source or node.origin.fqn or "the model"
        self.notes.setdefault(where, f"{node.op.split('.')[1]} at {where} ({why})")


def moved(terms: BatchTerms, source: Folded, target: Folded, loss: int | None) -> BatchTerms:
    """The same for another capture of the model, whose views may differ: of a single sample."""
    ops = {
        n.op for p in (*terms.totals, *terms.scaled) for n in source.segments[p[0]].nodes if p[1] in n.outs
    }
    ops |= {n.op for s, name, _ in terms.shares for n in source.segments[s].nodes if n.name == name}
    a, b = list(_marked(source, ops)), list(_marked(target, ops))
    if [k for _, _, k in a] != [k for _, _, k in b]:
        return averaged(target, loss, *terms.notes, "the model's graph for one sample alone is another one")
    names = {
        (s, x): (t, y) for (s, m, _), (t, n, _) in zip(a, b, strict=True) for x, y in zip(m, n, strict=True)
    }
    return replace(
        terms,
        totals=frozenset(names[p] for p in terms.totals),
        scaled={names[p]: power for p, power in terms.scaled.items()},
        shares={(*names[s, n], k): power for (s, n, k), power in terms.shares.items()},
    )


def _marked(folded: Folded, ops: set[str]) -> Iterator[tuple[str, tuple[str, ...], tuple[object, ...]]]:
    """(segment, outputs, what is the same in other captures) of every node with one of the ops."""
    for number, (name, graph) in enumerate(folded.segments.items()):
        for node in graph.nodes:
            if node.op in ops:
                kinds = tuple(None if t is None else (t.dtype, len(t.shape)) for t in node.types)
                yield name, node.outs, (number, node.op, node.backward, kinds)
