"""What the code behind a measurement does, read from ``frameworks.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from autoshard.cost.recipe import MIXED, Recipe
from autoshard.simulate.behaviour import Behaviour, Keeps
from autoshard.validate.rows import Run

#: words of a precision that say that gradients are summed in fp32
_WIDE_GRADIENTS = re.compile(r"fp32 (grad|acc|reduc)")


@dataclass(frozen=True)
class Framework:
    """One entry. assumed: whether it stands for frameworks that no entry names.

    vocab_multiple: with tensor parallelism the vocabulary is padded to a multiple of it times the tensor
    ranks; 0 for no padding. wide_gradient: bytes per parameter of gradients that are summed in fp32.
    """

    name: str
    match: str
    precision: str
    until: int | None
    behaviour: Behaviour
    vocab_multiple: int
    wide_gradient: int
    assumed: bool


@cache
def frameworks() -> tuple[Framework, ...]:
    """All entries, in the order in which they are tried."""
    text = files("autoshard.validate").joinpath("frameworks.toml").read_text(encoding="utf-8")
    found: list[Framework] = []
    for entry in tomllib.loads(text)["framework"]:
        name, match, until = entry.pop("name"), entry.pop("match"), entry.pop("until", None)
        precision = entry.pop("precision", "")
        multiple, wide = entry.pop("vocab_multiple"), entry.pop("wide_gradient", 4)
        entry.pop("source")
        recipe = Recipe(name, **entry.pop("recipe"))
        assumed = {"gradient_buffers": True, "late_waits": False}
        behaviour = Behaviour(**{**assumed, **entry}, recipe=recipe, name=name)
        found.append(Framework(name, match, precision, until, behaviour, multiple, wide, assumed=not match))
    return tuple(found)


def framework_of(run: Run) -> Framework:
    """The first entry that a run's framework and year fit."""
    text, precision = run.framework.lower(), run.precision.lower()
    return next(
        f for f in frameworks() if f.match in text and f.precision in precision and _in_time(f, run.year)
    )


def _in_time(framework: Framework, year: int) -> bool:
    """Whether an entry is for a year; for one that is not known (0) if it is for all."""
    return framework.until is None or 0 < year <= framework.until


def behaviour_of(run: Run, framework: Framework, rates: Collection[str]) -> Behaviour:
    """The behaviour of a run: its framework's, with what the row itself says.

    rates: types that its device has units for.
    """
    behaviour = framework.behaviour
    if _WIDE_GRADIENTS.search(run.precision.lower()) and behaviour.recipe.gradient_bytes(2) == 2:
        recipe = replace(MIXED, gradient=framework.wide_gradient)
        behaviour = replace(behaviour, recipe=recipe, gradient_dtype="f32", step_bytes=0.0)
    return replace(
        behaviour,
        attention_again=run.recompute == "attention",
        keeps=_keeps(run, behaviour),
        product_dtype="f8" if run.fp8 and "f8" in rates else "",
        tensor_overlap=behaviour.tensor_overlap or "async tp" in run.framework.lower(),
    )


def _keeps(run: Run, behaviour: Behaviour) -> Keeps:
    if run.recompute == "ops":
        return "ops"
    # a layer that runs again keeps its input alone, whatever its kernels do
    return "kernels" if run.recompute == "full" and behaviour.keeps == "compiled" else behaviour.keeps
