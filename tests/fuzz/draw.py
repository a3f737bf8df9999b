"""Draws recipes: statements are taken at random and kept if they run and give numbers of a sane size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fuzz.recipe import DTYPE, Body, Recipe, Spec, Statement, namespace

#: what a statement may give: elements, and the largest of them
_MOST, _LARGEST = 1500, 30.0
_SIZES = (1, 2, 3, 4, 4, 5, 6, 8, 8)


class Unfit(Exception):
    """Nothing here suits the statement that was to be drawn."""


@dataclass
class Scene:
    """What statements can be made of so far. values: name -> tensor, inputs and buffers among them."""

    rng: random.Random
    seed: int
    batch: int
    values: dict[str, Any]
    given: list[Spec] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    inside: bool = False
    drawn: int = 0

    # -- picking -----------------------------------------------------------------------------------

    def real(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """The name of a real value, rather a new one."""
        return self._picked(lambda t: t.is_floating_point() and fits(t))

    def wide(self, least: int, most: int = 9) -> str:
        """A real value of ``least`` to ``most`` dims."""
        return self.real(lambda t: least <= t.dim() <= most)

    def ints(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        return self._picked(lambda t: t.dtype == torch.int64 and fits(t))

    def bools(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        return self._picked(lambda t: t.dtype == torch.bool and fits(t))

    def _picked(self, fits: Callable[[torch.Tensor], bool]) -> str:
        names = [n for n, t in self.values.items() if not n.startswith("self.") and fits(t)]
        if not names:
            raise Unfit
        recent = names[-4:]
        return self.rng.choice(recent if self.rng.random() < 0.6 else names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dim(self, name: str) -> int:
        """A dim, counted from either end."""
        count = self.values[name].dim()
        if not count:
            raise Unfit
        return self.rng.randrange(-count, count)

    def size(self) -> int:
        return self.rng.choice(_SIZES)

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def any(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    # -- parameters --------------------------------------------------------------------------------

    def param(self, *shape: int) -> str:
        """A parameter of a shape: new, used before, or one whose tensor is another's."""
        alike = [g.name for g in self.given if g.shape == shape and g.name.startswith("p") and not g.tied]
        if alike and self.maybe(0.2):
            return f"self.{self.rng.choice(alike)}"
        tied = self.rng.choice(alike) if alike and self.maybe(0.2) else ""
        grad = not self.maybe(0.06)
        if tied:
            grad = next(g.grad for g in self.given if g.name == tied)
        return self._new(Spec(self._fresh("p"), shape, tied=tied, grad=grad))

    def buffer(self, *shape: int, kind: str = "unit", top: int = 0) -> str:
        return self._new(Spec(self._fresh("b"), shape, kind, top))

    def _fresh(self, letter: str) -> str:
        self.drawn += 1
        return f"{letter}{self.drawn}"

    def keep_used(self, known: int, expression: str) -> None:
        """Forget parameters beyond the first ``known`` that an expression does not use."""
        used = {u[5:] for u in Statement((), expression).uses if u.startswith("self.")}
        used |= {g.tied for g in self.given if g.name in used}
        for spec in self.given[known:]:
            if spec.name not in used:
                self.given.remove(spec)
                del self.values[f"self.{spec.name}"]

    def _new(self, spec: Spec) -> str:
        self.given.append(spec)
        owner = next(g for g in self.given if g.name == (spec.tied or spec.name))
        self.values[f"self.{spec.name}"] = owner.drawn(self.seed)
        return f"self.{spec.name}"

    # -- statements --------------------------------------------------------------------------------

    def add(self, expression: str) -> bool:
        """Run a statement and keep it; False if it does not run, or gives what nothing can be made of."""
        held = {n: (t, t.clone()) for n, t in self.values.items() if n.startswith("self.b")}
        try:
            result = self.run(expression)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        finally:
            for owner, before in held.values():
                owner.copy_(before)
        outs = list(result) if isinstance(result, tuple | list) else [result]
        if not outs or not all(isinstance(t, torch.Tensor) for t in outs) or len(outs) > 6:
            return False
        if any(t.numel() > _MOST or not t.numel() or not _sane(t) for t in outs):
            return False
        largest = max((float(t.abs().max()) for t in outs if t.is_floating_point()), default=0.0)
        if largest > _LARGEST and len(outs) == 1:
            expression = f"({expression}) * {4 / largest:.3g}"
            outs = [self.run(expression)]
        names = tuple(f"v{self.count + k}" for k in range(len(outs)))
        self.statements.append(Statement(names, expression))
        self.values.update(zip(names, outs, strict=True))
        return True

    @property
    def count(self) -> int:
        """How many values were made."""
        return sum(len(s.outs) for s in self.statements)

    def run(self, expression: str) -> Any:
        names = namespace()
        names.update((n, t) for n, t in self.values.items() if not n.startswith("self."))
        names["self"] = _Given({n[5:]: t for n, t in self.values.items() if n.startswith("self.")})
        with torch.no_grad():
            return eval(expression, names)


