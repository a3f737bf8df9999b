"""Models that are given to ``torch.compile``: which code computes what they say is no part of them.

Leans on private interfaces: ``_orig_mod`` of ``torch._dynamo.OptimizedModule`` and ``_compiled_call_impl``.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that was compiled, with what of its modules was compiled as it was before, in place; their
    parameters so have the names that they had before."""
    root = _original(model)
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _original(child)
        module.__dict__.pop("_compiled_call_impl", None)
    return root


def eagerly() -> AbstractContextManager[object]:
    """A context in which functions that were compiled run as they are written."""
    # what was compiled has imported the first of them; FlexAttention compiles what it calls
    compiling = "torch._dynamo.eval_frame", "torch.nn.attention.flex_attention"
    if sys.modules.keys().isdisjoint(compiling):
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def _original(module: nn.Module) -> nn.Module:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module
