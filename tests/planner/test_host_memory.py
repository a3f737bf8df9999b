"""What cannot be in host memory is refused before anything is searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest
from planned import analysed

from autoshard.cluster import Cluster, Mesh, load_cluster
from autoshard.errors import InfeasibleError
from autoshard.ir.offload import Offload
from autoshard.planner import host_memory
from autoshard.planner.analysis import Analysis
from autoshard.planner.memory_fit import MemoryFitter
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program
from autoshard.search.select.choose import choose
from autoshard.search.select.request import SearchRequest
from autoshard.search.solve.step_config import least_state
from autoshard.simulate.stage_costs import StagePrices


def test_states_that_no_host_holds_are_refused_at_once() -> None:
    machine = load_cluster("h100-dgx")
    host = machine.device.host
    assert host is not None
    small = replace(machine, device=replace(machine.device, host=replace(host, memory_bytes=10_000)))
    said: list[str] = []
    with pytest.raises(InfeasibleError, match="of host memory, a node has") as caught:
        plan_analysed(
            analysed("gpt2"),
            [Mesh.parse("fsdp=16")],
            small,
            memory=2**30,
            offload=Offload.parse("optimizer"),
            progress=said.append,
        )
    assert "16 ranks fill 2 nodes" in (caught.value.why or "") and not said


def _fitter(analysis: Analysis, machine: Cluster, budget: int, said: list[str]) -> MemoryFitter:
    return MemoryFitter(
        analysis,
        machine,
        SearchRequest(budget=budget),
        fixed=False,
        progress=said.append,
        offload=Offload.parse("activations"),
    )


def test_what_is_too_large_with_all_activations_away_speaks_for_what_stores_no_less() -> None:
    """Those like it are neither solved nor made programs, unless parameters may go over more ranks."""
    analysis, machine = analysed("gpt2"), load_cluster("h100-dgx")
    found = choose(analysis.model, [Mesh.parse("fsdp=4")], machine)
    state = least_state(found.formulated.problem.terms, found.placements.setting)
    said: list[str] = []
    alone = _fitter(analysis, machine, int(state) - 1, said)
    with pytest.raises(InfeasibleError, match="fits") as caught:
        alone.fit(found)
    assert "optimizer alone hold" in (caught.value.why or "") and not said
    assert alone.beyond(found.configuration, found.placements.setting) == inf
    budget = int(1.01 * state)
    fitter = _fitter(analysis, machine, budget, said)
    config, setting = found.configuration, found.placements.setting
    assert fitter.beyond(config, setting) == 0.0
    with pytest.raises(InfeasibleError) as first:
        fitter.fit(found)
    assert said and fitter.beyond(config, setting) == inf
    assert fitter.beyond(replace(config, mesh=Mesh.parse("dp=2,fsdp=2")), setting) == inf
    wider = replace(config, mesh=Mesh.parse("fsdp=8"), batch=2 * config.batch)
    assert fitter.beyond(wider, setting) == 0.0
    said.clear()
    with pytest.raises(InfeasibleError, match=r"programs like it hold|at its simulated peak") as again:
        fitter.fit(replace(found, placements=replace(found.placements)))
    assert not said and budget < again.value.smallest_bytes <= first.value.smallest_bytes


@pytest.mark.parametrize("bend", [0.5, 1.0, 3.0])
def test_few_programs_say_how_many_activations_have_to_be_in_host_memory(
    bend: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak falls from 100 bytes to 60, faster first or last, and to 50 where nothing is loaded ahead; 75
    are there, or less."""
    tried: list[float] = []

    def build(share: float, ahead: bool) -> Program:
        tried.append(share)
        made = SimpleNamespace(share=share, ahead=ahead, offload=Offload.parse("activations"))
        return cast(Program, made)

    def peaks(program: SimpleNamespace) -> SimpleNamespace:
        most = 100 - 40 * program.share**bend - 10 * (not program.ahead)
        return SimpleNamespace(prices=SimpleNamespace(program=program), fullest=(held, most))

    held = SimpleNamespace(activations=50)
    monkeypatch.setattr(host_memory, "Peaks", peaks)
    monkeypatch.setattr(host_memory, "check_host", lambda prices: None)
    prices_of = cast(Callable[[Program], StagePrices], lambda program: program)

    def least_for(budget: int) -> SimpleNamespace:
        peaks = host_memory.least_offload(build, prices_of, budget)
        return cast(SimpleNamespace, peaks.prices.program)

    share = least_for(75).share
    least = (25 / 40) ** (1 / bend)
    assert least <= share < least + 1 / 8 and len(tried) <= 5
    for budget, ahead in ((60, True), (55, False), (40, False)):
        found = least_for(budget)
        assert found.ahead == ahead and found.share > 0.9
