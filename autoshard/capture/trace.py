"""Trace the function of a model, and say what went wrong at which line of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from autoshard.capture import tracing
from autoshard.capture.data_dependent.masked_rows import RowsReturnedError, TurnRaisesError
from autoshard.capture.data_dependent.slot_rows import NoSlotsError
from autoshard.capture.garbage import not_collected
from autoshard.capture.host_random import no_host_random
from autoshard.capture.joint_trace import Traced
from autoshard.capture.meta_args import AbsentUsedError
from autoshard.capture.origins import user_line
from autoshard.capture.repeats import NotRepeated
from autoshard.capture.sparse_mixtures import NotSparseError, stands_nowhere
from autoshard.capture.traced_function import Function, call_model
from autoshard.errors import AutoshardError, CaptureError


def trace(function: Function, tensors: Sequence[torch.Tensor]) -> Traced:
    """The graph of a function on tensors like these; raises CaptureError with the user's line."""
    try:
        return _traced(function, tensors, compiling=True)
    except (AutoshardError, NotRepeated, AbsentUsedError):
        raise
    except Exception as error:
        explained = _explained(error)
        if isinstance(explained, NeedsValuesError):
            raise explained from error
        try:
            # some models take shorter ways when they are compiled, which fail for some inputs; some take
            # views of attention as only the CPU gives it
            function.like_queries = True
            return _traced(function, tensors, compiling=False)
        except Exception as other:
            asked = _explained(other)
            if isinstance(asked, NeedsValuesError) and not function.with_values:
                raise asked from explained  # the values may be found
            raise explained from error


def _traced(function: Function, tensors: Sequence[torch.Tensor], *, compiling: bool) -> Traced:
    mode = tracing.fake_mode()
    flag = tracing.compiling() if compiling else nullcontext()
    # the first call of a model may be one for inference, the next one for training
    with torch.inference_mode(False), torch.enable_grad(), flag, not_collected(), no_host_random():

        def attempt() -> Traced:
            fakes = [tracing.fake_like(t, mode) for t in tensors]
            return tracing.trace_joint(partial(_known, function), fakes, mode)

        traced = with_retries(function, attempt)
        if function.sparse and not stands_nowhere(traced.graph):
            function.sparse = False
            traced = with_retries(function, attempt)
        return traced


T = TypeVar("T")


def with_retries(function: Function, attempt: Callable[[], T]) -> T:
    """What an attempt to run a function gives, once it is known how its rows are to be followed."""
    while True:
        try:
            return attempt()
        except (_ReplacedError, TurnRaisesError):
            # one more buffer is known to be replaced, or turn to raise, and there are only so many
            continue
        except NoSlotsError:
            function.slots = False
        except NotSparseError:
            function.sparse = False


class _ReplacedError(Exception):
    """The run found a buffer that the model assigns anew: it has to be given as a copy from the start."""


def _known(function: Function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = len(function.replaced)
    outputs = function(*tensors)
    if len(function.replaced) > before:
        raise _ReplacedError
    return outputs


class NeedsValuesError(CaptureError):
    """Python code of the model asks for values of tensors, or shapes depend on them."""


class DynamicShapeError(NeedsValuesError):
    """The shape of a tensor depends on values."""


def _explained(error: Exception) -> CaptureError:
    """What went wrong, at which line of the model, and the usual way out."""
    line, text = user_line(error.__traceback__, call_model.__code__)
    where = f"{line}: {text}" if text else line
    if tracing.is_data_dependent(error):
        return NeedsValuesError(
            "the model's Python code asks for the value of a tensor",
            where=where,
            why="values are known only when a program runs, but Python runs now (an if, a while, .item(), "
            "int() or a print on a tensor)",
            hint="torch.where(condition, a, b) or a mask instead of a branch; a number passed as an argument "
            "instead of .item()",
        )
    if isinstance(error, RowsReturnedError):
        where = error.where
    if isinstance(error, (*tracing.DYNAMIC_SHAPE, RowsReturnedError)):
        return DynamicShapeError(
            "the shape of a tensor depends on values",
            where=where,
            why="all shapes in a program are fixed (those of unique or of repeats given by a tensor are not; "
            "of x[mask] functions of single rows, sums, means and losses are followed)",
            hint="torch.where(mask, x, 0) or x * mask instead of x[mask]; a buffer of the largest size "
            "with a mask",
        )
    reason = str(error).strip().splitlines()
    return CaptureError(
        "the model fails while it is traced" if line else "tracing failed",
        where=where,
        why=f"{type(error).__name__}: {reason[0] if reason else ''}",
        hint="run the model once on real inputs of these shapes; if that works, the statement needs the data "
        "of a tensor",
    )
