"""Programs of one plan for other sizes, and the template of them."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
from calls_worker import batch, build

import autoshard
from autoshard.api import compile_analysed
from autoshard.planner.planned import Planned
from autoshard.planner.resized import NotResizableError, resized
from autoshard.planner.source import Source
from autoshard.program.program import Program
from autoshard.program.template import NotAlikeError, Reciprocal, Size, template_of
from autoshard.program.text import program_text

#: (points, another size, mesh) of sizes that divide evenly over the ranks, and of lengths that do not
EVEN = (((8, 16), (8, 48), (12, 28), (24, 44)), (20, 36))
ODD = (((8, 11), (12, 19), (20, 7), (24, 31)), (16, 17))


@cache
def _planned(name: str, mesh: str) -> Planned:
    return autoshard.plan(build(name), mesh, example_inputs=batch(8, 16))


@cache
def _program(name: str, mesh: str, rows: int, length: int) -> Program:
    planned = _planned(name, mesh)
    assert planned.source is not None
    source = Source(planned.source.model, (), batch(rows, length))
    analysis = source.analysed(lambda _: None)
    plan = resized(planned.plan, planned.analysis, analysis)
    return compile_analysed(Planned(plan, analysis, planned.cluster, None, source))


@pytest.mark.parametrize(
    ("name", "mesh", "sizes"),
    [("Llama", "dp=2,tp=2", EVEN), ("Llama", "dp=2,tp=2", ODD), ("T5", "fsdp=4", ODD)],
)
def test_a_template_gives_the_program_that_is_compiled(name: str, mesh: str, sizes: object) -> None:
    points, other = sizes  # type: ignore[misc]
    template = template_of([_program(name, mesh, *point) for point in points])
    assert template.sizes_of({0: other, 1: other}) == other
    assert template.sizes_of({0: other, 1: (other[0], other[1] + 1)}) is None
    made, wanted = template.at(other), _program(name, mesh, *other)
    assert made.signature == wanted.signature
    assert made.lowered.values == wanted.lowered.values
    for key, segment in wanted.lowered.segments.items():
        found = {n.outs: (n.op, n.args, n.kwargs, n.types) for n in made.lowered.segments[key].graph.nodes}
        assert found == {n.outs: (n.op, n.args, n.kwargs, n.types) for n in segment.graph.nodes}


def test_a_template_prints_sizes_as_names() -> None:
    template = template_of([_program("Llama", "dp=2,tp=2", *point) for point in EVEN[0]])
    assert 'input_ids: "i64[B, S] dp:S(0) tp:R"' in program_text(template.program)


def test_programs_of_other_graphs_have_no_template() -> None:
    points = EVEN[0][:3]
    programs = [_program("Llama", "dp=2,tp=2", *point) for point in points]
    other = autoshard.compile(
        build("Llama").eval(), _planned("T5", "fsdp=4"), example_inputs=batch(8, 16)
    ).program
    with pytest.raises(NotAlikeError):
        template_of([*programs, other])


def test_a_plan_that_divides_nothing_there_is_no_plan() -> None:
    with pytest.raises(NotResizableError):
        _program("Llama", "dp=2,tp=2", 7, 11)


def test_an_odd_length_takes_the_decisions_of_an_even_one() -> None:
    # of which a causal attention may split pairs of rows
    even, odd = (_program("Llama", "dp=2,tp=2", 8, length).lowered.values for length in (16, 15))
    assert {name: x.layout for name, x in even.items()} == {name: x.layout for name, x in odd.items()}


def test_formulas() -> None:
    half = Size(Fraction(1, 2), (0, 1), 3)
    assert (half.at((4, 6)), str(half), str(Size(Fraction(2), (1,)))) == (15, "B*S/2+3", "2*S")
    with pytest.raises(NotAlikeError):
        half.at((3, 5))
    assert Reciprocal(2.0, (0,)).at((8,)) == 0.25
