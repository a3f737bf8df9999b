"""How many bytes of tensors are alive while something runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages that ops make inside ``with``, each until nothing refers to it any more.

    held: what is there before, counted as long as it lives. A storage counts whole and once, however many
    views of it there are; a DTensor counts as the part on this rank. now, peak: bytes. What a kernel takes
    while it runs is not seen. One use per object; other threads are not seen, either.
    """

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: Mapping[str, Any] = kwargs or {}
        result = func(*args, **given)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, value, traceback)
        self._sizes.clear()  # those that die later find nothing to take off

    def _see(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
