"""``python -m benchmarks.audit_spmd_types [-o FILE]``: `autoshard.audit` beside spmd_types, as markdown.

Programs of tests/audit and their sound twins: as they are for ours, as `audit_spmd_cases` annotates them for
spmd_types (fake process group, strict). Lines: those that name spmd_types; for ours, the step of one device.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

WRITTEN = re.compile(r"\bspmd\.|\binputs\(")
#: whether types of placements can show a fault: why: the faults
KINDS = """
* yes: types that do not fit meet in forward or in `backward()`: sum in both directions; bias on every rank;
no sum of input gradients; no sum before the head; slice behind split linear; sum behind replicated head;
slice behind keys; balance loss of every rank; balance loss doubled in backward; gradient of a summed loss;
to_local without grad_placements; partial sums called replicated; no redistribute before a mean; part of a
sequence called replicated; functional sum adds up gradients; gathered gradients are added up; gathered weight
outside of its module
* by hand: behind `backward()`, where the user types gradients and updated weights: norms not reduced; outside
of the bucket; reduced twice; gradient of one rank; local norm; shard not gathered; router not reduced;
reduced over another group; norms of a part are not reduced
* `rulecheck`: inside of the user's autograd function, which types do not look into: largest logit not
reduced; sum of powers not reduced
* where stated: the wrong type is allowed there, unless the user states that value's: loss by tokens of this
rank; replicated twice in the norm; loss by local counts; MTP loss by local counts; balance by local counts;
weights of this rank's experts; norm of a shard
* no: right types, wrong values (masks, positions, order, seeds, counts): words of other ranks not masked;
labels of other ranks not masked; mask not permuted; dropout of another seed on each rank; dropout of one seed
on parts; positions not permuted; wrong order of received tokens; fused weight cut in order; mean of each
rank; gradients cleared between microbatches; divided along the hidden dim; another use of scores in
loss_parallel
* no: a constant factor has no type: averaged over cp too; divided twice; not divided by microbatches; clipped
before unscaling; scaled before and after the reduction; divided by microbatches twice; experts not divided;
microbatches are not divided; wrong divide factor; sum that is averaged
* no: a gradient that leaves autograd has no type: frozen by mistake; detached input; sum of detached parts;
gathered without gradient; features of other ranks without gradient
* no: which parameters or rows a rank has, updates or steps: last words on no rank; update not gathered;
optimizer before fully_shard; adapters of one rank; step on one rank
* no: inside of FSDP or DDP, which its guide leaves unchecked: reduction stays off; no_sync around all;
gradients of ignored parameters; module inside of the wrapper; adapters beside sharded weights
* no: ranks that do different things, as one process stands for all: another order of groups; maximum and sum;
reported by one rank; figures of different lengths; skipped without labels; every rank its own root; gather of
other sizes; splits of the sender on both sides; gradients in another order; one rank reduces more; gradients
of two weights are added
* no: stages and messages of a pipeline, which its guide leaves out: shared embedding not reduced; scaled
twice; scaled at every stage; a message that nobody receives; a buffer of another shape; both receive first;
microbatches are not scaled; sum over a microbatch; scaled at every step; tied weights of two stages; gradient
of another microbatch; only the last microbatch goes back; labels of another microbatch; gradient sent before
it is divided
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.audit_spmd_types", description=__doc__)
    parser.add_argument("-o", type=Path, default=None, metavar="FILE", help="also write the tables there")
    told = parser.parse_args()
    if find_spec("spmd_types") is None:
        parser.error("spmd_types is not installed here: pip install --no-deps spmd_types")
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parents[1] / "audit"))
    text = "\n".join([*_compared(), "", *_kinds()])
    print(text)
    if told.o is not None:
        told.o.write_text(text + "\n")
    return 0


def _compared() -> list[str]:
    from case import named, places  # type: ignore[import-not-found]
    from test_audit_cases import CASES  # type: ignore[import-not-found]

    from benchmarks.audit_spmd_cases import PROGRAMS

    cases = {case.name: case for case in CASES}
    ours = "named | line | first line | twin passes | lines | s |"
    rows = [f"| fault | named | line | twin passes | lines | s | audit: {ours}", "|" + "---|" * 12]
    totals = [0.0] * 11
    for run, uses, faults in PROGRAMS:
        plain = getattr(run, "func", run)
        source = "".join(map(inspect.getsource, (plain, *uses)))
        lines = sum(bool(WRITTEN.search(line)) for line in source.splitlines())
        for name in faults.split("; "):
            case, start = cases[name], time.perf_counter()
            (found, at_line), (alarm, _) = _named(run, case, name), _named(run, case, "")
            middle = time.perf_counter()
            report, twin = case.audit(True), case.audit(False)
            marked, kinds = case.marked(), {f.kind for f in report.findings}
            first = places(next(line for f in report.findings for line in f.lines))
            cells: list[Any] = [found, at_line, not alarm, lines, middle - start, case.kind in kinds]
            cells += [bool(marked & set(named(report))), bool(marked & set(first)), twin.ok]
            cells += [len(inspect.getsource(case.step).splitlines()), time.perf_counter() - middle]
            totals = [a + b for a, b in zip(totals, cells, strict=True)]
            rows.append(_row(name + " (own function)" * (run != plain), cells))
    rows.append(_row(f"all {len(rows) - 2}", [t if k in (4, 10) else int(t) for k, t in enumerate(totals)]))
    return [f"spmd_types {version('spmd_types')}, torch {torch.__version__}", "", *rows]


def _row(name: str, cells: list[Any]) -> str:
    words = [{True: "yes", False: "no"}[c] if c is True or c is False else c for c in cells]
    return f"| {name} | {' | '.join(f'{w:.2f}' if isinstance(w, float) else str(w) for w in words)} |"


def _named(run: Any, case: Any, fault: str) -> tuple[bool, bool]:
    """Whether the check of spmd_types fails, and at a line that is marked with the fault."""
    import spmd_types as spmd  # type: ignore[import-not-found]
    from spmd_types.checker import typecheck  # type: ignore[import-not-found]
    from spmd_types.rulecheck import RuleCheckError, rulecheck  # type: ignore[import-not-found]

    from benchmarks.audit_spmd_cases import SplitCrossEntropy, split_words

    torch.manual_seed(0)
    model = case.model()
    dist.init_process_group(backend="fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(case.mesh.partition("=")[0],))
        with spmd.set_current_mesh(mesh), typecheck():
            run(model, mesh, fault)
    except spmd.SpmdTypeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(f.line or "" for f in reversed(frames) if f.filename.endswith("audit_spmd_cases.py"))
        return True, case.name in line.partition("# fault: ")[2].split(", ")
    finally:
        dist.destroy_process_group()
    try:
        if run is split_words:
            args = torch.arange(18.0).view(3, 6).sin(), torch.tensor([0, 3, 5]), "tp", fault
            places = {"logits": {"tp": spmd.S(1)}, "labels": {"tp": spmd.R}}
            rulecheck(SplitCrossEntropy, args, places, mesh={"tp": 2}, local_tensor_mode=True)
    except RuleCheckError:
        return True, False
    return False, False


def _kinds() -> list[str]:
    from test_audit_cases import NAMES

    rows, seen = [], []
    for kind in KINDS.replace("\n", " ").split("* ")[1:]:
        can, why, faults = kind.strip().split(": ")
        names = faults.split("; ")
        seen += names
        rows.append(f"| {can} | {len(names)} | {why} | {names[0]} |")
    assert sorted(seen) == sorted(NAMES)
    return [f"| types can show it | of {len(NAMES)} | fault | for instance |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    sys.exit(main())
