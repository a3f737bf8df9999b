"""``python -m fuzz``: many cases over all cores; of every failure its number and a small reproduction."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# before torch is imported, here and in the processes started from here
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

from fuzz import damage
from fuzz.case import Outcome
from fuzz.chunk import Chunk
from fuzz.kinds import KINDS, Work, left, mixed, reproduced, run_work, shown


@dataclass
class _Tally:
    kinds: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    ops: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, int, Outcome]] = field(default_factory=list)
    worst: float = 0.0

    def add(self, kind: str, chunk: Chunk) -> None:
        self.ops |= chunk.ops
        for number, outcome in chunk.outcomes:
            self.kinds[kind][outcome.kind] += 1
            if outcome.kind == "equal":
                self.worst = max(self.worst, outcome.error if kind == "graphs" else 0.0)
            if outcome.kind == "refused":
                self.refused[outcome.detail.split("\n")[0][:90]] += 1
            if outcome.kind == "failed":
                self.failed.append((kind, number, outcome))
                print(f"\nfailed: {kind} case {number}: {outcome.failure}: {outcome.detail[:300]}")


def main() -> int:
    """0 if every case is equal to eager or refused and every damaged folder is refused, 1 otherwise."""
    options = _options()
    if options.case is not None:
        return _one(options.kind if options.kind != "all" else "graphs", options.case)
    began = time.perf_counter()
    tally = _Tally()
    todo = mixed(options.kind, options.first, options.cases)
    pooled = [w for w in todo if w.kind != "steps"]
    stepped = [w for w in todo if w.kind == "steps"]
    share = options.seconds * (0.75 if pooled and stepped else 1.0)
    for kind, chunk in _pooled(pooled, options.processes, began + share if share else None):
        tally.add(kind, chunk)
        print(f"\r{_line(tally, began)}", end="", flush=True)
    for work in stepped:
        if options.seconds and time.perf_counter() > began + options.seconds:
            print("\nthe time is up", end="")
            break
        tally.add(work.kind, work.run())
        print(f"\r{_line(tally, began)}", end="", flush=True)
    return _closing(tally, options, began)


def _pooled(todo: Sequence[Work], processes: int, deadline: float | None) -> Iterator[tuple[str, Chunk]]:
    if not todo:
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        chunks = pool.imap_unordered(run_work, todo)
        while True:
            try:
                yield chunks.next(timeout=left(deadline))
            except StopIteration:
                return
            except multiprocessing.TimeoutError:
                print("\nthe time is up", end="")
                return


def _closing(tally: _Tally, options: argparse.Namespace, began: float) -> int:
    print(f"\r{_line(tally, began)}")
    for kind, number, outcome in tally.failed[: options.shrink]:
        print(f"\n{reproduced(kind, number, outcome)}")
    for kind, counts in tally.kinds.items():
        print(f"{kind}: {', '.join(f'{n} {what}' for what, n in counts.most_common())}")
    for what, count in tally.refused.most_common(options.refused):
        print(f"refused {count} times: {what}")
    missed: list[str] = []
    if "graphs" in tally.kinds:
        print(f"ops of the rule table in these models: {_covered(tally.ops)}")
        missed = damage.many(options.folders, options.first)
        print(f"damaged folders: {options.folders} tried, {len(missed)} not refused as they should be")
    for text in missed:
        print(text)
    return 1 if tally.failed or missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--kind", choices=("all", *KINDS), default="all")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so many; 0: never")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrink", type=int, default=3, help="failures that are made smaller")
    parser.add_argument("--refused", type=int, default=5, help="most frequent refusals that are named")
    parser.add_argument("--folders", type=int, default=400, help="damaged program folders")
    parser.add_argument("--case", type=int, help="run this case alone, and print it (of --kind)")
    return parser.parse_args()


def _line(tally: _Tally, began: float) -> str:
    counts: Counter[str] = sum(tally.kinds.values(), Counter())
    return (
        f"{counts.total()} cases in {time.perf_counter() - began:.0f} s: {counts['equal']} equal "
        f"(worst error of graphs {tally.worst:.1e}), {counts['refused']} refused, {counts['unfit']} on a "
        f"mesh that does not suit, {counts['dropped']} that eager refuses, {counts['failed']} failed"
    )


def _covered(ops: set[str]) -> str:
    from autoshard.rules.registry import RULES

    return f"{len(ops & set(RULES))} of {len(RULES)}"


def _one(kind: str, number: int) -> int:
    print(f"{kind} case {number}\n\n{shown(kind, number)}")
    ((_, outcome),) = [o for o in Work(kind, range(number, number + 1)).run().outcomes if o[0] == number]
    print(f"{outcome.kind} {outcome.failure} (error {outcome.error:.1e})\n{outcome.detail}")
    if outcome.kind == "failed":
        print(f"\n{reproduced(kind, number, outcome)}")
    return 1 if outcome.kind == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
