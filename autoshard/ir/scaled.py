"""Matrix products whose operands are cast to 8-bit floats, each with scales: which formats there are.

With s = amax_scale(x, dim, block, element, scale) and q = cast_scaled(x, s, element), x is about q * s. The
product of two such operands is ``autoshard.scaled_mm(scale_a, scale_b, a, b, dtype)``. Scales have the dims
of what they scale; a dim along which elements share one has size 1, or one element for each block.

Rows of experts [s, n] (`ops.experts`) that are summed over have scales [E, n], one for the rows of an expert:
``amax_by_expert(x, slots, experts, element, scale)`` and ``cast_by_expert(x, scale, element, slots)``.

Of 4-bit elements, w = amax_scale(x, None, 0, f4e2m1x2, f32), s = block_scale(x, w, f8e4m3, block) and
q = cast_packed(x, s, f4e2m1x2, w, dim) have two in a byte along a dim; x is about q * s * w (`ops.packed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.ir.graph import Node

AMAX_SCALE = "autoshard.amax_scale.default"
CAST_SCALED = "autoshard.cast_scaled.default"
SCALED_MM = "autoshard.scaled_mm.default"
AMAX_BY_EXPERT = "autoshard.amax_by_expert.default"
CAST_BY_EXPERT = "autoshard.cast_by_expert.default"
SCALED_EXPERT_MM = "autoshard.scaled_expert_mm.default"
SCALED_EXPERT_OUTER = "autoshard.scaled_expert_outer.default"
BLOCK_SCALE = "autoshard.block_scale.default"
CAST_PACKED = "autoshard.cast_packed.default"
PACKED_MM = "autoshard.packed_mm.default"
ROTATED = "autoshard.rotated.default"
#: ops that cast; their first arguments are what they cast, its scales, and the type of the cast
CASTS = frozenset((CAST_SCALED, CAST_BY_EXPERT, CAST_PACKED))
#: ops that round
ROUNDS = CASTS | {BLOCK_SCALE}
#: ops that give the largest of something
LARGEST = frozenset((AMAX_SCALE, AMAX_BY_EXPERT))


#: sizes that matrix units of 8 bits take whole
WORD = 16
#: two elements of 4 bits in a byte, and how many elements share a scale
FP4, FP4_BLOCK = "f4e2m1x2", 16
#: types of what is cast
ELEMENTS = ("f8e4m3", "f8e5m2", FP4)


@dataclass(frozen=True)
class ProductFormat:
    """How the operands of products are cast.

    element: type of what forward multiplies. gradient: of gradients of results. whole: one scale for a
    tensor, else one for every row or column that is summed over. block: elements that share a scale of
    those summed over, 0 for all. scale: type of scales. weight_gradient: whether products that make
    gradients of parameters are cast, too.
    """

    element: str = "f8e4m3"
    gradient: str = "f8e4m3"
    whole: bool = False
    block: int = 0
    scale: str = "f32"
    weight_gradient: bool = True

    @property
    def packed(self) -> bool:
        """Whether elements have 4 bits, and scales two levels."""
        return self.element == FP4

    def granularity(self, dim: int) -> int | None:
        """The dim along which elements share a scale, of an operand summed over ``dim``; None: all."""
        return None if self.whole else dim


#: by the names in `options.PRODUCTS`. Micikevicius et al., "FP8 formats for deep learning", 2022, section 3
#: (gradients in e5m2); torchao has recipes of these names, with dynamic scales, too; Open Compute Project,
#: "Microscaling formats (MX) specification", 1.0, section 5 (blocks of 32, scales that are powers of two);
#: NVIDIA, "Pretraining large language models with NVFP4", 2025
FORMATS: Mapping[str, ProductFormat] = MappingProxyType(
    {
        "float8-tensorwise": ProductFormat(gradient="f8e5m2", whole=True),
        "float8-rowwise": ProductFormat(),
        "float8-rowwise-gw-hp": ProductFormat(weight_gradient=False),
        "mxfp8": ProductFormat(block=32, scale="f8e8m0"),
        "nvfp4": ProductFormat(FP4, FP4, block=FP4_BLOCK, scale="f8e4m3"),
    }
)


def scale_shape(shape: Sequence[int], dim: int | None, block: int) -> tuple[int, ...]:
    """Of the scales of a tensor. dim: along which elements share one, None for all. block: see above."""
    if dim is None:
        return (1,) * len(shape)
    return tuple((n // block if block else 1) if d == dim else n for d, n in enumerate(shape))


def rate_of(scale: str) -> str:
    """At the rate of which type GPUs multiply operands whose scales are of a type.

    Scales of blocks are multiplied into bf16 copies first: no kernel here takes them.
    """
    return "f8" if scale == "f32" else "bf16"


def copies_of(rate: str, turned: tuple[bool, bool]) -> tuple[float, float]:
    """Bytes moved per byte of each operand before they are multiplied at a rate, which matrix units of 8 bits
    only do with rows of the left one and columns of the right one that lie contiguous. turned: whether each
    lies in memory by its other dim."""
    if rate != "f8":
        return 4.0, 4.0  # read once, written and read in 16 bits, less what the product would have read
    return 2.0 * turned[0], 2.0 * (not turned[1])


def expert_copies(node: Node, rate: str) -> tuple[float, ...]:
    """The same per input of a product of experts. Rows of which outer products are summed lie along the other
    dim: they are laid out anew, those of an expert from a whole word on."""
    if node.op == SCALED_EXPERT_OUTER:
        return 0.0, 0.0, *copies_of(rate, (True, False)), 0.0
    of_rows, of_matrices = copies_of(rate, (False, bool(node.args[5])))
    return 0.0, 0.0, of_rows, 0.0, of_matrices


def packed_rate(native: bool) -> str:
    """At the rate of which type a device multiplies 4-bit operands. native: whether it has units for them."""
    return "f4" if native else "bf16"


def packed_copies(native: bool, turned: tuple[bool, bool]) -> tuple[float, float]:
    """As `copies_of`; without units of 4 bits: read once, written and read in 16 bits, four times as many."""
    return copies_of("f8", turned) if native else (8.0, 8.0)


def elements(shape: Sequence[int], pairs: int | None) -> tuple[int, ...]:
    """The shape of what codes stand for that have two in a byte along a dim, None for one."""
    return tuple(n * 2 if dim == pairs else n for dim, n in enumerate(shape))
