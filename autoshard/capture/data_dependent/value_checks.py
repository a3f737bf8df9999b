"""Checks of values in the code of a model: no value is known while it is traced, so they count as passed.

A check is an ``assert``, or an ``if`` that only raises or warns. Leaving it out changes no number that a
program computes; every other use of a tensor's value in Python stays an error.

Leans on the private ``torch._check_tensor_all``, ``torch._check_tensor_all_with`` and
``torch.distributions.Distribution._validate_args``, and on the column numbers that Python 3.11 keeps for each
instruction. Run with torch 2.13.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.capture.origins import is_library
from autoshard.torch_adapters.replaced import replaced

#: (first line, its first column, last line, its last column), columns in UTF-8 bytes
Span = tuple[int, int, int, int]
_WARNINGS = frozenset({"warn", "warning", "warning_once", "info", "debug"})


class Checks:
    """Finds the checks in source files; a file is parsed once."""

    def __init__(self) -> None:
        self._tests: dict[str, tuple[tuple[Span, ast.expr, bool], ...]] = {}

    def passing(self, frame: FrameType | None) -> bool | None:
        """The truth value that lets the check at which ``frame`` stands pass; None if it stands at none."""
        result = self._at(frame)
        if result is None:
            return None
        # which of several conditions is asked cannot be told, as jumps have the place of others
        values = {value for leaf, value in _leaves(*result) if not _plain(leaf)}
        return values.pop() if len(values) == 1 else None

    def holds(self, frame: FrameType | None) -> bool:
        """Whether ``frame`` stands in the condition of a check."""
        return self._at(frame) is not None

    def _at(self, frame: FrameType | None) -> tuple[ast.expr, bool] | None:
        here = position(frame)
        if frame is None or here is None:
            return None
        for statement, test, wanted in self._of(frame):
            if within(here, span(test)) or here == statement:
                return test, wanted
        return None

    def _of(self, frame: FrameType) -> tuple[tuple[Span, ast.expr, bool], ...]:
        path = frame.f_code.co_filename
        if path not in self._tests:
            lines = linecache.getlines(path, frame.f_globals)
            self._tests[path] = tuple(_checks("".join(lines)))
        return self._tests[path]


def _checks(source: str) -> Iterator[tuple[Span, ast.expr, bool]]:
    """(place of the statement, condition, value of the condition that passes) of every check."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # not the text that was compiled: then nothing in it can be relied on
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield span(node), node.test, True
        elif isinstance(node, ast.If) and _only_complains(node):
            yield span(node), node.test, False


def _only_complains(node: ast.If) -> bool:
    *before, last = node.body
    raises = isinstance(last, ast.Raise)
    return all(_warns(s) for s in before) and (raises or (_warns(last) and not node.orelse))


def _warns(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _WARNINGS


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions joined by and, or, not, with a value of each; with these, the whole is ``wanted``."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _leaves(part, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    else:
        yield test, wanted


def _plain(leaf: ast.expr) -> bool:
    """Whether a condition (``x is None``, ``isinstance(x, y)``) never asks a tensor."""
    if isinstance(leaf, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in leaf.ops)
    return isinstance(leaf, ast.Call) and isinstance(leaf.func, ast.Name) and leaf.func.id == "isinstance"


def span(node: ast.stmt | ast.expr) -> Span:
    last_line, last_column = node.end_lineno, node.end_col_offset
    assert last_line is not None and last_column is not None
    return node.lineno, node.col_offset, last_line, last_column


def position(frame: FrameType | None) -> Span | None:
    """Where in its file the instruction stands that a frame executes now."""
    if frame is None:
        return None
    positions = list(frame.f_code.co_positions())
    line, last_line, column, last_column = positions[frame.f_lasti // 2]
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, column, last_line, last_column


def within(inner: Span, outer: Span) -> bool:
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]


class _Unknown:
    """A number that only a run can give, inside the condition of a check.

    All that is computed from it is unknown too; as a condition it is what lets the check pass.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    def _same(self, *others: object) -> _Unknown:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __floordiv__ = __mod__ = __neg__ = __abs__ = _same
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        passing = self._checks.passing(sys._getframe(1))
        if passing is None:
            raise RuntimeError("the value of a tensor is used outside of the check that asked for it")
        return passing


class _PassMode(TorchFunctionMode):
    """Answers checks that ask tensors for their values."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__ or func is torch.Tensor.item:
            frame, direct = _user_frame()
            if func is torch.Tensor.item and direct:
                if self._checks.holds(frame):
                    return _Unknown(self._checks)
            else:
                passing = self._checks.passing(frame)
                if passing is not None:
                    return passing
        return func(*args, **(kwargs or {}))


def _user_frame() -> tuple[FrameType | None, bool]:
    """(innermost frame that runs code of the model, whether it makes the call itself).

    While a model is traced, the truth value of a tensor is torch's own call of ``item``.
    """
    frame: FrameType | None = sys._getframe(2)
    direct = True
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":
            if not is_library(frame.f_code.co_filename):
                break
            direct = False
        frame = frame.f_back
    return frame, direct


def _passed(*args: Any, **kwargs: Any) -> None:
    """Stands in for torch's own checks of values."""


@contextmanager
def checks_pass() -> Iterator[None]:
    """Let checks of values pass, for all code that runs inside."""
    names: tuple[str, ...] = ("_check_tensor_all", "_check_tensor_all_with")
    stand_in: Callable[..., None] = _passed
    with (
        replaced(torch, names[0], stand_in),
        replaced(torch, names[1], stand_in),
        replaced(torch.distributions.Distribution, "_validate_args", False),
        _PassMode(Checks()),
    ):
        yield
