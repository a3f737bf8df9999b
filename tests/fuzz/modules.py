"""Random modules as people write them: pieces put together, as Python source."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fuzz.piece import Piece, pieces
from fuzz.pieces_hooks import HOOKS, MODES
from fuzz.pieces_python import PYTHON
from fuzz.pieces_tensor import STRUCTURE, TENSORS

PLAIN = Piece("linear", "h = torch.tanh(self.lin(h))")
PIECES = PYTHON | HOOKS | MODES | STRUCTURE | TENSORS | pieces(PLAIN)
_GROUPS = (PYTHON, PYTHON, HOOKS, MODES, STRUCTURE, TENSORS, pieces(PLAIN))

HEADER = """
import contextvars, copy, functools, math, os, random, types
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

B, S, D, DT = 8, 4, 8, torch.{dtype}
"""
#: what some sources need: name -> its lines
_HELPERS = {
    "Pair": """
from collections import namedtuple
Pair = namedtuple("Pair", "loss logits")
""",
    "Data": """
from dataclasses import dataclass
@dataclass
class Data:
    loss: object
    logits: object
""",
    "scaled": """
def scaled(x, factor):
    real = lambda t: isinstance(t, torch.Tensor) and t.is_floating_point()
    return torch.utils._pytree.tree_map(lambda t: t * factor if real(t) else t, x)
""",
    "full": """
def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x
""",
}
#: what forward returns: (the expression, where the loss is, where the logits are)
FORMS = {
    "scalar": ("loss", "out", ""),
    "dict": ('{"loss": loss, "logits": logits}', 'out["loss"]', 'out["logits"]'),
    "tuple": ("loss, logits, h", "out[0]", "out[1]"),
    "nested": ('{"loss": loss, "rest": (h, [logits, None])}', 'out["loss"]', 'out["rest"][1][0]'),
    "namedtuple": ("Pair(loss, logits)", "out.loss", "out.logits"),
    "dataclass": ("Data(loss, logits)", "out.loss", "out.logits"),
    "two losses": ('{"loss": loss, "more": h.pow(2).mean()}', 'out["loss"] + out["more"]', ""),
    "logits": ("logits", "full(out).pow(2).mean()", "out"),
    "none": ("None, loss, logits", "out[1]", "out[2]"),
    "twice": ("loss, loss, logits", "out[0]", "out[2]"),
    "input": ("loss, x, logits", "out[0]", "out[2]"),
    "weight": ("loss, self.head.weight, logits", "out[0]", "out[2]"),
    "numbers": ('loss, 3, "text", logits.shape[0], logits', "out[0]", "out[4]"),
    "detached": ("loss, logits.detach(), loss.detach()", "out[0]", ""),
}
#: a loss of ``logits`` with ``y`` (real) or ``c`` (classes, some of them -100)
LOSSES = (
    "F.mse_loss(logits, y)",
    'F.mse_loss(logits, y, reduction="sum")',
    'F.mse_loss(logits, y, reduction="none").mean(-1).sum()',
    "F.l1_loss(logits, y)",
    "F.smooth_l1_loss(logits, y)",
    "F.binary_cross_entropy_with_logits(logits, y.sigmoid())",
    "F.cross_entropy(logits.flatten(0, 1), c.flatten())",
    'F.cross_entropy(logits.flatten(0, 1), c.flatten(), reduction="sum")',
    "F.cross_entropy(logits.mT, c, weight=torch.arange(1, D + 1, dtype=DT))",
    'F.cross_entropy(logits.mT, c, reduction="none")[c >= 0].mean()',
    'F.cross_entropy(logits.mT, c, reduction="none").sum() / (c >= 0).sum()',
    "F.cross_entropy(logits[c >= 0], c[c >= 0])",
    "F.mse_loss(logits[c > 2], y[c > 2])",
    "F.cross_entropy(logits.mT, c, label_smoothing=0.1)",
    "F.nll_loss(logits.log_softmax(-1).flatten(0, 1), c.flatten())",
    'F.kl_div(logits.log_softmax(-1), y.softmax(-1), reduction="batchmean")',
    "nn.CrossEntropyLoss(ignore_index=3)(logits.flatten(0, 1), c.clamp(min=0).flatten())",
    "(logits - y).pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in self.parameters())",
)
_BATCH = """
def batch(k, rows=B):
    g = torch.Generator().manual_seed(k)
    x, y = torch.randn(2, rows, S, D, generator=g, dtype=DT)
    c = torch.randint(0, D, (rows, S), generator=g)
    c[:, 0][c[:, 0] > 3] = -100
    return {"x": x, "y": y, "c": c}
