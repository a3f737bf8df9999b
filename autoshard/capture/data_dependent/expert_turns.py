"""The turns of a loop over experts as one mixture, in which all experts are products of one op.

Each turn takes the rows of one expert, and adds what becomes of them to a sum. What is done to the rows is
written down meanwhile (`Step`); at the end, turns that do the same with other weights are computed together:
tokens are dispatched once, weights of all experts are one tensor, and one sum comes back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import autoshard.ops.experts  # noqa: F401 (defines the ops called here)
from autoshard.capture.data_dependent.constant_eval import attribute_of
from autoshard.capture.data_dependent.expert_choice import ExpertChoice
from autoshard.ops.draws import uniform

_ops = torch.ops.autoshard
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__"))


class UnlikeTurnsError(Exception):
    """Turns do different things, and are not computed together."""


class _Outside:
    """A tensor that is no rows of experts, as it was then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def get(self) -> torch.Tensor:
        """The tensor. Raises UnlikeTurnsError if it was changed since."""
        if self._tensor._version != self._version:
            raise UnlikeTurnsError
        return self._tensor


@dataclass(frozen=True, eq=False)
class MatrixSlice:
    """A matrix that is one of a tensor of several. number: which of its dim 0; turned: transposed."""

    base: torch.Tensor
    number: int
    turned: bool


