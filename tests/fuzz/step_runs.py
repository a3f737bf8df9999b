"""Many scripts on one start of four processes, which are started again where they hang."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ranks import run_ranks

from autoshard import parallelize
from fuzz.case import Outcome
from fuzz.steps import Steps

RANKS = 4
_WORKER = Path(__file__).with_name("step_worker.py")


def run_steps(
    cases: Sequence[Steps], seconds: float = 90.0, ways: Sequence[Callable[..., Any]] = ()
) -> list[Outcome]:
    """What became of the cases. seconds: of one case, after which it counts as hanging.

    ways: what makes the models of the cases parallel (default: autoshard).
    """
    found: list[Outcome] = []
    while len(found) < len(cases):
        with tempfile.TemporaryDirectory() as name:
            folder, first = Path(name), len(found)
            (folder / "cases").write_bytes(
                pickle.dumps(list(zip(cases, ways or [parallelize] * len(cases), strict=True)))
            )
            arguments = [str(_WORKER), name, str(first), str(seconds)]
            failed = ""
            try:
                run_ranks(arguments, ranks=RANKS, timeout=seconds * (len(cases) - first) + 60)
            except AssertionError as error:
                failed = str(error)
            rows = [_rows(folder / f"rank{r}") for r in range(RANKS)]
        while len(found) < len(cases) and any(len(found) in row for row in rows):
            found.append(_merged([row.get(len(found)) for row in rows], failed))
        if len(found) == first:
            found.append(Outcome("failed", "hang", f"no rank came to an end: {failed[-600:]}"))
    return found


def _rows(path: Path) -> dict[int, Outcome]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row.pop("case"): Outcome(**row) for row in lines}


def _merged(rows: Sequence[Outcome | None], failed: str) -> Outcome:
    """Of all ranks: only what they agree on is good."""
    present = [row for row in rows if row is not None]
    if len(present) < len(rows):
        late = [r for r, row in enumerate(rows) if row is None]
        return Outcome("failed", "hang", f"ranks {late} did not end; {_told(rows)}; {failed[-300:]}")
    if len({(row.kind, row.failure) for row in present}) > 1:
        return Outcome("failed", "ranks differ", _told(rows))
    return max(present, key=lambda row: row.error)


def _told(rows: Sequence[Any]) -> str:
    return "; ".join(f"rank {r}: {x.kind} {x.failure} {x.detail[:300]}" for r, x in enumerate(rows) if x)
