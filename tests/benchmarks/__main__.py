"""``python -m benchmarks [NAME ...]``, or ``published PATH``, ``same PATH``, ``sweep``, ``agree``,
``peers``, ``tools PATH``.

Names: planning, steps, estimates, quality, schedules, pipelines, cuts, frontier, rings, saving, rivals,
max-lengths, context, experts, muon, audit, overhead.
Runs benchmarks and prints their tables; without a name, planning, steps and estimates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from autoshard.errors import AutoshardError

CONSOLE, PROGRESS = Console(width=150), Console(stderr=True)


def planning() -> None:
    """Big models planned from cold, and how depth and width count."""
    from benchmarks.cases import Case
    from benchmarks.planning import PlanningRow, measure, median_of
    from benchmarks.planning_table import print_planning, print_scaling

    def told(case: Case, run: Callable[[Case], PlanningRow]) -> PlanningRow:
        PROGRESS.print(f"planning {case.name} on {case.devices:,} GPUs", highlight=False)
        return run(case)

    print_planning(CONSOLE, partial(told, run=median_of))
    print_scaling(CONSOLE, partial(told, run=measure))


def steps() -> None:
    """Step time of emitted programs against torch by hand: 4 gloo processes, one thread each."""
    from benchmarks.steps import measured, messages, print_messages, print_steps

    print_steps(CONSOLE, measured())
    print_messages(CONSOLE, messages())


def context() -> None:
    """Step time of one long sequence over four gloo processes, beside Ulysses by hand."""
    from benchmarks.steps import measured, print_steps

    print_steps(CONSOLE, measured("context_worker"), "Llama, 2 layers, hidden 256, cp=4")


def muon() -> None:
    """Steps of Muon on shards beside torch's."""
    from benchmarks.muon import print_muon
    from benchmarks.steps import measured

    print_muon(CONSOLE, measured("muon_worker"))


def overhead() -> None:
    """What a step takes beside its ops; a minute."""
    from benchmarks.overhead import print_overhead

    print_overhead(CONSOLE)


def audit() -> None:
    """Faulty parallel programs: how many `autoshard.audit` names."""
    from benchmarks.audit import print_audit

    print_audit(CONSOLE)


def experts() -> None:
    """Step time of a mixture of experts over four gloo processes, beside FSDP2 and transformers' own."""
    from benchmarks.steps import measured, print_steps

    what = "Mixtral, 4 layers, hidden 256, 16 experts of 512, two for each token"
    print_steps(CONSOLE, measured("experts_worker"), what)


def estimates() -> None:
    """Predicted steps of small programs against measured ones: 4 gloo processes, one thread each; minutes."""
    from benchmarks.estimates import measured_rows
    from benchmarks.estimates_table import print_estimates

    print_estimates(CONSOLE, measured_rows())


def quality() -> None:
    """Small cases against trying everything; some minutes."""
    from benchmarks.quality import SMALL, quality_of
    from benchmarks.quality_table import print_quality

    print_quality(CONSOLE, (q for case in SMALL for q in quality_of(case)))


def schedules() -> None:
    """Bubbles and memory of pipeline schedules, simulated; seconds."""
    from benchmarks.schedules_table import print_schedules, rows

    print_schedules(CONSOLE, rows())


def pipelines() -> None:
    """Steps of pipelines against torch.distributed.pipelining: 4 gloo processes; some minutes."""
    from benchmarks.pipelines import measured
    from benchmarks.pipelines_table import print_pipelines

    print_pipelines(CONSOLE, measured())


def cuts() -> None:
    """What planned cuts and interleaving gain: simulated, and one case on 4 gloo processes; minutes."""
    from benchmarks.cuts import heads, interleaved_rows
    from benchmarks.cuts_measured import measured
    from benchmarks.cuts_table import print_cuts

    print_cuts(CONSOLE, heads(), measured(), list(interleaved_rows()))


