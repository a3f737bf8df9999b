"""Which experts tokens chose: followed from scores to the mask of the tokens that chose one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

#: of a dim of a mask: it numbers experts
_EXPERTS = -1
#: of a dim of one element
_UNIT = -2
#: what leads from scores to a mask of the rows that chose one of many, and keeps what is one
CLASSIFIED = frozenset(
    """
    topk argmax max one_hot permute transpose squeeze unsqueeze view reshape flatten __getitem__ select unbind
    to bool eq __eq__ int long mul __mul__ __and__ logical_and any
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
_CASTS = frozenset(("to", "bool", "int", "long"))
_NARROWED = frozenset(("mul", "__mul__", "__and__", "logical_and"))
_VIEWS = frozenset(("squeeze", "unsqueeze", "view", "reshape", "flatten"))


@dataclass(frozen=True, eq=False)
class ExpertChoice:
    """A tensor that says which of ``classes`` experts were chosen: their numbers, or masks.

    root, shape: the numbers as the router gave them, and in which shape. each: of how many experts a token
    chose, all different, along the last dim of the root; 0 if every number is a token's only one. dims: of
    each dim of the tensor, which dim of the shape it is, `_EXPERTS` or `_UNIT`; None if that is not known.
    number: the expert that it is a mask of. any: whether its last dim was reduced, over all choices of a
    token. exact: whether a mask has all that chose an expert, not only some. table: of a mask of some, that
    of all experts, and its dim of experts.
    """

    tensor: torch.Tensor
    classes: int
    root: torch.Tensor
    shape: tuple[int, ...]
    each: int
    dims: tuple[int, ...] | None
    number: int | None = None
    any: bool = False
    exact: bool = True
    table: tuple[torch.Tensor, int] | None = None

    @property
    def is_numbers(self) -> bool:
        """Whether it has the numbers themselves."""
        return self.number is None and self.dims is not None and _EXPERTS not in self.dims

    @property
    def has_choices(self) -> bool:
        """Whether the last dim of its shape are all choices of a token."""
        return self.each > 0 and len(self.shape) > 0 and self.shape[-1] == self.each

    def has_one_each(self, tokens: int) -> bool:
        """Whether each of so many tokens chose one expert."""
        return self.dims is not None and not self.any and prod(self.shape) == tokens

    def is_alike(self, other: ExpertChoice) -> bool:
        """Whether both are masks of one kind, of experts that may differ."""
        known = self.classes, self.dims, self.shape, self.exact, self.any
        same = self.root is other.root and self._table_is(other)
        return same and known == (other.classes, other.dims, other.shape, other.exact, other.any)

    def _table_is(self, other: ExpertChoice) -> bool:
        if self.table is None or other.table is None:
            return self.table is other.table
        return self.table[0] is other.table[0] and self.table[1] == other.table[1]

    def choices(self, shape: Sequence[int], tokens: int) -> torch.Tensor | None:
        """The experts of every token [t, k], those of none below 0; None if that is not known.

        shape: of a mask, of one or two dims. tokens: which of them are tokens.
        """
        if self.dims is None:
            return None
        if self.exact and self.any:
            return self.root.reshape(-1, self.each)
        if self.exact:
            numbers, order = self.root.reshape(self.shape), [d for d in self.dims if d != _UNIT]
            if len(order) != len(shape) or numbers.dim() != len(order):
                return None
            numbers = numbers.permute(order)
        elif self.table is None:
            return None
        else:
            table, along = self.table
            each = torch.arange(1, self.classes + 1, device=table.device)
            each = each.reshape([-1 if d == along else 1 for d in range(table.dim())])
            numbers = ((table != 0) * each).sum(along) - 1
            if numbers.numel() != prod(shape):
                return None
            numbers = numbers.reshape(tuple(shape))
        if numbers.dim() == 1:
            return numbers.unsqueeze(1)
        return numbers if tokens == 0 else numbers.t()


