"""Texts of graphs after passes, each written when it is first read: most programs are never dumped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoshard.ir import Folded
from autoshard.ir.lowered import Lowered
from autoshard.program.dump import dump_text


@dataclass(frozen=True)
class Shot:
    """A graph as it was after a pass. mesh: what the head of its text says. head: lines before that."""

    graph: Folded | Lowered
    mesh: str
    head: str = ""


@dataclass(frozen=True, eq=False)
class Dumps(Mapping[str, str]):
    """Pass name -> text of the graph after it; equal to any mapping of the same texts."""

    shots: Mapping[str, Shot] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> str:
        if name not in self._texts:
            shot = self.shots[name]
            self._texts[name] = shot.head + dump_text(name, shot.graph, shot.mesh)
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shots)

    def __len__(self) -> int:
        return len(self.shots)

    def headed(self, name: str, head: str) -> Dumps:
        """The same with more lines before one of the texts."""
        shot = self.shots[name]
        return Dumps({**self.shots, name: replace(shot, head=head + shot.head)})
