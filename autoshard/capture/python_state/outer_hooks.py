"""Hooks of a model: what a capture takes in, leaves to the call, or refuses.

Forward hooks of submodules are part of the graph. Hooks of the model itself stay what they are: they run
around the program at every call. Hooks on gradients of modules, and those for all modules of the process, are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from autoshard.capture.origins import hook_line
from autoshard.errors import CaptureError
from autoshard.torch_adapters.hooks import BACKWARD_TABLES, clear_hooks, global_hooks, module_hooks


@contextmanager
def outer_hooks_apart(model: nn.Module) -> Iterator[None]:
    """The model without its own hooks; whoever calls this puts them back.

    Raises CaptureError for hooks that can be neither part of a graph nor left to the call.
    """
    for hook in global_hooks():
        raise CaptureError(
            "a hook is registered for all modules of the process",
            where=hook_line(hook),
            why="it would run while the model is captured, and not where submodules run in a program",
            hint="register it on the model itself, or remove it before the model is parallelized",
        )
    for name, module in model.named_modules():
        for hook in module_hooks(module, BACKWARD_TABLES) if module is not model else ():
            raise CaptureError(
                f"module {name} has a hook on its gradients",
                where=hook_line(hook),
                why="a program computes gradients without calling modules",
                hint="use a hook on the parameters (tensor.register_hook), on the model itself, or an "
                "autograd.Function in forward",
            )
    clear_hooks(model)
    yield
