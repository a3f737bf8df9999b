"""The graph that every pass reads and writes: immutable nodes over named, typed values."""

from autoshard.ir.folded import Call, Folded
from autoshard.ir.graph import Arg, Graph, Node, Origin, Ref, refs_of, substitute
from autoshard.ir.joint import Joint, Port, Result
from autoshard.ir.symbols import CallSite, LocalOffset, LocalSize, ShardOf
from autoshard.ir.types import DTYPES, Dtype, TensorType

__all__ = [
    "DTYPES",
    "Arg",
    "Call",
    "CallSite",
    "Dtype",
    "Folded",
    "Graph",
    "Joint",
    "LocalOffset",
    "LocalSize",
    "Node",
    "Origin",
    "Port",
    "Ref",
    "Result",
    "ShardOf",
    "TensorType",
    "refs_of",
    "substitute",
]