def frontier() -> None:
    """Partitions of parameters over slow networks, against two papers; simulated, a minute."""
    from benchmarks.frontier import rows_of_dgx2, rows_of_frontier
    from benchmarks.frontier_table import print_dgx2, print_frontier

    def say(text: str) -> None:
        PROGRESS.print(text, highlight=False)

    print_frontier(CONSOLE, list(rows_of_frontier(say)))
    print_dgx2(CONSOLE, list(rows_of_dgx2(say)))


def max_lengths() -> None:
    """The longest sequences that fit by recipes of ALST, accounted for, against published ones; seconds."""
    from benchmarks.max_lengths import rows
    from benchmarks.max_lengths_table import print_lengths

    print_lengths(CONSOLE, list(rows()))


def rings() -> None:
    """Products beside their messages in chunks, and apart; simulated, a minute."""
    from benchmarks.rings import rows
    from benchmarks.rings_table import print_rings

    print_rings(CONSOLE, list(rows(lambda text: PROGRESS.print(text, highlight=False))))


def saving() -> None:
    """How long checkpoints keep training from going on: 4 gloo processes; minutes."""
    from benchmarks.saving import measured, print_saving

    print_saving(CONSOLE, measured())


def published(args: Sequence[str]) -> None:
    """Published plans against ours; some minutes."""
    parser = argparse.ArgumentParser("python -m benchmarks published")
    parser.add_argument("path", type=Path, help="measurements, a JSON list of objects")
    parser.add_argument("--study", default="", help="only the runs of this study")
    parser.add_argument(
        "--programs", type=int, metavar="K", help="make programs of every K-th, and simulate them"
    )
    given = parser.parse_args(args)
    from benchmarks.published import Comparison, compare
    from benchmarks.published_programs import Programs, simulate
    from benchmarks.published_rows import Skipped, read_rows
    from benchmarks.published_table import print_comparisons, print_programs

    def say(text: str) -> None:
        PROGRESS.print(text, markup=False, highlight=False)

    rows, skipped = read_rows(given.path, given.study)
    if given.programs is not None:
        if given.programs < 1:
            parser.error("--programs takes 1 for all rows, or more to leave some out")
        chosen = sorted(rows, key=lambda r: (r.study, r.id))[:: given.programs]
        pairs = list(simulate(chosen, say))
        without = [s for s in pairs if isinstance(s, Skipped)]
        print_programs(CONSOLE, [p for p in pairs if isinstance(p, Programs)], [*skipped, *without])
        return
    found = list(compare(rows, say))
    unpriced = [s for s in found if isinstance(s, Skipped)]
    print_comparisons(CONSOLE, [c for c in found if isinstance(c, Comparison)], [*skipped, *unpriced])


def same(args: Sequence[str]) -> None:
    """Plans of this checkout and of another one, for random real cases; SystemExit 1 if one is worse."""
    parser = argparse.ArgumentParser("python -m benchmarks same")
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(args)
    from benchmarks.same_plans import compare
    from benchmarks.sweep import case_of

    worse = 0
    for pair in compare((case_of(given.seed, n) for n in range(given.cases)), given.before.resolve()):
        CONSOLE.print(str(pair), markup=False, highlight=False, soft_wrap=True)
        worse += pair.kind == "worse"
    CONSOLE.print(f"{given.cases} cases, {worse} worse", highlight=False)
    if worse:
        raise SystemExit(1)


def sweep(args: Sequence[str]) -> None:
    """Random cases of real models on real machines: each is planned, or refused with a reason.

    Raises SystemExit with code 1 if any crashed or was over the limit.
    """
    parser = argparse.ArgumentParser("python -m benchmarks sweep")
    parser.add_argument("--cases", type=int, default=200, help="how many [default: 200]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [default: 0]")
    parser.add_argument("--case", type=int, metavar="K", help="case K alone")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin at case K [default: 0]")
    parser.add_argument("--limit", type=float, default=60.0, help="processor seconds of a case [default: 60]")
    parser.add_argument(
        "--plain", action="store_true", help="without options beside the cluster and the batch"
    )
    given = parser.parse_args(args)
    if given.cases < 1:
        parser.error("--cases takes 1 or more")
    from benchmarks.sweep import case_of, closing_line, sweep, with_options

    numbers = range(given.first, given.first + given.cases) if given.case is None else [given.case]
    cases = (case_of(given.seed, k) for k in numbers)
    drawn = cases if given.plain else (with_options(given.seed, case) for case in cases)
    rows = []
    for row in sweep(drawn, given.limit):
        print(row, flush=True)
        rows.append(row)
    text, good = closing_line(rows)
    print(text)
    if not good:
        raise SystemExit(1)


