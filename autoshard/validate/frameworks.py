"""What the code behind a measurement does, read from ``frameworks.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from autoshard.cost.recipe import MIXED, Recipe
from autoshard.ir.decode import decoded
from autoshard.ir.routing import Routing
from autoshard.simulate.behaviour import Behaviour, Keeps
from autoshard.validate.rows import Run

#: words of a precision that say that gradients are summed in fp32
_WIDE_GRADIENTS = re.compile(r"fp32 (grad|acc|reduc)")
#: keys that say for which runs an entry is
#: bytes per parameter of fp32 masters and two moments
_MASTERS = 12
_WIDTHS = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
_FOR = frozenset(("name", "match", "precision", "network", "remarks", "gpus", "until"))


@dataclass(frozen=True)
class Framework:
    """One entry.

    vocab_multiple: with tensor parallelism the vocabulary is padded to a multiple of it times the tensor
    ranks; 0 for no padding. wide_gradient: bytes per parameter of gradients that are summed in fp32;
    wide_sum: bytes that a microbatch moves for it, None for as many as in the type of the parameters.
    exchange_tasks: of its own all-to-all, see `Behaviour`. round_robin: whether a gate that forces balance
    chooses experts in turn.
    """

    name: str
    match: str
    behaviour: Behaviour
    vocab_multiple: int
    precision: str = ""
    network: str = ""
    gpus: int = 0
    until: int | None = None
    wide_gradient: int = 4
    wide_sum: int | None = None
    exchange_tasks: int = 0
    round_robin: bool = False
    remarks: str = ""

    @property
    def assumed(self) -> bool:
        """Whether it stands for frameworks that no entry names."""
        return not self.match

    def fits(self, run: Run) -> bool:
        """Whether it is for runs like this one."""
        return (
            self.match in run.framework.lower()
            and self.precision in run.precision.lower()
            and self.remarks in run.remarks.lower()
            and self.network in run.network.lower()
            and self.gpus <= run.gpus
            and (self.until is None or 0 < run.year <= self.until)
        )


@cache
def frameworks() -> tuple[Framework, ...]:
    """All entries, in the order in which they are tried."""
    text = files("autoshard.validate").joinpath("frameworks.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["framework"]
    named = {entry["name"]: entry for entry in entries}
    return tuple(_framework({**_shared(named, entry.get("like", "")), **entry}) for entry in entries)


def _shared(named: Mapping[str, Mapping[str, Any]], like: str) -> dict[str, Any]:
    """What an entry takes from the one that it is like: all but what says for which runs that one is."""
    if not like:
        return {}
    entry = {**_shared(named, named[like].get("like", "")), **named[like]}
    return {key: value for key, value in entry.items() if key not in _FOR}


def _framework(entry: Mapping[str, Any]) -> Framework:
    """One entry, of which the keys that are not of a `Framework` are those of `Behaviour`."""
    own = {f.name for f in fields(Framework)}
    name, given = entry["name"], {key: value for key, value in entry.items() if key in own}
    rest = {key: value for key, value in entry.items() if key not in (*own, "source", "like")}
    assumed = {"fused_bytes": True, "gradient_buffers": True, "late_waits": False, "name": name}
    given["behaviour"] = {**assumed, **rest, "recipe": {"name": name, **entry["recipe"]}}
    return decoded(given, Framework, f"frameworks.toml, {name}")


def framework_of(run: Run) -> Framework:
    """The first entry that fits a run; of entries with a year, none does if its year is not known (0)."""
    return next(f for f in frameworks() if f.fits(run))


def behaviour_of(run: Run, framework: Framework, rates: Collection[str]) -> Behaviour:
    """The behaviour of a run: its framework's, with what the row itself says.

    rates: types that its device has units for.
    """
    behaviour = framework.behaviour
    if _WIDE_GRADIENTS.search(run.precision.lower()) and behaviour.recipe.gradient_bytes(2) == 2:
        recipe = replace(MIXED, gradient=framework.wide_gradient)
        summed = behaviour.sum_bytes if framework.wide_sum is None else framework.wide_sum
        behaviour = replace(behaviour, recipe=recipe, gradient_dtype="f32", step_bytes=0.0, sum_bytes=summed)
    if run.cuda_graphs not in ("", "none"):
        # of graphs of parts, what is left to the host counts as little
        behaviour = replace(behaviour, eager=False)
    if run.dispatcher == "alltoall":
        behaviour = replace(behaviour, exchange="choice", exchange_tasks=framework.exchange_tasks)
    if framework.round_robin and run.routing == "forced balanced":
        behaviour = replace(behaviour, routing=Routing(round_robin=True))
    if run.tiling and any(word in str(run.tiling) for word in ("loss", "entropy")):
        behaviour = replace(behaviour, loss_kept=0.0, loss_peak=0.0)
    told = run.overlap
    behaviour = replace(behaviour, recipe=_recipe(run, behaviour.recipe))
    return replace(
        behaviour,
        gradients_overlap=_or(told.grad_reduce, behaviour.gradients_overlap),
        gathers_overlap=_or(told.param_gather, behaviour.gathers_overlap),
        exchange_overlap=told.ep_a2a,
        recomputes_scores=run.recompute == "attention",
        keeps=_keeps(run, behaviour),
        product_dtype="f8" if run.fp8 and "f8" in rates else "",
        tensor_overlap=_or(told.tp, behaviour.tensor_overlap) or "async tp" in run.framework.lower(),
    )


def _recipe(run: Run, recipe: Recipe) -> Recipe:
    """With the types that a row says of an optimizer whose parameters have fp32 masters."""
    if recipe.optimizer != _MASTERS or not run.optimizer.moments:
        return recipe
    moments = 2 * _WIDTHS[run.optimizer.moments]
    masters = 4 if run.optimizer.main_params == "float32" else 0
    gradient = next(
        (w for name, w in _WIDTHS.items() if run.optimizer.grads.startswith(name)), recipe.gradient
    )
    return replace(recipe, optimizer=moments + masters, gradient=gradient)


def _or(told: bool | None, assumed: bool) -> bool:
    return assumed if told is None else told


def _keeps(run: Run, behaviour: Behaviour) -> Keeps:
    if run.recompute == "ops":
        return "ops"
    # a layer that is recomputed keeps its input alone, whatever its kernels do
    return "kernels" if run.recompute == "full" and behaviour.keeps == "compiled" else behaviour.keeps
