"""``autoshard validate``: measured steps of published training against what is predicted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cluster.cluster import Cluster
    from autoshard.validate.ranking import Ranking
    from autoshard.validate.rows import Run, Unsupported
    from autoshard.validate.score import Scored, ScoreSummary

RowsArgument = Annotated[
    Path, typer.Argument(metavar="ROWS.JSON", help="a list of measured runs", show_default=False)
]
StudyOption = Annotated[
    list[str] | None, typer.Option("--study", metavar="NAME", help="only this study; may be repeated")
]
MachineOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME|FILE", help="cost model of all runs [default: their own]"),
]
FitOption = Annotated[bool, typer.Option("--fit", help="fit figures of devices and links to the runs")]
#: notes of a kind that are shown with all their runs
_SHOWN = 3


def validate_command(
    rows: RowsArgument,
    study: StudyOption = None,
    cluster: MachineOption = None,
    fit: FitOption = False,
    out: opt.MaybeOut = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Rebuild measured runs as programs and compare their simulated steps with what was measured.

    With --fit, the figures of devices and links are fitted to the runs, each study is predicted by figures
    that were fitted to the others, and cluster files are written.
    """
    with reporting(debug):
        if (out is not None) != fit:
            raise UsageError(
                "--fit and --out go together", hint="--fit -o DIR writes the cluster files to DIR"
            )
        from autoshard.cluster import load_cluster
        from autoshard.simulate.step import estimate_step
        from autoshard.validate.ranking import alternatives_of, ranking
        from autoshard.validate.rebuild import rebuilt
        from autoshard.validate.rows import Run, Unsupported, read_rows
        from autoshard.validate.score import scored

        say = Progress()
        machine = None if cluster is None else load_cluster(cluster)
        given = read_rows(rows, study or ())
        order = {row.id: number for number, row in enumerate(given)}
        runs_by_id = {row.id: row for row in given if isinstance(row, Run)}
        unsupported = [row for row in given if isinstance(row, Unsupported)]
        if fit:
            assert out is not None
            _calibrate(given, say, machine, out, json)
            return
        scores: list[Scored] = []
        for result in rebuilt([row for row in given if isinstance(row, Run)], say, machine):
            if isinstance(result, Unsupported):
                unsupported.append(result)
                continue
            step = estimate_step(result.program, result.cluster, behaviour=result.behaviour)
            scores.append(scored(result, step.seconds, step.fullest.peak))
        scores.sort(key=lambda row: order[row.id])
        unsupported.sort(key=lambda row: order[row.id])
        plans = ranking(scores, [alternatives_of(runs_by_id[row.id]) for row in scores])
        if json:
            print_json(document(scores, unsupported, plans))
        else:
            _print(scores, unsupported, plans)


