"""Where each traced op comes from: module, call of that module, line of the user's code."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autoshard.capture.tracing import mark, unmark
from autoshard.ir import Origin

#: the mark of nodes that only copy an input or an output of the model
COPY = 0

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)


def is_library(filename: str) -> bool:
    """Whether a source file belongs to torch or to autoshard (or to Python's own plumbing)."""
    return filename.startswith(_LIBRARIES) or filename.startswith("<frozen") or filename == _CONTEXTLIB


_CONTEXTLIB = contextmanager.__code__.co_filename


#: packages whose decorators stand between the user and torch
_WRAPPERS = ("typing_extensions",)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_line_of(frame: FrameType | None, outside: Collection[str] = ()) -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours, "" if there is none.

    outside: further packages whose frames are not the user's.
    """
    return next((_line(f) for f in _user_frames(frame, outside)), "")


def user_statement_of(frame: FrameType | None) -> str:
    """The same with the text of the line."""
    result = next(_user_frames(frame, ()), None)
    if result is None:
        return ""
    text = linecache.getline(result.f_code.co_filename, result.f_lineno, result.f_globals)
    return f"{_line(result)}: {text.strip()}"


@dataclass(frozen=True)
class CodeLine:
    """A line of the user's code. function: the first line of the function it is in. called: where that was
    called, if that is the user's, too, and no lambda."""

    path: str = ""
    number: int = 0
    function: int = 0
    called: str = ""

    def __bool__(self) -> bool:
        return self.number > 0

    def __str__(self) -> str:
        if not self:
            return ""
        return f"{self.path}:{self.number}" + (f", called at {self.called}" if self.called else "")


def code_line_of(frame: FrameType | None, until: CodeType) -> CodeLine:
    """The innermost frame that is the user's. until: a function whose callers are not asked."""
    inner, outer = (*islice(_user_frames(frame, (), until), 2), None, None)[:2]
    if inner is None:
        return CodeLine()
    called = _line(outer) if outer is not None and outer.f_code.co_name != "<lambda>" else ""
    code = inner.f_code
    return CodeLine(short_path(code.co_filename), inner.f_lineno, code.co_firstlineno, called)


def _user_frames(
    frame: FrameType | None, outside: Collection[str], until: CodeType | None = None
) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not until:
        path = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        ours = is_library(path) or path.startswith(_PACKAGE)
        if not ours and package not in (*_WRAPPERS, *outside):
            yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def hook_line(hook: Any) -> str:
    """``file:line`` where a hook was written, "" if it is not a Python function."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}" if code is not None else ""


def short_path(filename: str) -> str:
    """A path to show: from the package on for installed code, else relative to the working directory."""
    for marker in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"):
        if marker in filename:
            return filename.rsplit(marker, 1)[1]
    if not os.path.isabs(filename):
        return filename
    relative = os.path.relpath(filename)
    return os.path.basename(filename) if relative.startswith(os.pardir) else relative


class OriginRecorder:
    """Numbers the origins met while a model runs (``origins``) and marks traced nodes with them.

    names: ``id(module) -> fully qualified name``. Inside a layer (a numbered module, ``layers.3``) the call
    recorded is that of the outermost such layer, so that one call of a layer stays together even if it
    calls a part of itself twice; elsewhere it is that of the module itself.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.origins: list[Origin] = [Origin()]
        self._names = names
        self._numbers: dict[tuple[str, int, str], int] = {}
        self._calls: Counter[str] = Counter()
        #: of the modules that run now: name, call, whether in a layer
        self._stack: list[tuple[str, int, bool]] = []
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._source = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """One run of the model: calls are counted from 0, hooks are set on all modules."""
        self._calls.clear()
        self._stack.clear()
        self._source = ""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            unmark()

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        call, inside = self._calls[name], name.rpartition(".")[2].isdigit()
        self._calls[name] += 1
        if self._stack and self._stack[-1][2]:
            call, inside = self._stack[-1][1], True
        self._stack.append((name, call, inside))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._names and self._stack:
            self._stack.pop()
            self._mark()

    def at(self, frame: FrameType | None) -> None:
        """Ops traced from now on belong to the user's line that ``frame`` was called from."""
        while frame is not None:
            key = (frame.f_code, frame.f_lineno)
            line = self._lines.get(key)
            if line is None:
                path = frame.f_code.co_filename
                line = "" if is_library(path) else f"{short_path(path)}:{frame.f_lineno}"
                self._lines[key] = line
            if line:
                break
            frame = frame.f_back
        else:
            line = ""
        if line != self._source:
            self._source = line
            self._mark()

    def _mark(self) -> None:
        fqn, call, _ = self._stack[-1] if self._stack else ("", 0, False)
        key = (fqn, call, self._source)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.origins)
            self.origins.append(Origin(fqn, call, self._source))
        mark(number)


def user_line(traceback: TracebackType | None, within: CodeType) -> tuple[str, str]:
    """(``file:line``, text of the line) of the innermost user code called by ``within`` in a traceback."""
    inside, result = False, ("", "")
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is within:
            inside, result = True, ("", "")
        elif inside and not is_library(code.co_filename):
            text = linecache.getline(code.co_filename, traceback.tb_lineno, traceback.tb_frame.f_globals)
            result = (f"{short_path(code.co_filename)}:{traceback.tb_lineno}", text.strip())
        traceback = traceback.tb_next
    return result
