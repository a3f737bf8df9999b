"""Plans and programs of the test families, each made once per session.

Most are without reasons: to say what every other choice would cost takes as long as the choice.
"""

from __future__ import annotations

import functools

from families import family

from autoshard.api import compile_analysed
from autoshard.capture.capture import capture
from autoshard.cluster import Mesh, load_cluster
from autoshard.planner.analysis import Analysis, analyse
from autoshard.planner.planned import Planned
from autoshard.planner.planning import plan_analysed
from autoshard.program.program import Program


@functools.cache
def analysed(name: str) -> Analysis:
    model, inputs = family(name).make()
    return analyse(capture(model, (), inputs))


@functools.cache
def planned(name: str, mesh: str, cluster: str = "cpu-gloo", reasons: bool = False) -> Planned:
    return plan_analysed(analysed(name), [Mesh.parse(mesh)], load_cluster(cluster), reasons=reasons)


@functools.cache
def program(name: str, mesh: str, cluster: str = "cpu-gloo", reasons: bool = False) -> Program:
    return compile_analysed(planned(name, mesh, cluster, reasons))
