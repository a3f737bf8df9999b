"""Loops in the code of a model whose turns leave nothing behind in names of Python: no counters, no flags."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from autoshard.capture.data_dependent.value_checks import Span, position, span, within
from autoshard.capture.origins import is_library

_PLAIN = ast.Assign | ast.AnnAssign | ast.Expr | ast.Continue | ast.Assert | ast.Pass
_LEAVING = ast.Global | ast.Nonlocal | ast.Return | ast.Break | ast.Yield | ast.YieldFrom
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Loops:
    """Finds the loops in source files; a file is parsed once."""

    def __init__(self) -> None:
        self._trees: dict[str, ast.Module | None] = {}

    def keeps_to_itself(self, frame: FrameType | None) -> bool:
        """Whether the innermost code of a model stands at the head of a ``for`` over the tensor itself.

        Its body may only store names that it sets before it reads them, and that nothing outside of it reads.
        """
        _, here, tree = self._innermost(frame)
        if here is None or tree is None:
            return False
        result = [
            (function, loop)
            for function in ast.walk(tree)
            if isinstance(function, _FUNCTIONS)
            for loop in ast.walk(function)
            if isinstance(loop, ast.For) and _same(here, span(loop.iter))
        ]
        if not result:
            return False
        function, loop = max(result, key=lambda pair: pair[0].lineno)
        known = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        return not loop.orelse and _direct(loop.iter) and _closed(function, loop.body, loop, known)

    def region_of(self, frame: FrameType | None, *, filled: bool) -> Region | None:
        """The statements that run only if there are rows, at whose condition the innermost code of a model
        stands: the body of an ``if``, or what comes after one that goes on to the next turn of a loop.

        filled: whether the condition holds if there are rows. None if they leave more behind than tensors.
        """
        frame, here, tree = self._innermost(frame)
        if frame is None or here is None or tree is None:
            return None
        for function in (f for f in ast.walk(tree) if isinstance(f, _FUNCTIONS)):
            for block in _blocks(function):
                for k, statement in enumerate(block):
                    if not isinstance(statement, ast.If):
                        continue
                    if not within(here, span(statement.test)) and here != span(statement):
                        continue
                    test = statement.test
                    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                    skips = [type(s) for s in statement.body] == [ast.Continue]
                    runs = filled != negated
                    inside = statement.body if runs else block[k + 1 :]
                    if statement.orelse or skips == runs or not inside or not _closed(function, inside):
                        return None
                    return Region(frame, (*span(inside[0])[:2], *span(inside[-1])[2:]))
        return None

    def _innermost(self, frame: FrameType | None) -> tuple[FrameType | None, Span | None, ast.Module | None]:
        """The frame of the innermost code of a model, where it stands, and its source file."""
        while frame is not None and _between(frame):
            frame = frame.f_back
        return frame, position(frame), None if frame is None else self._of(frame)

    def _of(self, frame: FrameType) -> ast.Module | None:
        path = frame.f_code.co_filename
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse("".join(linecache.getlines(path, frame.f_globals)))
            except SyntaxError:  # not the text that was compiled
                self._trees[path] = None
        return self._trees[path]


@dataclass(frozen=True)
class Region:
    """Statements that a frame runs. place: where they stand."""

    frame: FrameType
    place: Span

    def holds(self, frame: FrameType | None) -> bool:
        """Whether a frame runs in one of them."""
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        here = position(frame)
        return here is not None and within(here, self.place)


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):  # of a lambda it is an expression
                yield block


def _between(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "__torch_function__" or is_library(code.co_filename)


def _same(here: Span, wanted: Span) -> bool:
    return within(here, wanted) or within(wanted, here)


def _direct(iterated: ast.expr) -> bool:
    """Whether a loop goes over a tensor itself, not over something (enumerate, zip) that counts its turns."""
    return not isinstance(iterated, ast.Call) or isinstance(iterated.func, ast.Attribute)


def _closed(
    function: ast.AST, body: Sequence[ast.stmt], loop: ast.For | None = None, known: set[str] | None = None
) -> bool:
    """Whether statements only store names that they set before they read them, and that nothing else reads.

    loop: whose body they are. known: names that are set before.
    """
    roots: Sequence[ast.AST] = body if loop is None else [loop]
    inside = {id(node) for root in roots for node in ast.walk(root)}
    stored = {name for root in roots for name in _stored(root)}
    for node in ast.walk(function):
        if id(node) in inside:
            if isinstance(node, _LEAVING):
                return False
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                return False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in stored:
            return False
    known = set(known or ())
    return all(_set_first(statement, known, stored) for statement in body)


def _set_first(statement: ast.stmt, known: set[str], stored: set[str]) -> bool:
    """Whether a statement reads no name of ``stored`` before it is set; adds what it sets to ``known``.

    A name that only one branch of an ``if`` sets counts as not set.
    """
    if isinstance(statement, ast.If):
        if not _reads_known(statement.test, known, stored):
            return False
        after = []
        for branch in (statement.body, statement.orelse):
            names = set(known)
            if not all(_set_first(s, names, stored) for s in branch):
                return False
            if not (branch and isinstance(branch[-1], ast.Continue | ast.Raise)):
                after.append(names)
        known |= set.intersection(*after) if after else stored
        return True
    if isinstance(statement, ast.With):
        return all(_reads_known(i.context_expr, known, stored) for i in statement.items) and all(
            _set_first(s, known, stored) for s in statement.body
        )
    if isinstance(statement, ast.AugAssign):
        target = statement.target
        fine = not isinstance(target, ast.Name) or target.id in known
        return fine and _reads_known(statement, known, stored)
    if not isinstance(statement, _PLAIN) or not _reads_known(statement, known, stored):
        return False
    known |= _stored(statement)
    return True


def _reads_known(tree: ast.AST, known: set[str], stored: set[str]) -> bool:
    return all(n in known or n not in stored for n in _read(tree))


def _stored(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _read(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
