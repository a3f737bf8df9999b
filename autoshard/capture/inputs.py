"""What a captured function takes: the parameters and buffers of a model, and its flattened call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.capture import tracing
from autoshard.capture.meta_args import Absent
from autoshard.errors import CaptureError
from autoshard.torch_adapters.flex import is_block_mask
from autoshard.torch_adapters.hooks import has_gradient_hooks

#: images or videos in a batch, if their sizes are to be part of a program
_MOST_ROWS = 256


@dataclass(frozen=True)
class Leaf:
    """One flattened argument or output; position: among the tensors, or -1."""

    position: int
    static: str = ""


@dataclass
class State:
    """Parameters and buffers: one argument per object, however many names it has.

    slots: (dict of a module, key in it, position among the arguments) of every name. modules: identity of a
    module -> its first name.
    """

    slots: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    arguments: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    tied: list[tuple[str, str]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    modules: dict[int, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[tuple[int, str], str]:
        """(identity of a module's table, key in it) -> name of the argument."""
        return {(id(table), key): self.arguments[position][1] for table, key, position in self.slots}

    def hooked(self) -> str:
        """The first parameter with a hook on its gradient, if there is one."""
        pairs = zip(self.arguments, self.tensors, strict=True)
        return next((name for (_, name, _), tensor in pairs if has_gradient_hooks(tensor)), "")

    def absent(self, names: Collection[str]) -> dict[int, Absent]:
        """What stands for the parameters of these names, by position."""
        return {
            k: Absent(tensor)
            for k, ((_, name, _), tensor) in enumerate(zip(self.arguments, self.tensors, strict=True))
            if name in names
        }


def state_of(model: nn.Module) -> State:
    state = State()
    known: dict[int, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        state.modules.setdefault(id(module), prefix)
        for kind, table in (("param", module._parameters), ("buffer", module._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                position = known.get(id(tensor))
                if position is None:
                    known[id(tensor)] = position = len(state.tensors)
                    _check_plain(tensor, name)
                    if kind == "param" and not tensor.requires_grad:
                        state.frozen.append(name)
                    state.arguments.append((kind, name, name))
                    state.tensors.append(tensor)
                elif kind == "param":
                    state.tied.append((name, state.arguments[position][1]))
                state.slots.append((table, key, position))
    return state


@dataclass
class Inputs:
    """The flattened call. leaves: per leaf the position among the tensors, or (-1, repr)."""

    spec: pytree.TreeSpec
    values: list[Any] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[tuple[str, str, str]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments."""
        args, kwargs = pytree.tree_unflatten(self.values, self.spec)
        return args, kwargs


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any], *, fix_sizes: bool = False) -> Inputs:
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    inputs = Inputs(spec)
    for number, (path, value) in enumerate(paths):
        name = _path_name(path)
        inputs.names.append(name)
        inputs.values.append(value)
        if isinstance(value, torch.Tensor) and not (fix_sizes and _is_table_of_sizes(value)):
            _check_plain(value, name)
            inputs.leaves.append(Leaf(len(inputs.tensors)))
            inputs.arguments.append(("input", str(number), name))
            inputs.tensors.append(value)
        elif is_block_mask(value):
            raise CaptureError(
                f"{name} is a BlockMask",
                why="its function may read tensors that differ from call to call, which are no inputs then",
                hint="make it in forward, by create_block_mask of tensors that the model is given",
            )
        else:
            inputs.leaves.append(Leaf(-1, repr(value)))
    return inputs


def _is_table_of_sizes(tensor: torch.Tensor) -> bool:
    """Whether this may be the (height, width) or (time, height, width) of some images, with its values."""
    return (
        tensor.dim() == 2
        and tensor.shape[1] in (2, 3)
        and tensor.shape[0] <= _MOST_ROWS
        and tensor.dtype in (torch.int32, torch.int64)
        and tensor.device.type != "meta"
        and not tracing.is_fake(tensor)
    )


def _path_name(path: Sequence[Any]) -> str:
    """``input_ids``, ``args[0]``, ``batch['x']``."""
    where, *rest = path
    text = "args" if where.idx == 0 else ""
    for key in rest:
        text += key.key if not text and isinstance(key, pytree.MappingKey) else pytree.keystr((key,))
    return text


def _check_plain(tensor: torch.Tensor, name: str) -> None:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise CaptureError(
            f"{name} has no shape yet",
            why="lazy modules learn their shapes from data",
            hint="call the model once on real data, then capture",
        )
    if tracing.is_wrapper(tensor) or tensor.layout is not torch.strided:
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, not a plain tensor",
            why="shards are made from plain dense tensors",
            hint="give the model before it is distributed, quantised or made sparse",
        )