def _calibrate(
    given: Sequence[Run | Unsupported], say: Progress, machine: Cluster | None, out: Path, json: bool
) -> None:
    """Fit, print the errors of every study, write the files."""
    from autoshard.cluster.write import write_all
    from autoshard.validate.fit import fit
    from autoshard.validate.fit_files import cluster_files, errors_by_study
    from autoshard.validate.rebuild import Rebuilt, rebuilt
    from autoshard.validate.rows import Run

    timed = [row for row in given if isinstance(row, Run) and row.seconds is not None and not row.oom]
    runs = [r for r in rebuilt(timed, say, machine) if isinstance(r, Rebuilt)]
    fitted = fit(runs, say)
    errors = errors_by_study(runs, fitted)
    files = cluster_files(runs, fitted, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {out}", why=error.strerror or str(error)) from error
    write_all(files)
    if json:
        print_json(
            {
                "command": "validate --fit",
                "figures": asdict(fitted.figures),
                "studies": {name: asdict(one) for name, one in errors.items()},
                "written": [str(path) for path in files],
            }
        )
        return
    rows = table("study", "runs", "fitted to all", "held out", "worst", right=(1, 2, 3, 4))
    for name, one in errors.items():
        rows.add_row(
            name, str(one.rows), _plain(one.fitted), _plain(one.held_out), _plain(one.held_out_worst)
        )
    print_table(rows)
    for path in files:
        stdout().print(f"written {path}", markup=False)


def document(scores: Sequence[Scored], unsupported: Sequence[Unsupported], plans: Ranking) -> dict[str, Any]:
    """What ``--json`` prints beside the schema."""
    from autoshard.validate.score import by_study, summary

    overall = asdict(summary(scores))
    overall.pop("rank_correlation")  # steps of different studies are far apart, whatever is predicted
    return {
        "overall": overall,
        "ranking": asdict(plans),
        "studies": {name: asdict(one) for name, one in by_study(scores).items()},
        "rows": [
            {
                "id": row.id,
                "measured_s": row.measured_s,
                "predicted_s": row.predicted_s,
                "pct_error": row.pct_error,
                "measured_gib": row.measured_gib,
                "predicted_gib": row.predicted_gib,
                "oom": row.oom,
                "predicted_oom": row.predicted_oom,
                "notes": list(row.notes),
            }
            for row in scores
        ],
        "unsupported": [{"id": row.id, "reason": row.reason} for row in unsupported],
    }


def _print(scores: Sequence[Scored], unsupported: Sequence[Unsupported], plans: Ranking) -> None:
    from autoshard.ir.units import seconds_text
    from autoshard.validate.score import by_study, summary

    if scores:
        rows = table(
            *("run", "measured", "predicted", "error", "memory, GiB", "predicted", "error"),
            right=(1, 2, 3, 4, 5, 6),
        )
        for row in scores:
            rows.add_row(
                row.id,
                _measured(row),
                seconds_text(row.predicted_s),
                _signed(row.pct_error),
                "" if row.measured_gib is None else f"{row.measured_gib:.1f}",
                f"{row.predicted_gib:.1f}" + (" OOM" if row.predicted_oom else ""),
                _signed(row.memory_pct_error),
            )
        print_table(rows)
        stdout().print()
        print_table(_studies({**by_study(scores), "all": summary(scores)}))
        if plans.groups:
            stdout().print(
                f"\nplan selection: the fastest plan, or one within 3 %, is selected in {plans.picked} of "
                f"{plans.groups} groups; the selected one is {plans.mean_regret_pct:.1f} % slower than the "
                f"fastest on average, {plans.worst_regret_pct:.1f} % at most",
                highlight=False,
            )
    _notes("assumed", [(row.id, note) for row in scores for note in row.notes])
    _notes("not compared", [(row.id, row.reason) for row in unsupported])


def _studies(summaries: dict[str, ScoreSummary]) -> Any:
    study_table = table(
        *("study", "runs", "mean error", "worst", "rank correlation", "memory error", "OOM predicted"),
        right=(1, 2, 3, 4, 5, 6),
    )
    for name, one in summaries.items():
        ran_out = one.oom_predicted + one.oom_missed
        study_table.add_row(
            name or "(no study)",
            str(one.rows),
            _plain(one.mean_abs_pct_error),
            _plain(one.worst_abs_pct_error),
            "" if one.rank_correlation is None or name == "all" else f"{one.rank_correlation:.3f}",
            _plain(one.memory_mean_abs_pct_error),
            f"{one.oom_predicted} of {ran_out}" if ran_out else "",
        )
    return study_table


def _notes(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Runs by what is said of them."""
    runs_by_note: dict[str, list[str]] = {}
    for name, text in pairs:
        runs_by_note.setdefault(text, []).append(name)
    if runs_by_note:
        stdout().print(f"\n{title}", markup=False)
    for text, names in runs_by_note.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        stdout().print(f"  {text}: {', '.join(names[:_SHOWN])}{more}", markup=False)


def _measured(row: Scored) -> str:
    from autoshard.ir.units import seconds_text

    if row.oom:
        return "out of memory"
    return "" if row.measured_s is None else seconds_text(row.measured_s)


def _signed(pct: float | None) -> str:
    return "" if pct is None else f"{pct:+.1f}%"


def _plain(pct: float | None) -> str:
    return "" if pct is None else f"{pct:.1f}%"
