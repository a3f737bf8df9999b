"""A segment whose subgraphs are machine code, compiled at its first call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from autoshard.runtime.compiled_subgraphs import Subgraph, parts_of
from autoshard.runtime.pending import arrived
from autoshard.runtime.prepared_call import Env, PreparedCall
from autoshard.runtime.straight_line import FunctionText, SegmentCode, Stopping, to_its_end


class CompiledSegment:
    """Calls the code for arguments that lie in memory as those given; compiles it where there is none.

    Layers that run the same segment share its code: more layers take no longer to compile.
    """

    def __init__(
        self,
        steps: Sequence[PreparedCall],
        inputs: int,
        size: int,
        outputs: Sequence[int],
        late: Collection[int],
        kept: Path | None = None,
        ragged: Collection[int] = (),
        stops: bool = False,
    ) -> None:
        """inputs: how many slots are arguments. size: of all slots. late: those that messages fill. kept: a
        folder of compiled graphs. ragged: slots of values with as many rows as the data say. stops: whether
        any of the steps does."""
        self.kept, self.stops = kept, stops
        self.parts = parts_of(steps, outputs, late, ragged)
        self.inputs, self.size, self.outputs, self.late = inputs, size, outputs, late
        #: types and strides of the arguments -> code, which itself checks their sizes
        self.codes: dict[tuple[Any, ...], SegmentCode] = {}

    def __call__(self, args: list[Any], site: int) -> Any:
        forms = tuple([(x.dtype, x.stride()) if isinstance(x, torch.Tensor) else None for x in args])
        code = self.codes.get(forms)
        if code is not None:
            return code(args, site)
        first = self._first(forms, args, site)
        return first if self.stops else to_its_end(first)

    def _first(self, forms: tuple[Any, ...], args: list[Any], site: int) -> Stopping:
        """Run it part by part, each compiled before."""
        source = FunctionText(self.inputs)
        env: Env = [*args, *([None] * (self.size - self.inputs))]
        args.clear()
        for part in self.parts:
            for step in part.steps if isinstance(part, Subgraph) else (part,):
                if step.stops:
                    yield
            for slot in part.takes if isinstance(part, Subgraph) else part.awaits:
                if slot in self.late:
                    env[slot] = arrived(env[slot])
            if isinstance(part, Subgraph):
                code, outs = part.compiled([env[slot] for slot in part.takes], self.kept)
                source.add_subgraph(part, code)
                for slot in part.dead:
                    env[slot] = None
                for slot, out in zip(part.gives, outs, strict=True):
                    env[slot] = out
                del outs
            else:
                source.add(part)
                part.run(env, site)
        self.codes[forms] = source.function(self.outputs)
        return tuple(env[slot] for slot in self.outputs)
