"""Values out of nested tables, and flags out of scripts, that people write."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from autoshard.errors import UsageError

Table = Mapping[str, Any]
#: ``NAME=value`` of a shell script, on a line of its own; and what stands for its value: ``$NAME``,
#: ``${NAME}``, ``${NAME:-default}``
_SET = re.compile(r"^\s*(?:export\s+)?(\w+)=(['\"]?)([^'\"\n#]*)\2\s*(?:#.*)?$", re.MULTILINE)
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


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


def json_table(text: str) -> dict[str, Any]:
    """A JSON object. Raises UsageError for anything else."""
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise UsageError("the config is no JSON", why=str(error)) from None
    if not isinstance(loaded, dict):
        raise UsageError("the config is no table of JSON")
    return loaded


def integer(values: Table, key: str, default: int | None = None) -> int | None:
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
    value = integer(values, key, default)
    assert value is not None
    if value < 1:
        raise UsageError(f"{key} is {value}", hint="a number of at least 1")
    return value


def refuse(values: Table, *keys: str) -> None:
    """Raises UsageError for degrees of these names that would change what is simulated."""
    for key in keys:
        if degree(values, key) > 1:
            raise UsageError(
                f"{key} is {values[key]}", why="it cannot be simulated yet", hint="1, to see the rest"
            )


def on(values: Table, key: str, default: bool = False) -> bool:
    """A switch, as TOML, JSON, YAML or a flag writes it."""
    value = values.get(key, default)
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)


def words(text: str) -> list[str]:
    """Of a shell script, without comments; variables that it sets itself are what it sets them to.

    Raises UsageError where a quotation does not end.
    """
    values: dict[str, str] = {name: value.strip() for name, _, value in _SET.findall(text)}

    def value_of(used: re.Match[str]) -> str:
        plain, braced, default = used.groups()
        unset: str = used.group() if default is None else default
        return values.get(plain or braced, unset)

    for _ in range(3):  # variables of variables
        text = _USED.sub(value_of, text)
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError("the script cannot be divided into words", why=str(error)) from None


def flags(text: str) -> dict[str, Any]:
    """``--name value``, ``--name=value`` or ``--name``, which is True, of a script."""
    values: dict[str, Any] = {}
    every = words(text)
    for word, after in zip(every, [*every[1:], "--"], strict=True):
        key, equals, value = word.partition("=")
        if word.startswith("--"):
            values[key[2:]] = value if equals else True if after.startswith("-") else after
    return values
