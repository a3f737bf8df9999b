"""``python -m fuzz``: many cases over all cores; of every failure its number and a small reproduction."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

# before torch is imported, here and in the processes started from here
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from fuzz import damage
from fuzz.case import PLANS, Case, Outcome
from fuzz.chunk import run_chunk
from fuzz.shrink import shrunk

#: cases that a process takes at a time: whole models
_CHUNK = 4 * PLANS


@dataclass
class _Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    ops: set[str] = field(default_factory=set)
    failed: list[tuple[int, Outcome]] = field(default_factory=list)
    worst: float = 0.0


def _chunks(first: int, cases: int) -> Iterator[range]:
    first -= first % PLANS
    for start in range(first, first + cases, _CHUNK):
        yield range(start, min(start + _CHUNK, first + cases))


def main() -> int:
    """0 if every case is equal to eager and every damaged folder is refused, 1 otherwise."""
    options = _options()
    if options.case is not None:
        return _one(options.case)
    began = time.perf_counter()
    deadline = began + options.seconds if options.seconds else None
    tally = _Tally()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        chunks = pool.imap_unordered(run_chunk, _chunks(options.first, options.cases))
        while True:
            try:
                left = None if deadline is None else max(0.1, deadline - time.perf_counter())
                chunk = chunks.next(timeout=left)
            except StopIteration:
                break
            except multiprocessing.TimeoutError:
                print("\nthe time is up", end="")
                break
            tally.ops |= chunk.ops
            for number, outcome in chunk.outcomes:
                tally.kinds[outcome.kind] += 1
                tally.worst = max(tally.worst, outcome.error if outcome.kind == "equal" else 0.0)
                if outcome.kind == "failed":
                    tally.failed.append((number, outcome))
                    print(f"\nfailed: case {number}: {outcome.failure}: {outcome.detail[:300]}")
            print(f"\r{_line(tally, began)}", end="", flush=True)
    print()
    for number, outcome in tally.failed[: options.shrink]:
        _reproduce(number, outcome)
    print(f"ops of the rule table in these models: {_covered(tally.ops)}")
    missed = damage.many(options.folders, options.first)
    print(f"damaged folders: {options.folders} tried, {len(missed)} not refused as they should be")
    for text in missed:
        print(text)
    return 1 if tally.failed or missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: never")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrink", type=int, default=3, help="failures that are made smaller")
    parser.add_argument("--folders", type=int, default=400, help="damaged program folders")
    parser.add_argument("--case", type=int, help="run this case alone, and print it")
    return parser.parse_args()


def _line(tally: _Tally, began: float) -> str:
    done = sum(tally.kinds.values())
    seconds = time.perf_counter() - began
    return (
        f"{done} cases in {seconds:.0f} s: {tally.kinds['equal']} equal (worst error {tally.worst:.1e}), "
        f"{tally.kinds['unfit']} on a mesh that does not suit, {tally.kinds['failed']} failed"
    )


def _covered(ops: set[str]) -> str:
    from autoshard.rules.registry import RULES

    return f"{len(ops & set(RULES))} of {len(RULES)}"


def _one(number: int) -> int:
    case = Case.of(number)
    print(f"case {number}: mesh {case.mesh}\n\n{case.recipe.source()}")
    outcome = case.run()
    print(f"{outcome.kind} {outcome.failure} (error {outcome.error:.1e})\n{outcome.detail}")
    if outcome.kind == "failed":
        _reproduce(number, outcome)
    return 1 if outcome.kind == "failed" else 0


def _reproduce(number: int, outcome: Outcome) -> None:
    """Print a failure with the smallest case that fails alike."""
    case, found = Case.of(number), outcome
    if not outcome.failure.startswith("capture"):
        case, found = shrunk(case, outcome)
    print(f"\ncase {number}, made smaller: mesh {case.mesh}, plan seed {case.plan_seed}")
    print(f"{found.failure}: {found.detail}\n\n{case.recipe.source()}")
    print(f"run it again: PYTHONPATH=tests python -m fuzz --case {number}")


if __name__ == "__main__":
    sys.exit(main())