class MatrixSlices:
    """Follows matrices of experts that lie in one tensor. number: see `ExpertChoices`."""

    def __init__(self, number: Callable[[torch.Tensor], int | None]) -> None:
        self._number = number
        self._of: dict[int, tuple[torch.Tensor, MatrixSlice]] = {}

    def note(self, name: str, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """What a function makes of a tensor."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return
        if name == "unbind" and args[1:] in ((), (0,)):
            self._of.update((id(t), (t, MatrixSlice(first, k, False))) for k, t in enumerate(out))
        elif not isinstance(out, torch.Tensor):
            return
        elif name in ("__getitem__", "select"):
            index = args[-1] if name == "__getitem__" or args[1:2] == (0,) else None
            value = self._number(index) if isinstance(index, torch.Tensor) and index.dim() == 0 else index
            if type(value) is int:
                self._of[id(out)] = out, MatrixSlice(first, value % len(first), False)
        elif id(first) in self._of and out.dim() == 2 and _transposes(name, func, args):
            of = self._of[id(first)][1]
            self._of[id(out)] = out, MatrixSlice(of.base, of.number, not of.turned)

    def stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [n, ...] of experts as one [experts, n, ...]: of which they are slices, if they are."""
        if len({(t.shape, t.dtype) for t in tensors}) > 1:
            raise UnlikeTurnsError
        of = [self._of[id(t)][1] for t in tensors if id(t) in self._of]
        numbers = range(of[0].number, of[0].number + len(tensors)) if of else range(0)
        alike = all(s.base is of[0].base and s.turned == of[0].turned for s in of)
        if of and alike and [s.number for s in of] == list(numbers):
            base = of[0].base
            base = base if len(base) == len(tensors) else base[numbers.start : numbers.stop]
            return base.mT if of[0].turned else base
        return torch.stack(list(tensors))


def _transposes(name: str, func: Any, args: tuple[Any, ...]) -> bool:
    if name == "__get__":
        return attribute_of(func) in ("T", "mT")
    return name == "t" or (name == "transpose" and args[1:] in ((0, 1), (1, 0), (-1, -2), (-2, -1)))


# -- what is done to rows ----------------------------------------------------------------------------------


class Mixture:
    """Turns that are computed together. chosen: experts of every token [t, k]."""

    def __init__(self, chosen: torch.Tensor, start: int, experts: int, slices: MatrixSlices) -> None:
        numbers = chosen - start if start else chosen
        self.slices = slices
        self.chosen: torch.Tensor = _ops.choices(numbers)
        self.slots: torch.Tensor = _ops.route(self.chosen, experts)
        self._known: dict[int, Any] = {}

    def of(self, steps: Sequence[Step]) -> Any:
        """What the same step of every turn gives for the rows of all experts."""
        first = steps[0]
        if id(first) not in self._known:
            if any(type(step) is not type(first) for step in steps):
                raise UnlikeTurnsError
            self._known[id(first)] = first.join(steps, self)
        return self._known[id(first)]

    def stack(self, tensors: Sequence[_Outside]) -> torch.Tensor:
        return self.slices.stacked([t.get() for t in tensors])


class Step(ABC):
    """A value of the rows of one expert, and what it is made of.

    value: as the turn has it. key: equal where steps of turns may be one.
    """

    def __init__(self, value: Any, key: tuple[Any, ...]) -> None:
        self.value, self.key = value, (type(self).__name__, *key)

    @abstractmethod
    def join(self, steps: Sequence[Any], of: Mixture) -> Any:
        """The same value for the rows of all experts. steps: those of the turns, the first of them this."""


class Gathered(Step):
    """The rows [rows, n] of a tensor of tokens."""

    def __init__(self, value: torch.Tensor, x: torch.Tensor) -> None:
        super().__init__(value, (id(x),))
        self.x = _Outside(x)

    def join(self, steps: Sequence[Gathered], of: Mixture) -> torch.Tensor:
        return gathered(_one([s.x for s in steps]), of.chosen, of.slots)


def gathered(x: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of slots [rows, n]. x: of all tokens [..., n]."""
    flat = x if x.dim() == 2 else x.reshape(len(chosen), x.shape[-1])
    rows: torch.Tensor = _ops.dispatch(flat, chosen, slots)
    return rows


class Weighed(Step):
    """The weight of each row [rows]. x, kind: see `weighed`."""

    def __init__(self, value: torch.Tensor, x: torch.Tensor, kind: str) -> None:
        super().__init__(value, (id(x), kind))
        self.x, self.kind = _Outside(x), kind

    def join(self, steps: Sequence[Weighed], of: Mixture) -> torch.Tensor:
        return weighed(_one([s.x for s in steps]), self.kind, of.chosen, of.slots)


def weighed(x: torch.Tensor, kind: str, chosen: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The weights of slots [rows].

    kind: of x, "choices" [t, k], "choices first" [k, t] or "tokens" [t], one for all choices of a token.
    """
    if kind == "tokens":
        x = x.unsqueeze(1).expand(chosen.shape)
    elif kind == "choices first":
        x = x.t()
    weights: torch.Tensor = _ops.dispatch_weights(x, chosen, slots)
    return weights


class ScoredRows(Step):
    """The score of its expert for each row [rows]. x: of every token and expert."""

    def __init__(self, value: torch.Tensor, x: torch.Tensor, number: int) -> None:
        super().__init__(value, (id(x),))
        self.x, self.number = _Outside(x), number

    def join(self, steps: Sequence[ScoredRows], of: Mixture) -> torch.Tensor:
        x, start = _one([s.x for s in steps]), self.number
        if [s.number for s in steps] != list(range(start, start + len(steps))):
            raise UnlikeTurnsError
        index = (of.chosen + start if start else of.chosen).clamp(0, x.shape[1] - 1)
        return weighed(x.gather(1, index), "choices", of.chosen, of.slots)


class Multiplied(Step):
    """Rows times a matrix [k, n], or [n, k] if it is transposed."""

    def __init__(self, value: torch.Tensor, rows: Step, weight: torch.Tensor, transposed: bool) -> None:
        super().__init__(value, (rows.key, weight.shape, weight.dtype, transposed))
        self.rows, self.weight, self.transposed = rows, _Outside(weight), transposed

    def join(self, steps: Sequence[Multiplied], of: Mixture) -> torch.Tensor:
        return self.with_rows(of.of([s.rows for s in steps]), steps, of)

    def with_rows(self, rows: torch.Tensor, steps: Sequence[Multiplied], of: Mixture) -> torch.Tensor:
        """The product of other rows."""
        weight = of.stack([s.weight for s in steps])
        new: torch.Tensor = _ops.expert_mm(rows, of.slots, weight, self.transposed)
        return new


class Dropped(Step):
    """Rows after a dropout. seed, site: of the op that the model calls (`autoshard.ops.dropout`)."""

    def __init__(self, value: torch.Tensor, rows: Step, p: float, seed: torch.Tensor, site: int) -> None:
        super().__init__(value, (rows.key, p))
        self.rows, self.p, self.seed, self.site = rows, p, _Outside(seed), site

    def join(self, steps: Sequence[Dropped], of: Mixture) -> torch.Tensor:
        rows = of.of([s.rows for s in steps])
        return dropped(rows, self.p, self.seed.get(), self.site, of.chosen, of.slots)


def dropped(
    rows: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    site: int,
    chosen: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rows [rows, n] after a dropout, by a random key of every token and choice."""

    def drop(x: torch.Tensor, p: float) -> torch.Tensor:
        new: torch.Tensor = _ops.dropout(x, p, seed, site, [0] * x.dim(), list(x.shape))
        return new

    key = weighed(uniform(drop, chosen.shape), "choices", chosen, slots)
    new: torch.Tensor = _ops.row_dropout(rows, key, p, 0)
    return new


class Called(Step):
    """A function that treats every row alike. args: with steps, and tensors as they were then."""

    def __init__(
        self,
        value: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        steps: Mapping[int, Step],
    ) -> None:
        leaves, self.spec = pytree.tree_flatten((args, dict(kwargs)))
        self.func, self.name = func, getattr(func, "__name__", "").partition(".")[0]
        self.leaves = [
            x if not isinstance(x, torch.Tensor) else steps.get(id(x)) or _Outside(x) for x in leaves
        ]
        super().__init__(value, (self.name, str(self.spec), *map(_key, self.leaves)))

    def join(self, steps: Sequence[Called], of: Mixture) -> Any:
        if any(s.func is not self.func for s in steps):
            raise UnlikeTurnsError
        each = list(zip(*(s.leaves for s in steps), strict=True))
        if self.name in _PRODUCTS and len(each) == 2:
            for product, weights in (each, each[::-1]):
                if _is_weighted(product[0], weights[0]):
                    return _scaled_before(product, weights, of)
        args, kwargs = pytree.tree_unflatten([self._leaf(leaf, of) for leaf in each], self.spec)
        return self.func(*args, **kwargs)

    def _leaf(self, leaves: Sequence[Any], of: Mixture) -> Any:
        first = leaves[0]
        if isinstance(first, Step):
            return of.of(leaves)
        if not isinstance(first, _Outside):
            return first
        tensors = [x.get() for x in leaves]
        if all(t is tensors[0] for t in tensors):
            return tensors[0]
        if tensors[0].dim() != 1 or self.name not in ("add", "__add__", "__radd__", *_PRODUCTS):
            raise UnlikeTurnsError
        # a bias, or a scale, of each expert
        table: torch.Tensor = _ops.expert_rows(of.stack(leaves), of.slots)
        return table.to(tensors[0].dtype)


class Part(Step):
    """One of several results. number: which."""

    def __init__(self, value: torch.Tensor, call: Step, number: int) -> None:
        super().__init__(value, (call.key, number))
        self.call, self.number = call, number

    def join(self, steps: Sequence[Part], of: Mixture) -> torch.Tensor:
        part: torch.Tensor = of.of([s.call for s in steps])[self.number]
        return part


def _one(tensors: Sequence[_Outside]) -> torch.Tensor:
    """The tensor that all are."""
    first = tensors[0].get()
    if any(t.get() is not first for t in tensors):
        raise UnlikeTurnsError
    return first


def _key(leaf: Any) -> Any:
    if isinstance(leaf, Step):
        return leaf.key
    return repr(leaf) if not isinstance(leaf, _Outside) else ("tensor", tuple(leaf.get().shape))


def _is_weighted(product: Any, weights: Any) -> bool:
    """Whether a product of rows is multiplied by one weight for each row [rows, 1]."""
    if not isinstance(product, Multiplied) or not isinstance(weights, Called):
        return False
    picked = weights.name in ("__getitem__", "unsqueeze") and isinstance(
        weights.leaves[0], Weighed | ScoredRows
    )
    alike = product.value.dtype == weights.value.dtype
    return picked and alike and tuple(weights.value.shape[1:]) == (1,)


def _scaled_before(product: Sequence[Multiplied], weights: Sequence[Called], of: Mixture) -> torch.Tensor:
    """A product of rows that are weighted already: backward then needs nothing of its results."""
    by = of.of([w.leaves[0] for w in weights if isinstance(w.leaves[0], Step)])
    rows = of.of([p.rows for p in product])
    scaled: torch.Tensor = _ops.scale_rows(rows, by)
    return product[0].with_rows(scaled, product, of)


# -- sums --------------------------------------------------------------------------------------------------


class Turn:
    """What an expert's rows add to a sum, and by itself.

    choice: of the tokens that chose it. shape: of its mask, and axis, that of tokens.
    """

    def __init__(
        self,
        choice: ExpertChoice,
        shape: tuple[int, ...],
        axis: int,
        rows: Step,
        alone: Callable[[], torch.Tensor],
    ) -> None:
        self.choice, self.shape, self.axis, self.rows, self.alone = choice, shape, axis, rows, alone
        self._masks = [_Outside(choice.root)]
        if choice.table is not None:
            self._masks.append(_Outside(choice.table[0]))

    def choices(self) -> torch.Tensor | None:
        """The experts of every token [t, k], None if that is not known."""
        if self.choice.number is None:
            return None
        for mask in self._masks:
            mask.get()
        return self.choice.choices(self.shape, self.axis)

    def comes_after(self, other: Turn, distance: int) -> bool:
        """Whether it may be computed together with that of an expert so many before."""
        one, first = self.choice, other.choice
        consecutive = one.number is not None and one.number - distance == first.number
        alike = (self.shape, self.axis, self.rows.key) == (other.shape, other.axis, other.rows.key)
        return consecutive and alike and one.is_alike(first)


def summed(turns: Sequence[Turn], slices: MatrixSlices) -> list[torch.Tensor]:
    """What turns add to a sum [tokens, n], those that are alike together."""
    sums, left = list[torch.Tensor](), sorted(turns, key=lambda turn: turn.choice.number or 0)
    while left:
        count = 1
        while count < len(left) and left[count].comes_after(left[0], count):
            count += 1
        joined = _joined(left[:count], slices) if count > 1 else None
        sums += [turn.alone() for turn in left[:count]] if joined is None else [joined]
        left = left[count:]
    return sums


def _joined(turns: Sequence[Turn], slices: MatrixSlices) -> torch.Tensor | None:
    first = turns[0]
    try:
        chosen = first.choices()
        if chosen is None:
            return None
        mixture = Mixture(chosen, first.choice.number or 0, len(turns), slices)
        rows = mixture.of([t.rows for t in turns])
    except UnlikeTurnsError:
        return None
    result: torch.Tensor = _ops.combine(rows, mixture.chosen, mixture.slots)
    return result
