"""What training keeps per parameter: the bytes of its gradient and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from autoshard.cluster.cluster import Device, host_of
from autoshard.errors import UsageError, nearest
from autoshard.ir import DTYPES, Port
from autoshard.ir.offload import Offload

#: per element of a sum of gradients of half precision (`runtime.stepper`)
SUM_BYTES = 4
#: per element of SOAP's and Shampoo's factors, bases and roots
FACTOR_BYTES = 4
#: per element of what Muon orthogonalises, bfloat16
ORTHOGONAL_BYTES = 2


def added_bytes(width: int) -> int:
    """Moved per element of ``width`` bytes to add a gradient to a sum, which is read and written."""
    return width + 2 * max(width, SUM_BYTES)


@dataclass(frozen=True)
class Preconditioners:
    """What the owner of an m x n matrix keeps beside moments, in fp32, and computes (`LayerWiseOptimizer`).

    products: of 2 m n (m + n) FLOP, in a step. renewed: FLOP per m^3, and per n^3, when bases or roots are
    computed. kept: matrices of [m, m], and of [n, n]. every: steps from one time to the next.
    """

    products: int
    renewed: float
    kept: int = 2
    every: int = 10


@dataclass(frozen=True)
class Recipe:
    """Copies that a trained parameter has, for AdamW, Muon, SOAP or Shampoo.

    gradient, optimizer: bytes per element; None: as wide as the parameter, each of its moments. touched:
    bytes per element that the update reads and writes, None: parameter and moments are read and written, the
    gradient is read. resident: whether the parameter itself is on the device. slower: times that the update
    takes of what the memory of the device would allow. iterations: of Newton-Schulz, by which matrices are
    orthogonalised (`cost.orthogonal`); 0: none are. preconditioners: of matrices whose owners have
    their state. tables: targets of matrices that take AdamW: of lookups, and heads.
    """

    name: str
    gradient: int | None = None
    optimizer: int | None = None
    touched: int | None = None
    resident: bool = True
    slower: float = 1.0
    moments: int = 2
    iterations: int = 0
    preconditioners: Preconditioners | None = None
    tables: frozenset[str] = frozenset()

    @property
    def needs_matrices(self) -> bool:
        """Whether matrices go to owners."""
        return bool(self.iterations or self.preconditioners)

    def of(self, port: Port) -> Recipe:
        """That of a parameter: one that is stored in f32 and taken in 16 bits is its own master copy; AdamW's
        for what is no matrix, and for tables."""
        if self.needs_matrices and (len(port.type.shape) not in (2, 3) or port.target in self.tables):
            return replace(self, moments=2, iterations=0, preconditioners=None).of(port)
        if not port.stored:
            return self
        wide = DTYPES[port.stored][1]
        touched = self._moved(wide) + DTYPES[port.type.dtype][1] if self.touched is None else self.touched
        optimizer = self.optimizer_bytes(wide) + wide * self.resident
        return replace(self, gradient=self.gradient_bytes(wide), optimizer=optimizer, touched=touched)

    def gradient_bytes(self, width: int) -> int:
        """Per element of a parameter that has ``width`` bytes per element."""
        return width if self.gradient is None else self.gradient

    def sum_bytes(self, width: int) -> int:
        """Per element while gradients are summed over microbatches: halves are summed in fp32."""
        return max(SUM_BYTES if width < SUM_BYTES else width, self.gradient_bytes(width))

    def optimizer_bytes(self, width: int) -> int:
        """Per element, on the ranks that have it."""
        return self.sharded_moments * width if self.optimizer is None else self.optimizer

    def owned_bytes(self, port: Port) -> float:
        """Of the state of a parameter at its owner; 0 if ranks have what belongs to their parts."""
        if self.preconditioners is None:
            return 0.0
        *batch, rows, columns = port.type.shape
        factors = self.preconditioners.kept * prod(batch) * (rows * rows + columns * columns)
        return self.moments * DTYPES[port.stored_dtype][1] * port.type.numel + FACTOR_BYTES * factors

    @property
    def sharded_moments(self) -> int:
        """Those of which a rank has what it has of the parameter."""
        return 0 if self.preconditioners else self.moments

    def update_bytes(self, width: int) -> float:
        return self.slower * (self._moved(width) if self.touched is None else self.touched)

    @property
    def accesses(self) -> int:
        """How often an update reads or writes an element: parameter and moments twice, the gradient once.

        Where owners make it: messages of gradient and parameter, and of the parameter back.
        """
        return 6 if self.preconditioners else 3 + 2 * self.moments

    def _moved(self, width: int) -> int:
        """Bytes of an update per element; what is orthogonalised is written and read before, and after."""
        return self.accesses * width + 4 * ORTHOGONAL_BYTES * bool(self.iterations)


def hosted(recipe: Recipe, offload: Offload, device: Device) -> Recipe:
    """What is left of a recipe on the device, and what its update takes.

    Raises UsageError if the device's host memory is not known, or for another optimizer than AdamW.
    """
    if not offload.states:
        return recipe
    if recipe.needs_matrices:
        what = f"the states of {recipe.name} cannot live in host memory"
        raise UsageError(what, why="the optimizer that runs there is AdamW", hint="leave out --offload")
    host = host_of(device)
    slower = device.memory_bandwidth * host.devices / host.memory_bandwidth
    gradient = 0 if offload.parameters else recipe.gradient
    return replace(
        recipe, gradient=gradient, optimizer=0, resident=not offload.parameters, slower=max(1.0, slower)
    )


#: everything in the type of the parameter: what torch.optim.AdamW does, and what our runtime runs
ADAMW = Recipe("adamw")
#: 16-bit parameters with gradients, master copy and moments in fp32: 18 bytes per parameter
#: (Narayanan et al., SC'21, and Rajbhandari et al., ZeRO, SC'20, section 3.1, with fp32 gradients)
MIXED = Recipe("adamw-fp32", gradient=4, optimizer=12, touched=2 + 4 + 12 + 12)
#: what `autoshard.Muon` does, and AdamW for what is no matrix, for lookups and heads
MUON = Recipe("muon", moments=1, iterations=5)
#: Vyas et al., 2409.11321, algorithm 3: gradient and momentum to the bases, the update back, and the factors;
#: a product and a QR decomposition with its Q, 4/3 each (Golub, Van Loan, "Matrix Computations", 5.2)
SOAP = Recipe("soap", preconditioners=Preconditioners(products=4, renewed=2 + 8 / 3))
#: Gupta et al., 2018, with momentum: the gradient by both roots, and the factors; a symmetric decomposition
#: with its vectors (Golub, Van Loan, 8.3), and a product
SHAMPOO = Recipe("shampoo", moments=1, preconditioners=Preconditioners(products=2, renewed=9 + 2))
RECIPES: Mapping[str, Recipe] = MappingProxyType({r.name: r for r in (ADAMW, MIXED, MUON, SOAP, SHAMPOO)})


def recipe_named(name: str) -> Recipe:
    """Raises UsageError if there is none of that name."""
    if name not in RECIPES:
        raise UsageError(f"no optimizer is called {name!r}", hint=nearest(name, RECIPES))
    return RECIPES[name]
