"""Command line options from the fields of option classes (`autoshard.options`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from autoshard.cli.output import memory_of, reporting
from autoshard.errors import UsageError
from autoshard.ir.routing import most_chosen
from autoshard.options import PassOptions, PlanOptions, visible_fields

_KINDS = (PlanOptions, PassOptions)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its parameters of an option class.

    A field that two classes have is one option, given to both.
    """
    hints = get_type_hints(command, include_extras=True)
    kinds = {name: kind for name, kind in hints.items() if kind in _KINDS}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        parameters_of = map(_parameter, visible_fields(kinds[name])) if name in kinds else (parameter,)
        for each in parameters_of:
            annotation = hints.get(each.name, each.annotation) if each is parameter else each.annotation
            keyword = each.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.setdefault(each.name, keyword)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        built = {}
        with reporting(bool(given.get("debug"))):
            for name, kind in kinds.items():
                built[name] = kind(**{f.name: _value(f, given[f.name]) for f in visible_fields(kind)})
        arguments = {k: v for k, v in given.items() if k in hints and k not in kinds}
        command(**arguments, **built)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in parameters.items()}
    del run.__wrapped__  # its signature is another one
    return run


def _parameter(field: Field[Any]) -> inspect.Parameter:
    about = field.metadata
    kind: Any = {"bool": bool, "int | None": int | None}.get(str(field.type), str)
    if "unit" in about:
        kind = str | None
    if str(field.type).startswith("tuple"):
        kind = list[str] | None
    flag = about.get("flag", "--" + field.name.replace("_", "-"))
    if kind is bool and field.default:
        flag = f"{flag}/--no-{flag[2:]}"
    counted = kind == int | None
    shown = typer.Option(
        flag, metavar=about.get("metavar"), min=about.get("least", 1) if counted else None, help=about["help"]
    )
    plain = kind in (bool, str)
    default = field.default if plain and field.default is not MISSING else None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def _value(field: Field[Any], given: Any) -> Any:
    if "counts" in field.metadata and ":" in given:
        return _most_chosen(given)
    if "unit" in field.metadata:
        return memory_of(given)
    return tuple(given or ()) if str(field.type).startswith("tuple") else given


def _most_chosen(text: str) -> str:
    """Experts that are chosen most often, of ``COUNTS.json:N``."""
    from autoshard.report.routing import counts_of

    path, _, number = text.rpartition(":")
    if not number.isdigit() or number == "0":
        raise UsageError(f"{number!r} is no number of experts", where=text, hint="COUNTS.json:4")
    return most_chosen(counts_of(Path(path)), int(number))
