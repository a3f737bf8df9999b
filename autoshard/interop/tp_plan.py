"""A plan as a ``tp_plan`` of transformers (5.x): JSON that maps module names to its tensor parallel styles.

The names of the styles are those that ``transformers.distributed.tensor_parallel`` registers. A user's
tp_plan is laid over the one a model brings along, so modules that stay whole are named as well.
"""

from __future__ import annotations

import json

from autoshard.errors import UsageError
from autoshard.interop.by_module import ByModule, Example, by_module, grouped, note_lines
from autoshard.interop.module_styles import Style
from autoshard.planner.analysis import Analysis
from autoshard.search.plan.plan import Plan

WHOLE = "replicate"


def tp_plan_text(plan: Plan, analysis: Analysis, example: Example | None) -> tuple[str, tuple[str, ...]]:
    """(JSON text, remarks on what of the plan is not in it).

    Raises UsageError if the plan divides no module over ``tp`` in a way that transformers knows.
    """
    result = by_module(plan, analysis, example, split_tables=False)
    remarks = [f"{', '.join(names)}: {reason}" for reason, names in note_lines(result)]
    if result.axis != "tp":
        raise UsageError(
            f"the plan for {result.mesh} has nothing that a tp_plan could say",
            why="; ".join(remarks) or "no axis divides modules",
            hint="a mesh with a tp axis, or --format torch",
        )
    others = [
        f"{n}={s}" for n, s in zip(result.mesh.names, result.mesh.sizes, strict=True) if n != "tp" and s > 1
    ]
    if others:
        remarks.append(f"axis {', '.join(others)}: a tp_plan is about tp alone; give these to the trainer")
    if plan.recompute or plan.microbatches > 1:
        remarks.append("recomputation and microbatches: a tp_plan cannot say them; give them to the trainer")
    return json.dumps(_entries(result), indent=2) + "\n", tuple(remarks)


def _entries(result: ByModule) -> dict[str, str]:
    """Pattern -> style, in the order of the model's parameters."""
    styles = {m: _style_name(result.styles[m]) if m in result.styles else WHOLE for m in result.modules}
    # parameters with names of their own may have entries of their own in the model's plan
    styles |= {p: WHOLE for p in result.params if p.rpartition(".")[2] not in ("weight", "bias")}
    by_style: dict[str, list[str]] = {}
    for name, style in styles.items():
        by_style.setdefault(style, []).append(name)
    patterns = {p: style for style, names in by_style.items() for p in grouped(names, styles)}
    single = [p for p in patterns if any(word.isdigit() for word in p.split("."))]
    if single:
        raise UsageError(
            "the plan treats repeated layers differently",
            where=", ".join(single[:4]),
            why="a tp_plan names all layers of a list at once",
            hint="--format torch names layers one by one",
        )
    return {p: s for p, s in patterns.items() if p}


def _style_name(style: Style) -> str:
    if style.kind == "columns":
        return "colwise_gather_output" if style.gather_output else "colwise"
    if style.kind == "rows":
        return "rowwise_split_input" if style.full_input else "rowwise"
    return "embedding_rowwise" if style.kind == "table_rows" else "embedding_colwise"