class ExpertChoices:
    """Follows what a ``topk`` or ``argmax`` of scores chose.

    number: gives the value of a tensor, if it is known.
    """

    def __init__(self, number: Callable[[torch.Tensor], int | None]) -> None:
        self._number = number
        self._of: dict[int, ExpertChoice] = {}

    def get(self, tensor: object) -> ExpertChoice | None:
        """What a tensor says of choices."""
        return self._of.get(id(tensor))

    def changed(self, tensor: torch.Tensor) -> None:
        """A tensor was changed in place: it, and what is made of the same numbers, says nothing any more."""
        known = self._of.get(id(tensor))
        if known is not None:
            self._of = {k: of for k, of in self._of.items() if of.root is not known.root}

    def flat(self, mask: torch.Tensor, flat: torch.Tensor) -> ExpertChoice:
        """What a mask says, of its places in one dim."""
        of = self._of[id(mask)]
        if mask.dim() == 1:
            return of
        return replace(
            (_viewed(of, flat) if of.dims is not None else None) or replace(of, dims=None), tensor=flat
        )

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What a function that is `CLASSIFIED` makes of them."""
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor):
            return
        known = self.get(first)
        if name in ("topk", "argmax", "max"):
            self._chosen(name, args, kwargs, out)
        elif name == "one_hot" and known is None:
            shape = tuple(first.shape)
            dims = (*range(len(shape)), _EXPERTS)
            self._of[id(out)] = ExpertChoice(out, out.shape[-1], first, shape, 0, dims)
        elif known is not None:
            each = out if isinstance(out, (tuple, list)) else [out]
            for k, t in enumerate(each):
                if isinstance(t, torch.Tensor):
                    self._of[id(t)] = replace(self._followed(name, args, kwargs, known, t, k), tensor=t)

    def _chosen(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        scores: torch.Tensor = args[0]
        place = 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[place] if len(args) > place else -1 if name == "topk" else None)
        keepdim = name != "topk" and (kwargs.get("keepdim") or len(args) > place + 1)
        if keepdim or not isinstance(dim, int) or dim not in (-1, scores.dim() - 1):
            return
        numbers = out if name == "argmax" else out[1]
        shape = tuple(numbers.shape)
        each = shape[-1] if name == "topk" else 0
        dims = tuple(range(len(shape)))
        self._of[id(numbers)] = ExpertChoice(numbers, scores.shape[-1], numbers, shape, each, dims)

    def _followed(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of: ExpertChoice,
        out: torch.Tensor,
        part: int,
    ) -> ExpertChoice:
        """What is known of a result. part: which of several it is."""
        lost = replace(of, dims=None)
        if of.dims is None or name in _CASTS:
            return of
        if name in ("eq", "__eq__"):
            number = self._value(args[1]) if of.is_numbers else None
            return lost if number is None else replace(of, number=number)
        if name == "one_hot":
            classes = out.shape[-1]
            return replace(of, classes=classes, dims=(*of.dims, _EXPERTS)) if of.is_numbers else lost
        if name in _NARROWED:
            fits = _EXPERTS in of.dims and out.shape == of.tensor.shape
            return _tabled(replace(of, exact=False), out) if fits else lost
        if name == "any":
            return _any(args, kwargs, of) or lost
        if name in ("permute", "transpose"):
            return _permuted(name, args, kwargs, of, out) or lost
        if name in ("select", "unbind", "__getitem__"):
            return self._indexed(name, args, kwargs, of, out, part) or lost
        return (_viewed(of, out) if name in _VIEWS else None) or lost

    def _value(self, value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            return self._number(value) if value.numel() == 1 else None
        return value if type(value) is int else None

    def _indexed(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of: ExpertChoice,
        out: torch.Tensor,
        part: int,
    ) -> ExpertChoice | None:
        """A part of it: the mask of one expert, or, of numbers, others."""
        assert of.dims is not None
        if of.is_numbers:
            shape = tuple(out.shape)
            return replace(of, root=out, shape=shape, each=0, dims=tuple(range(len(shape))))
        if name == "__getitem__":
            index = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        else:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(of.dims)
            index = [*[slice(None)] * dim, part if name == "unbind" else kwargs.get("index", args[-1])]
        if any(i is Ellipsis for i in index):
            at = next(k for k, i in enumerate(index) if i is Ellipsis)
            used = sum(i is not None for i in index) - 1
            index[at : at + 1] = [slice(None)] * (len(of.dims) - used)
        left, dims = list(enumerate(of.dims)), list[int]()
        for i in index:
            if i is None:
                dims.append(_UNIT)
                continue
            at, d = left.pop(0)
            if isinstance(i, slice) and i == slice(None):
                dims.append(d)
                continue
            number = self._value(i) if d == _EXPERTS else None
            if number is None:
                return None
            # a tensor of one element leaves a dim of one
            dims += [_UNIT] if isinstance(i, torch.Tensor) and i.dim() == 1 else []
            table = of.table and (of.table[0], at)
            of = replace(of, number=number, table=table)
        return replace(of, dims=(*dims, *(d for _, d in left)))


def _tabled(of: ExpertChoice, out: torch.Tensor) -> ExpertChoice:
    """A mask of all experts: of some of their tokens it is the table itself."""
    assert of.dims is not None
    return of if of.exact else replace(of, table=(out, of.dims.index(_EXPERTS)))


def _any(args: tuple[Any, ...], kwargs: dict[str, Any], of: ExpertChoice) -> ExpertChoice | None:
    """Whether any choice of a token is an expert."""
    assert of.dims is not None
    natural = of.dims == tuple(range(len(of.shape))) and not kwargs.get("keepdim") and len(args) < 3
    last = (args[1:] or (kwargs.get("dim"),))[0] in (-1, len(of.shape) - 1)
    fits = natural and last and of.number is not None and len(of.shape) > 1 and of.has_choices and of.exact
    return replace(of, dims=of.dims[:-1], any=True) if fits else None


def _permuted(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], of: ExpertChoice, out: torch.Tensor
) -> ExpertChoice | None:
    assert of.dims is not None
    given = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if kwargs or (not of.exact and of.number is not None):
        return None
    order = list(range(len(of.dims)))
    if name == "permute":
        order = [d % len(order) for d in given]
    else:
        one, other = given
        order[one], order[other] = order[other], order[one]
    new = replace(of, dims=tuple(of.dims[d] for d in order))
    if of.is_numbers:
        return replace(new, root=out, shape=tuple(out.shape), each=0, dims=tuple(range(len(order))))
    return _tabled(new, out) if of.number is None else new


def _viewed(of: ExpertChoice, out: torch.Tensor) -> ExpertChoice | None:
    """Another shape of it: its dims are what they were beside those of one element, or all in their order."""
    assert of.dims is not None
    if not of.exact and of.number is not None:
        return of  # the table says what it is, in its order
    sizes = [(d, n) for d, n in zip(of.dims, of.tensor.shape, strict=True) if d != _UNIT]
    if not of.any and [d for d, _ in sizes] == list(range(len(of.shape))):
        shape = tuple(out.shape)
        return replace(of, shape=shape, dims=tuple(range(len(shape))))
    if of.any and out.dim() == 1:
        return replace(of, dims=(0,))  # tokens in their order
    if [d for d, _ in sizes] == [*range(len(of.shape)), _EXPERTS] and out.shape[-1:] == of.tensor.shape[-1:]:
        shape = tuple(out.shape[:-1])
        return _tabled(replace(of, shape=shape, dims=(*range(len(shape)), _EXPERTS)), out)
    dims = []
    for n in out.shape:
        if sizes and sizes[0][1] == n:
            dims.append(sizes.pop(0)[0])
        elif n == 1:
            dims.append(_UNIT)
        else:
            return None
    new = replace(of, dims=tuple(dims))
    return None if sizes else (_tabled(new, out) if of.number is None else new)
