"""What is decided already: placements by name, and axes one by one."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from families import BATCH, family
from lockstep_check import RTOL, compare_step
from planned import analysed

from autoshard.api import compile_analysed
from autoshard.cluster import Mesh, load_cluster
from autoshard.cluster.assign import assign_ranks
from autoshard.cluster.links import Links
from autoshard.errors import UsageError
from autoshard.ir.flow import Place
from autoshard.ir.placement import R, Shard
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.search.plan.plan import Plan
from autoshard.search.problem.pins import Pin
from autoshard.search.select.request import SearchRequest
from autoshard.search.select.tactics import parse_tactics

CLUSTER = "cpu-gloo"
MESH = "dp=2,tp=2"
Q = "model.layers.*.self_attn.q_proj.weight"
GATE = "model.layers.*.mlp.gate_proj"


@functools.cache
def _made(pins: tuple[str, ...] = (), tactics: str = "", name: str = "llama") -> Planned:
    mesh = Mesh.parse(MESH)
    ask = SearchRequest(
        pins=tuple(map(Pin.parse, pins)), tactics=parse_tactics(tactics, mesh) if tactics else ()
    )
    return plan_analysed(analysed(name), [mesh], load_cluster(CLUSTER), request=ask)


def _param(plan: Plan, target: str) -> Place:
    groups = analysed("llama").flow.classes
    return next(
        key for key, g in groups.items() if any(p.target == target for p in g.ports) and key in plan.params
    )


def _equals_eager(made: Planned) -> None:
    errors = compare_step(compile_analysed(made), *family("llama").make())
    assert "loss" in errors and len(errors) > 10
    assert {k: e for k, e in errors.items() if e > RTOL} == {}


# -- pins --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [f"{Q}=tp:S(1)", "*.norm=tp:R,dp:S(0)", "input_ids=dp:S(0)", "w=tp:S(0,outer=8),dp:R", "w=tp:P"]
)
def test_a_pin_is_its_text(text: str) -> None:
    assert str(Pin.parse(text)) == text
    assert Pin.parse(f" {text.replace('=', ' = ', 1).replace(':', ' : ')} ") == Pin.parse(text)


@pytest.mark.parametrize(
    "text", ["", "a", "=tp:R", "a=", "a=tp", "a=:R", "a=tp:", "a=tp:S(", "a=tp:R,", "a=tp:X"]
)
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a pin"):
        Pin.parse(text)


def test_a_parameter_is_pinned() -> None:
    free, made = _made(), _made((f"{Q}=tp:S(1)",))
    key = _param(made.plan, Q.replace("*", "0"))
    assert free.plan.params[key].stored[1] == free.plan.params[key].use[1] == Shard(0)
    assert made.plan.params[key].stored[1] == made.plan.params[key].use[1] == Shard(1)
    assert made.plan.optimality.seconds > free.plan.optimality.seconds
    _equals_eager(made)


def test_a_module_is_pinned() -> None:
    """Its output has the placement, in both layers."""
    free, made = _made(), _made((f"{GATE}=tp:S(2)",))
    made_of = {
        (name, number): node
        for name, graph in analysed("llama").folded.segments.items()
        for number, node in enumerate(graph.nodes)
        if node.origin.fqn == GATE.replace("*", "0") and not node.backward
    }
    last = max(made_of)
    assert made_of[last].types[0].shape == (BATCH, 12, 88)
    assert free.plan.nodes[last].outputs[0][1] != Shard(2)
    assert made.plan.nodes[last].outputs[0][1] == Shard(2)
    _equals_eager(made)


def test_an_input_is_pinned() -> None:
    made = _made(("input_ids=dp:S(0)",))
    assert made.plan.optimality.seconds == _made().plan.optimality.seconds
    with pytest.raises(UsageError, match="'input_ids=dp:S\\(1\\)' is infeasible") as refused:
        _made(("input_ids=dp:S(1)",))
    assert "feasible layouts: dp:S(0) tp:R\n" in str(refused.value)


def test_a_number_in_a_name_is_pinned() -> None:
    pin = Pin.parse("model.layers.#.*.weight=tp:S(0)")
    assert pin.matches("model.layers.12.q_proj.weight") and not pin.matches("model.layers.a.q_proj.weight")
    assert not pin.matches("model.layers.#.q_proj.weight") and str(pin) == "model.layers.#.*.weight=tp:S(0)"
    numbered, starred = (_made((glob + "=tp:S(0)",)) for glob in (Q.replace("*", "#"), Q))
    assert numbered.plan.params == starred.plan.params


def test_a_part_of_a_dim_is_pinned() -> None:
    """What a refusal says is possible can be given as it stands."""
    made = _made((f"{Q}=tp:S(0,outer=2)",))
    strategy = made.plan.params[_param(made.plan, Q.replace("*", "1"))]
    assert str(strategy.stored[1]) == str(strategy.use[1]) == "S(0,outer=2)"
    _equals_eager(made)


def test_pins_hold_together() -> None:
    made = _made((f"{GATE}=tp:S(2)", "lm_head.weight=tp:S(0)"))
    assert made.plan.params[_param(made.plan, "lm_head.weight")].stored == (R, Shard(0))
    assert made.plan.optimality.seconds >= max(
        _made((pin,)).plan.optimality.seconds for pin in (f"{GATE}=tp:S(2)", "lm_head.weight=tp:S(0)")
    )


@pytest.mark.parametrize(
    ("pins", "what", "hint"),
    [
        ((f"{Q}=tp:S(7)",), "is infeasible", "S\\(1\\)"),
        (("model.layers.*.self_attn.q_porj.weight=tp:R",), "matches no tensor", "self_attn.q_proj.weight"),
        (("model.layers.0.mlp.up_proj.weight=tp:R",), "but not model.layers.1.mlp.up_proj.weight", "use \\*"),
        (("lm_head.weight=sp:S(0)",), "no axis 'sp'", "dp, tp"),
        (("lm_head.weight=tp:S(0)", "lm_head.*=tp:R"), "contradict each other", "drop one"),
    ],
)
def test_impossible_pins_are_refused(pins: tuple[str, ...], what: str, hint: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        _made(pins)
    assert refused.match(hint)


def test_a_contradiction_names_the_pins_that_make_it() -> None:
    """And none beside them."""
    pins = ("input_ids=dp:S(0)", "lm_head.weight=tp:S(0)", f"{GATE}=tp:S(2)", "lm_head.*=tp:R")
    with pytest.raises(UsageError) as refused:
        _made(pins)
    assert refused.value.what == f"the pins '{pins[1]}' and '{pins[3]}' contradict each other"


# -- tactics -----------------------------------------------------------------------------------------------


def test_tactics_are_applied_in_order() -> None:
    text = "dp on batch; pin lm_head.weight=tp:S(0); auto on tp"
    made = _made((), text)
    assert made.solution is not None
    stages = made.solution.stages
    assert [s.tactic for s in stages] == [part.strip() for part in text.split(";")]
    assert [s.mesh for s in stages] == ["dp=2,tp=1", "dp=2,tp=1", "dp=2,tp=2"]
    assert stages[0].step == stages[1].step and stages[1].held.total > stages[2].held.total > 0
    assert stages[2].step == made.solution.placements.step
    assert made.plan.params[_param(made.plan, "lm_head.weight")].stored == (R, Shard(0))
    _equals_eager(made)


def test_later_tactics_keep_what_was_decided() -> None:
    """What is decided on dp alone is found again once tp is decided, too."""
    one = plan_analysed(analysed("llama"), [Mesh.parse("dp=2,tp=1")], load_cluster(CLUSTER)).plan
    both = _made((), "dp on batch; auto on tp").plan
    for key, strategy in one.params.items():
        assert (both.params[key].stored[0], both.params[key].use[0]) == (strategy.stored[0], strategy.use[0])
    for key, state in one.nodes.items():
        before = [layout and layout[0] for layout in (*state.inputs, *state.outputs)]
        after = both.nodes[key]
        assert [layout and layout[0] for layout in (*after.inputs, *after.outputs)] == before, key


def test_a_tactic_may_use_an_axis_for_something_else() -> None:
    """dp stores parameters split if it is told to."""
    made = _made((), "dp on parameters; auto on tp")
    strategies = made.plan.params.values()
    assert any(isinstance(strategy.stored[0], Shard) for strategy in strategies)
    assert all(strategy.stored[0] == R for strategy in _made().plan.params.values())
    _equals_eager(made)


def test_pins_hold_beside_tactics() -> None:
    free, made = _made((), "dp on batch; auto on tp"), _made((f"{Q}=tp:S(1)",), "dp on batch; auto on tp")
    key = _param(made.plan, Q.replace("*", "0"))
    assert free.plan.params[key].stored[1] == Shard(0)
    assert made.plan.params[key].stored == made.plan.params[key].use == (R, Shard(1))
    assert made.solution is not None and free.solution is not None
    # before tp is in play there is nothing to hold
    assert made.solution.stages[0] == free.solution.stages[0]
    assert made.plan.optimality.seconds > free.plan.optimality.seconds
    _equals_eager(made)


def test_a_pin_on_two_axes_holds_from_the_first_on() -> None:
    """Else the first tactic would decide against it, and could not take that back."""
    pin, text = "lm_head.weight=dp:S(1),tp:S(0)", "dp on parameters; auto on tp"
    free, made = _made((), text), _made((pin,), text)
    key = _param(made.plan, "lm_head.weight")
    assert free.plan.params[key].stored != (Shard(1), Shard(0))
    assert made.plan.params[key].stored == (Shard(1), Shard(0))
    _equals_eager(made)


@pytest.mark.parametrize(
    ("pin", "what"), [(f"{Q}=tp:S(7)", "is infeasible"), ("lm_head.weight=sp:S(0)", "no axis 'sp'")]
)
def test_impossible_pins_are_refused_beside_tactics(pin: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        _made((pin,), "dp on batch; auto on tp")


def test_tactics_use_the_measured_order_of_ranks() -> None:
    """Four devices in two pairs with fast links inside, which are not neighbours by number."""
    fast, slow = 1e11, 1e8
    pairs = [[fast if a % 2 == b % 2 else slow for b in range(4)] for a in range(4)]
    bandwidth = np.array(pairs) * (1 - np.eye(4))
    machine = replace(load_cluster(CLUSTER), devices=4, links=Links(bandwidth))
    mesh = Mesh.parse(MESH)
    ask = SearchRequest(tactics=parse_tactics("dp on batch; auto on tp", mesh))
    made = plan_analysed(analysed("llama"), [mesh], machine, request=ask)
    order = assign_ranks(mesh, machine.links)
    assert made.solution is not None and made.plan.order == order.devices != (0, 1, 2, 3)
    one, both = made.solution.stages
    assert (one.mesh, both.mesh) == ("dp=2,tp=1", "dp=2,tp=2") and both.step == made.solution.placements.step
    # on devices 0 and 1 in turn, the last stage has other prices
    plain = plan_analysed(analysed("llama"), [mesh], replace(machine, links=None), request=ask)
    assert not plain.plan.order and plain.plan.optimality.seconds != made.plan.optimality.seconds


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sp on batch; auto", "no axis 'sp'"),
        ("auto on sp; auto", "no axis 'sp'"),
        ("dp on batch; auto on dp; auto on tp", "two tactics use the axis 'dp'"),
        ("dp on batch", "no tactic uses the axis 'tp'"),
        ("; ;", "no tactic uses the axis 'dp'"),
        ("dp on bath; auto", "did you mean 'batch'"),
        ("dp; auto", "'dp' is not a tactic"),
        ("dp on ; auto", "is not a tactic"),
        ("pin lm_head; auto", "is not a pin"),
    ],
)
def test_what_is_no_tactic_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_tactics(text, Mesh.parse(MESH))


def test_auto_takes_the_axes_that_are_left() -> None:
    mesh = Mesh.parse("dp=2,fsdp=2,tp=2")
    assert [t.axis for t in parse_tactics("fsdp on parameters; auto", mesh)] == ["fsdp", "dp", "tp"]
    assert [t.text for t in parse_tactics("auto", mesh)] == ["auto on dp", "auto on fsdp", "auto on tp"]
