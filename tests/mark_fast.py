"""Writes fast.txt, the tests that ``make quick`` runs, by what each took::

    make test PYTEST_ARGS="--durations=0 --durations-min=0.01" | tee durations.txt
    python tests/mark_fast.py durations.txt [seconds]

A function is fast if all of its cases together took less than so many seconds (default: 0.3).
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

_ROW = re.compile(r"([\d.]+)s (?:call|setup|teardown) +(tests/\S+?\.py)::(\w+)")
_HEAD = "# Tests that `make quick` runs: a file, and its fast functions. Written by tests/mark_fast.py.\n"


def main(durations: str, seconds: str = "0.3") -> None:
    took: Counter[tuple[str, str]] = Counter()
    for row in map(_ROW.match, Path(durations).read_text().splitlines()):
        if row:
            took[row[2], row[3]] += float(row[1])  # type: ignore[assignment]
    files = defaultdict[str, list[str]](list)
    for (file, name), total in sorted(took.items()):
        if total < float(seconds):
            files[file].append(name)
    lines = [f"{file}: {' '.join(names)}\n" for file, names in files.items()]
    (Path(__file__).parent / "fast.txt").write_text(_HEAD + "".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
