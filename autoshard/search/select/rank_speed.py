"""How fast unlike ranks of a pipeline do the work of a model, before anything is cut."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cluster.cluster import Cluster, Device
from autoshard.cluster.mesh import Axis, Mesh
from autoshard.search.problem.problem import Model
from autoshard.search.solve.configuration import Staged
from autoshard.search.solve.formulate import formulate
from autoshard.search.solve.step_config import StepConfig

_ALONE = Mesh((Axis("dp", 1),))


class RankSpeeds:
    """Seconds of the full model on single devices of a cluster, each worked out once."""

    def __init__(self, model: Model, cluster: Cluster, setting: StepConfig) -> None:
        self._model, self._setting, self._bound = model, setting, cluster.device
        self._cache: list[tuple[Device, float]] = []

    def of(self, staged: Staged) -> Staged:
        """With the speeds of the ranks of its pipelines, as multiples of that of what bounds all."""
        if not staged.devices:
            return staged
        speeds = tuple(self._seconds(self._bound) / self._seconds(device) for device in staged.devices)
        return replace(staged, pipes=tuple(replace(pipe, speeds=speeds) for pipe in staged.pipes))

    def _seconds(self, device: Device) -> float:
        for measured, seconds in self._cache:
            if measured == device:
                return seconds
        formulated = formulate(self._model, _ALONE, Cluster(device.name, 1, device, ()), self._setting)
        sums = self._setting.sums(formulated.free.usage)
        self._cache.append((device, sums.work_forward + sums.work_backward))
        return self._cache[-1][1]
