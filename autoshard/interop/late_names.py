"""The table of all names of transformers, read from its files when a name is wanted that only the files tell.

transformers opens every file below its ``models`` when it is imported, more than a thousand, to know which
class is in which. With ``LateTables`` in the place of the loader of its ``utils.import_utils``, it does so at
the first name that it does not know otherwise, and is the plain thing from there on. Modules are imported by
their own names without that.

Run with transformers 5.23.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

#: the module that has what is to be replaced
TABLES = "transformers.utils.import_utils"
#: of it: what reads the files, what looks names up; `transformers.utils` passes the latter on
_READER, _KIND = "define_import_structure", "_LazyModule"
_READING = RLock()


class _Unread(dict[frozenset[str], dict[str, Any]]):
    """A table of which ``read`` gets what is in files; it has what is put into it meanwhile."""

    def __init__(self, read: Callable[[], dict[frozenset[str], dict[str, Any]]]) -> None:
        super().__init__({frozenset(): {}})
        self.read = read

    def whole(self) -> dict[frozenset[str], dict[str, Any]]:
        """Both."""
        table = self.read()
        for needed, names in self.items():
            table.setdefault(needed, {}).update(names)
        return table


class LateTables(Loader):
    """Loads the module ``TABLES`` of ``spec``, with tables that are read late until ``close``."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self.loader = spec.loader
        self._put: list[tuple[ModuleType, str, Any]] = []

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run its body; a version without the two names is left as it is."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        read, kind = getattr(module, _READER, None), getattr(module, _KIND, None)
        if module.__file__ is None or read is None or not isinstance(kind, type):
            return
        models = os.path.join(os.path.dirname(os.path.dirname(module.__file__)), "models")
        for name, late in ((_READER, _late_reader(read, models)), (_KIND, _late_kind(kind))):
            self._put.append((module, name, getattr(module, name)))
            setattr(module, name, late)

    def close(self) -> None:
        """Put back what was replaced; tables that were not read are still read when they are needed."""
        for module, name, plain in self._put:
            late = vars(module)[name]
            package = sys.modules.get(TABLES.rpartition(".")[0])
            for holder in (module, package):
                if holder is not None and vars(holder).get(name) is late:
                    setattr(holder, name, plain)
        self._put.clear()


def _late_reader(read: Callable[..., Any], models: str) -> Callable[..., Any]:
    """``define_import_structure`` that reads the folder ``models`` later, others at once."""

    def define(module_path: Any, *args: Any, **kwargs: Any) -> Any:
        folder = os.fspath(module_path)
        if os.path.basename(folder) == "__init__.py":
            folder = os.path.dirname(folder)
        if folder != models:
            return read(module_path, *args, **kwargs)
        return _Unread(lambda: read(module_path, *args, **kwargs))

    return define


def _late_kind(plain: Any) -> Any:
    """``_LazyModule`` that takes an unread table too, and is plain once that is read."""

    class LateNames(plain):
        def __init__(self, name: str, file: str, table: Any, *args: Any, **kwargs: Any) -> None:
            plain.__init__(self, name, file, table, *args, **kwargs)
            if not isinstance(table, _Unread):
                self.__class__ = plain
                return
            del self.__all__
            self._whole = lambda: plain(name, file, table.whole(), *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            own = vars(self)
            if any(name in own.get(table, ()) for table in ("_objects", "_class_to_module", "_modules")):
                return plain.__getattr__(self, name)
            if name.startswith("__") and name != "__all__":
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            if PathFinder.find_spec(f"{self.__name__}.{name}", own["__path__"]) is not None:
                return self._get_module(name)
            return getattr(_read(self), name)

        def __dir__(self) -> list[str]:
            return dir(_read(self))

        def __reduce__(self) -> Any:
            return _read(self).__reduce__()

    def _read(module: Any) -> Any:
        with _READING:
            if type(module) is LateNames:
                module.__dict__.update(vars(module._whole()))
                del module._whole
                module.__class__ = plain
        return module

    return LateNames
