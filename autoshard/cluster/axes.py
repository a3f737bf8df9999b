"""What the names of mesh axes mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisMeaning:
    """What the search may do with an axis.

    splits_batch: inputs arrive split over it. splits_batch_inside, splits_layers: ops may split their batch,
    or their other dims, over it. stores_sharded, may_store_sharded: trained parameters must, or may, be
    stored split over it. divides_sequence: a sequence may be split over it in a zigzag, which gives causal
    attention the same work on all its ranks, and not otherwise. divides_experts: it is as wide as experts are
    to be divided, other sizes of it are other ways to run them.
    """

    name: str
    text: str
    splits_batch: bool
    splits_batch_inside: bool
    splits_layers: bool
    stores_sharded: bool
    may_store_sharded: bool
    divides_products: bool = False
    divides_experts: bool = False
    divides_sequence: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the search decides what it divides within a sequence, if anything."""
        return self in (FREE, CP)

    def allows(self, is_batch: bool) -> bool:
        """Whether ops may split the batch (or, if not is_batch, any other dim) over the axis."""
        return self.splits_batch_inside if is_batch else self.splits_layers

    def __str__(self) -> str:
        return self.text


DP = AxisMeaning(
    "dp",
    "shards the batch, replicates parameters",
    splits_batch=True,
    splits_batch_inside=True,
    splits_layers=False,
    stores_sharded=False,
    may_store_sharded=False,
)
FSDP = AxisMeaning(
    "fsdp",
    "shards batch and parameters",
    splits_batch=True,
    splits_batch_inside=True,
    splits_layers=False,
    stores_sharded=True,
    may_store_sharded=True,
)
EP = AxisMeaning(
    "ep",
    "shards the batch, experts among its ranks, and other parameters as fsdp does",
    splits_batch=True,
    splits_batch_inside=True,
    splits_layers=False,
    stores_sharded=True,
    may_store_sharded=True,
    divides_experts=True,
)
TP = AxisMeaning(
    "tp",
    "shards inside layers",
    splits_batch=False,
    splits_batch_inside=False,
    splits_layers=True,
    stores_sharded=False,
    may_store_sharded=True,
    divides_products=True,
)
CP = AxisMeaning(
    "cp",
    "shards the sequence",
    splits_batch=False,
    splits_batch_inside=False,
    splits_layers=True,
    stores_sharded=False,
    may_store_sharded=True,
    divides_sequence=True,
)
PP = AxisMeaning(
    "pp",
    "divides the model into pipeline stages",
    splits_batch=False,
    splits_batch_inside=False,
    splits_layers=False,
    stores_sharded=False,
    may_store_sharded=False,
)
FREE = AxisMeaning(
    "free",
    "free",
    splits_batch=False,
    splits_batch_inside=True,
    splits_layers=True,
    stores_sharded=False,
    may_store_sharded=True,
)

_RESERVED: Mapping[str, AxisMeaning] = {meaning.name: meaning for meaning in (DP, FSDP, EP, TP, CP, PP)}


def meaning_of(name: str) -> AxisMeaning:
    """The meaning of an axis called ``name``; a name that is not reserved is free."""
    return _RESERVED.get(name, FREE)