class _Given:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def _sane(t: torch.Tensor) -> bool:
    if t.is_floating_point():
        return t.dtype == DTYPE and bool(t.isfinite().all()) and float(t.abs().max()) < 1e4
    return t.dtype in (torch.bool, torch.int64)


def recipe(seed: int) -> Recipe:
    """The recipe of a seed: a model that runs, whose gradients are finite and of a sane size."""
    for attempt in range(50):
        found = _attempt(random.Random(f"{seed}/{attempt}"), seed)
        if found is not None and _trains(found):
            return found
    raise RuntimeError(f"no recipe for seed {seed}: the statements in fuzz.operations never fit together")


def _attempt(rng: random.Random, seed: int) -> Recipe | None:
    from fuzz.operations import drawn_statement

    batch = rng.choice((4, 4, 5, 6, 8))
    inputs = _inputs(rng, batch)
    scene = Scene(rng, seed, batch, {x.name: x.drawn(seed) for x in inputs})
    layer, repeats, at = Body((), ()), 0, -1
    count = rng.choice((2, 3, 4, 5, 6, 8, 10, 12))
    if rng.random() < 0.35:
        at, repeats = rng.randrange(count), rng.choice((2, 2, 3))
    for number in range(count):
        if number == at:
            layer = _layered(scene)
        for _ in range(6):
            expression = drawn_statement(scene)
            if expression is not None and scene.add(expression):
                break
    repeats = repeats if layer.result else 0
    loss = _loss(scene)
    if loss is None:
        return None
    outputs = _outputs(scene, loss)
    given = tuple(scene.given)
    return Recipe(seed, inputs, Body(given, tuple(scene.statements)), layer, repeats, loss, outputs)


def _inputs(rng: random.Random, batch: int) -> tuple[Spec, ...]:
    shapes = [
        (batch, rng.choice((4, 6, 8))),
        (batch, rng.choice((2, 4, 6)), rng.choice((4, 8))),
        (batch, rng.choice((2, 3, 4)), rng.choice((4, 6)), rng.choice((4, 6))),
    ]
    wanted = rng.random() < 0.25
    found = [Spec("x0", rng.choice(shapes), rng.choice(("real", "real", "unit")), batch=True, grad=wanted)]
    for number in range(rng.choice((0, 1, 1, 2))):
        kind = rng.choice(("real", "ints", "ints", "bool"))
        shape = rng.choice((found[0].shape, found[0].shape[:2], (batch,)))
        top = rng.choice((3, 5, 7))
        found.append(Spec(f"x{number + 1}", shape, kind, top, batch=True, grad=wanted and kind == "real"))
    return tuple(found)


