"""What is solved, and which solution is made a program first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest
from planned import analysed

from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import InfeasibleError
from autoshard.options import PlanOptions
from autoshard.planner.candidates import candidate_meshes
from autoshard.planner.planning import plan_analysed
from autoshard.search.bound.candidate_queue import CandidateQueue
from autoshard.search.bound.estimate import BoundInputs, Estimated
from autoshard.search.bound.global_lower_bound import GlobalLowerBound
from autoshard.search.problem.problem import experts_of
from autoshard.search.reasons.explain import explain
from autoshard.search.select.branch_and_bound import BranchAndBound
from autoshard.search.select.choose import choose
from autoshard.search.select.refine import CandidateSolver
from autoshard.search.select.request import WORK, CandidateSolution, SearchRequest
from autoshard.search.solve.configuration import Configuration
from autoshard.search.solve.formulate import ShardingProblem
from autoshard.search.solve.pipeline_model import Pipe
from autoshard.search.solve.problem_cache import ProblemCache
from autoshard.search.solve.step_config import StepConfig

BATCH = 8


class Programs:
    """Solutions made programs, as a search asks for it. slow: how much slower one is with its stages cut."""

    def __init__(self, fits: Callable[[Configuration], bool], slow: float = 1.0) -> None:
        self.fits, self.slow = fits, slow
        self.made: list[tuple[Configuration, float, float]] = []
        self.cut: list[Configuration] = []

    def seconds(self, found: CandidateSolution) -> float:
        self.cut.append(found.configuration)
        return self.slow * found.placements.seconds

    def fit(
        self, found: CandidateSolution, limit: float = inf, spent: Callable[[], bool] = bool
    ) -> CandidateSolution:
        where = found.configuration
        seconds = found.placements.seconds * (1.0 if where.pipe.ranks == 1 else self.slow)
        self.made.append((where, seconds, limit))
        if not self.fits(where):
            raise InfeasibleError(f"{where.name} does not fit")
        return found

    def waits(self, found: CandidateSolution) -> float:
        return 0.0

    def measured(self, found: CandidateSolution) -> float | None:
        return None


def chosen(judge: Programs, work: int = WORK) -> CandidateSolution:
    machine = load_cluster("h100-dgx")
    meshes = candidate_meshes(machine, 4, 4, BATCH, PlanOptions())
    return choose(
        analysed("gpt2").model, meshes, machine, SearchRequest(batch=BATCH, work=work), evaluator=judge
    )


@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_what_does_not_fit_makes_room_for_others(slow: float) -> None:
    """Configurations that were left out for others are solved once those turn out not to fit."""
    first = chosen(Programs(lambda where: True, slow)).configuration.mesh
    for mesh in ("dp=4", "dp=2,fsdp=2", "dp=2,tp=2", "tp=4"):
        if mesh != str(first):
            judge = Programs(lambda where, only=mesh: where.name == only, slow)
            assert chosen(judge).configuration.name == mesh


def test_an_axis_of_experts_is_tried_and_taken_where_that_is_faster() -> None:
    """Beside all other meshes, and never to a plan's disadvantage."""
    machine, model = load_cluster("h100-dgx"), analysed("mixtral").model
    meshes = [
        candidate_meshes(machine, 8, 2, BATCH, PlanOptions(), experts) for experts in (0, experts_of(model))
    ]
    added = {(s.ranks, str(s.mesh)) for s in set(meshes[1]) - set(meshes[0])}
    assert added == {(1, "fsdp=4,ep=2"), (1, "fsdp=2,ep=4"), (2, "fsdp=2,ep=2")}
    without, with_ = (choose(model, given, machine, SearchRequest(batch=BATCH)) for given in meshes)
    assert with_.placements.seconds <= without.placements.seconds
    tried = {with_.configuration.name, *(r.name.partition(" ")[0] for r in with_.rejected)}
    assert tried & {"fsdp=4,ep=2", "fsdp=2,ep=4"}
    only = choose(model, [s for s in meshes[1] if "ep" in s.mesh.names], machine, SearchRequest(batch=BATCH))
    assert only.configuration.name in tried