def agree(args: Sequence[str]) -> None:
    """Free plans against what experts try by hand, all simulated; half a minute a case."""
    parser = argparse.ArgumentParser("python -m benchmarks agree")
    parser.add_argument("--cases", type=int, default=40, help="how many [default: 40]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [default: 0]")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="begin at case K [default: 0]")
    given = parser.parse_args(args)
    from benchmarks.agree import agree_case, rows_of
    from benchmarks.agree_table import print_agreement, row_text

    numbers = range(given.first, given.first + given.cases)
    rows = []
    for row in rows_of(agree_case(given.seed, k) for k in numbers):
        PROGRESS.print(row_text(row), markup=False, highlight=False, soft_wrap=True)
        rows.append(row)
    print_agreement(CONSOLE, rows)


def peers(args: Sequence[str]) -> None:
    """Everyday training scripts under autoshard and its peers on 4 gloo processes; a quarter of an hour."""
    from benchmarks.peers import main

    def say(text: str) -> None:
        PROGRESS.print(text, markup=False, highlight=False, soft_wrap=True)

    print(main(args, say))


def tools(args: Sequence[str]) -> None:
    """Published recipes of other tools beside the best of their spaces, by our prices; minutes."""
    parser = argparse.ArgumentParser("python -m benchmarks tools")
    parser.add_argument("path", type=Path, help="measurements, a JSON list of objects")
    parser.add_argument("--study", action="append", default=[], help="only this study; may be repeated")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th work [default: 1]")
    given = parser.parse_args(args)
    from autoshard.validate.rows import Run, read_rows
    from benchmarks.tools import PublishedRow, closing_line, published_against_best

    runs = [row for row in read_rows(given.path, given.study) if isinstance(row, Run)]
    rows = []
    for row in published_against_best(runs, given.every):
        CONSOLE.print(str(row), markup=False, highlight=False, soft_wrap=True)
        rows += [row] if isinstance(row, PublishedRow) else []
    CONSOLE.print(closing_line(rows), highlight=False)


def rivals() -> None:
    """The best configurations of other tools beside our plans; some minutes."""
    from benchmarks.rivals import rows

    for row in rows(lambda text: PROGRESS.print(text, highlight=False)):
        CONSOLE.print(str(row), markup=False, highlight=False, soft_wrap=True)


BENCHMARKS = {
    "planning": planning,
    "steps": steps,
    "estimates": estimates,
    "quality": quality,
    "schedules": schedules,
    "pipelines": pipelines,
    "cuts": cuts,
    "frontier": frontier,
    "rings": rings,
    "saving": saving,
    "rivals": rivals,
    "max-lengths": max_lengths,
    "context": context,
    "experts": experts,
    "muon": muon,
    "overhead": overhead,
    "audit": audit,
}
#: those that take arguments
ASKED = {"published": published, "same": same, "sweep": sweep, "agree": agree, "peers": peers, "tools": tools}
DEFAULT = ("planning", "steps", "estimates")


def main(args: Sequence[str]) -> None:
    """Raises SystemExit with a message for a name that is not known, or what a benchmark refuses."""
    try:
        if args and args[0] in ASKED:
            ASKED[args[0]](args[1:])
            return
        unknown = set(args) - set(BENCHMARKS)
        if unknown:
            known = ", ".join(
                [*BENCHMARKS, "published PATH", "same PATH", "sweep", "agree", "peers", "tools PATH"]
            )
            raise SystemExit(f"unknown benchmark {', '.join(sorted(unknown))}; there are {known}")
        for name in args or DEFAULT:
            BENCHMARKS[name]()
    except AutoshardError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main(sys.argv[1:])
