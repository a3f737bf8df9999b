"""A model whose ops have rules, and what there is to decide about it on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod

import numpy as np

from autoshard.ir import Folded
from autoshard.ir.flow import Flow, Place
from autoshard.rules.core import Factored
from autoshard.rules.factor_splits import DigitTable
from autoshard.rules.states import OpState
from autoshard.search.problem.cost_entries import BatchPricing, Entry
from autoshard.search.problem.cost_terms import CostTerms
from autoshard.search.problem.decisions import NodeVar, ValueVar, Variable, with_states
from autoshard.search.problem.gradient_casts import before_gradient_casts
from autoshard.search.problem.op_classes import Kinds
from autoshard.search.problem.param_buckets import Shares, shares_of
from autoshard.search.problem.recomputed_chains import RecomputedOp, recomputed_chains
from autoshard.search.problem.saved_for_backward import NodeKey, SavedTerms, kept_activations
from autoshard.search.problem.search_axes import SearchAxes
from autoshard.search.problem.tied_decisions import TiedDecisions
from autoshard.solver.network import Array, Indices
from autoshard.solver.single_elimination import Orders
from autoshard.solver.solution_cache import SolutionCache

#: bytes that differ by less are the same, but for uneven parts
MORE = 1.01


@dataclass(frozen=True)
class Model:
    """Everything the problem is built from. expert_chunks: in which tokens of experts are exchanged."""

    folded: Folded
    flow: Flow
    rules: dict[tuple[str, int], Factored]
    digits: DigitTable
    expert_chunks: int = 1
    #: ways to run calls that were found already, by all that they depend on
    ways: dict[object, tuple[OpState, ...]] = field(default_factory=dict, compare=False, repr=False)
    #: orders of elimination of its networks, on any mesh
    orders: Orders = field(default_factory=Orders, compare=False, repr=False)

    @cached_property
    def kept(self) -> SavedTerms:
        """What backward reads of forward; the same on every mesh."""
        return kept_activations(self.folded, self.flow, self.rules)

    @cached_property
    def recomputed(self) -> dict[NodeKey, RecomputedOp]:
        """What of recomputed layers stays inside fused kernels."""
        return recomputed_chains(self.folded, self.flow, self.kept)

    @cached_property
    def unreduced(self) -> frozenset[Place]:
        """Gradients that are cast before they are reduced."""
        return before_gradient_casts(self.folded, self.flow)

    @cached_property
    def alike(self) -> TiedDecisions:
        """Ops and values that may decide together."""
        return TiedDecisions.of(self.folded)

    @cached_property
    def kinds(self) -> Kinds:
        """What of its ops is the same on every mesh."""
        return Kinds.of(self.folded, self.rules, self.digits)

    @cached_property
    def shares(self) -> dict[Place, Shares]:
        """Of parameters in the messages they travel in, by class."""
        return shares_of(self.flow)


def model_flop(model: Model) -> tuple[float, str]:
    """(FLOP of one forward and backward, the type that most of them are done in)."""
    counts = model.folded.counts()
    done: dict[str, float] = {}
    for (name, number), rule in model.rules.items():
        if rule.flops:
            types = model.folded.segments[name].nodes[number].types
            dtype = next((t.dtype for t in types if t is not None and t.is_float), "f32")
            done[dtype] = done.get(dtype, 0.0) + counts[name] * (rule.flops - rule.recomputed)
    return sum(done.values()), max(done, key=lambda d: done[d], default="f32")


def experts_of(model: Model) -> int:
    """How many experts the rows of a model may be exchanged between; 0 if it has none."""
    owners = [rule.sizes[o] for rule in model.rules.values() for _, o in rule.exchange]
    return min(owners, default=0)


def tokens_of(folded: Folded) -> int:
    """Tokens, or rows like them, that the model was captured with: the most of any input with a batch."""
    inputs = (p for p in folded.joint.ports if p.kind == "input" and p.target in folded.joint.batch_inputs)
    return max((prod(p.type.shape[:2]) for p in inputs), default=0)


def batch_of(folded: Folded) -> int:
    """The batch that the model was captured with; 1 if no input has one."""
    return folded.joint.sequences


@dataclass(frozen=True, eq=False)
class Blueprint:
    """Terms that can be priced for several batches. states: of every variable. batch: sequences that they
    were laid out with; 0 if another batch may have other states."""

    states: tuple[int, ...]
    entries: tuple[Entry, ...]
    prices: BatchPricing
    batch: int

    def terms(self, batch: int | None = None) -> CostTerms:
        """For that batch, a multiple of the one that they were laid out with."""
        prices = self.prices
        if batch is not None and batch != self.batch:
            scale = batch / self.batch
            prices = BatchPricing(prices.cost, prices.sizes, scale, prices, waves=prices.waves)
        terms = CostTerms(list(self.states))
        for entry in self.entries:
            entry.put(terms, prices)
        return terms


def compatible_states(before: Array | None, mask: Array) -> Array:
    """Two masks of 0 and inf together, the second left out where they leave no state."""
    both = mask if before is None else before + mask
    return both if before is None or np.isfinite(both).any() else before


@dataclass(frozen=True)
class Problem:
    """What there is to decide and what its costs are made of (see `compose` for the network).

    choices: states of all variables, those that turned out impossible among them (see
    `search.problem.feasible_states`). known: its solutions so far. kept: which states of a variable were
    possible, where not all. others: what decides with a variable, whatever states they are written with (see
    `search.problem.tied_decisions`).
    """

    axes: SearchAxes
    terms: CostTerms
    variables: tuple[Variable, ...]
    index: dict[object, int]
    choices: int
    known: SolutionCache = field(default_factory=SolutionCache, compare=False, repr=False)
    blueprint: Blueprint | None = field(default=None, compare=False, repr=False)
    kept: Mapping[int, Indices] = field(default_factory=dict, compare=False, repr=False)
    others: Mapping[int, Sequence[NodeVar | ValueVar]] = field(default_factory=dict, repr=False)

    def together(self, number: int) -> Iterator[Variable]:
        """A variable and all that decide with it, in its states."""
        variable = self.variables[number]
        yield variable
        for other in self.others.get(number, ()):
            yield with_states(other, variable.states)

    def masks(self, of: Callable[[Variable], Array | None]) -> list[Array | None]:
        """Per variable 0 or inf for each state, as all that decide together want it; None for all states.

        of: what each wants. Where all together want none of the states, the later ones are not heard.
        """
        masks: list[Array | None] = []
        for number in range(len(self.variables)):
            both: Array | None = None
            for variable in self.together(number):
                mask = of(variable)
                both = both if mask is None else compatible_states(both, mask)
            masks.append(both)
        return masks

    def grows_to(self, batch: int) -> bool:
        """Whether microbatches of ``batch`` sequences leave the same to decide."""
        laid = self.blueprint.batch if self.blueprint is not None else 0
        return laid > 0 and batch % laid == 0

    def bounds(self, batch: int) -> bool:
        """Whether `grown` to microbatches of ``batch`` sequences takes no more than they do: nothing that
        splits them over devices does not split these.

        An axis may split whatever its size divides, so that no prime factor of the devices may divide more
        sequences than before.
        """
        laid = self.blueprint.batch if self.blueprint is not None else 0
        if laid == 0 or batch < laid:
            return False
        even = gcd(batch, prod(self.axes.sizes) ** batch.bit_length())
        return laid % even == 0

    def grown(self, batch: int) -> Problem:
        """The same for microbatches of ``batch`` sequences. Its layouts are still those of the smaller batch:
        good for costs, not for a plan."""
        assert self.blueprint is not None
        return replace(self._priced(self.blueprint, batch), blueprint=None)

    def with_waves(self) -> Problem:
        """The same where waves of tiles count, as for a plan: see `CostModel.op_seconds`."""
        assert self.blueprint is not None
        before = self.blueprint.prices
        prices = BatchPricing(before.cost, before.sizes, before.scale, before, waves=True)
        blueprint = replace(self.blueprint, prices=prices)
        return replace(self._priced(blueprint), blueprint=blueprint)

    def _priced(self, blueprint: Blueprint, batch: int | None = None) -> Problem:
        terms = blueprint.terms(batch).only(self.kept)
        return replace(self, terms=terms, known=SolutionCache(self.known.orders))
