"""``autoshard simulate``: the predicted step of a program on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli import options as opt
from autoshard.cli.output import Progress, print_json, print_table, reporting, stdout, table
from autoshard.errors import UsageError

if TYPE_CHECKING:
    from autoshard.cluster.cluster import Cluster
    from autoshard.program.program import Program
    from autoshard.report.routing import RoutedStep
    from autoshard.report.simulation import Bill, Rates
    from autoshard.simulate.device_memory import DeviceMemory
    from autoshard.simulate.step import StepEstimate

TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="300B", help="also print steps and device-hours for so many tokens"),
]
PriceOption = Annotated[
    float | None,
    typer.Option("--price", min=0.0, metavar="2.50", help="of one device-hour, for the cost of --tokens"),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev"),
]
RoutingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--routing",
        metavar="round-robin|worst|zipf=1.2|FILE",
        help="how often experts are chosen, by a rule or JSON counts; may be repeated [default: evenly]",
    ),
]
MovesOption = Annotated[
    int | None,
    typer.Option("--move-experts", min=0, help="per layer, to place them by load [default: as many as help]"),
]
_SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def simulate_command(
    folder: opt.FolderArgument,
    cluster: opt.CostModelOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    perfetto: TraceOption = None,
    routing: RoutingOption = None,
    move_experts: MovesOption = None,
    json: opt.JsonOption = False,
    debug: opt.DebugOption = False,
) -> None:
    """Predict the step time of a program and its breakdown, MFU, tokens/s, cost, and memory."""
    with reporting(debug):
        from autoshard.cli.inspect import prices_of
        from autoshard.program.store import load_program
        from autoshard.report import simulation
        from autoshard.report.routing import routed_steps
        from autoshard.simulate.device_memory import device_memory
        from autoshard.simulate.peaks import Peaks
        from autoshard.simulate.step import simulated

        say = Progress(quiet=json)
        budget = None if tokens is None else tokens_of(tokens)
        if price is not None and budget is None:
            raise UsageError("--price needs --tokens", hint="for instance --tokens 300B --price 2.50")
        if move_experts is not None and not routing:
            raise UsageError("--move-experts needs --routing FILE", hint="counts say which experts are full")
        say(f"reading {folder}")
        program = load_program(folder, only_read=True)
        machine = prices_of(program.plan, cluster)
        say(f"simulating {program.full_mesh} on {machine.name}")
        estimate, prices = simulated(program, machine)
        device = device_memory(Peaks(prices))
        rate = simulation.rates(program, estimate)
        cost = None if budget is None else simulation.bill(rate, estimate, budget, price)
        routed = routed_steps(program, machine, estimate, routing, move_experts) if routing else []
        if perfetto is not None:
            _write_trace(perfetto, estimate, prices)
        if json:
            document = simulation.as_json(program, machine, estimate, rate, cost, device)
            written = {} if perfetto is None else {"perfetto": str(perfetto)}
            told = {"routing": [asdict(step) for step in routed]} if routed else {}
            print_json({"command": "simulate", "folder": str(folder), **document, **told, "written": written})
        else:
            _print(program, machine, estimate, rate, cost, device)
            if routed:
                _print_routed(routed, machine)


def tokens_of(text: str) -> float:
    """Tokens of ``300B``, ``1.5T``, ``2e12``; UsageError if it is no number above zero."""
    words = text.strip().lower().replace("_", "").replace(",", "")
    scale = _SCALES.get(words[-1:], 1.0)
    try:
        count = float(words[:-1] if words[-1:] in _SCALES else words) * scale
    except ValueError:
        count = 0.0
    if not 0 < count < 1e30:
        raise UsageError(f"--tokens {text} is not a number of tokens", hint="for instance 300B, 1.5T or 2e12")
    return count


def _write_trace(path: Path, estimate: StepEstimate, prices: object) -> None:
    from json import dumps

    from autoshard.cli.inspect import write_text
    from autoshard.report import gantt
    from autoshard.report.trace import op_events

    trace = gantt.perfetto(estimate.timeline)
    trace["traceEvents"] += op_events(estimate, prices)  # type: ignore[arg-type]
    write_text(path, dumps(trace) + "\n", "--perfetto")


def _print_routed(steps: Sequence[RoutedStep], cluster: Cluster) -> None:
    from autoshard.cluster import usable_memory
    from autoshard.ir.units import bytes_text, seconds_text

    stdout().print()
    rows = table("routing", "fullest rank", "step", "peak memory", "", right=(1, 2, 3))
    for step in steps:
        name = f"{step.name} ({step.moved} moved)" if step.order else step.name
        fits = "" if step.peak <= usable_memory(cluster.device) else "does not fit"
        rows.add_row(name, f"{step.load:.2f} x", seconds_text(step.seconds), bytes_text(step.peak), fits)
    print_table(rows)


def _print(
    program: Program,
    cluster: Cluster,
    estimate: StepEstimate,
    rate: Rates,
    cost: Bill | None,
    device: DeviceMemory | None,
) -> None:
    from autoshard.cluster import usable_memory
    from autoshard.ir.units import bytes_text, seconds_text
    from autoshard.report import simulation

    console = stdout()
    count = f"{program.microbatches} microbatch{'es' * (program.microbatches > 1)}"
    console.print(f"[bold]{program.full_mesh}[/]  {rate.devices} x {cluster.device.name}, {count}\n")
    breakdown = table("breakdown", "time", "share", right=(1, 2))
    for name, seconds in simulation.parts_of(estimate):
        breakdown.add_row(name, seconds_text(seconds), f"{100 * seconds / estimate.seconds:.1f} %")
    breakdown.add_row("[bold]step time[/]", f"[bold]{seconds_text(estimate.seconds)}[/]", "")
    print_table(breakdown)
    console.print(
        f"\nthroughput   {rate.per_second:,.0f} {rate.what}/s, "
        f"{rate.per_second / rate.devices:,.0f} {rate.what}/s per device, MFU {100 * estimate.mfu:.1f} %",
        markup=False,
    )
    if cost is not None:
        money = "" if cost.money is None else f", cost {cost.money:,.0f} (device-hours x --price)"
        console.print(
            f"training     {cost.tokens:.4g} tokens: {cost.steps:,} steps, {cost.days:,.1f} days, "
            f"{cost.hours:,.0f} device-hours{money}",
            markup=False,
        )
    row = estimate.fullest
    usable = usable_memory(cluster.device)
    word = "fits" if row.peak <= usable else "[bold red]does not fit[/]"
    console.print(
        f"peak memory  {bytes_text(row.peak)} of {bytes_text(usable)} on pipeline rank {row.rank}: {word}"
    )
    if device is not None:
        console.print(f"on device    {simulation.device_text(device)}", markup=False)
    console.print()
    resident = table("at the peak", "size", right=(1,))
    for name, nbytes in simulation.memory_of(estimate):
        resident.add_row(name, bytes_text(nbytes))
    for name, nbytes in simulation.host_of(estimate):
        if nbytes:
            resident.add_row(f"{name} in host memory", bytes_text(nbytes))
    print_table(resident)