"""


@dataclass(frozen=True)
class Model:
    """A module. root, layer: names of pieces in the model and in its ``layers`` layers."""

    root: tuple[str, ...]
    layer: tuple[str, ...]
    layers: int
    form: str
    loss: str

    def pieces(self) -> list[tuple[int, Piece, str]]:
        """(number, piece, the module that has it)."""
        owners = [(p, "model") for p in self.root]
        owners += [(p, f"model.layers[{min(1, self.layers - 1)}]") for p in self.layer if self.layers]
        return [(n, PIECES[p], owner) for n, (p, owner) in enumerate(owners)]

    @property
    def random(self) -> bool:
        return any(p.random for _, p, _ in self.pieces())

    @property
    def single(self) -> bool:
        return any(p.single for _, p, _ in self.pieces())

    def source(self, script: str = "") -> str:
        """Everything up to ``make()`` and ``batch(k)``, and a script."""
        own = self.pieces()
        lines: list[str] = []
        for number, piece, _ in own:
            lines += piece.lines("top", number)
        if self.layers:
            layer = [(n, p) for n, p, owner in own if owner != "model"]
            lines += _class("Layer", "k", layer, [], "h", ["return 10 * F.softsign(h / 10)"])
        root = [(n, p) for n, p, owner in own if owner == "model"]
        init = [f"self.layers = nn.ModuleList([Layer(k) for k in range({self.layers})])"] * bool(self.layers)
        end = ["for layer in self.layers:", "    h = layer(h)"] * bool(self.layers)
        end += [
            "logits = self.head(10 * F.softsign(h / 10))",
            f"loss = {self.loss}",
            f"return {FORMS[self.form][0]}",
        ]
        lines += _class("Net", "k=1", root, [*init, "self.head = nn.Linear(D, D)"], "x, y, c", end)
        lines += ["def make():", "    torch.manual_seed(0)", "    model = Net().to(DT)"]
        for number, piece, owner in own:
            if piece.made:
                lines += [f"    m = {owner}", *(f"    {x}" for x in piece.lines("made", number))]
        lines += ["    return model", *_BATCH.rstrip().split("\n")]
        text = "\n".join(lines) + script
        helpers = [lines for name, lines in _HELPERS.items() if f"{name}(" in text]
        header = HEADER.format(dtype="float32" if self.single else "float64")
        return "".join([header, *helpers, text]).strip() + "\n"


def _class(
    name: str, given: str, own: list[tuple[int, Piece]], init: list[str], takes: str, end: list[str]
) -> list[str]:
    lines = ["", f"class {name}(nn.Module):"]
    for n, p in own:
        lines += [f"    {x}" for x in p.lines("body", n)]
    lines += [f"    def __init__(self, {given}):", "        super().__init__()"]
    lines += ["        self.lin = nn.Linear(D, D)"]
    for n, p in own:
        lines += [f"        {x}" for x in p.lines("init", n)]
    lines += [f"        {x}" for x in init]
    lines += [f"    def forward(self, {takes}):"] + ["        h = x"] * (takes != "h")
    lines += ["        h = h + self.lin(h)"]
    for n, p in own:
        lines += [f"        {x}" for x in p.lines("forward", n)]
    return [*lines, *(f"        {x}" for x in end), ""]


def systematic(number: int) -> Model | None:
    """The first modules have one piece each: in the model, then in three layers."""
    names = list(PIECES)
    if number >= 2 * len(names):
        return None
    name, inside = names[number % len(names)], number >= len(names)
    return Model((name,) * (not inside), (name,) * inside, 3 * inside, "dict", LOSSES[0])


def drawn(rng: random.Random) -> Model:
    """A module of one to four pieces."""
    layers = rng.choice((0, 0, 1, 3, 3, 4))
    chosen = [rng.choice(list(rng.choice(_GROUPS))) for _ in range(rng.choice((1, 2, 2, 3, 4)))]
    inside = [bool(layers) and rng.random() < 0.7 for _ in chosen]
    form = rng.choice(("scalar", "dict", "dict", "tuple", *FORMS))
    return Model(
        tuple(p for p, i in zip(chosen, inside, strict=True) if not i),
        tuple(p for p, i in zip(chosen, inside, strict=True) if i),
        layers,
        form,
        rng.choice((LOSSES[0], *LOSSES)),
    )


def smaller(model: Model) -> list[Model]:
    """With less in it, the boldest first."""
    found = []
    plain = Model(model.root, model.layer, model.layers, "scalar", LOSSES[0])
    found += [plain, Model(model.root, model.layer, model.layers, "dict", LOSSES[0])]
    found += [Model(model.root + model.layer, (), 0, model.form, model.loss)]
    found += [Model(model.root, model.layer, 3, model.form, model.loss)] * (model.layers > 3)
    for k in range(len(model.root)):
        rest = model.root[:k] + model.root[k + 1 :]
        found.append(Model(rest, model.layer, model.layers, model.form, model.loss))
    for k in range(len(model.layer)):
        rest = model.layer[:k] + model.layer[k + 1 :]
        found.append(Model(model.root, rest, model.layers, model.form, model.loss))
    found.append(Model(model.root, model.layer, model.layers, model.form, LOSSES[0]))
    return [m for m in dict.fromkeys(found) if m != model and len(m.source()) < len(model.source())]
