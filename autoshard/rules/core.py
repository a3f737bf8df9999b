"""What a rule says about one call of an op: its factors.

A rule names the *factors* of the iteration space of a call, einsum-like, and lays every dim of every
tensor out as a product of factors, outermost first. From that alone the framework derives all ways
to run the op on shards:

* a factor is split over an axis: tensors that have it are sharded, the other inputs are replicated,
  an output that lacks it is a partial reduction (``reduce``);
* the op is linear in a group of inputs: those may be partial sums, and so is the output;
* everything replicated.

A rule knows nothing of meshes, costs or placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

from autoshard.ir import Node, Ref, TensorType
from autoshard.ir.placement import Layout, Shard
from autoshard.ir.scaled import elements

if TYPE_CHECKING:
    from autoshard.rules.local import LocalCall
    from autoshard.rules.row_tiles import Tile

#: factor numbers of one tensor dim, outermost first; () for a dim of size 1 or a broadcast
Dim: TypeAlias = tuple[int, ...]
Dims: TypeAlias = tuple[Dim, ...]
Kind: TypeAlias = Literal["matmul", "pointwise", "view", "create"]
Kernel: TypeAlias = Literal["", "product", "attention", "attention_backward"]
#: makes the call that a rank runs on its shards
Localizer: TypeAlias = "Callable[[LocalCall], Node]"
#: (layouts of inputs, of outputs, sizes of the axes, as many times the sequences) -> what a rank runs
TileFn: TypeAlias = "Callable[[Sequence[Layout], Sequence[Layout | None], Sequence[int], float], Tile]"
RuleFn: TypeAlias = "Callable[[Node, Sequence[TensorType]], Factored]"


@dataclass(frozen=True, slots=True)
class Factored:
    """The factors of one call.

    sizes: elements of each factor.
    inputs: per tensor input, in order of appearance among the arguments, its dims.
    outputs: per output its dims; None where the output is no tensor.
    fixed: factors that must stay whole.
    reduce: for factors missing in an output, how partial results combine (``sum`` or ``max``); a
        factor that is missing in an output and not named here is fixed.
    linear: groups of inputs; when all of one group are partial sums and the other inputs are
        replicated, every output is a partial sum.
    kind: how the call is priced; ``view`` costs nothing.
    flops: FLOP of the full call, 0 if it is bound by memory.
    local: how the call is rewritten to run on shards; None: as it stands.
    contiguous: factors that may only be split into contiguous ranges, since the call on a shard is
        told its offset.
    zigzag: factors that may only be split in a zigzag, which gives all ranks the same work; in contiguous
        ranges, too, if they are among those.
    exchange: pairs (rows, owners) of factors that one axis may split at once: tensors that have owners are
        split by these, the others by rows, so that ``local`` must send rows to their owners or back.
    ring: pairs (rows, keys) of factors of one size that one axis may split at once, alike: every tensor has
        one of the two, and keys go round the ranks of the axis (`runtime.ring_attention`), or to those with
        rows in their ``window`` (`runtime.window_ring`).
    kernel: what the call is on a device, if that has a rate of its own; a ``product`` is of the last two
        inputs, [..., rows, depth] and [..., depth, columns].
    recomputed: of the FLOP, those that repeat what forward did. rate: at the rate of which type a
        product is done, where not at that of its result. copies: bytes moved per byte of each input before
        it is multiplied, () for what `ir.scaled.copies_of` says. packed: dims along which two elements of the
        operands of a product share a byte, () for none. slowdown: as many times as long as a kernel
        of its name takes it. tile: of a call that runs others on some rows at a time, what these are on a
        rank.
    """

    sizes: tuple[int, ...]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    fixed: frozenset[int] = frozenset()
    reduce: tuple[tuple[int, str], ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    kind: Kind = "pointwise"
    flops: float = 0.0
    local: Localizer | None = None
    contiguous: frozenset[int] = frozenset()
    zigzag: frozenset[int] = frozenset()
    exchange: tuple[tuple[int, int], ...] = ()
    ring: tuple[tuple[int, int], ...] = ()
    window: int = 0
    kernel: Kernel = ""
    recomputed: float = 0.0
    rate: str = ""
    copies: tuple[float, ...] = ()
    packed: tuple[int, ...] = ()
    tile: TileFn | None = None
    slowdown: float = 1.0

    def exchanged(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> int | None:
        """The axis (its number) over which a call with these layouts exchanges rows, or None."""
        return self._splits_both(self.exchange, inputs, outputs)

    def circulates(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> int | None:
        """The axis (its number) round which keys go in a call with these layouts, or None."""
        return self._splits_both(self.ring, inputs, outputs)

    def _splits_both(
        self,
        pairs: Sequence[tuple[int, int]],
        inputs: Sequence[Layout],
        outputs: Sequence[Layout | None],
    ) -> int | None:
        if not pairs:
            return None
        laid = [*zip(self.inputs, inputs, strict=True), *zip(self.outputs, outputs, strict=True)]
        for rows, owners in pairs:
            both = _axes_of(laid, rows, self.sizes) & _axes_of(laid, owners, self.sizes)
            if both:
                return min(both)
        return None

    @property
    def division(self) -> tuple[object, ...]:
        """All that says how the call may be divided; without what it costs and how it is then run."""
        both = self.reduce, self.linear
        return (
            self.sizes,
            self.inputs,
            self.outputs,
            self.fixed,
            *both,
            self.contiguous,
            self.zigzag,
            self.exchange,
            self.ring,
        )

    def operands(self, ins: Sequence[TensorType]) -> list[TensorType]:
        """The matrices of a product, with as many elements as they stand for."""
        return [
            replace(t, shape=elements(t.shape, dim))
            for t, dim in zip(ins[-2:], self.packed or (None, None), strict=True)
        ]

    def may_split(self, factor: int, outer: int) -> bool:
        """Whether a factor may be split that is seen as ``outer`` blocks (`ir.placement.Shard`)."""
        if factor in self.zigzag and outer < 0:
            return True
        return outer == 1 if factor in self.contiguous else factor not in self.zigzag

    def shardable(self) -> tuple[int, ...]:
        """Factors that may be split over an axis."""
        reduced = {f for f, _ in self.reduce}
        result = []
        for factor, size in enumerate(self.sizes):
            if size < 2 or factor in self.fixed:
                continue
            missing = any(d is not None and not _has(d, factor) for d in self.outputs)
            if missing and factor not in reduced:
                continue
            result.append(factor)
        return tuple(result)

    def without_units(self) -> Factored:
        """The same call without factors of a single element, as rules lay out tensors of such sizes."""
        kept = [f for f, size in enumerate(self.sizes) if size > 1]
        if len(kept) == len(self.sizes):
            return self
        number = {f: k for k, f in enumerate(kept)}

        def dims(laid: Dims) -> Dims:
            return tuple(tuple(number[f] for f in dim if f in number) for dim in laid)

        return replace(
            self,
            sizes=tuple(self.sizes[f] for f in kept),
            inputs=tuple(dims(laid) for laid in self.inputs),
            outputs=tuple(None if laid is None else dims(laid) for laid in self.outputs),
            fixed=frozenset(number[f] for f in self.fixed if f in number),
            reduce=tuple((number[f], how) for f, how in self.reduce if f in number),
            contiguous=frozenset(number[f] for f in self.contiguous if f in number),
            zigzag=frozenset(number[f] for f in self.zigzag if f in number),
            exchange=tuple((number[a], number[b]) for a, b in self.exchange if a in number and b in number),
            ring=tuple((number[a], number[b]) for a, b in self.ring if a in number and b in number),
        )

    def check(self, ins: Sequence[TensorType], outs: Sequence[TensorType | None]) -> None:
        """ValueError unless every dim of every tensor is the product of its factors."""
        for kind, laid, types in (("input", self.inputs, ins), ("output", self.outputs, outs)):
            if len(laid) != len(types):
                raise ValueError(f"the call has {len(types)} {kind}s, the rule {len(laid)}")
            for number, (dims, type_) in enumerate(zip(laid, types, strict=True)):
                if not _fits(dims, type_, self.sizes):
                    raise ValueError(f"{kind} {number} is {type_}, which {dims} of {self.sizes} does not fit")


def _fits(dims: Dims | None, type_: TensorType | None, sizes: Sequence[int]) -> bool:
    if dims is None or type_ is None:
        return dims is None and type_ is None
    return len(dims) == len(type_.shape) and all(
        not factors or prod(sizes[f] for f in factors) == n
        for factors, n in zip(dims, type_.shape, strict=True)
    )


def _axes_of(
    laid: Sequence[tuple[Dims | None, Layout | None]], factor: int, sizes: Sequence[int]
) -> set[int]:
    """Axes that split a factor in some tensor."""
    return {
        axis
        for dims, layout in laid
        for axis, placed in enumerate(layout or ())
        if dims is not None and isinstance(placed, Shard) and _splits(dims[placed.dim], factor, placed, sizes)
    }


def _splits(dim: Dim, factor: int, placed: Shard, sizes: Sequence[int]) -> bool:
    """Whether a placement of a dim splits one of its factors."""
    if factor not in dim:
        return False
    above = prod(sizes[f] for f in dim[: dim.index(factor)])
    return above <= placed.blocks < above * sizes[factor]


def _has(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


class Builder:
    """Collects factors while a rule lays out its tensors."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> Dim:
        """A dim made of one new factor, or () for size 1."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def dims(self, shape: Sequence[int]) -> Dims:
        return tuple(self.new(n) for n in shape)


def einsum(
    spec: str,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    *,
    fixed: str = "",
    reduce: str = "sum",
    linear: tuple[tuple[int, ...], ...] = (),
    kind: Kind = "pointwise",
    flops: float = 0.0,
    local: Localizer | None = None,
    contiguous: str = "",
) -> Factored:
    """A rule from a spec like ``"b s k, k n -> b s n"``: one letter word per dim, tensors by comma.

    A dim written ``.`` has no factor (broadcast); ``(a b)`` is not needed here: views have their own
    builder. Letters missing in an output are reduced by ``reduce`` unless they are ``fixed``.
    Dims of size 1 lose their factor.
    """
    left, right = spec.split("->")
    names: dict[str, int] = {}
    sizes: list[int] = []

    def dims(words: str, type_: TensorType) -> Dims:
        parts = words.split()
        if len(parts) != len(type_.shape):
            raise ValueError(f"rule {spec!r}: {words!r} does not fit shape {type_.shape}")
        laid: list[Dim] = []
        for word, size in zip(parts, type_.shape, strict=True):
            if word == "." or size == 1:
                laid.append(())
                continue
            if word not in names:
                names[word] = len(sizes)
                sizes.append(size)
            if sizes[names[word]] != size:
                raise ValueError(f"rule {spec!r}: factor {word} has sizes {sizes[names[word]]} and {size}")
            laid.append((names[word],))
        return tuple(laid)

    inputs = tuple(dims(w, t) for w, t in zip(left.split(","), ins, strict=True))
    outputs = tuple(None if t is None else dims(w, t) for w, t in zip(right.split(","), outs, strict=True))
    missing = tuple(
        (f, reduce) for f in range(len(sizes)) if any(o is not None and not _has(o, f) for o in outputs)
    )
    return Factored(
        tuple(sizes),
        inputs,
        outputs,
        frozenset(names[w] for w in fixed.split() if w in names),
        missing,
        linear,
        kind,
        flops,
        local,
        frozenset(names[w] for w in contiguous.split() if w in names),
    )


def broadcast(
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    *,
    linear: tuple[tuple[int, ...], ...] = (),
    fixed_dims: Sequence[int] = (),
    kind: Kind = "pointwise",
    local: Localizer | None = None,
) -> Factored:
    """A pointwise call: one factor per dim of the first output, inputs aligned at the right.

    fixed_dims: dims of the output that must stay whole (softmax over a dim, for instance).
    """
    first = outs[0]
    assert first is not None
    shape = first.shape
    build = Builder()
    out = build.dims(shape)

    def aligned(t: TensorType) -> Dims:
        lead = len(shape) - len(t.shape)
        return tuple(out[lead + k] if n == shape[lead + k] else () for k, n in enumerate(t.shape))

    fixed = frozenset(f for d in fixed_dims for f in out[d])
    return Factored(
        tuple(build.sizes),
        tuple(aligned(t) for t in ins),
        tuple(None if t is None else aligned(t) for t in outs),
        fixed,
        (),
        linear,
        kind,
        0.0,
        local,
    )


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all these broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    sizes = [1] * rank
    for shape in shapes:
        for k, n in enumerate(shape, rank - len(shape)):
            sizes[k] = n if n != 1 else sizes[k]
    return tuple(sizes)


def of_tensors(node: Node, laid: Mapping[int, Dims]) -> tuple[Dims, ...]:
    """The dims of those positional arguments that are tensors, where optional ones may be missing."""
    given = range(len(node.args))
    return tuple(laid[k] for k in sorted(laid) if k in given and isinstance(node.args[k], Ref))


def opaque_rule(node: Node, ins: Sequence[TensorType]) -> Factored:
    """The rule of ops that are always such calls."""
    return opaque(ins, node.types)


def opaque(ins: Sequence[TensorType], outs: Sequence[TensorType | None]) -> Factored:
    """A call that must see full tensors: replicated on every axis."""
    build = Builder()
    inputs = tuple(build.dims(t.shape) for t in ins)
    outputs = tuple(None if t is None else build.dims(t.shape) for t in outs)
    return Factored(tuple(build.sizes), inputs, outputs, frozenset(range(len(build.sizes))))
