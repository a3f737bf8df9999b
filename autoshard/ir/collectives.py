"""The collectives of a program: one row per ``comm`` op, with all that layers above ask of it by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from autoshard.ir.graph import Arg, Node, Origin, Ref
from autoshard.ir.placement import Partial, Placement, Replicate, Shard
from autoshard.ir.quantized import WIRE_BITS, wire_gather
from autoshard.ir.types import TensorType

#: layout: brings tensors into another layout. quantised: the same with fewer bits. experts: tokens are sent
#: to the ranks of their experts, or back. ring: products whose chunks travel round the ranks of an axis
#: meanwhile (`ir.rings`), and attention whose keys do (`runtime.ring_attention`)
Family: TypeAlias = Literal["layout", "quantised", "experts", "ring"]
TransferKind: TypeAlias = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice"]

#: reductions of gradients once a step go out in messages of so many bytes, as DistributedDataParallel's do
BUCKET_BYTES = 25 * 2**20
#: bytes of full tensors up to which a message holds too little to wait for
_LITTLE = 1 << 18


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """One tensor of a collective, by names. where: what is cut or joined, in the order of `CollectiveSpec`:
    (dim, outer, inner, size) of a gather, a slice or a reduction in parts; () for a reduction."""

    source: str
    out: str
    where: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSpec:
    """One collective op: ``outs = op(tensor or tensors, axis or axes, ...)``.

    transfer: what it does to the placement of a tensor; of a ring, what its messages do together.
    primitive: of `cost.collective`, whose price its messages have; "" where ranks exchange nothing. dims,
    keywords: how many arguments after the axes say where a single tensor is cut or joined, and the keywords
    of the rest with their defaults. between: the placements on an axis before and after, of the first that
    does so. fits: which two of them. bucket: whether it moves several tensors in one message. in_turn:
    whether large ones go out over an axis one at a time, as they hold what they send, and nothing may need
    their results before the end of the step. packed: whether it is given what is sent, rather than values.
    product: the op on full tensors that an exchange of tokens, or attention whose keys go round, is. agreed:
    whether what goes where is known before, so that it need not be waited for.
    """

    op: str
    family: Family
    transfer: TransferKind
    primitive: str = ""
    dims: int = 0
    keywords: tuple[tuple[str, Arg], ...] = ()
    between: tuple[type[Placement], type[Placement]] | None = None
    fits: Callable[[Any, Any], bool] = lambda before, after: True
    bucket: bool = False
    in_turn: bool = False
    packed: bool = False
    product: str = ""
    agreed: bool = True

    @property
    def name(self) -> str:
        """``all_gather_bucket``: also of the function that runs it (`runtime.collectives`)."""
        return self.op.split(".")[1]

    @property
    def kind(self) -> str:
        """``all_reduce`` for itself and its bucket."""
        return self.name.removesuffix("_bucket")

    @property
    def moves(self) -> bool:
        """Whether it changes where tensors lie, and nothing else."""
        return self.family in ("layout", "quantised")

    @property
    def pending(self) -> bool:
        """Whether it is only issued, and waited for by who needs the result."""
        return (self.moves or self.family == "experts") and self.agreed and bool(self.primitive)

    @property
    def gathers(self) -> bool:
        """Whether the price counts its results, which are whole; else what it is given, which is then."""
        return self.transfer == "all_gather"


_PARTS = (("outer", 1), ("inner", 1), ("size", None))
_BLOCKS = (("split_outer", 1), ("concat_outer", 1))

ALL_GATHER = CollectiveSpec(
    "comm.all_gather.default", "layout", "all_gather", "all_gather", 1, _PARTS, (Shard, Replicate)
)
ALL_REDUCE = CollectiveSpec(
    "comm.all_reduce.default", "layout", "all_reduce", "all_reduce", between=(Partial, Replicate)
)
REDUCE_SCATTER = replace(
    CollectiveSpec("comm.reduce_scatter.default", "layout", "reduce_scatter", "reduce_scatter", 1, _PARTS),
    between=(Partial, Shard),
    fits=lambda before, after: before.reduce == "sum",
    in_turn=True,
)
ALL_TO_ALL = replace(
    CollectiveSpec("comm.all_to_all.default", "layout", "all_to_all", "all_to_all", 2, _BLOCKS),
    between=(Shard, Shard),
    fits=lambda before, after: before.dim != after.dim,
)
SLICE = CollectiveSpec("comm.slice.default", "layout", "slice", "", 1, _PARTS, (Replicate, Shard))
ALL_GATHER_BUCKET = replace(ALL_GATHER, op="comm.all_gather_bucket.default", between=None, bucket=True)
ALL_REDUCE_BUCKET = replace(ALL_REDUCE, op="comm.all_reduce_bucket.default", between=None, bucket=True)
REDUCE_SCATTER_BUCKET = replace(
    REDUCE_SCATTER, op="comm.reduce_scatter_bucket.default", between=None, bucket=True
)
ALL_GATHER_Q = replace(ALL_GATHER_BUCKET, op="comm.all_gather_q_bucket.default", family="quantised")
REDUCE_SCATTER_Q = replace(
    REDUCE_SCATTER_BUCKET,
    op="comm.reduce_scatter_q_bucket.default",
    family="quantised",
    primitive="all_to_all",
)
#: rows that are quantised already (`autoshard.rules.quantized_gather`)
ALL_GATHER_WIRE = CollectiveSpec(
    "comm.all_gather_wire.default", "quantised", "all_gather", "all_gather", packed=True
)
#: the op on full tensors -> what sends its tokens, or what is made of them, over an axis
EXPERT_EXCHANGES = tuple(
    CollectiveSpec(
        f"comm.expert_{name}.default",
        "experts",
        "all_to_all",
        "all_to_all",
        product=f"autoshard.{name}.default",
        agreed=name != "route",
    )
    for name in ("route", "dispatch", "combine", "dispatch_weights", "combine_weights")
)
DISPATCHES = frozenset(spec.op for spec in EXPERT_EXCHANGES if spec.name == "expert_dispatch")
#: exchanges whose second hop is an op of its own if they go by node: those of which is known what goes where
RELAYED = frozenset(spec.op for spec in EXPERT_EXCHANGES if spec.agreed)
#: sends on what an exchange by node has brought to this node, or to the node that it came from
EXPERT_RELAY = CollectiveSpec("comm.expert_relay.default", "experts", "all_to_all", "all_to_all")
ALL_GATHER_MM = CollectiveSpec("comm.all_gather_mm.default", "ring", "all_gather", "all_gather")
MM_REDUCE_SCATTER = CollectiveSpec(
    "comm.mm_reduce_scatter.default", "ring", "reduce_scatter", "reduce_scatter"
)
#: attention of a rank's rows while keys and values of all ranks go round (`runtime.ring_attention`)
RING_ATTENTION = CollectiveSpec(
    "comm.ring_attention.default", "ring", "all_gather", "all_gather", product="autoshard.sdpa.default"
)
RING_ATTENTION_BACKWARD = replace(
    RING_ATTENTION, op="comm.ring_attention_backward.default", product="autoshard.sdpa_backward.default"
)
_ROWS = (
    *(ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, SLICE),
    *(ALL_GATHER_BUCKET, REDUCE_SCATTER_BUCKET, ALL_REDUCE_BUCKET),
    *(ALL_GATHER_Q, REDUCE_SCATTER_Q, ALL_GATHER_WIRE),
    *(*EXPERT_EXCHANGES, EXPERT_RELAY, ALL_GATHER_MM, MM_REDUCE_SCATTER),
    *(RING_ATTENTION, RING_ATTENTION_BACKWARD),
)


def _once(rows: Sequence[CollectiveSpec], field: str) -> dict[Any, CollectiveSpec]:
    """A field of the rows, where it is not None, -> its row. Raises ValueError if two rows have the same."""
    result: dict[Any, CollectiveSpec] = {}
    for spec in rows:
        value = getattr(spec, field)
        if value is not None and (first := result.setdefault(value, spec)) is not spec:
            raise ValueError(f"the rows {first.op} and {spec.op} of ir/collectives.py have the same {field}")
    return result


def _first_layout(rows: Sequence[CollectiveSpec], bucket: bool) -> dict[TransferKind, CollectiveSpec]:
    """Transfer -> its first row of family ``layout``; a pass may emit the ops of later ones itself."""
    fitting = [spec for spec in rows if spec.family == "layout" and spec.bucket is bucket]
    return {spec.transfer: spec for spec in reversed(fitting)}


#: op -> its row
COLLECTIVES: Mapping[str, CollectiveSpec] = MappingProxyType(_once(_ROWS, "op"))
#: what it does to a placement -> the collective of one tensor, and of several, that does so with all bits
TENSOR_COLLECTIVES, BUCKET_COLLECTIVES = (
    MappingProxyType(_first_layout(_ROWS, bucket)) for bucket in (False, True)
)
_BETWEEN = _once(_ROWS, "between")


def spec_of(node: Node) -> CollectiveSpec | None:
    """The row of a node's op, None for an op that is no collective."""
    return COLLECTIVES.get(node.op)


