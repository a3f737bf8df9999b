"""``autoshard explain``: the reason of a decision, and what an alternative costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, reporting, stdout
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cli.opened import Opened, Opener
    from autoshard.cli.why_not import Wanted
    from autoshard.cluster.cluster import Cluster
    from autoshard.cluster.mesh import Mesh
    from autoshard.report.explain import Explanation
    from autoshard.report.what_if import WhatIf

EitherFolder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="a folder that `autoshard plan` or `autoshard compile` wrote", show_default=False
    ),
]
NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="a parameter, an input, a module, or SEGMENT/VALUE; the end of a name is enough where only one "
        "has it; not needed for --why-not mesh=...",
        show_default=False,
    ),
]
WhyNotOption = Annotated[
    str | None,
    typer.Option(
        "--why-not",
        metavar="tp=Replicate",
        help="solve again with this forced: axis=Replicate, axis=Shard(0), or mesh=dp=8,tp=8",
    ),
]


def explain_command(
    folder: EitherFolder,
    name: NameArgument = None,
    why_not: WhyNotOption = None,
    cluster: opt.CostModelOption = None,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Say why a parameter, a module or a value is placed as it is, back to the model's own lines.

    With --why-not, also the step time with another placement, and which other decisions change.
    """
    with reporting(debug):
        from autoshard.cli.inspect import prices_of
        from autoshard.cli.opened import Opener
        from autoshard.cli.why_not import alternative_of, check_axes, whatif_json, whatif_lines
        from autoshard.cluster import Mesh
        from autoshard.report.explain import explain_name
        from autoshard.report.explain_text import explanation_lines

        if name is None and why_not is None:
            raise UsageError("nothing to explain", hint="give a name, or --why-not mesh=dp=8,tp=8")
        say = Progress(quiet=json)
        opener = Opener(rules, say)
        alternative = None if why_not is None else alternative_of(why_not, name)
        if alternative is not None and not isinstance(alternative, Mesh):
            # before anything that takes time
            check_axes(alternative, Mesh.parse(opener.plan_of(folder).mesh))
        opened = opener.open(folder)
        prices = prices_of(opened.program.plan, cluster)
        explanation = None if name is None else explain_name(opened.program, prices, name)
        answer = None if alternative is None else _answer(opener, opened, prices, explanation, alternative)
        if json:
            document: dict[str, Any] = {"command": "explain", "folder": str(folder), "version": 2}
            if explanation is not None:
                document["explanation"] = explanation.as_json()
            if answer is not None:
                document["why_not"] = whatif_json(answer)
            print_json(document)
            return
        console = stdout()
        lines = [] if explanation is None else list(explanation_lines(explanation))
        if answer is not None:
            lines += ["", *whatif_lines(answer, asks_all=opened.asks_all)]
        for line in lines:
            console.print(line, markup=False)


def _answer(
    opener: Opener,
    opened: Opened,
    prices: Cluster,
    explanation: Explanation | None,
    alternative: Wanted | Mesh,
) -> WhatIf:
    """Solve the question of the folder again, with the alternative."""
    from autoshard.cli.why_not import pin_for
    from autoshard.cluster import Mesh
    from autoshard.report.what_if import Solver

    request = opened.request
    planned = opened.planned or opener.planned(opened.plan, request, prices)
    solver = Solver(planned.analysis, opened.plan, prices, request.options, opener.say)
    if isinstance(alternative, Mesh):
        return solver.on_mesh(alternative)
    assert explanation is not None
    return solver.pinned(pin_for(explanation, alternative))
