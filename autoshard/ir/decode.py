"""Values of a type from what a TOML or JSON file holds; errors say what of it is wrong, where, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, inspect

from autoshard.errors import AutoshardError, UsageError, nearest

T = TypeVar("T")
#: makes an error of the keywords where, why and hint that `AutoshardError` has
Fail: TypeAlias = Callable[..., AutoshardError]

#: the largest number that there is, and more than any machine has of anything
_LARGEST, _MOST = 1.7976931348623157e308, 1 << 62
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=_LARGEST)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST)]
Factor: TypeAlias = Annotated[float, Meta(ge=1, le=_LARGEST)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=_MOST)]
Number: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST)]
#: what there is to know about a type, however it is written
_form: Callable[[Any], inspect.Type] = cache(inspect.type_info)
_TABLES = (inspect.StructType, inspect.DataclassType)
_NUMBERS = (inspect.IntType, inspect.FloatType, inspect.NoneType)


def decoded(raw: object, kind: type[T], where: str, *, fail: Fail = UsageError, hint: str = "") -> T:
    """``raw`` as a struct or a dataclass whose constraints (`msgspec.Meta`) hold.

    where: names the file in errors. fail: makes the error of a key that is unknown or missing, or of a wrong
    value; hint: of it, where there is no nearer one.
    """
    _check_keys(raw, _form(kind), where, fail, hint)
    try:
        new: T = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        value, name = raw, ""
        for key, number in re.findall(r"\.(\w+)|\[(\d+)\]", path.partition("[...]")[0]):
            at = key or str(int(number) + 1)
            where, name = (f"{where}, {at}", at) if key else (f"{where} {at}", f"{name} {at}")
            value = value[key or int(number)]  # type: ignore[index]
        if "[...]" in path and isinstance(value, dict):  # the first entry that is of the type that is wrong
            wrong = [key for key in value if f"got `{type(value[key]).__name__}`" in why]
            for name in wrong[:1]:
                where, value = f"{where}, {name}", value[name]
        what = f"{name.strip() or 'all of it'} is {_shown(value)}"
        raise fail(what, where=where, why=_in_words(why), hint=hint) from None
    return new


def check_fields(value: Any, where: str) -> None:
    """UsageError if a number of a dataclass is not within the constraints of its type."""
    for name, kind in _numbers(value.__class__).items():
        given = getattr(value, name)
        try:
            msgspec.convert(float(given) if isinstance(given, float) else given, kind)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name} is {_shown(given)}", where=where, why=_in_words(str(error))) from None


def _check_keys(raw: object, form: inspect.Type, where: str, fail: Fail, hint: str) -> None:
    """All keys at once, with the nearest known one, which msgspec does not tell."""
    if isinstance(form, inspect.UnionType):
        form = next(t for t in form.types if not isinstance(t, inspect.NoneType))
    if isinstance(raw, list) and isinstance(form, inspect.ListType | inspect.VarTupleType):
        for number, entry in enumerate(raw, 1):
            _check_keys(entry, form.item_type, f"{where} {number}", fail, hint)
    if not isinstance(raw, Mapping) or not isinstance(form, _TABLES):
        return
    known = {f.encode_name: f for f in form.fields}
    for key, entry in raw.items():
        if key not in known:
            if not getattr(form, "forbid_unknown_fields", True):
                continue
            raise fail(f"unknown key {key[:40]!r}", where=where, hint=nearest(key, known))
        _check_keys(entry, known[key].type, f"{where}, {key}", fail, hint)
    if missing := [key for key, f in known.items() if f.required and key not in raw]:
        raise fail(f"missing: {', '.join(missing)}", where=where, hint=hint)


@cache
def _numbers(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that are numbers, with their constraints."""
    form, hints = _form(kind), get_type_hints(kind, include_extras=True)
    assert isinstance(form, inspect.DataclassType)
    kinds = {
        f.name: f.type.types if isinstance(f.type, inspect.UnionType) else (f.type,) for f in form.fields
    }
    return {name: hints[name] for name, each in kinds.items() if all(isinstance(t, _NUMBERS) for t in each)}


def _in_words(text: str) -> str:
    """A text of msgspec: ``it must be `int`, got `float```."""
    for theirs, ours in (("Expected", "it must be"), ("`object`", "a table"), ("`array`", "a list")):
        text = text.replace(theirs, ours)
    return text


def _shown(raw: object) -> str:
    """A value as errors call it: by its kind where it is long."""
    if isinstance(raw, list | dict):
        return f"{'a list' if isinstance(raw, list) else 'a table'} of {len(raw)}"
    if isinstance(raw, int) and abs(raw) >= 1 << 64:
        return f"a number of {raw.bit_length()} bits"
    text = repr(raw)
    return text if len(text) <= 40 else f"{text[:40]}..."
