"""A plan folder or a program folder, whichever a command was given, and the model behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoshard.cli.output import Progress
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cli.folders import Request
    from autoshard.cluster.cluster import Cluster
    from autoshard.planner.planned import Planned
    from autoshard.program.program import Program
    from autoshard.search.plan.plan import Plan


@dataclass(frozen=True)
class Opened:
    """What a folder holds. request: what was asked for, so far as the folder says. asks_all: whether it says
    everything (a program folder does not name pins). planned: of a plan folder, whose model was captured."""

    folder: Path
    program: Program
    request: Request
    asks_all: bool
    planned: Planned | None = None

    @property
    def plan(self) -> Plan:
        from autoshard.search.plan.plan_json import plan_from_json

        return plan_from_json(self.program.plan)


class Opener:
    """Opens folders; the same model is captured once for several of them."""

    def __init__(self, rules: Path | None, say: Progress) -> None:
        self.rules, self.say = rules, say
        self._cache: dict[tuple[object, ...], Planned] = {}

    def plan_of(self, folder: Path) -> Plan:
        """The plan that a folder of either kind holds, and nothing else of it."""
        from autoshard.search.plan.plan_json import plan_from_json

        try:
            return plan_from_json((folder / "plan.json").read_text(encoding="utf-8"))
        except OSError:
            raise _neither(folder) from None

    def open(self, folder: Path) -> Opened:
        """UsageError if the folder is neither kind, VerificationError if it is damaged."""
        if (folder / "manifest.json").is_file():
            return self._program(folder)
        if (folder / "plan.json").is_file():
            return self._plan(folder)
        raise _neither(folder)

    def _program(self, folder: Path) -> Opened:
        from autoshard.cli.folders import Request
        from autoshard.options import PlanOptions
        from autoshard.program.store import load_program

        program = load_program(folder, only_read=True)
        options = {key: int(value) for key, value in program.options}
        return Opened(folder, program, Request(program.target, options, PlanOptions(), ""), False)

    def _plan(self, folder: Path) -> Opened:
        from autoshard.api import compile_analysed, with_options
        from autoshard.cli.folders import read_plan

        plan, request = read_plan(folder)
        planned = self.planned(plan, request)
        program = compile_analysed(planned, self.say)
        program = with_options(program, **{k: str(v) for k, v in request.inputs.items()})
        return Opened(folder, program, request, True, planned)

    def planned(self, plan: Plan, request: Request, cluster: Cluster | None = None) -> Planned:
        """A stored plan with its model, captured with the inputs that were asked for.

        Raises UsageError if the model cannot be found.
        """
        from autoshard.cluster import load_cluster
        from autoshard.interop.targets import build, load_rules
        from autoshard.planner.planned import Planned
        from autoshard.planner.source import Source, options_of
        from autoshard.runtime.arguments import split_inputs

        if not request.target:
            raise UsageError(
                "the folder does not say which model it is for",
                why="it was made from Python, not by `autoshard plan` or `autoshard compile`",
                hint="plan the model with `autoshard plan TARGET ... -o DIR`",
            )
        sizes = _sizes(plan, request)
        rules = self.rules or (Path(request.rules) if request.rules else None)
        key = (request.target, *sorted(sizes.items()), rules, options_of(plan))
        machine = cluster or load_cluster(plan.cluster)
        if key not in self._cache:
            custom_rules = load_rules(rules)
            self.say(f"building {request.target}")
            built = build(request.target, batch=sizes.get("batch"), seq=sizes.get("seq"))
            args, kwargs = split_inputs(built.inputs)
            source = Source.of_plan(built.model, args, kwargs, plan, custom_rules)
            self._cache[key] = Planned(plan, source.analysed(self.say), machine, None, source)
        return replace(self._cache[key], plan=plan, cluster=machine)


def _sizes(plan: Plan, request: Request) -> dict[str, int]:
    """What to capture a target with: one microbatch of the plan, which saves capturing it a second time.

    From a single sequence nothing can be scaled to more of them.
    """
    from autoshard.interop.targets import is_config

    sizes = dict(request.inputs)
    if is_config(request.target) and plan.batch > 1:
        sizes["batch"] = plan.batch
    return sizes


def _neither(folder: Path) -> UsageError:
    return UsageError(
        f"{folder} is neither a plan folder nor a program folder",
        hint="autoshard plan ... -o DIR, or autoshard compile ... -o DIR",
    )
