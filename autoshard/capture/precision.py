"""The type that a model computes in, where it is not the one that it is stored in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoshard.torch_adapters.dtypes import torch_dtype

_DTYPES = {"bf16": "bf16", "fp16": "f16"}


@dataclass(frozen=True)
class MixedPrecision:
    """name: ``bf16``, ``fp16``, or "" for the model's own types. inputs: whether floating inputs are given in
    that type, too."""

    name: str = ""
    inputs: bool = True

    def applies(self, owner: nn.Module) -> bool:
        """Whether a module computes in it: batch norms, whose statistics are buffers, keep their types."""
        return bool(self.name) and not isinstance(owner, _BatchNorm)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter of a module that it applies to, as the module gets it."""
        dtype = torch_dtype(_DTYPES[self.name]) if self.name else tensor.dtype
        narrower = tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize
        return tensor.to(dtype) if narrower else tensor

    def parameters(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Of a model, by name, as its modules get them: for ``torch.func.functional_call``."""
        return {
            f"{path}.{key}" if path else key: self.cast(p)
            for path, module in model.named_modules()
            if self.applies(module)
            for key, p in module.named_parameters(recurse=False)
        }

    def of_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """An argument of the model, as its code gets it."""
        return self.cast(tensor) if self.inputs else tensor


UNCHANGED = MixedPrecision()
