"""``autoshard check``: ops of a model without a sharding rule, all at once and before any search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, print_table, reporting, stdout, table

if TYPE_CHECKING:
    from autoshard.report.coverage import Coverage
    from autoshard.rules.registry import OpCalls

_MOST_PLACES = 3
_MOST_UNEVEN = 8
NO_RULE = 3


def check_command(
    target: opt.TargetArgument,
    batch: opt.BatchOption = None,
    seq: opt.SeqOption = None,
    rules: opt.RulesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Capture a model and list every op without a sharding rule; exit code 3 if there is one."""
    with reporting(debug):
        from autoshard.capture.capture import capture
        from autoshard.interop.targets import build, load_rules, options_of
        from autoshard.report.coverage import coverage
        from autoshard.runtime.arguments import split_inputs

        say = Progress()
        options = options_of(target, batch, seq)
        custom_rules = load_rules(rules)
        say(f"building {target}")
        built = build(target, batch=options.get("batch"), seq=options.get("seq"))
        for note in built.notes:
            say.note(note)
        say("capturing")
        args, kwargs = split_inputs(built.inputs)
        report = coverage(capture(built.model, args, kwargs), custom_rules)
        if json:
            print_json({"command": "check", "target": target, "options": options, **report.as_json()})
        else:
            _print(report)
        if report.missing:
            raise typer.Exit(NO_RULE)


def _print(report: Coverage) -> None:
    console = stdout()
    console.print(f"captured  {report.calls} calls of {report.kinds} ops, {report.segments} segments")
    if report.missing:
        number = len(report.missing)
        console.print(f"[bold red]no rule[/]   for {number} op{'s' * (number > 1)}")
    else:
        console.print("rules     every op has one")
    _print_ops("no rule", report.missing)
    _print_ops("runs replicated", report.replicated)
    if report.uneven:
        console.print()
        uneven = table("uneven", "size", "shape")
        for row in report.uneven[:_MOST_UNEVEN]:
            uneven.add_row(row.name, str(row.size), "x".join(map(str, row.shape)))
        if len(report.uneven) > _MOST_UNEVEN:
            uneven.add_row(f"... {len(report.uneven) - _MOST_UNEVEN} more", "", "")
        print_table(uneven)
        console.print("an odd size can be sharded, but not evenly")
    if report.missing:
        console.print("\nadd rules (--rules FILE.py), or run these ops replicated (--replicate-unknown)")


def _print_ops(title: str, ops: tuple[OpCalls, ...]) -> None:
    if not ops:
        return
    stdout().print()
    op_table = table(title, "calls", "called at", "in", right=(1,))
    for row in ops:
        op_table.add_row(row.op, str(row.count), _some(row.sources), _some(row.modules))
    print_table(op_table)


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_PLACES
    return ", ".join(names[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
