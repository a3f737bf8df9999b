"""Readable names for the inputs of a program."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoshard.ir import Port


def port_names(ports: Sequence[Port]) -> dict[str, str]:
    """Old name -> new name: parameters and buffers by their module path, inputs by position.

    Prefixed by kind, so that no name meets one of a value inside main.
    """
    letters = {"param": "p", "buffer": "b", "input": "in", "tangent": "grad", "const": "c"}
    result: dict[str, str] = {}
    taken: set[str] = set()
    for port in ports:
        base = f"{letters[port.kind]}_{re.sub(r'[^0-9a-zA-Z]+', '_', port.target)}"
        name, k = base, 1
        while name in taken:
            k += 1
            name = f"{base}_{k}"
        taken.add(name)
        result[port.name] = name
    return result
