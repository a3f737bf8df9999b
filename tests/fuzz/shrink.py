"""From a case that fails to a smaller one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter

import torch

from autoshard.errors import AutoshardError
from fuzz.case import Case, Outcome, analysed
from fuzz.recipe import Body, Recipe, namespace

#: seeds of plans tried on a smaller model: its decisions are others, so that the old seed says nothing
_PLANS = 6


def shrunk(case: Case, outcome: Outcome, seconds: float = 60.0) -> tuple[Case, Outcome]:
    """The smallest found in so many seconds; the case itself if nothing smaller fails alike."""
    deadline = perf_counter() + seconds
    best, found = case, outcome
    going = True
    while going and perf_counter() < deadline:
        going = False
        for candidate in _smaller(best):
            if perf_counter() > deadline:
                break
            failed = _fails(candidate, outcome.failure)
            if failed is not None:
                best, found = failed
                going = True
                break
    return best, found


def _fails(case: Case, failure: str) -> tuple[Case, Outcome] | None:
    """The case with a plan under which it fails so."""
    try:
        analysis = analysed(case.recipe)
    except (AutoshardError, RuntimeError, ValueError, IndexError, TypeError, NameError, AttributeError):
        return None
    for k in range(_PLANS):
        tried = replace(case, plan_seed=case.plan_seed + k)
        found = tried.run(analysis)
        if found.kind == "failed" and found.failure == failure:
            return tried, found
    return None


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them, the boldest first."""
    made = case.recipe
    tried: list[Recipe] = []
    if made.outputs:
        tried.append(replace(made, outputs=()))
        tried += [replace(made, outputs=tuple(o for o in made.outputs if o != name)) for name in made.outputs]
    tried.append(made.without_dead())
    tried += _shorter_losses(made)
    if made.repeats > 1:
        tried.append(replace(made, repeats=made.repeats - 1))
    tried += [replace(made, body=body) for body in _bypassed(made, made.body, _values(made))]
    if made.repeats:
        tried += [replace(made, layer=body) for body in _bypassed(made, made.layer, _layer_values(made))]
    seen = {made}
    for recipe in tried:
        small = recipe.without_dead() if recipe.loss else recipe
        if small not in seen:
            seen.add(small)
            yield replace(case, recipe=small)
    for mesh in _meshes(case.mesh):
        yield replace(case, mesh=mesh)


def _meshes(mesh: str) -> list[str]:
    axes = mesh.split(",")
    return [",".join(a for a in axes if a != axis) for axis in axes] if len(axes) > 1 else []


def _shorter_losses(made: Recipe) -> list[Recipe]:
    """The loss with one term less, or of another value altogether."""
    last = next(s for s in made.body.statements if made.loss in s.outs)
    before = made.body.statements[: made.body.statements.index(last)]
    terms = last.expression.split(" + ")
    shorter = [[t for t in terms if t != term] for term in terms] if len(terms) > 1 else []
    texts = [" + ".join(kept) for kept in shorter]
    texts += [f"{out}.pow(2).mean()" for s in before for out in s.outs]
    found = []
    for text in texts:
        statement = replace(last, expression=text)
        if text != last.expression:
            found.append(replace(made, body=replace(made.body, statements=(*before, statement))))
    return [r for r in found if len(r.without_dead().source()) < len(made.source())]


def _bypassed(made: Recipe, body: Body, values: dict[str, torch.Tensor]) -> Iterator[Body]:
    """A body in which an earlier value of the same kind is used in place of a later one."""
    names = list(values)
    for statement in reversed(body.statements):
        for out in statement.outs:
            if out not in values or out == made.loss:
                continue
            for other in names[: names.index(out)]:
                if other in statement.outs or not _alike(values[other], values[out]):
                    continue
                rest = tuple(s if out in s.outs else s.renamed(out, other) for s in body.statements)
                result = other if body.result == out else body.result
                yield replace(body, statements=rest, result=result)


def _alike(a: object, b: object) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and (a.shape, a.dtype) == (b.shape, b.dtype)
    )


def _values(made: Recipe) -> dict[str, torch.Tensor]:
    """What the statements of a model give."""
    model = made.module()
    return _run(made.body, {x.name: x.drawn(made.seed) for x in made.inputs}, model)


def _layer_values(made: Recipe) -> dict[str, torch.Tensor]:
    model = made.module()
    body = made.body
    at = next(k for k, s in enumerate(body.statements) if "self.layers" in s.expression)
    given = {x.name: x.drawn(made.seed) for x in made.inputs}
    known = _run(replace(body, statements=body.statements[:at]), given, model)
    name = next(u for u in body.statements[at].uses)
    return _run(made.layer, {"h": known[name]}, model.layers[0])  # type: ignore[index]


def _run(body: Body, given: dict[str, torch.Tensor], module: torch.nn.Module) -> dict[str, torch.Tensor]:
    values = dict(given)
    scope = namespace() | {"self": module}
    evaluate: Callable[..., object] = eval
    with torch.no_grad():
        for statement in body.statements:
            result = evaluate(statement.expression, {**scope, **values})
            outs = list(result) if isinstance(result, tuple | list) else [result]
            values.update(zip(statement.outs, outs, strict=True))  # type: ignore[arg-type]
    return values
