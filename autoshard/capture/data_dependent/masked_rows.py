"""Follows the rows that a mask chooses through the code of a model, while it is traced.

The loop over experts that many models share::

    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        choice, token = torch.where(mask[expert].squeeze(0))
        out.index_add_(0, token, experts[expert](x[token]) * weights[token, choice, None])

runs over all experts and, for each, over all rows (see ``autoshard.ops.chosen``). That is the same only if
nothing mixes rows, and if a turn of the loop that would not take place leaves nothing behind but rows that do
not count. ``loss[mask].mean()`` and its like are followed in the same way, to where rows are added up
(`row_totals`). Whatever is not known to be so is refused, as a shape that depends on values.

Leans on the exceptions of ``torch._subclasses.fake_tensor`` and on the frames of a ``TorchFunctionMode``. Run
with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoshard.capture import tracing
from autoshard.capture.data_dependent import row_totals
from autoshard.capture.data_dependent.constant_eval import attribute_of, changed_by
from autoshard.capture.data_dependent.equal_masks import DERIVED, EqualMasks
from autoshard.capture.data_dependent.expert_choice import CLASSIFIED, ExpertChoices
from autoshard.capture.data_dependent.expert_turns import Called, MatrixSlices, Part, Step
from autoshard.capture.data_dependent.loops import Loops, Region
from autoshard.capture.data_dependent.row_count import RowCount
from autoshard.capture.data_dependent.row_sums import RowSums
from autoshard.capture.data_dependent.slot_rows import NoSlotsError, SlotSelection, same_rows
from autoshard.capture.origins import user_statement_of
from autoshard.ops.chosen import Selection, moved, places
from autoshard.torch_adapters.replaced import replaced

#: what is computed element by element; all of it gives new tensors
_POINTWISE = frozenset(
    """
    __rsub__ __rpow__ abs add add_ celu clamp clamp_max clamp_min cos div div_ dropout elu exp expm1 gelu
    hardsigmoid hardswish hardtanh leaky_relu log log1p logsigmoid masked_fill maximum minimum mish mul mul_
    neg pow reciprocal relu relu6 rsqrt rsub selu sigmoid sign silu sin softplus softsign sqrt square sub sub_
    tanh threshold true_divide where
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
#: element by element as well, and perhaps the tensor itself
_SAME = frozenset(
    ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach")
)
#: element by element as well, where the rows are those of a mask
_COMPARED = frozenset(
    """
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not
    logical_xor __and__ __or__ __xor__ __invert__ isnan isinf isfinite nan_to_num floor ceil round trunc
    remainder fmod erf log2 log10 tan asin acos atan atan2 sinh cosh bool int long float_power
    broadcast_tensors
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)
_RESHAPES = frozenset(("view", "reshape", "squeeze", "unsqueeze", "flatten"))
#: arithmetic with the number of rows
_COUNTED = frozenset(("div", "__truediv__", "true_divide", "mul", "__mul__"))
#: ways to add to rows of a tensor, and to put rows into it
_SUMS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
_PUTS = _SUMS | {"__setitem__", "masked_scatter", "to"}
_ASKS = frozenset(("__bool__", "item"))
_ADDS = frozenset(("index_add_", "__getitem__", "__setitem__", "masked_scatter"))
_ABOUT = frozenset(("dim", "ndimension", "is_floating_point", "element_size", "is_complex", "result_type"))
_ATTRIBUTES = frozenset(("dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_nested"))


@dataclass(frozen=True, eq=False)
class _Rows:
    """A tensor whose dim ``dim`` are the rows of a selection; axis: it is their index along that axis.

    lead: dims of one element that the model takes it to have before.
    """

    tensor: torch.Tensor
    selection: Selection | SlotSelection
    dim: int
    axis: int | None = None
    lead: int = 0


class RowsReturnedError(Exception):
    """The model returns rows that a mask chose, at ``where`` in its code: how many depends on values."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class TurnRaisesError(Exception):
    """A turn of a loop raises, so that it counts as one that is never taken: the trace starts again."""


class ChosenRows(TorchFunctionMode):
    """Answers ``torch.where(mask)`` and ``mask.nonzero()`` with all places, and watches what they become.

    raising: (number of a loop, place) of the turns that are left out, as the model itself raises in them.
    slots: whether rows that are an expert's are slots.
    """

    def __init__(self, raising: set[tuple[int, int]], slots: bool) -> None:
        super().__init__()
        self._raising, self._slots = raising, slots
        self._choices = ExpertChoices(_known_number)
        self._slices = MatrixSlices(_known_number)
        self._sums = RowSums(self._slices, self._run)
        #: what rows of experts are made of
        self._steps: dict[int, Step] = {}
        #: rows -> the tensor, at which of its changes, and along which axis, whose rows they are, or exceed
        self._picked: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._increased: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, int, int], torch.Tensor]] = {}
        #: rows of a sum that lacks what waits for it, and these with more; tensors with rows put into them
        self._stale: dict[int, torch.Tensor] = {}
        self._scattered: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        #: by the identity of what counts: rows of experts
        self._selected: dict[int, SlotSelection] = {}
        self._loop = 0
        self._number = 0
        self._rows: dict[int, _Rows] = {}
        self._masks = EqualMasks()
        #: by selection: the statement of the model that chose the rows
        self._where: dict[int, str] = {}
        self._loops = Loops()
        # of the turn of a loop that is going on
        self._turn: torch.Tensor | None = None
        self._made: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        # of turns that are over
        self._gone: dict[int, torch.Tensor] = {}
        self._left = False
        # of statements that run only if there are rows
        self._region: Region | None = None
        #: whether a mask holds anywhere
        self._anywhere: dict[int, torch.Tensor] = {}
        # whether autograd functions that run are those of our ops
        self._ours = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        if self._region is not None and not self._region.holds(sys._getframe(1)):
            self._region = None
            self._end_turn()
        if name in _COUNTED or name in _RESHAPES:
            args = self._numbered(name, args)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(id(t) in self._gone for t in given):
            raise _refused(func)
        rows = [self._rows[id(t)] for t in given if id(t) in self._rows]
        changed = changed_by(name, args, kwargs)
        if self._slots:
            self._check_waiting(func, name, args, given, rows)
        if name == "copy_" and len(args) == 2 and id(args[1]) in self._scattered:
            out = self._copy(*args)
        elif rows:
            out = self._on_rows(func, name, args, kwargs, rows)
        elif _finds_places(name, args, kwargs):
            out = self._places(func, name, args, kwargs)
        elif self._turn is None and name in ("__getitem__", "masked_select") and _by_mask(name, args, kwargs):
            out = self._masked(func, args)
        elif name == "bincount" and (classes := self._classes(args, kwargs)):
            out = self._called(F.one_hot, (args[0].reshape(-1), classes), {}).sum(0)
        elif name in _ASKS and id(args[0]) in self._anywhere and self._enters(sys._getframe(1)):
            return True
        else:
            if self._is_guarded and any(id(t) not in self._fresh for t in changed):
                raise _refused(func)
            out = self._called(func, args, kwargs)
            self._note(func, name, args, kwargs, out)
        for t in changed:
            self._masks.changed(t)
            self._choices.changed(t)
        if name in DERIVED:
            self._masks.note(name, args, kwargs, out)
        if self._is_guarded:
            for t in pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and all(t is not g for g in given):
                    self._made[id(t)] = t
                    if name in _POINTWISE:
                        self._fresh.add(id(t))
        return out

    @property
    def _is_guarded(self) -> bool:
        """Whether code runs that, in some calls, does not: it may change nothing but rows."""
        return self._turn is not None or self._region is not None

    def _enters(self, frame: FrameType, filled: bool = True) -> bool:
        """Whether a condition of rows to exist stands before statements that do nothing without them."""
        if self._turn is not None:
            return False
        region = self._loops.region_of(frame, filled=filled)
        if region is not None:
            self._region = region
        return region is not None

    def _classes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Of how many experts choices are counted, 0 if these are no choices."""
        known = self._choices.get(args[0])
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        weighted = (args[1:2] or (kwargs.get("weights"),))[0] is not None
        fits = known is not None and known.is_numbers and not weighted and least >= known.classes
        return least if fits else 0

    def _numbered(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with tensors, or sizes, in place of the numbers of rows."""

        def number(value: Any) -> Any:
            if not isinstance(value, RowCount):
                return value
            return value.size_of(args[0]) if name in _RESHAPES and id(args[0]) in self._rows else value.value

        return tuple(type(a)(map(number, a)) if type(a) in (tuple, list) else number(a) for a in args)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except IndexError as error:
            if self._turn is None:
                raise
            self._raising.add((self._loop, self._number))
            raise TurnRaisesError from error

    # -- where rows come from ---------------------------------------------------------------------------

    def _places(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """All places of a mask, unless which of them hold is known."""
        try:
            return func(*args, **kwargs)
        except DynamicOutputShapeException:
            mask = args[0]
            one = name == "where" or kwargs.get("as_tuple")
            if mask.dim() == 0 or mask.numel() < 2 or (mask.dim() != 1 and not one):
                raise
        counts = self._masks.counts(mask)
        if self._turn is not None:
            counts = counts & self._turn
        choice = self._choices.get(mask)
        distinct = mask.dim() == 1 or (choice is not None and choice.has_choices)
        selection: Selection | SlotSelection = Selection(tuple(mask.shape), counts, distinct)
        if choice is not None and self._slots and mask.dim() <= 2:
            selection = SlotSelection(counts.reshape(mask.shape), choice, self._steps)
        self._note_where(selection)
        result = tuple(self._tag(selection.index(axis), selection, 0, axis) for axis in range(mask.dim()))
        if name == "where" or kwargs.get("as_tuple"):
            return result
        return self._tag(result[0].unsqueeze(1), selection, 0, 0)

    def _masked(self, func: Any, args: tuple[Any, ...]) -> Any:
        """``x[mask]``, ``x[mask, 0]``: the rows of a mask over the first dims."""
        x, (mask, *rest) = args[0], places(args[1])
        try:
            return func(*args)
        except DynamicOutputShapeException:
            if mask.numel() < 2:
                raise
        counts = self._masks.counts(mask)
        if self._slots and self._choices.get(mask) is not None:
            return self._of_expert(x, mask, rest, counts)
        selection = Selection(tuple(mask.shape), counts, True)
        self._note_where(selection)
        out = self._run(row_totals.chosen, x, counts, mask.dim())
        rows = self._tag(out[(slice(None), *rest)] if rest else out, selection, 0)
        return rows if rest else self._pick_from(x, rows, 0)

    def _of_expert(
        self, x: torch.Tensor, mask: torch.Tensor, rest: list[Any], counts: torch.Tensor
    ) -> torch.Tensor:
        """The rows of ``x``, or of a column of it, that chose an expert."""
        selection = self._selected.get(id(counts))
        if selection is None:
            flat = self._choices.flat(mask, counts)
            selection = self._selected[id(counts)] = SlotSelection(counts, flat, self._steps)
            self._note_where(selection)
        if rest and (mask.dim() > 1 or type(rest[0]) is not int or any(i is not None for i in rest[1:])):
            raise NoSlotsError
        if rest:
            return self._tag_scores(x, selection, rest[0], rest[1:])
        if x.dim() == mask.dim():
            return self._tag(self._run(selection.gather, x.reshape(-1), 0, [0]), selection, 0)
        if x.dim() != mask.dim() + 1:
            raise NoSlotsError
        rows = self._tag(self._run(selection.rows_of, x), selection, 0)
        return self._pick_from(x, rows, 0)

    def _tag_scores(
        self, x: torch.Tensor, selection: SlotSelection, number: int, after: Sequence[None]
    ) -> torch.Tensor:
        """Of rows of scores one column, perhaps with dims of one element after it."""
        scores = self._run(selection.scores_of, x, number)
        return self._tag(self._indexed(scores, (slice(None), *after)) if after else scores, selection, 0)

    def _indexed(self, rows: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
        out = rows[index]
        self._steps[id(out)] = Called(out, torch.Tensor.__getitem__, (rows, index), {}, self._steps)
        return out

    def _note_where(self, selection: Selection | SlotSelection) -> None:
        self._where[id(selection)] = user_statement_of(sys._getframe(1))

    def _note(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What leads from scores to a mask of the rows that chose one of many, and the like."""
        if name in CLASSIFIED:
            self._choices.note(name, args, kwargs, out)
        if name == "any" and len(args) == 1 and not kwargs and args[0].dtype == torch.bool:
            self._anywhere[id(out)] = out
        self._slices.note(name, func, args, out)
        self._sums.note(name, out)

    def _tag(
        self,
        tensor: torch.Tensor,
        selection: Selection | SlotSelection,
        dim: int,
        axis: int | None = None,
        lead: int = 0,
    ) -> torch.Tensor:
        self._rows[id(tensor)] = _Rows(tensor, selection, dim, axis, lead)
        return tensor

    # -- what becomes of them ---------------------------------------------------------------------------

    def _on_rows(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[_Rows]
    ) -> Any:
        first, selection = rows[0], rows[0].selection
        own = bool(args) and args[0] is first.tensor
        if any(not _alike(r.selection, selection) for r in rows):
            raise _refused(func)
        if name in _ABOUT:
            return func(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args, first)
        if name in ("numel", "__len__") or (name == "size" and len(args) == 2 and own):
            return self._size(func, name, args, first)
        if name in ("index_add_", "index_add"):
            return self._add(func, name, args, kwargs)
        if name == "__setitem__":
            return self._put(func, args)
        if name == "masked_scatter" and not kwargs and (new := self._scatter(*args)) is not None:
            return new
        if name == "__getitem__" and not own:
            return self._pick(func, args)
        if name in _SUMS and (new := self._more(name, args, kwargs)) is not None:
            return new
        if name == "to" and own and args[1:] == (first.tensor.dtype,) and not kwargs:
            return first.tensor
        if any(id(r.tensor) in self._stale for r in rows):
            raise NoSlotsError
        refusal: Exception = _refused(func)
        if isinstance(selection, SlotSelection):
            new = self._on_slots(func, name, args, kwargs, rows, selection)
            if new is not None:
                return new
            refusal = NoSlotsError()
        elif (new := self._on_masked(func, name, args, kwargs, rows, selection)) is not None:
            return new
        elif name == "unbind" and own and first.axis is not None and args[1:] in ((), (0,)):
            return self._turns(func, first)
        elif name in _RESHAPES and own:
            return self._reshaped(func, args, kwargs, first)
        dims = self._dims(name, args, kwargs, rows)
        if dims is None:
            raise refusal
        out = self._run(func, *args) if name == "dropout" and not kwargs else func(*args, **kwargs)
        parts = out if isinstance(out, (tuple, list)) else [out]
        for t in parts:
            if not isinstance(t, torch.Tensor) or t.shape[dims + t.dim()] != selection.rows:
                raise refusal
            if id(t) not in self._rows:
                self._tag(t, selection, dims + t.dim(), first.axis if name in _SAME else None)
        if isinstance(selection, SlotSelection):
            self._note_step(func, args, kwargs, out)
        return out

    def _note_step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What rows of an expert are made of."""
        call = Called(out, func, args, kwargs, self._steps)
        if isinstance(out, torch.Tensor):
            self._steps[id(out)] = call
        else:
            self._steps.update((id(t), Part(t, call, k)) for k, t in enumerate(out))

    def _on_masked(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: list[_Rows],
        selection: Selection,
    ) -> Any:
        """What rows come to, and what is made of each by functions of rows; None for any other function."""
        first, counts = rows[0], selection.counts
        own = bool(args) and args[0] is first.tensor
        others = self._others(args, kwargs)
        if self._turn is not None or any(r.dim for r in rows):
            return None
        classwise = name in row_totals.CLASSWISE
        if classwise or name in row_totals.ELEMENTWISE:
            known = not others if classwise else _broadcasts(rows, others)
            result = (
                self._run(row_totals.loss, func, classwise, args, kwargs, counts) if own and known else None
            )
            if result is None:
                return None
            return self._tag(result[0], selection, 0) if result[1] else result[0]
        if name == "xent" and own and not others and not kwargs:
            return tuple(self._tag(t, selection, 0) for t in self._run(func, *args))
        if not own or "out" in kwargs:
            return None
        if name in ("sum", "mean", "var", "std") and row_totals.is_over_rows(args, kwargs):
            over_rows = row_totals.total if name in ("sum", "mean") else row_totals.spread
            return self._run(over_rows, name, args, kwargs, counts)
        if not row_totals.row_by_row(name, args, kwargs, len(others)):
            return None
        out = func(*args, **kwargs)
        for t in out if isinstance(out, tuple | list) else [out]:
            if len(t) != len(counts):
                raise _refused(func)
            self._tag(t, selection, 0)
        return out

    def returns(self, output: Any) -> None:
        """What the model returns: rows that a mask chose have a shape that depends on values."""
        self._sums.finish()
        for rows in (self._rows[id(t)] for t in pytree.tree_leaves(output) if id(t) in self._rows):
            raise RowsReturnedError(self._where[id(rows.selection)])

    def _on_slots(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: list[_Rows],
        selection: SlotSelection,
    ) -> Any:
        """What is done to rows of which there are as many as chose an expert, None if it is row by row."""
        first = rows[0]
        own = bool(args) and args[0] is first.tensor
        draws = name == "dropout" and _draws(*args, **kwargs)
        if any(r.axis is not None or r.dim for r in rows) or name in ("where", "masked_fill"):
            raise NoSlotsError
        if draws:
            if not own or len(args) != 6 or first.lead:
                raise NoSlotsError
            return self._tag(self._run(selection.dropped, *args[:4]), selection, 0)
        if name in _RESHAPES and own and same_rows(name, args, kwargs, first.tensor.shape, first.lead):
            return self._tag(first.tensor, selection, 0)
        if any(r.lead for r in rows):
            raise NoSlotsError
        if name in _RESHAPES and own:
            out = func(*args, **kwargs)
            if moved(first.tensor.shape, 0, out.shape) != 0:
                raise NoSlotsError
            self._note_step(func, args, kwargs, out)
            return self._tag(out, selection, 0)
        if name == "linear" and own and len(rows) == 1:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            out = self._run(selection.product, first.tensor, given["weight"], True)
            if given.get("bias") is not None:
                with_bias = out + given["bias"]
                self._note_step(torch.add, (out, given["bias"]), {}, with_bias)
                out = with_bias
            return self._tag(out, selection, 0)
        if name in ("matmul", "mm", "__matmul__"):
            if not own or len(rows) > 1 or len(args) != 2 or kwargs:
                raise NoSlotsError
            return self._tag(self._run(selection.product, first.tensor, args[1], False), selection, 0)
        return None

    def _dims(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[_Rows]
    ) -> int | None:
        """The dim of the rows in the result, counted from the last; None if the function may mix them."""
        first = rows[0]
        back = first.dim - first.tensor.dim()
        own = args[0] is first.tensor if args else False
        compared = name in _COMPARED and isinstance(first.selection, Selection) and self._turn is None
        if name in _POINTWISE or name in _SAME or compared:
            if any(id(t) not in self._fresh for t in changed_by(name, args, kwargs)):
                return None
            return back if _broadcasts(rows, self._others(args, kwargs)) and "out" not in kwargs else None
        if name == "linear" or (name in ("matmul", "mm", "__matmul__") and args[1].dim() == 2):
            return back if own and len(rows) == 1 and back < -1 else None
        if name in ("chunk", "split", "softmax", "log_softmax") and own and len(rows) == 1:
            dim = kwargs.get("dim", args[2] if len(args) > 2 and name in ("chunk", "split") else None)
            if dim is None and name in ("softmax", "log_softmax") and len(args) > 1:
                dim = args[1]
            apart = isinstance(dim, int) and dim % first.tensor.dim() != first.dim
            return back if apart else None
        if name in ("layer_norm", "rms_norm") and own and len(rows) == 1:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
            return back if 0 < len(shape) < -back else None
        return None

    def _others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Tensors among the arguments that are no rows."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        return [t for t in tensors if id(t) not in self._rows]

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a selection makes of rows, by ops of ours."""
        self._ours = True
        try:
            return function(*args)
        finally:
            self._ours = False

    def _attribute(self, func: Any, args: tuple[Any, ...], rows: _Rows) -> Any:
        if attribute_of(func) in _ATTRIBUTES:
            return func(*args)
        if attribute_of(func) == "shape":
            known: list[Any] = list(func(*args))
            known[rows.dim] = self._count(func, rows, 1)
            return tuple(known)
        raise _refused(func)

    def _size(self, func: Any, name: str, args: tuple[Any, ...], rows: _Rows) -> Any:
        if name == "size" and args[1] % rows.tensor.dim() != rows.dim:
            return func(*args)
        if name == "__len__":  # Python takes nothing but a number
            raise _refused(func)
        others = rows.tensor.numel() // len(rows.tensor) if name == "numel" and rows.dim == 0 else 1
        return self._count(func, rows, others)

    def _count(self, func: Any, rows: _Rows, times: int) -> RowCount:
        if isinstance(rows.selection, Selection) and self._turn is None and rows.dim == 0:
            return RowCount(lambda: _refused(func), rows.selection.counts, times, self._enters)
        return RowCount(lambda: _refused(func), asked=self._enters)

    def _pick(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """``x[None, token]``, ``x[token, choice, None]``: the rows of another tensor."""
        x, index = args[0], places(args[1])
        result = [self._rows.get(id(i)) if isinstance(i, torch.Tensor) else None for i in index]
        at = [k for k, f in enumerate(result) if f is not None]
        rest = [i for i, f in zip(index, result, strict=True) if f is None]
        plain = all(i is None or (isinstance(i, slice) and i == slice(None)) for i in rest)
        apart = at != list(range(at[0], at[0] + len(at))) if at else True
        axes = [f.axis for f in result if f is not None and f.tensor.dim() == 1]
        selection = next(f.selection for f in result if f is not None)
        if isinstance(selection, SlotSelection) and at == [0] and rest and type(rest[0]) is int:
            plain = all(i is None for i in rest[1:])
            if not plain or len(axes) != 1 or axes[0] is None:
                raise NoSlotsError
            selection.with_tokens(axes[0])
            return self._tag_scores(x, selection, rest[0], rest[1:])
        plain = all(i is None or (isinstance(i, slice) and i == slice(None)) for i in rest)
        if apart or not plain or len(axes) < len(at) or None in axes or id(x) in self._rows:
            raise _refused(func)
        dim = sum(i is not None for i in index[: at[0]])
        new = self._run(selection.gather, x, dim, [a for a in axes if a is not None])
        if new is None:
            raise _refused(func)
        alone = len(index) == 1 and axes[0] is not None
        if isinstance(selection, SlotSelection):
            if any(i is not None for i in index[: at[0]]):
                raise NoSlotsError
            after = index[at[-1] + 1 :]
            new = self._indexed(new, (slice(None), *after)) if after else new
            out = self._tag(new, selection, 0, lead=at[0])
        else:
            out = self._tag(new[(*index[: at[0]], slice(None), *index[at[-1] + 1 :])], selection, at[0])
        return self._pick_from(x, out, axes[0] or 0) if alone else out

    def _pick_from(self, x: torch.Tensor, rows: torch.Tensor, axis: int) -> torch.Tensor:
        """Note that rows are ``x[rows]``, to which something may be added."""
        self._picked[id(rows)] = x, x._version, axis
        if self._sums.waits_for(x):
            self._stale[id(rows)] = rows
        return rows

    def _reshaped(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: _Rows
    ) -> torch.Tensor:
        out: torch.Tensor = func(*args, **kwargs)
        dim = moved(rows.tensor.shape, rows.dim, out.shape)
        if dim is None:
            raise _refused(func)
        return self._tag(out, rows.selection, dim, rows.axis)

    def _add(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """``out.index_add_(0, token, rows)``, without the rows that do not count."""
        if kwargs or len(args) != 4 or args[1] != 0:
            raise _refused(func)
        out, _, index, source = args
        at, rows = self._rows.get(id(index)), self._rows.get(id(source))
        if at is None or rows is None or id(out) in self._rows or at.axis is None:
            raise _refused(func)
        selection = rows.selection
        if index.dim() != 1 or rows.dim != 0 or out.shape[0] != selection.shape[at.axis]:
            raise _refused(func)
        if out.dtype != source.dtype or out.shape[1:] != source.shape[1:]:
            raise _refused(func)
        if name == "index_add_":
            return self._add_rows(out, selection, source, at.axis)
        self._sums.used([out])
        return out + self._run(selection.added, source, at.axis)

    def _add_rows(
        self,
        out: torch.Tensor,
        selection: Selection | SlotSelection,
        rows: torch.Tensor,
        axis: int,
        assigned: bool = False,
    ) -> torch.Tensor:
        """``out`` with rows added to it, or put there, now or when the turns of a loop are over."""
        if isinstance(selection, SlotSelection):
            turn = self._run(selection.turn, rows, axis)
            if self._sums.waits(out, turn, assigned):
                return out
            self._sums.used([out])
            if assigned:
                raise NoSlotsError
        return out.add_(self._run(selection.added, rows, axis).reshape(out.shape))

    def _more(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """``out[rows] + more``, which is to be put back; None if it is another sum."""
        pair = [t for t in args if isinstance(t, torch.Tensor)]
        of = [self._picked.get(id(t)) for t in pair]
        if kwargs or len(args) != 2 or len(pair) != 2 or (of[0] is None) == (of[1] is None):
            return None
        old, more = pair if of[0] is not None else pair[::-1]
        rows, other = self._rows[id(old)], self._rows.get(id(more))
        in_place = name in ("__iadd__", "add_")
        if other is None or other.dim or old.shape != more.shape or old.dtype != more.dtype:
            return None
        if in_place and old is not args[0]:
            return None
        picked = self._picked[id(old)]
        new = self._tag(old + more, rows.selection, 0)
        if isinstance(rows.selection, SlotSelection):
            self._note_step(torch.add, (old, more), {}, new)
        self._increased[id(new)] = new, picked, more
        if id(old) in self._stale:
            self._stale[id(new)] = new
        if in_place:  # what else has the old one would see the new one
            self._gone[id(old)] = old
        return new

    def _put(self, func: Any, args: tuple[Any, ...]) -> None:
        """``out[token] = out[token] + more``, or any other rows."""
        out, index, value = args
        at = self._rows.get(id(places(index)[0]))
        of = self._rows.get(id(value))
        if len(places(index)) != 1 or at is None or of is None or of.dim or id(out) in self._rows:
            raise _refused(func)
        if not _alike(at.selection, of.selection) or at.axis is None or at.tensor.dim() != 1:
            raise _refused(func)
        if not of.selection.distinct or out.dtype != value.dtype:
            raise _refused(func)
        if isinstance(of.selection, Selection):
            out.copy_(self._run(of.selection.assigned, out, value, at.axis))
        else:
            self._put_rows(out, of.selection, value, at.axis)

    def _put_rows(
        self, out: torch.Tensor, selection: SlotSelection, value: torch.Tensor, axis: int
    ) -> torch.Tensor:
        _, picked, more = self._increased.get(id(value), (None, None, None))
        if picked is not None and more is not None:
            if picked[0] is not out or picked[1:] != (out._version, axis):
                raise NoSlotsError
            return self._add_rows(out, selection, more, axis)
        if not selection.is_only:
            raise NoSlotsError
        return self._add_rows(out, selection, value, axis, assigned=True)

    def _scatter(self, x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """``x`` with rows in the places of a mask: what ``x[mask] = rows`` is copied from.

        None if the rows are those of another mask.
        """
        of = self._rows.get(id(rows))
        if of is None or of.dim or self._masks.counts_below(mask) is not of.selection.counts:
            return None
        if isinstance(of.selection, Selection):
            out = self._run(row_totals.assigned, x, rows, of.selection.counts, x.dim() - rows.dim() + 1)
        else:
            out = x.clone()  # stands for what is copied, which is nothing yet
        self._scattered[id(out)] = out, x, rows
        return out

    def _copy(self, x: torch.Tensor, scattered: torch.Tensor) -> torch.Tensor:
        """The second half of ``x[mask] = rows``."""
        _, source, rows = self._scattered[id(scattered)]
        selection = self._rows[id(rows)].selection
        if isinstance(selection, Selection):
            return x.copy_(scattered)
        if source is not x:
            raise NoSlotsError
        return self._put_rows(x, selection, rows, 0)

    def _check_waiting(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        given: Sequence[torch.Tensor],
        rows: Sequence[_Rows],
    ) -> None:
        """Sums that are about to be read get what is to be added to them. Rows of one that waits, and what is
        no more than put into one, are used for nothing else."""
        puts = name == "copy_" and len(args) == 2 and id(args[1]) in self._scattered
        if name in _ABOUT or (name == "__get__" and attribute_of(func) in {*_ATTRIBUTES, "shape"}):
            return
        if any(id(t) in self._stale for t in given) and name not in _PUTS:
            raise NoSlotsError
        standing = (self._scattered[id(t)][2] for t in given if id(t) in self._scattered)
        if not puts and any(isinstance(self._rows[id(t)].selection, SlotSelection) for t in standing):
            raise NoSlotsError
        picks = name == "__getitem__" and isinstance(args[1], torch.Tensor) and self._choices.get(args[1])
        if puts or picks or (rows and name in _ADDS and id(args[0]) not in self._rows):
            given = [t for t in given if t is not args[0]]
        self._sums.used(given)

    # -- loops over places ------------------------------------------------------------------------------

    def _turns(self, func: Any, rows: _Rows) -> Iterator[torch.Tensor]:
        """A turn for each place; what a turn makes is not used by another, nor after them."""
        if self._turn is not None or not self._loops.keeps_to_itself(sys._getframe(1)):
            raise _refused(func)
        return self._each(func, rows)

    def _each(self, func: Any, rows: _Rows) -> Iterator[torch.Tensor]:
        full, selection = rows.tensor.dim() > 1, rows.selection
        assert isinstance(selection, Selection)
        self._left = True
        self._loop += 1
        try:
            for number in range(selection.rows):
                self._number = number
                if (self._loop, number) in self._raising:
                    continue
                self._turn = selection.counts[number]
                yield torch.full((1,), number) if full else torch.full((), number)
                self._end_turn()
            self._left = False
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._turn = None
        self._gone.update(self._made)
        self._made, self._fresh = {}, set()

    def apply(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An autograd function of the user, whose backward nobody has looked at."""
        if self._ours:
            return function(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if self._turn is not None or any(id(t) in self._rows or id(t) in self._gone for t in given):
            raise _refused(function)
        return function(*args, **kwargs)

    def finish(self) -> None:
        """Raises if a loop was left before its last turn: which turn comes first depends on values."""
        if self._left:
            raise _refused(None)


@contextmanager
def chosen_rows(raising: set[tuple[int, int]], slots: bool) -> Iterator[ChosenRows]:
    """Follow chosen rows through all code that runs inside.

    raising: of the model's code, kept from trace to trace. slots: see `ChosenRows`.
    """
    mode = ChosenRows(raising, slots)
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return mode.apply(lambda *a, **k: original(cls, *a, **k), args, kwargs)

    with mode, replaced(torch.autograd.Function, "apply", classmethod(apply)):
        yield mode
        mode.finish()


def _known_number(tensor: torch.Tensor) -> int | None:
    """The value of a tensor, if it is known while a model is traced."""
    try:
        return int(tensor)
    except Exception as error:
        if not tracing.is_data_dependent(error):
            raise
        return None


def _draws(rows: torch.Tensor, p: float = 0.5, training: bool = True, *more: Any, **kwargs: Any) -> bool:
    """Whether a dropout, torch's or the op of ours that takes its place, draws numbers."""
    return len(more) > 1 or (training and p > 0)


def _alike(one: Selection | SlotSelection, other: Selection | SlotSelection) -> bool:
    """Whether two choose the same rows."""
    same = isinstance(one, Selection) and isinstance(other, Selection) and one.counts is other.counts
    return one is other or same


def _broadcasts(rows: Sequence[_Rows], others: Sequence[torch.Tensor]) -> bool:
    """Whether broadcasting puts a row beside the same row of all rows, and beside one place of any other."""
    back = rows[0].dim - rows[0].tensor.dim()
    same = all(r.dim - r.tensor.dim() == back for r in rows)
    return same and all(t.dim() < -back or t.shape[back] == 1 for t in others)


def _by_mask(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first index is a mask of the first dims, beside others that leave the rows to it.

    The mask of ``masked_select`` is one of all elements, or broadcasts.
    """
    if kwargs or len(args) != 2 or not isinstance(args[0], torch.Tensor):
        return False
    mask, *rest = places(args[1])
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() == 0:
        return False
    plain = all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in rest)
    dims = args[0].dim() if name == "masked_select" else mask.dim()
    return plain and args[0].shape[:dims] == mask.shape


def _finds_places(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], torch.Tensor):
        return False
    return (name == "where" and not kwargs) or (name == "nonzero" and not set(kwargs) - {"as_tuple"})


def _refused(func: Any) -> DynamicOutputShapeException:
    return DynamicOutputShapeException(func)