def test_nothing_fits() -> None:
    judge = Programs(lambda where: False)
    with pytest.raises(InfeasibleError, match="does not fit"):
        chosen(judge)
    assert len({where for where, _, _ in judge.made}) == len(judge.made) > 3


class Stopped(Programs):
    """The user stops the search as something is made a program, or a pipeline is cut; at: after so many."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(lambda where: True, 0.9)
        self.what, self.at = what, at

    def _count(self, what: str) -> None:
        if self.what == what:
            self.at -= 1
            if self.at < 0:
                raise KeyboardInterrupt

    def seconds(self, found: CandidateSolution) -> float:
        self._count("cut")
        return super().seconds(found)

    def fit(
        self, found: CandidateSolution, limit: float = inf, spent: Callable[[], bool] = bool
    ) -> CandidateSolution:
        self._count("fit")
        return super().fit(found, limit)


@pytest.mark.parametrize(("what", "at"), [("cut", 0), ("fit", 0), ("fit", 1), ("cut", 1)])
def test_what_is_stopped_gives_the_best_so_far(what: str, at: int) -> None:
    """Of those that are known to fit, if there are any."""
    judge = Stopped(what, at)
    found = chosen(judge)
    assert found.interrupted == (judge.at < 0)
    fitting = {where for where, _, _ in judge.made if judge.fits(where)}
    assert not fitting or found.configuration in fitting


@pytest.mark.parametrize("slow", [0.01, 0.5, 100.0])
def test_only_what_may_be_the_fastest_becomes_a_program(slow: float) -> None:
    """Pipelines that are slow once they are cut are not made programs before something without one was."""
    judge = Programs(lambda where: True, slow)
    found = chosen(judge)
    assert all(seconds < limit for _, seconds, limit in judge.made)
    kinds = [where.pipe.ranks > 1 for where, _, _ in judge.made]
    assert kinds[-1] == (found.configuration.pipe.ranks > 1) == (slow < 1)
    if slow > 1:
        assert not any(kinds)
        # where one is so slow, its like are not even solved
        assert len(judge.cut) == 1


class Failing(CandidateSolver):
    """Nothing fits."""

    def __init__(self) -> None:
        self.tried: list[Configuration] = []
        self.evaluator = None

    def _fit(self, bnb: BranchAndBound, expected: float) -> bool:
        return False

    def _solve(self, bnb: BranchAndBound, estimated: Estimated) -> None:
        self.tried.append(estimated.configuration)
        bnb.fail(estimated.configuration)


def test_what_does_not_fit_with_the_smallest_microbatch_is_not_tried_with_others() -> None:
    where = [
        Configuration(Mesh.parse(mesh), size, 64 // size)
        for mesh in ("fsdp=4", "dp=2,tp=2")
        for size in (4, 8, 16, 32, 64)
    ]
    unsure = [Estimated(c, cast(StepConfig, None), inf, 0.0, floor=1 / c.batch) for c in where]
    solver = Failing()
    solver._run_unsure(BranchAndBound(), unsure)
    assert [(c.name, c.batch) for c in solver.tried] == [
        ("dp=2,tp=2", 64),
        ("dp=2,tp=2", 4),
        ("fsdp=4", 64),
        ("fsdp=4", 4),
    ]


# -- what one solution says of others ------------------------------------------------------------------------


def _solved(where: Configuration, estimated: float, seconds: float, choices: int = 100) -> BranchAndBound:
    """A race in which one was solved and is a program."""
    made = BranchAndBound()
    formulated = SimpleNamespace(problem=SimpleNamespace(choices=choices))
    found = cast(
        CandidateSolution,
        SimpleNamespace(
            configuration=where, placements=SimpleNamespace(seconds=seconds), formulated=formulated
        ),
    )
    made.enter(where)
    made.solve(Estimated(where, cast(StepConfig, None), estimated, 0.0), found, seconds)
    assert made.next(inf) == (found, seconds)
    made.finish(found, seconds)
    return made


def _estimated(
    mesh: str, seconds: float, pipe: Pipe | None = None, *, hopeless: bool = False, choices: int = 100
) -> Estimated:
    where = Configuration(Mesh.parse(mesh), 8, 1, pipe or Pipe())
    return Estimated(where, cast(StepConfig, None), seconds, 0.0, hopeless, choices)


def test_an_estimate_that_was_wrong_rules_out_its_like_alone() -> None:
    """What a tensor axis costs beyond the estimate says nothing of meshes without one, however much work was
    done before."""
    for choices in (100, 10**6):
        race = _solved(Configuration(Mesh.parse("fsdp=4,tp=2"), 8, 1, Pipe()), 1.0, 2.0, choices)
        assert not race.leaves_out(_estimated("fsdp=8", 1.5))
        assert race.leaves_out(_estimated("fsdp=2,tp=4", 1.5))
        assert race.leaves_out(_estimated("fsdp=8", 2.5))


def test_one_that_has_to_hold_less_says_little_of_others() -> None:
    """Once it fits as a program it may be far slower than was expected: what looked a little slower than it
    is solved after all."""
    where, other = Configuration(Mesh.parse("fsdp=4,tp=2"), 8, 1, Pipe()), _estimated("fsdp=2,tp=4", 1.02)
    race = _solved(where, 1.0, 1.0)
    assert race.leaves_out(other)
    formulated = SimpleNamespace(problem=SimpleNamespace(choices=100))
    less = SimpleNamespace(
        configuration=where, placements=SimpleNamespace(seconds=1.1), formulated=formulated
    )
    race.finish(cast(CandidateSolution, less), 1.1, 1.15)
    assert not race.leaves_out(other)


def test_what_splits_tensors_and_what_does_not_err_otherwise() -> None:
    """A program that takes longer than was evaluated says that of others that split tensors, as it does."""
    race, where = BranchAndBound(), Configuration(Mesh.parse("fsdp=4,tp=2"), 8, 1, Pipe())
    _finished(race, where, 1.0, 1.15)
    assert race.leaves_out(_estimated("fsdp=2,tp=4", 1.05)) and not race.leaves_out(
        _estimated("fsdp=8", 1.05)
    )
    assert race.leaves_out(_estimated("fsdp=8", 1.2))


def test_what_divides_the_data_ranks_otherwise_errs_alike() -> None:
    """Where nothing else is divided; what a tensor axis leaves to store may be divided better or worse."""
    race = _solved(Configuration(Mesh.parse("fsdp=8"), 8, 1, Pipe()), 1.0, 1.02)
    assert race.leaves_out(_estimated("dp=2,fsdp=4", 1.005))
    assert not race.leaves_out(_estimated("dp=2,fsdp=4", 0.99))
    race = _solved(Configuration(Mesh.parse("fsdp=4,tp=2"), 8, 1, Pipe()), 1.0, 1.02)
    assert not race.leaves_out(_estimated("dp=2,fsdp=2,tp=2", 1.005))


def _finished(race: BranchAndBound, where: Configuration, seconds: float, measured: float | None) -> None:
    """One more was solved, and made a program where it is measured."""
    formulated = SimpleNamespace(problem=SimpleNamespace(choices=100))
    found = cast(
        CandidateSolution,
        SimpleNamespace(
            configuration=where, placements=SimpleNamespace(seconds=seconds), formulated=formulated
        ),
    )
    race.enter(where)
    race.solve(Estimated(where, cast(StepConfig, None), seconds, 0.0), found, seconds)
    assert race.next(inf) == (found, seconds)
    race.finish(found, seconds, measured)


def test_the_last_word_is_what_programs_take() -> None:
    """And what they take beyond what they were judged to is expected of others like them."""
    race = BranchAndBound()
    plain, piped = (Configuration(Mesh.parse("fsdp=8"), 8, 1, p) for p in (Pipe(), Pipe(2)))
    _finished(race, plain, 1.0, 1.2)
    assert race.reached == 1.2 and race.needed(plain) == pytest.approx(1.0)
    # of the other kind nothing is known yet: it may err as much, or be right
    assert race.needed(piped) == pytest.approx(1.2)
    _finished(race, piped, 0.99, 1.08)
    assert race.incumbent is not None and race.incumbent.configuration == piped
    assert race.needed(plain) == pytest.approx(1.08 / 1.2) and race.needed(piped) == pytest.approx(0.99)
    assert race.seconds == {plain: 1.0, piped: 0.99}
    # faster as it was judged, but not by what those like it took
    other = Configuration(Mesh.parse("dp=2,fsdp=4"), 8, 1, Pipe())
    _finished(race, other, 0.95, None)
    assert race.incumbent.configuration == piped


def test_a_little_faster_is_not_worth_any_work() -> None:
    where = Configuration(Mesh.parse("fsdp=4,tp=2"), 8, 1, Pipe())
    for large in (100, 10**6):
        assert not _solved(where, 1.0, 2.0).leaves_out(_estimated("fsdp=8", 1.9, choices=large))
    after_much = _solved(where, 1.0, 2.0, 10**6)
    assert after_much.leaves_out(_estimated("fsdp=8", 1.9, choices=10**6))
    # unless next to what was done already it takes a moment
    assert not after_much.leaves_out(_estimated("fsdp=8", 1.9, choices=10**5))


def test_what_seems_not_to_fit_is_solved_where_that_is_cheap() -> None:
    """An estimate without placements that fit may be wrong, unless parameters alone are too large."""
    where = Configuration(Mesh.parse("fsdp=8"), 8, 1, Pipe())
    race = _solved(where, 1.0, 1.0)
    assert not race.leaves_out(_estimated("dp=4,tp=2", inf))
    assert race.leaves_out(_estimated("dp=4,tp=2", inf, hopeless=True))
    assert race.leaves_out(_estimated("dp=4", inf, Pipe(2, "1f1b")))


def test_estimates_of_pipelines_and_of_others_are_compared_with_what_was_reached() -> None:
    """One without a pipeline came out slower than the estimate of another with one."""
    race = _solved(Configuration(Mesh.parse("fsdp=8"), 8, 1, Pipe()), 1.0, 2.0)
    assert not race.leaves_out(_estimated("fsdp=4", 1.9, Pipe(2, "1f1b")))
    assert race.leaves_out(_estimated("fsdp=4", 2.5, Pipe(2, "1f1b")))


def test_pipelines_that_only_divide_the_data_ranks_otherwise_are_left_out() -> None:
    where = Configuration(Mesh.parse("dp=2,fsdp=2"), 8, 1, Pipe(2, "1f1b"))
    race = _solved(where, 1.0, 1.0)
    assert race.leaves_out(_estimated("dp=4", 0.9, Pipe(2, "1f1b")))
    assert not race.leaves_out(_estimated("dp=2,tp=2", 0.9, Pipe(2, "1f1b")))


class _Told(CandidateSolver):
    """Solutions that take as long as estimated; notes in which order they were asked for."""

    def __init__(self, judge: Programs) -> None:
        poses = cast(ProblemCache, SimpleNamespace(work=0))
        super().__init__(poses, SearchRequest(), cast(StepConfig, None), lambda _: None, judge)
        self.order: list[str] = []

    def _formulated(self, where: Configuration) -> ShardingProblem:
        return cast(ShardingProblem, None)

    def _solved(self, estimated: Estimated, beat: float, *, at_once: bool) -> CandidateSolution:
        where = estimated.configuration
        self.order.append(str(where.mesh))
        placed = SimpleNamespace(seconds=estimated.seconds)
        formulated = SimpleNamespace(problem=SimpleNamespace(choices=100))
        return cast(
            CandidateSolution, SimpleNamespace(configuration=where, placements=placed, formulated=formulated)
        )


def test_what_waited_for_a_program_comes_before_what_is_slower() -> None:
    """Of two pipelines the second waits until the first is a program, which it only is made when the turn of
    a third comes: the second is still the next."""
    exact, pipe = _Told(Programs(lambda where: where.name != "pp=2,fsdp=4")), Pipe(2, "1f1b")
    meshes = {"fsdp=4": 1.0, "fsdp=2,tp=2": 1.01, "tp=4": 1.1}
    exact._run(
        BranchAndBound(),
        CandidateQueue(_estimated(mesh, at, pipe) for mesh, at in meshes.items()),
    )
    assert exact.order[:2] == ["fsdp=4", "fsdp=2,tp=2"]


def test_worth_is_what_is_reached_or_waits() -> None:
    """Of a pipeline, which is judged by other seconds than those of the search, a little more."""
    whole, piped = (
        Configuration(Mesh.parse("fsdp=8"), 8, 1, Pipe()),
        Configuration(Mesh.parse("pp=2,fsdp=4"), 8, 4, Pipe(2, "1f1b")),
    )
    race = BranchAndBound()
    assert race.worth(whole) == race.worth(piped) == inf
    race = _solved(whole, 1.0, 1.0)
    assert race.worth(whole) == 1.0
    assert 1.0 < race.worth(piped) < 1.1


class _Bounds:
    """A proof whose bounds get better; says how many were asked for. own: by its own problem."""

    def __init__(self, *bounds: float, own: float = 0.0) -> None:
        self.all, self.asked, self.own = bounds, 0, own

    def bounds(self) -> Iterator[float]:
        for bound in self.all:
            self.asked += 1
            yield bound

    def of(self, formulated: ShardingProblem) -> Iterator[float]:
        yield self.own


def test_what_is_proven_to_be_slower_is_not_solved() -> None:
    """As soon as a bound says so; what is not proven to be is solved, though its estimate is no better."""
    exact = _Told(Programs(lambda _: True))
    slow, open_ = _Bounds(0.9, 1.1, 5.0), _Bounds(0.9, 0.95)
    estimates = [
        _estimated("fsdp=8", 1.0),
        replace(_estimated("fsdp=4,tp=2", 1.001), proof=cast(BoundInputs, slow)),
        replace(_estimated("fsdp=2,tp=4", 1.002), proof=cast(BoundInputs, open_)),
    ]
    left = CandidateQueue(estimates)
    exact._run(BranchAndBound(), left)
    assert exact.order == ["fsdp=8", "fsdp=2,tp=4"]
    assert (slow.asked, open_.asked) == (2, 2)
    bounds = {str(e.configuration.mesh): e.bound for e in left}
    assert bounds["fsdp=4,tp=2"] == 1.1


def test_what_its_own_problem_proves_to_be_slower_is_not_solved() -> None:
    exact = _Told(Programs(lambda _: True))
    estimates = [
        _estimated("fsdp=8", 1.0),
        replace(_estimated("fsdp=4,tp=2", 1.001), proof=cast(BoundInputs, _Bounds(0.9, own=1.05))),
        replace(_estimated("fsdp=2,tp=4", 1.002), proof=cast(BoundInputs, _Bounds(0.9, own=0.95))),
    ]
    exact._run(BranchAndBound(), CandidateQueue(estimates))
    assert exact.order == ["fsdp=8", "fsdp=2,tp=4"]


# -- what none of them goes below ----------------------------------------------------------------------------


def _lowest(
    rows: dict[str, tuple[tuple[float, ...], float]], choices: int
) -> tuple[GlobalLowerBound, list[str]]:
    """Of configurations with these bounds and those by their own problems; who was asked for the latter."""
    asked: list[str] = []
    others = [
        replace(
            _estimated(mesh, bounds[0]),
            bound=bounds[0],
            choices=choices,
            proof=cast(BoundInputs, _Bounds(*bounds)),
        )
        for mesh, (bounds, _) in rows.items()
    ]

    def exactly(estimated: Estimated, enough: float) -> float:
        asked.append(str(estimated.configuration.mesh))
        return rows[asked[-1]][1]

    return GlobalLowerBound(others, exactly), asked


def test_the_lowest_is_looked_at_until_nothing_more_can_be_said() -> None:
    rows = {"tp=8": ((0.5, 0.8), 0.0), "fsdp=8": ((0.6, 0.81), 0.0), "dp=8": ((0.9,), 0.0)}
    lowest, asked = _lowest(rows, 1_000_000)
    assert lowest.raised(1.0) == 0.8
    assert not asked
    assert _lowest(rows, 1_000_000)[0].raised(0.7) == 0.7


def test_own_problems_are_looked_at_where_that_raises_the_bound() -> None:
    """And only there: not of many that are all about as low."""
    few = {"tp=8": ((0.5,), 0.97), "fsdp=8": ((0.52, 0.55), 0.96), "dp=8": ((0.9, 0.959), 0.0)}
    lowest, asked = _lowest(few, 1_000)
    assert lowest.raised(1.0) == 0.959
    assert asked == ["tp=8", "fsdp=8"]
    many = {f"dp={k}": ((0.5 + 0.0001 * k,), 0.97) for k in range(1, 20)}
    lowest, asked = _lowest(many, 1_000)
    assert lowest.raised(1.0) == 0.5001
    assert not asked


def test_what_interrupts_a_look_leaves_a_bound() -> None:
    rows = {"tp=8": ((0.5,), 0.9), "fsdp=8": ((0.95,), 0.0)}
    others = _lowest(rows, 1_000)[0]._others

    def stop(_: Estimated, enough: float) -> float:
        raise KeyboardInterrupt

    lowest = GlobalLowerBound(others, stop)
    with pytest.raises(KeyboardInterrupt):
        lowest.raised(1.0)
    assert lowest.seconds == 0.5


def test_a_pipeline_that_is_proven_to_be_slower_does_not_go_ahead() -> None:
    """Neither before what waits is a program, nor after that; nor do others that are estimated like it."""
    exact, pipe = _Told(Programs(lambda _: True)), Pipe(2, "1f1b")
    estimates = [
        _estimated("fsdp=8", 1.0),
        replace(_estimated("fsdp=4", 1.05, pipe), proof=cast(BoundInputs, _Bounds(1.02))),
        _estimated("fsdp=2,tp=2", 1.06, pipe),
    ]
    exact._run(BranchAndBound(), CandidateQueue(estimates))
    assert exact.order == ["fsdp=8"]


def test_a_search_that_did_its_work_takes_the_first_that_fits() -> None:
    whole, judge = chosen(Programs(lambda where: True)), Programs(lambda where: True)
    found = chosen(judge, work=0)
    assert found.spent and not whole.spent and len(judge.made) == 1
    assert found.bound <= whole.bound <= whole.placements.seconds <= found.placements.seconds
    assert not any(rejected.solved for rejected in found.rejected)
    told = [explain(s, load_cluster("h100-dgx"), "fingerprint").warnings for s in (found, whole)]
    assert "work limit" in told[0][0] and not told[1]
    only = chosen(Programs(lambda where: where.name == "tp=4"), work=0)
    assert only.spent and only.configuration.name == "tp=4"


def test_less_room_is_found_with_little_work_once_all_is_done() -> None:
    """The first solution that fits as a program is taken, where there are faster ones that need more room."""
    machine, analysis = load_cluster("h100-dgx"), analysed("gpt2")
    meshes = [Mesh.parse("fsdp=4")]
    peak = plan_analysed(analysis, meshes, machine, memory=2**40, request=SearchRequest(batch=2 * BATCH)).peak
    assert peak is not None
    memory = int(0.8 * peak.bytes)
    tight, quick = (
        plan_analysed(
            analysis, meshes, machine, memory=memory, request=SearchRequest(batch=2 * BATCH, work=work)
        )
        for work in (SearchRequest().work, 0)
    )
    assert tight.peak is not None and quick.peak is not None
    assert max(tight.peak.bytes, quick.peak.bytes) <= memory
    found = [p.solution for p in (tight, quick)]
    assert found[0] is not None and found[1] is not None
    assert found[1].bound <= found[0].placements.seconds <= found[1].placements.seconds
