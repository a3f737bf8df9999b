"""Time and memory of planning big models, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PlanningRow:
    """seconds: of the whole process, which also compiles the program; capture_s: of the trace;
    after_capture_s: from there to the plan; peak_gib: memory.
    """

    case: str
    seconds: float
    capture_s: float
    after_capture_s: float
    peak_gib: float
    gap: float


def plan_case(layers: int, hidden: int, heads: int, mesh: str) -> PlanningRow:
    """Plan and compile one GPT shape in this process."""
    import gc
    import resource

    start = time.perf_counter()
    from autoshard.analysis import analyse
    from autoshard.api import compile_analysed, plan_analysed
    from autoshard.bench.models import gpt2_shape
    from autoshard.cluster import Mesh, load_cluster
    from autoshard.passes.capture import capture

    model, inputs = gpt2_shape(layers, hidden, heads)
    before = time.perf_counter()
    joint = capture(model, (), inputs)
    gc.collect()  # what the trace left behind is part of its price
    captured = time.perf_counter()
    planned = plan_analysed(analyse(joint), [Mesh.parse(mesh)], load_cluster("h100-dgx"))
    end = time.perf_counter()
    compile_analysed(planned)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    name = f"GPT {layers} layers, hidden {hidden}, {mesh}"
    return PlanningRow(name, end - start, captured - before, end - captured, peak, planned.plan.proof.gap)


def measure(layers: int, hidden: int, heads: int, mesh: str) -> PlanningRow:
    """The same in a fresh process, whose whole life is timed."""
    command = [sys.executable, "-m", "autoshard.bench.planning", str(layers), str(hidden), str(heads), mesh]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    raw = json.loads(done.stdout.splitlines()[-1])
    raw["seconds"] = time.perf_counter() - start
    return PlanningRow(**raw)


if __name__ == "__main__":
    layers, hidden, heads = (int(a) for a in sys.argv[1:4])
    print(json.dumps(asdict(plan_case(layers, hidden, heads, sys.argv[4]))))
