"""What cannot be in host memory is refused before anything is searched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import analysed

from autoshard.cluster import Mesh, load_cluster
from autoshard.errors import InfeasibleError
from autoshard.ir.offload import Offload
from autoshard.planner.planning import plan_analysed


def test_states_that_no_host_holds_are_refused_at_once() -> None:
    machine = load_cluster("h100-dgx")
    host = machine.device.host
    assert host is not None
    small = replace(machine, device=replace(machine.device, host=replace(host, memory_bytes=10_000)))
    said: list[str] = []
    with pytest.raises(InfeasibleError, match="of host memory, a node has") as caught:
        plan_analysed(
            analysed("gpt2"),
            [Mesh.parse("fsdp=16")],
            small,
            memory=2**30,
            offload=Offload.parse("optimizer"),
            progress=said.append,
        )
    assert "16 ranks fill 2 nodes" in (caught.value.why or "") and not said
