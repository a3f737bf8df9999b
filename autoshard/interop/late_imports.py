"""Import transformers without what only checkpoints, distribution by hand or losses of detection need, and
without the table of all its names (`late_names`).

Modeling code takes a few functions from large modules when it is imported, and calls hardly any of them.
While ``late_imports`` is entered, names taken from these modules stand for what is in them; the first use of
one loads its module, puts what is in it in the place of all names that modules took from it, and goes on with
the real thing, so nothing is missing, and nothing happens where a module is loaded already or a version of
transformers has no such module. Everybody else who imports one of the modules gets it as always.

Run with transformers 5.23.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ForwardRef, Union

from autoshard.interop.late_names import TABLES, LateTables
from autoshard.torch_adapters.late_module import LateModule, loaded

#: modules of which importing modeling code uses nothing but names
_LATE = frozenset(
    {
        "huggingface_hub._commit_api",
        "huggingface_hub._snapshot_download",
        "huggingface_hub.file_download",
        "huggingface_hub.hf_api",
        "huggingface_hub.repocard",
        "huggingface_hub.repocard_data",
        "scipy.optimize",
        "transformers.distributed.checkpoint",
        "transformers.distributed.expert_parallel",
        "transformers.distributed.fsdp",
        "transformers.distributed.parallel_utils",
        "transformers.distributed.pipeline_parallel",
        "transformers.distributed.sharding_utils",
        "transformers.distributed.tensor_parallel",
        "trio",
    }
)


class LateName:
    """What a module that is not loaded yet calls ``name``; used in any way, it is the real thing."""

    __slots__ = ("_late_module", "_late_name")

    def __init__(self, module: ModuleType, name: str) -> None:
        self._late_module, self._late_name = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _real(self)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(self), name)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, _real(self))

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, _real(self))

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (_real(self),)

    def __or__(self, other: Any) -> Any:
        return _either(self, other) if _is_type(other) else _real(self) | other

    def __ror__(self, other: Any) -> Any:
        return _either(other, self) if _is_type(other) else other | _real(self)

    def __getitem__(self, key: Any) -> Any:
        return _real(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        _real(self)[key] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(_real(self))

    def __contains__(self, value: object) -> bool:
        return value in _real(self)

    def __len__(self) -> int:
        return len(_real(self))

    def __bool__(self) -> bool:
        return bool(_real(self))

    def __eq__(self, other: object) -> bool:
        return bool(_real(self) == (_real(other) if isinstance(other, LateName) else other))

    def __hash__(self) -> int:
        return hash(_real(self))

    def __repr__(self) -> str:
        return repr(_real(self))


def _real(late: LateName) -> Any:
    module = loaded(late._late_module)
    try:
        return getattr(module, late._late_name)
    except AttributeError:
        raise ImportError(f"cannot import name {late._late_name!r} from {module.__name__!r}") from None


def _is_type(value: object) -> bool:
    """Whether ``name | value`` says of which types something may be."""
    return value is None or isinstance(value, type | LateName)


def _either(*types: Any) -> Any:
    """One of them; a name that is not loaded yet is a reference to what it will be."""
    return Union[tuple([_forward(t) if type(t) is LateName else t for t in types])]  # noqa: UP007


def _forward(late: LateName) -> ForwardRef:
    return ForwardRef(late._late_name, module=late._late_module.__name__)


class _Named(LateModule):
    """open: whether names may still stand for what is in it."""

    open: bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.open:
            return super().__getattr__(name)
        return LateName(self, name)

    def finish(self) -> None:
        """Whoever imported a name has the real thing from here on: what is asked by identity is found."""
        del self.open
        for holder in list(sys.modules.values()):
            names = vars(holder) if isinstance(holder, ModuleType) else {}
            for name, held in list(names.items()):
                if type(held) is LateName and held._late_module is self:
                    names[name] = getattr(self, held._late_name, held)


class _Put(Loader):
    """Puts a late module in the place of one."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Named(self.spec)
        module.open = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Its body runs later."""
        module.__spec__, module.__loader__ = self.spec, self.spec.loader


class _Finder(MetaPathFinder):
    """Finds late modules while it is in place."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.tables: list[LateTables] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _LATE and fullname != TABLES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        if fullname == TABLES:
            tables = LateTables(spec)
            self.tables.append(tables)
            spec.loader = tables
            return spec
        self.found.append(fullname)
        late = ModuleSpec(fullname, _Put(spec), origin=spec.origin)
        late.submodule_search_locations = spec.submodule_search_locations
        return late


@contextmanager
def late_imports() -> Iterator[None]:
    """Import what is imported inside without what the table names, until that is used."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for tables in finder.tables:
            tables.close()
        for name in finder.found:
            module = sys.modules.get(name)
            if isinstance(module, _Named):
                module.open = False
