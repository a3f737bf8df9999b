"""A simulated step in words: one row per stage, what the time goes to, what the fullest rank holds."""

from __future__ import annotations

from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.ir.units import bytes_text, seconds_text
from autoshard.simulate.saved_for_backward import ResidentBytes
from autoshard.simulate.step import StepEstimate

#: columns of the table, and which of them are numbers
COLUMNS = ("stage", "rank", "layers", "forward", "backward", "in flight", "saved/microbatch", "peak of rank")
RIGHT = (0, 1, 3, 4, 5, 6, 7)


def stage_rows(estimate: StepEstimate) -> list[tuple[str, ...]]:
    """The cells of every stage; saved: bytes per microbatch in flight, peak: of the full rank."""
    return [
        (
            str(row.stage),
            str(row.rank),
            row.layers,
            seconds_text(row.forward),
            seconds_text(row.backward),
            str(row.in_flight),
            bytes_text(row.kept),
            bytes_text(estimate.ranks[row.rank].held.total),
        )
        for row in estimate.stages
    ]


def table_lines(estimate: StepEstimate) -> list[str]:
    """The table as plain text."""
    rows = [COLUMNS, *stage_rows(estimate)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.rjust(width) if k in RIGHT else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def step_text(estimate: StepEstimate) -> str:
    """What the step takes and what it is spent on."""
    spent, ranks = estimate.spent, estimate.timeline.ranks
    share = f" (idle {estimate.timeline.bubble:.1%})"
    mean = f", means over {ranks} pipeline ranks" if ranks > 1 else ""
    waits = f"exposed p2p {seconds_text(spent.p2p)} + bubble {seconds_text(spent.bubble)}{share} + "
    return (
        f"{seconds_text(estimate.seconds)}: compute {seconds_text(spent.compute)} + exposed "
        f"communication {seconds_text(spent.exposed)} + {waits if ranks > 1 else ''}optimizer "
        f"{seconds_text(spent.update)}{mean}; MFU {estimate.mfu:.1%}"
    )


def memory_text(estimate: StepEstimate, cluster: Cluster) -> str:
    """What the fullest rank holds at its peak."""
    row = estimate.fullest
    who = f"pipeline rank {row.rank} holds most: " if estimate.timeline.ranks > 1 else ""
    return f"{who}{held_text(row.held)} of {bytes_text(cluster.device.memory_bytes)}"


def held_text(resident: ResidentBytes) -> str:
    """A sum of bytes, with its terms."""
    return (
        f"parameters {bytes_text(resident.parameters)} + gradients {bytes_text(resident.gradients)} + "
        f"optimizer {bytes_text(resident.optimizer)} + "
        f"saved for backward {bytes_text(resident.activations)} = "
        f"{bytes_text(resident.total)}"
    )


def held_json(resident: ResidentBytes) -> dict[str, int]:
    """Bytes, by what they are for."""
    return {
        "parameters": int(resident.parameters),
        "gradients": int(resident.gradients),
        "optimizer": int(resident.optimizer),
        "saved_for_backward": int(resident.activations),
    }


def timeline_json(estimate: StepEstimate) -> dict[str, Any]:
    """The simulated step as a document; seconds of ``breakdown_seconds`` are means over the pipeline ranks.

    bubble: the share of the makespan in which a rank is idle, waiting for messages included.
    """
    timeline, spent, costs = estimate.timeline, estimate.spent, estimate.costs
    return {
        "schedule": timeline.name,
        "makespan_seconds": timeline.makespan,
        "bubble": timeline.bubble,
        "mfu": estimate.mfu,
        "model_flop": estimate.model_flop,
        "breakdown_seconds": {
            "compute": spent.compute,
            "exposed_communication": spent.exposed,
            "exposed_p2p": spent.p2p,
            "bubble": spent.bubble,
            "optimizer": spent.update,
        },
        "stages": [
            {
                "stage": row.stage,
                "rank": row.rank,
                "layers": row.layers,
                "forward_seconds": row.forward,
                "backward_seconds": row.backward,
                "backward_input_seconds": costs.backward_input[row.stage],
                "backward_weight_seconds": costs.backward_weight[row.stage],
                "in_flight": row.in_flight,
                "saved_bytes": int(row.kept),
            }
            for row in estimate.stages
        ],
        "send_forward_seconds": list(costs.send_forward),
        "send_backward_seconds": list(costs.send_backward),
        "ranks": [
            {
                "rank": row.rank,
                "stages": list(row.stages),
                "busy_seconds": row.busy,
                "idle_seconds": row.idle,
                "end_seconds": costs.update[row.rank],
                "peak_bytes": int(row.held.total),
                "resident_bytes": held_json(row.held),
            }
            for row in estimate.ranks
        ],
    }
