"""The type that a model computes in, where it is not the one that it is stored in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autoshard.torch_adapters.dtypes import torch_dtype

T = TypeVar("T")
_DTYPES = {"bf16": "bf16", "fp16": "f16"}


@dataclass(frozen=True)
class MixedPrecision:
    """name: ``bf16``, ``fp16``, or "" for the model's own types. inputs: whether floating inputs are given in
    that type, too."""

    name: str = ""
    inputs: bool = True

    def of_parameter(self, tensor: torch.Tensor, owner: nn.Module) -> torch.Tensor:
        """A parameter as its module gets it: batch norms, whose statistics are buffers, keep their types."""
        return tensor if isinstance(owner, _BatchNorm) else self._cast(tensor)

    def of_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument of the model, as its code gets it."""
        return self._cast(tensor) if self.inputs else tensor

    def of_call(self, given: T) -> T:
        """All arguments of a call, in any pytree."""
        return cast(T, pytree.tree_map_only(torch.Tensor, self.of_input, given))

    def parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Of a model, by name, as its modules get them: for ``torch.func.functional_call``, which takes no
        two tensors for the names of a tied one."""
        result: dict[str, torch.Tensor] = {}
        cast_once: dict[tuple[int, bool], torch.Tensor] = {}
        for path, module in model.named_modules():
            for key, p in module.named_parameters(recurse=False):
                same = id(p), isinstance(module, _BatchNorm)
                if same not in cast_once:
                    cast_once[same] = self.of_parameter(p, module)
                result[f"{path}.{key}" if path else key] = cast_once[same]
        return result

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch_dtype(_DTYPES[self.name]) if self.name else tensor.dtype
        cast = tensor.is_floating_point() and dtype.itemsize <= tensor.dtype.itemsize
        return tensor.to(dtype) if cast else tensor


UNCHANGED = MixedPrecision()
