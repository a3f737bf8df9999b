"""What the ``comm`` ops of a program are: their kind, their mesh axes, whether ranks exchange anything."""

from __future__ import annotations

from autoshard.ir.graph import Arg, Node

#: reductions of gradients once a step go out in messages of so many bytes, as DistributedDataParallel's do
BUCKET_BYTES = 25 * 2**20
#: products whose chunks travel round the ranks of an axis meanwhile (`ir.rings`)
GATHER_MM, MM_SCATTER = "comm.all_gather_mm.default", "comm.mm_reduce_scatter.default"
#: with all bits, of one tensor and of several
GATHERS = ("comm.all_gather.default", "comm.all_gather_bucket.default")
#: with fewer bits than the values have
GATHER_Q, SCATTER_Q = "comm.all_gather_q_bucket.default", "comm.reduce_scatter_q_bucket.default"
ANY_GATHER = (*GATHERS, GATHER_Q)
#: reductions of which each rank keeps a part, of one tensor and of several
SCATTERS = ("comm.reduce_scatter.default", "comm.reduce_scatter_bucket.default")
#: rows that are quantised already (`autoshard.rules.quantized_gather`)
GATHER_WIRE = "comm.all_gather_wire.default"


def collective_kind(node: Node) -> str:
    """``all_reduce`` for itself and its bucket; "" for an op that is no collective."""
    return node.op.split(".")[1].removesuffix("_bucket") if node.op.startswith("comm.") else ""


def is_bucket(node: Node) -> bool:
    """Whether it moves several tensors in one message."""
    return node.op.startswith("comm.") and node.op.split(".")[1].endswith("_bucket")


def is_ring(node: Node) -> bool:
    """Whether it is products in chunks that travel round an axis."""
    return node.op in (GATHER_MM, MM_SCATTER)


def axes_of(node: Node) -> tuple[str, ...]:
    """The mesh axes that a collective goes over, one after the other."""
    return (node.args[1],) if isinstance(node.args[1], str) else tuple(node.args[1])


def wheres_of(node: Node) -> tuple[tuple[Arg, ...], ...]:
    """(dim, outer, inner, size) of every tensor that a gather or a reduction in parts joins or splits."""
    if isinstance(node.args[0], tuple):
        return tuple(tuple(where) for where in node.args[2])
    return ((node.args[2], node.kwarg("outer", 1), node.kwarg("inner", 1), node.kwarg("size", None)),)


#: bytes of whole tensors up to which a message holds too little to wait for
_LITTLE = 1 << 18


def goes_in_turn(node: Node) -> bool:
    """Whether one such message is on its way per axis at a time: a reduce-scatter holds what it sends, and
    nothing may need its results before the end of the step, as with the gradients of a layer."""
    return node.op.startswith("comm.reduce_scatter") and nbytes_made(node) > _LITTLE


def nbytes_made(node: Node) -> int:
    """Bytes of the whole tensors that a node makes."""
    return sum(t.nbytes for t in node.types if t is not None)


def is_message(node: Node) -> bool:
    """Whether ranks exchange anything; a slice of what a rank has sends nothing."""
    return collective_kind(node) not in ("", "slice")


def sent_bits(node: Node) -> tuple[int, ...]:
    """With how few bits each tensor of a quantised collective travels, 0 for all of them; () for others."""
    if node.op == GATHER_WIRE:
        return (8,)
    return tuple(node.args[3]) if node.op in (GATHER_Q, SCATTER_Q) else ()