def spec_named(name: str) -> CollectiveSpec | None:
    """The row of an op that is given without its overload, ``comm.all_gather``; None for others."""
    return COLLECTIVES.get(f"{name}.default")


def is_collective(node: Node) -> bool:
    """Whether its op is in the table."""
    return node.op in COLLECTIVES


def is_message(node: Node) -> bool:
    """Whether ranks exchange anything; a slice of what a rank has sends nothing."""
    return node.op in COLLECTIVES and bool(COLLECTIVES[node.op].primitive)


def kind_of(node: Node) -> str:
    """``all_reduce`` for itself and its bucket; "" for an op that is no collective."""
    return COLLECTIVES[node.op].kind if node.op in COLLECTIVES else ""


def is_ring(node: Node) -> bool:
    """Whether it is products in chunks that travel round an axis."""
    return node.op in COLLECTIVES and COLLECTIVES[node.op].family == "ring"


def transfer_of(node: Node) -> TransferKind | None:
    """What a node does to layouts that does nothing else, with fewer bits or not; None for other ops."""
    spec = COLLECTIVES.get(node.op)
    return spec.transfer if spec is not None and spec.moves else None


def exact_transfer(node: Node) -> TransferKind | None:
    """The same of those that send all bits; None for others."""
    spec = COLLECTIVES.get(node.op)
    return spec.transfer if spec is not None and spec.family == "layout" else None


