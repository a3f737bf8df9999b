"""Which masks have the same values, by how they were made: ``x[mask]`` and ``y.view(-1)[mask.view(-1)]``."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

#: what keeps the flat values of a mask
_SAME_PLACES = frozenset(
    ("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "bool", "detach", "clone")
)
#: what makes a mask of tensors, beside these
DERIVED = _SAME_PLACES | frozenset(
    """
    eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ logical_and
    logical_or logical_not bitwise_and bitwise_or bitwise_not expand expand_as
    """.split()  # noqa: SIM905 - a table reads better than quoted names
)


class EqualMasks:
    """Keys of masks and of what they are made of: those of one key are equal when flat."""

    def __init__(self) -> None:
        #: by identity: a tensor, and what it is made of; of floats apart
        self._keys: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._keys_of_floats: dict[int, tuple[torch.Tensor, Hashable]] = {}
        self._kept: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        #: how often tensors were changed in place: those of integers, any
        self._changes = [0, 0]

    def counts(self, mask: torch.Tensor) -> torch.Tensor:
        """Which places of a mask hold, flat: one tensor for all masks that are known to be equal."""
        key = self._key(mask)
        if key not in self._kept:
            self._kept[key] = mask, (mask != 0).reshape(-1)
        return self._kept[key][1]

    def _key(self, t: torch.Tensor) -> Hashable:
        result = self._keys.get(id(t)) or self._keys_of_floats.get(id(t))
        return result[1] if result else (id(t), self._changes[not _is_full(t)])

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """What a mask, or integers that one is made of, is made of."""
        if not isinstance(out, torch.Tensor) or not _is_full(out):
            return
        if not isinstance(args[0], torch.Tensor) or any(out is a for a in args):
            return
        key: Hashable
        if name in _SAME_PLACES:
            same = out.dtype == args[0].dtype
            key = self._key(args[0]) if same else (name, out.dtype, self._key(args[0]))
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            of = tuple(self._key(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
            key = (name, of, str(spec))
        # the arguments are kept as well, so that no other tensor gets the identity of one
        self._keys[id(out)] = out, key
        for a in args:
            if isinstance(a, torch.Tensor):
                keys = self._keys if _is_full(a) else self._keys_of_floats
                keys.setdefault(id(a), (a, self._key(a)))

    def changed(self, t: torch.Tensor) -> None:
        """A tensor was changed in place, and with it perhaps others that share its memory.

        Masks that were made of floats before stay what they are.
        """
        self._changes[1] += 1
        self._keys_of_floats = {}
        if _is_full(t):
            self._changes[0] += 1
            self._keys = {}

    def counts_below(self, mask: torch.Tensor) -> torch.Tensor | None:
        """The same of the mask that one was expanded from, if it has chosen rows."""
        key = self._key(mask)
        below = key[1][0] if isinstance(key, tuple) and key[0] in ("expand", "expand_as") else key
        return self._kept[below][1] if below in self._kept else None


def _is_full(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex())
