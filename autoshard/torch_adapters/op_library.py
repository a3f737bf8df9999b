"""The ``autoshard`` namespace of torch ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: kept alive for as long as the ops are to exist
LIBRARY = torch.library.Library("autoshard", "FRAGMENT")


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    cuda: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    waits: bool = False,
) -> None:
    """Add the op ``autoshard::<schema>``.

    implementation: for all devices, but for NVIDIA's where there is ``cuda``. fake: types of the outputs.
    backward, save: its gradient, as ``torch.library.register_autograd`` takes them. waits: whether it waits
    for the device, as for a size that its data decide.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if waits else ())
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    if cuda is not None:
        LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"autoshard::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"autoshard::{name}", backward, setup_context=save, lib=LIBRARY)
