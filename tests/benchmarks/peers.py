"""Everyday scripts on 4 gloo processes under autoshard and three peers, against one plain process."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ranks import HERE, forks

PLAIN = "one process"
TOOLS = (
    "autoshard fsdp=4", "autoshard dp=2,tp=2", "FSDP2", "Accelerate FSDP2", "transformers fsdp=4",
    "transformers fsdp=2,tp=2",
)  # fmt: skip
#: scripts on 2 ranks, which go on from what another one left
AFTER = {"resumed on 2 ranks": "checkpoint of 4 ranks"}
SECONDS = 120.0
#: where the documentation of torch and Accelerate says that data-parallel ranks differ from one process
DOCUMENTED = ("uneven last batch", "padded batches")
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")


@dataclass(frozen=True)
class Cell:
    """What came of a script. worst: (losses, weights), relative. said: of an error."""

    tool: str
    script: str
    outcome: str
    worst: tuple[float, float] | None = None
    said: str = ""
    trace: str = ""

    def __str__(self) -> str:
        if self.outcome != "wrong number" or self.worst is None:
            return self.outcome
        documented = self.script in DOCUMENTED and "autoshard" not in self.tool
        return f"{'documented difference' if documented else self.outcome} ({max(self.worst):.0e})"


def measured(
    tools: Sequence[str] = TOOLS,
    scripts: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
    seconds: float = SECONDS,
) -> list[Cell]:
    """Every script under every tool.

    Args:
        tools: of `TOOLS`.
        scripts: of `peers_rows.SCRIPTS`; all if empty.
        say: told of each cell.
        seconds: after which a script hangs.

    Raises:
        RuntimeError: a script does not run on one plain process.
    """
    from benchmarks.peers_rows import SCRIPTS

    chosen = [s for s in SCRIPTS if s in (scripts or SCRIPTS)]
    cells = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for cell in _run(PLAIN, chosen, folder, 1, seconds):
            if cell.outcome != "works":
                raise RuntimeError(f"{cell.script} on one process: {cell.said}\n{cell.trace}")
        for tool in tools:
            late = [s for s in chosen if s in AFTER]
            for scripts_, ranks in (([s for s in chosen if s not in AFTER], 4), (late, 2)):
                for cell in _run(tool, scripts_, folder, ranks, seconds):
                    say(f"{tool}: {cell.script}: {cell} {cell.worst or ''} {cell.said}\n{cell.trace}".strip())
                    cells.append(cell)
    return cells


def _run(tool: str, scripts: Sequence[str], folder: Path, ranks: int, seconds: float) -> Iterator[Cell]:
    """Start processes until all scripts have come to an end: an error or a hang ends them."""
    left = list(scripts)
    while left:
        log = folder / "log"
        log.write_text("")
        arguments = [str(HERE / "benchmarks" / "peers_worker.py"), tool, str(folder), str(seconds), *left]
        job = {"arguments": arguments, "ranks": ranks, "timeout": seconds * (len(left) + 1), "log": str(log)}
        failed = forks().run(job | {"env": {"AUTOSHARD_QUIET": "1", "OMP_NUM_THREADS": "1"}})
        here = folder / tool
        begun = [s for s in left if (here / f"{s}.begun").exists()]
        if not begun:
            raise RuntimeError(f"{tool} does not start: {failed}\n{log.read_text()[-3000:]}")
        for script in begun:
            left.remove(script)
            yield _cell(tool, script, here, failed, log)


def _cell(tool: str, script: str, here: Path, failed: str, log: Path) -> Cell:
    errors = [json.loads(path.read_text()) for path in sorted(here.glob(f"{script}.error.*"))]
    if errors:
        first = min(errors, key=lambda error: float(error["time"]))
        message = " ".join(first["message"].split())
        said = f"{first['type']}: {message}"
        return Cell(
            tool, script, "clear error" if first["clear"] else "traceback", None, said, first["trace"]
        )
    path = here / f"{script}.json"
    if not path.exists():
        text = log.read_text(errors="replace")
        return Cell(tool, script, "hangs" if "Timeout (" in text else "crash", None, failed, text[-6000:])
    read = json.loads(path.read_text())
    worst = (read["losses"], read["weights"]) if "losses" in read else None
    return Cell(tool, script, read["outcome"], worst, str(read.get("same", "")))


def table(cells: Sequence[Cell]) -> str:
    """In markdown: a row for each script, and what errors said."""
    tools, scripts = list(dict.fromkeys(c.tool for c in cells)), list(dict.fromkeys(c.script for c in cells))
    of = {(c.script, c.tool): c for c in cells}
    notes: list[str] = []
    lines = ["| script | " + " | ".join(tools) + " |", "| --- " * (len(tools) + 1) + "|"]
    for script in scripts:
        row = []
        for tool in tools:
            cell = of[script, tool]
            if cell.outcome in ("clear error", "traceback"):
                text = cell.said if len(cell.said) < 220 else cell.said[:160] + " ..."
                if text not in notes:
                    notes.append(text)
                row.append(f"{cell} [{notes.index(text) + 1}]")
            else:
                row.append(str(cell))
        lines.append(f"| {script} | " + " | ".join(row) + " |")
    works = [str(sum(c.outcome in ("works", "other draws") for c in cells if c.tool == t)) for t in tools]
    lines.append(f"| **works or other draws, of {len(scripts)}** | " + " | ".join(works) + " |")
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers", "peft")
    )
    said = [f"{number}. `{text.replace('`', chr(39))}`" for number, text in enumerate(notes, 1)]
    return "\n".join([*lines, "", f"{versions}.", "", "Messages of errors:", "", *said, ""])


def main(args: Sequence[str], say: Callable[[str], None]) -> str:
    """The table; with ``--page``, written into a page, too."""
    parser = argparse.ArgumentParser("python -m benchmarks peers")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="one of them; may be repeated")
    parser.add_argument("--script", action="append", help="one of them; may be repeated")
    parser.add_argument("--page", type=Path, help="a page in which the table is replaced: docs/peers.md")
    given = parser.parse_args(args)
    found = table(measured(given.tool or TOOLS, given.script or (), say))
    if given.page is not None:
        before, rest = given.page.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        given.page.write_text(f"{before}{MARKS[0]}\n{found}\n{MARKS[1]}{after}")
    return found
