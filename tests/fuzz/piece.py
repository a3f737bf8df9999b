"""Pieces of modules: a few lines each, which take ``h`` and give it another value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Something that a module may do. In all lines ``$`` is the number of the piece in its module.

    forward: what it does with ``h``, of ``[B, S, D]``. init: of the module, where ``k`` is 1 in the middle
    one of repeated layers, and in a model. top: before the classes. body: of the class. made: once the model
    is made, ``m`` being the module (of repeated layers the middle one). change: what a user may do between
    calls. random: whether it draws random numbers. single: whether it computes in a lower precision than the
    model's, which is float32 then.
    """

    name: str
    forward: str = ""
    init: str = ""
    top: str = ""
    body: str = ""
    made: str = ""
    change: str = ""
    random: bool = False
    single: bool = False

    def lines(self, kind: str, number: int) -> list[str]:
        text: str = getattr(self, kind)
        return text.strip("\n").replace("$", str(number)).split("\n") if text.strip() else []


def pieces(*texts: Piece) -> dict[str, Piece]:
    """By name, each of which may stand once."""
    found = {p.name: p for p in texts}
    assert len(found) == len(texts)
    return found
