"""Values out of nested tables that people write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.errors import UsageError

Table = Mapping[str, Any]


def flat(table: Table, before: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            values |= flat(value, f"{name}.")
        else:
            values[name] = value
    return values


def whole(values: Table, key: str, default: int | None = None) -> int | None:
    """A number, the default where it is absent, null or "auto". Raises UsageError for anything else."""
    value = values.get(key)
    if value is None or value == "auto":
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{key} is {value!r}", hint="a whole number") from None


def degree(values: Table, key: str, default: int = 1) -> int:
    """A number of at least 1. Raises UsageError."""
    value = whole(values, key, default)
    assert value is not None
    if value < 1:
        raise UsageError(f"{key} is {value}", hint="a number of at least 1")
    return value


def on(values: Table, key: str, default: bool = False) -> bool:
    """A switch, as TOML, JSON, YAML or a flag writes it."""
    value = values.get(key, default)
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)