def transfer_between(before: Placement, after: Placement) -> TransferKind | None:
    """The collective that leads from one placement of an axis to another, None if there is none."""
    spec = _BETWEEN.get((type(before), type(after)))
    return spec.transfer if spec is not None and spec.fits(before, after) else None


def axes_of(node: Node) -> tuple[str, ...]:
    """The mesh axes that a collective goes over, one after the other."""
    return (node.args[1],) if isinstance(node.args[1], str) else tuple(node.args[1])


def in_one_message(node: Node) -> bool:
    """Whether all that a rank sends is issued before it waits; over several axes, or where parts of attention
    are merged by the largest log-sum-exp of all, one message follows another."""
    return len(axes_of(node)) == 1 and node.kwarg("op", "sum") != "attention"


def transfers_of(node: Node) -> tuple[TensorTransfer, ...] | None:
    """The tensors of a collective, one by one; None if its text is not that of one, or if it computes."""
    spec, args = COLLECTIVES[node.op], node.args
    if spec.packed:
        said = wire_gather(node)
        return None if said is None else (TensorTransfer(said.wire, node.outs[0], said.where),)
    count = 2 + bool(spec.dims) + 2 * (spec.family == "quantised") if spec.bucket else 2 + spec.dims
    if not spec.moves or len(args) != count:
        return None
    if spec.bucket:
        sources, wheres = args[0], args[2] if spec.dims else ((),) * len(node.outs)
    else:
        where = (*args[2:], *(node.kwarg(key, default) for key, default in spec.keywords))
        sources, wheres = args[:1], (where,)
    if not isinstance(sources, tuple) or not isinstance(wheres, tuple):
        return None
    if not len(sources) == len(wheres) == len(node.outs):
        return None
    if not all(isinstance(s, Ref) for s in sources) or not all(isinstance(w, tuple) for w in wheres):
        return None
    return tuple(TensorTransfer(s.name, o, w) for s, o, w in zip(sources, node.outs, wheres, strict=True))