def _layered(scene: Scene) -> Body:
    """Append layers to a scene: the body of one of them."""
    from fuzz.operations import drawn_statement

    try:
        name = scene.wide(2)
    except Unfit:
        return Body((), ())
    inner = Scene(scene.rng, scene.seed + 1, scene.batch, {"h": scene.values[name]}, inside=True)
    for _ in range(scene.rng.choice((2, 3, 4))):
        for _ in range(6):
            expression = drawn_statement(inner)
            if expression is not None and inner.add(expression):
                break
    shape = inner.shape("h")
    same = [
        n for n, t in inner.values.items() if n.startswith("v") and t.shape == shape and t.is_floating_point()
    ]
    made = [n for n, t in inner.values.items() if n.startswith("v") and t.is_floating_point()]
    if not made:
        return Body((), ())
    last = same[-1] if same else f"torch.tanh({made[-1]}).mean()"
    if not inner.add(
        scene.any(f"h + torch.tanh({last})", f"torch.tanh({last}) * h", f"0.5 * h + 0.3 * torch.sin({last})")
    ):
        return Body((), ())
    body = Body(tuple(inner.given), tuple(inner.statements), inner.statements[-1].outs[0])
    # what the layers give is tried later, with the whole model: here it only needs a shape
    out = f"v{scene.count}"
    scene.statements.append(Statement((out,), f"run(self.layers, {name})"))
    scene.values[out] = torch.tanh(scene.values[name])
    return body


def _loss(scene: Scene) -> str | None:
    """Append the statements of a loss; the name of its scalar."""
    reals = [n for n, t in scene.values.items() if n.startswith("v") and t.is_floating_point()]
    if not reals:
        return None
    used = {u for s in scene.statements for u in s.uses}
    ends = [n for n in reals if n not in used] or reals
    chosen = scene.rng.sample(ends, min(len(ends), scene.rng.choice((1, 2, 3, 4))))
    if scene.maybe(0.2):
        chosen = [*dict.fromkeys([*chosen, scene.rng.choice(reals)])]
    terms = [_term(scene, name) for name in chosen]
    return scene.statements[-1].outs[0] if scene.add(" + ".join(terms)) else None


def _term(scene: Scene, name: str) -> str:
    shape = scene.shape(name)
    labels = [
        n for n, t in scene.values.items() if t.dtype == torch.int64 and t.shape == shape[:-1] and shape
    ]
    labels = [
        n for n in labels if n.startswith("x") and int(scene.values[n].max()) < shape[-1] and shape[-1] > 7
    ]
    if labels:
        rows = f"{name}.reshape(-1, {shape[-1]})"
        return f"F.cross_entropy({rows}, {scene.rng.choice(labels)}.reshape(-1))"
    return scene.any(
        f"{name}.pow(2).mean()",
        f"torch.tanh({name}).mean()",
        f"({name} * {name}.detach().cos()).mean()",
        f"F.softplus({name}).mean()",
        f"{name}.mean().sin()",
        f"0.1 * {name}.sum()",
    )


def _outputs(scene: Scene, loss: str) -> tuple[str, ...]:
    """Further results of the model: the capture differentiates them too if there are real scalars besides."""
    if not scene.maybe(0.4):
        return ()
    names = [n for n, t in scene.values.items() if n.startswith("v") and n != loss]
    return tuple(scene.rng.sample(names, min(len(names), scene.rng.choice((1, 2)))))


def _trains(made: Recipe) -> bool:
    """Whether forward and backward run and give finite numbers, on each of two batches."""
    for piece in range(2):
        model = made.module()
        batch = {x.name: x.drawn(made.seed + piece) for x in made.inputs if piece == 0 or x.batch}
        batch |= {x.name: x.drawn(made.seed) for x in made.inputs if x.name not in batch}
        try:
            out = model(**batch)
            if not out["loss"].requires_grad:
                return False
            out["loss"].backward()
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        numbers = [t for t in pytree.tree_leaves(out) if t.is_floating_point()]
        if not grads or not all(bool(t.isfinite().all()) for t in (*grads, *numbers)):
            return False
        if max(float(t.abs().max()) for t in grads) > 1e4 or max(float(t.abs().max()) for t in grads) < 1e-6:
            return False
    return True
