"""Parts of torch that planning does not need, loaded once something uses them."""

from __future__ import annotations

from autoshard.torch_adapters.late_compiler import defer_compiler
from autoshard.torch_adapters.late_symbols import defer_symbols


def defer_unused() -> None:
    """Have torch's compiler and its symbolic shapes loaded when they are used, unless they are there."""
    defer_compiler()
    defer_symbols()