def moved_by(node: Node) -> list[tuple[str, str]]:
    """(source, out) of every tensor of a collective."""
    return [(t.source, t.out) for t in transfers_of(node) or ()]


def wheres_of(node: Node) -> tuple[tuple[Arg, ...], ...]:
    """Where each tensor of a collective is cut or joined."""
    return tuple(t.where for t in transfers_of(node) or ())


def kept_outs(node: Node, outs: Collection[str]) -> Node | None:
    """A collective of those of its tensors whose results are among ``outs``, None if there are none."""
    left = [k for k, out in enumerate(node.outs) if out in outs]
    if len(left) == len(node.outs):
        return node
    if not left:
        return None
    sources, axis, *rest = node.args
    args = (tuple(sources[k] for k in left), axis, *(tuple(each[k] for k in left) for each in rest))
    new, types = tuple(node.outs[k] for k in left), tuple(node.types[k] for k in left)
    return replace(node, args=args, outs=new, types=types)


def sent_bits(node: Node) -> tuple[int, ...]:
    """With how few bits each tensor of a quantised collective travels, 0 for all of them; () for others."""
    spec = COLLECTIVES.get(node.op)
    if spec is not None and spec.op in DISPATCHES and node.kwarg("bits", 0):
        return (node.kwarg("bits", 0),)
    if spec is None or spec.family != "quantised":
        return ()
    return (WIRE_BITS,) if spec.packed else tuple(node.args[3])


def nbytes_made(node: Node) -> int:
    """Bytes of the full tensors that a node makes."""
    return sum(t.nbytes for t in node.types if t is not None)


def goes_in_turn(node: Node) -> bool:
    """Whether one such message is on its way per axis at a time."""
    return node.op in COLLECTIVES and COLLECTIVES[node.op].in_turn and nbytes_made(node) > _LITTLE


def collective(
    transfer: str,
    axis: str,
    transfers: Sequence[TensorTransfer],
    types: Sequence[TensorType | None],
    origin: Origin,
    backward: bool,
    *,
    reduce: Arg = None,
    bucket: bool | None = None,
) -> Node:
    """A collective with all bits: ``y = comm.all_gather(x, axis, dim)``, or with several tensors
    ``a, b = comm.all_gather_bucket((x, y), axis, (where, where))``.

    types: of the outs. reduce: to be said, None for a sum. bucket: None for one if there are several tensors.
    """
    bucket = len(transfers) > 1 if bucket is None else bucket
    spec = (BUCKET_COLLECTIVES if bucket else TENSOR_COLLECTIVES)[transfer]  # type: ignore[index]
    refs, wheres = tuple(Ref(t.source) for t in transfers), tuple(t.where for t in transfers)
    args: tuple[Arg, ...] = (refs, axis, wheres) if spec.dims else (refs, axis)
    kwargs: list[tuple[str, Arg]] = [("op", reduce)] if reduce else []
    if not bucket:
        args = (refs[0], axis, *wheres[0][: spec.dims])
        said = zip(spec.keywords, wheres[0][spec.dims :], strict=True)
        kwargs += [(key, value) for (key, default), value in said if value != default]
    outs = tuple(t.out for t in transfers)
    return Node(spec.op, args, tuple(kwargs), outs, tuple(types), origin, backward)
