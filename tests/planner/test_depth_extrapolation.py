"""What programs without most of their equal layers say of the whole one is what it says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from math import inf

import pytest
import torch
from families import _gpt2, _llama, _tokens
from test_truncate_layers import _bart, _gemma2, _opt

import autoshard.planner.depth_extrapolation as deep
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.ir import Folded
from autoshard.passes.pipeline import LoweringOptions
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.depth_extrapolation import TruncatedRun, extrapolate_depth
from autoshard.planner.memory_fit import MemoryFitter
from autoshard.planner.planning import plan_analysed
from autoshard.search.plan.plan import Recompute
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.formulate import layer_calls
from autoshard.simulate.saved_for_backward import ResidentBytes

MODELS = {
    "llama": lambda: _llama(layers=14),
    "gpt2": lambda: _gpt2(layers=14),
    "bart": _bart,
    "gemma2": _gemma2,
    "opt": _opt,
}
Case = tuple[Folded, LoweringOptions, Callable[[Folded, LoweringOptions], TruncatedRun]]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where the whole program is looked at as fast."""
    monkeypatch.setattr(deep, "_is_worth_it", lambda whole, short: True)
    yield


@cache
def _analysed(name: str) -> Analysis:
    torch.manual_seed(0)
    return analyse(capture(MODELS[name](), (), _tokens(96)()))


def _case(
    name: str, mesh: str, cluster: str, again: str = "", share: float = 0.0, microbatches: int = 1
) -> Case:
    """A model as it is placed on a mesh, with some calls of every layer that run again."""
    analysis, machine = _analysed(name), load_cluster(cluster)
    planned = plan_analysed(
        analysis, [Mesh.parse(mesh)], machine, request=SearchRequest(batch=None), reasons=False
    )
    assert planned.solution is not None
    fitter = MemoryFitter(analysis, machine, SearchRequest(), fixed=False, progress=lambda _: None)
    how = fitter.lowering(planned.solution)[1]
    folded = planned.solution.formulated.model.folded
    chosen = {s: Recompute(again, int(share * c)) for s, c in layer_calls(folded).items()} if again else {}
    plan = replace(how.plan, recompute=chosen, microbatches=microbatches)
    return folded, replace(how, plan=plan), fitter._look(planned.solution)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mesh", "cluster"), [("dp=2,tp=2", "cpu-gloo"), ("fsdp=4,tp=2", "h100-dgx")])
def test_it_is_what_the_whole_program_says(name: str, mesh: str, cluster: str) -> None:
    known = 0
    for again, share, microbatches in [("", 0, 1), ("", 0, 3), ("full", 1, 1), ("selective", 0.3, 2)]:
        folded, how, look = _case(name, mesh, cluster, again, share, microbatches)
        found = extrapolate_depth(folded, how, look, inf)
        if found is None:
            continue
        known += 1
        whole = look(folded, how)
        assert found.bytes == pytest.approx(whole.bytes, rel=1e-9)
        assert found.step == pytest.approx(whole.step().seconds, rel=1e-3)
        for each in fields(ResidentBytes):
            wanted = getattr(whole.held, each.name)
            assert getattr(found.held, each.name) == pytest.approx(wanted, rel=1e-9, abs=1e-6 * whole.bytes)
    # two stacks, the second of which reads what the first makes, say too little of each other
    assert known >= 2 or name == "bart"


def test_seconds_are_those_of_what_fits() -> None:
    folded, how, look = _case("llama", "fsdp=4", "h100-dgx")
    bytes_ = look(folded, how).bytes
    tight, wide = (extrapolate_depth(folded, how, look, share * bytes_) for share in (0.9, 1.1))
    assert tight is not None and tight.step is None and tight.bytes > 0.9 * bytes_
    assert wide is not None and wide.step is not None


def test_what_may_peak_elsewhere_is_looked_at_whole() -> None:
    folded, how, look = _case("llama", "fsdp=4", "h100-dgx")
    assert extrapolate_depth(folded, how, look, inf) is not None

    def flat(folded: Folded, how: LoweringOptions) -> TruncatedRun:
        """The peak does not rise, while something below it does."""
        return replace(look(folded, how), bytes=1e12)

    assert extrapolate_depth(folded, how, flat, inf) is None


def test_seconds_without_a_steady_state_are_those_of_the_whole() -> None:
    folded, how, look = _case("llama", "fsdp=4", "h100-dgx")

    def slower(folded: Folded, how: LoweringOptions) -> TruncatedRun:
        seen = look(folded, how)
        return replace(seen, step=lambda: replace(seen.step(), seconds=seen.step().seconds ** 2))

    assert extrapolate_depth(folded, how, slower, inf) is None


def test_messages_that_come_to_hold_up_the_rest_are_those_of_the_whole() -> None:
    folded, how, look = _case("llama", "fsdp=4", "h100-dgx")

    def behind(folded: Folded, how: LoweringOptions) -> TruncatedRun:
        """Messages of a layer take longer than the layer, but others hide them in a short program."""
        seen = look(folded, how)
        step = seen.step()
        parts = tuple((seconds, 1.5 * seconds) for seconds, _ in step.parts)
        return replace(seen, step=lambda: replace(step, parts=parts))

    assert extrapolate_depth(folded, how, behind, inf) is None
