"""Compiles the programs of one parallel model: the first, and those of further kinds of calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import nn

from autoshard.capture.garbage import collected_rarely
from autoshard.capture.python_state.captured_state import CapturedState, state_here
from autoshard.capture.python_state.model_key import NoKeyError, model_key
from autoshard.cluster import Cluster, Mesh
from autoshard.errors import UsageError
from autoshard.options import Differentiate, PassOptions, PlanOptions
from autoshard.planner.compiling import cluster_of, compile_analysed, options_on, request_of
from autoshard.planner.length_plans import LengthShare, most_frequent, plan_lengths, resized_inputs
from autoshard.planner.lowering import full_mesh, schedule_of
from autoshard.planner.planned import Planned
from autoshard.planner.resized import NotResizableError, resized
from autoshard.planner.source import Progress, Source
from autoshard.program.program import Program
from autoshard.rules.user import Rules, user_rules
from autoshard.runtime.checks.call_guard import Captured, Inputs
from autoshard.runtime.checks.recapture import captured_of, example_of
from autoshard.runtime.compile_once import CompiledOnce, CompilingRanks, compile_once
from autoshard.runtime.said import stages_said
from autoshard.search.plan.plan_json import plan_from_json


@dataclass(frozen=True)
class ModelCompiler:
    """Compiles on one of the ranks, for all of them: every method that compiles is collective.

    mesh: a mesh, or a cluster whose meshes are searched for the first plan. cluster: as for `autoshard.plan`.
    options: of every plan. progress: see `autoshard.plan`; of the rank that plans.
    """

    mesh: Mesh | Cluster
    cluster: str | os.PathLike[str] | Cluster | None
    options: PlanOptions
    passes: PassOptions
    rules: Rules
    ranks: CompilingRanks
    progress: Progress | None = None

    def first(
        self, model: nn.Module, inputs: Inputs, shares: Sequence[LengthShare] = ()
    ) -> tuple[Program, Captured, Planned | None]:
        """The first program of a model, what its capture left, and its plan, where it was planned here.
        shares: of lengths that are planned together; it is that of the most frequent one."""
        result = self._compiled(model, inputs, self.options, shares)
        program = _program_of(result)
        if shares:
            inputs = resized_inputs(inputs, most_frequent(shares).length)
        prices = self.mesh if isinstance(self.mesh, Cluster) else self.cluster
        plan = plan_from_json(program.plan)
        further = replace(self, mesh=full_mesh(Mesh.parse(plan.mesh), plan), cluster=prices)
        return program, further._captured(model, inputs, result, self.options), result.here

    def compiled(
        self,
        module: nn.Module,
        inputs: Inputs,
        differentiate: Differentiate,
        stored: Sequence[Program],
        pins: Sequence[str],
    ) -> tuple[Program, Captured]:
        """A program for other inputs: see `runtime.checks.call_guard.Compiling`."""
        options = replace(
            options_on(self.options, stored),
            differentiate="all" if self.options.differentiate == "all" else differentiate,
            pins=tuple(pins),
        )
        result = self._compiled(module, inputs, options)
        return _program_of(result), self._captured(module, inputs, result, options)

    def of_stored(self, program: Program, model: nn.Module) -> Captured | None:
        """What a capture of a stored program would leave; None where its inputs cannot be told."""
        inputs = example_of(program.signature)
        if inputs is None:
            return None
        captured = self._captured(model, inputs, CompiledOnce(program), self.options)
        return replace(captured, stored={**program.state.variables, **program.state.attributes})

    def _compiled(
        self,
        model: nn.Module,
        inputs: Inputs,
        options: PlanOptions,
        shares: Sequence[LengthShare] = (),
    ) -> CompiledOnce[Planned]:
        def compile_here() -> tuple[Program, Planned]:
            with stages_said(self.progress, here=self.ranks.first) as say, collected_rarely():
                request = request_of(model, self.mesh, self.cluster, options, progress=say)
                source = self._source(model, inputs, options.replicate_unknown, options)
                if shares:
                    planned = plan_lengths(request, source, shares).most_frequent.planned
                else:
                    planned = request.planned(source)
                return compile_analysed(planned, say, self.passes), planned

        return compile_once(compile_here, self._key(model, inputs, options, shares), self.ranks, self.rules)

    def _source(
        self, model: nn.Module, inputs: Inputs, replicate_unknown: bool, options: PlanOptions
    ) -> Source:
        source = Source.of_options(model, *inputs, options, self.rules)
        stored = {name: layout for name, layout, _ in options.stored}
        return replace(source, replicate_unknown=replicate_unknown, stored=stored)

    def _key(self, model: nn.Module, inputs: Inputs, *more: object) -> str:
        if self.options.replicate_unknown:
            return ""  # a text alone is not trusted to name ops that have no rule
        try:
            about = (self.mesh, self._machine(model), self.cluster is None, self.passes, *more)
            return model_key(model, inputs, *about, code=user_rules(self.rules))
        except NoKeyError:
            return ""

    def _machine(self, model: nn.Module) -> Cluster:
        return cluster_of(self.mesh, self.cluster, model)

    def _captured(
        self, model: nn.Module, inputs: Inputs, result: CompiledOnce[Planned], options: PlanOptions
    ) -> Captured:
        program = _program_of(result)
        # where one rank compiled for others, all compare calls with what they all know
        together = result.shared and bool(self.ranks.groups)

        @cache
        def planned_of(module: nn.Module) -> Planned:
            if result.here is not None:
                return result.here
            plan = plan_from_json(program.plan)
            tiled = replace(options, tile_rows=plan.tile_rows or None, expert_chunks=plan.expert_chunks)
            source = self._source(module, inputs, bool(plan.replicated), tiled)
            return Planned(plan, source.analysed(lambda _: None), self._machine(module), None, source)

        @cache
        def micro_of(module: nn.Module) -> Planned:
            return planned_of(module).of_microbatch(lambda _: None)

        return captured_of(
            _state_of(program, model, None if together else result.here),
            program.state.graph,
            inputs,
            options.differentiate,
            options.precision,
            self.compiled,
            partial(self._resized, program, micro_of),
            self.ranks if result.shared else CompilingRanks.alone(),
            program.signature.batched,
        )

    def _resized(
        self,
        program: Program,
        planned_of: Callable[[nn.Module], Planned],
        module: nn.Module,
        inputs: Inputs,
        microbatches: int,
    ) -> Program | None:
        """The program of the same plan for inputs of other sizes, None where it does not suit them.

        inputs: of one microbatch.
        """

        def compile_here() -> tuple[Program, None] | None:
            planned = planned_of(module)
            assert planned.source is not None
            source = replace(planned.source, model=module, args=inputs[0], kwargs=inputs[1])
            try:
                analysis = source.analysed(lambda _: None)
                plan = replace(resized(planned.plan, planned.analysis, analysis), microbatches=microbatches)
                schedule_of(plan)  # may not be for so many
            except (NotResizableError, UsageError):
                return None
            of_size = Planned(plan, analysis, planned.cluster, None, source)
            return compile_analysed(of_size, passes=self.passes), None

        key = self._key(module, inputs, "resized", program.plan, microbatches)
        return compile_once(compile_here, key, self.ranks, self.rules).program


def _program_of(result: CompiledOnce[Planned]) -> Program:
    assert result.program is not None
    return result.program


def _state_of(program: Program, model: nn.Module, planned: Planned | None) -> CapturedState:
    if planned is not None:
        state: CapturedState = planned.analysis.folded.joint.captured_state
        return state
    stored = program.state
    return state_here(model, stored.attributes, stored.grad_mode, stored.environment)
