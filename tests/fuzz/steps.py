"""Training scripts as people write them: calls, losses, optimizers, and changes between the calls."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from fuzz.modules import FORMS, Model, drawn, smaller, systematic

MESHES = ("dp=4", "fsdp=4", "tp=4", "x=4", "dp=2,tp=2", "fsdp=2,tp=2", "x=2,y=2", "dp=2,x=2")
OPTIMIZERS = ("SGD(model.parameters(), lr=0.01)", "AdamW(model.parameters(), lr=0.01)")
_STEP = ["opt.step()", "opt.zero_grad()"]
#: lines of an event; LOSS and LOGITS stand for those of ``out``, N for its number
EVENTS = {
    "train": ["out = model(**batch(N))", "LOSS.backward()", "see('N', out)", *_STEP],
    "clip": [
        "out = model(**batch(N))",
        "LOSS.backward()",
        "norm = clip(model.parameters(), 0.5)",
        "see('N', out, float(norm))",
        *_STEP,
    ],
    "logits": ["out = model(**batch(N))", "full(LOGITS).pow(2).mean().backward()", "see('N', out)", *_STEP],
    "both": [
        "out = model(**batch(N))",
        "(LOSS + full(LOGITS).pow(2).mean()).backward()",
        "see('N', out)",
        *_STEP,
    ],
    "accumulate": [
        "for k in (N, N + 50):",
        "    out = model(**batch(k))",
        "    (LOSS / 2).backward()",
        "see('N', out)",
        *_STEP,
    ],
    "sum": [
        "total = 0.0",
        "for k in (N, N + 50):",
        "    out = model(**batch(k))",
        "    total = total + LOSS",
        "total.backward()",
        "see('N', out)",
        *_STEP,
    ],
    "no_grad": ["with torch.no_grad():", "    see('N', model(**batch(N)))"],
    "eval": ["model.eval()", "with torch.no_grad():", "    see('N', model(**batch(N)))", "model.train()"],
    "outer autocast": [
        "with torch.autocast('cpu', dtype=torch.bfloat16):",
        "    out = model(**batch(N))",
        "see('N', out)",
    ],
    "save": ["saved = {k: full(v).clone() for k, v in model.state_dict().items()}", "see('N', saved)"],
    "load": [
        "model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v",
        "    for k, v in saved.items()})",
    ],
    "copy": ["twin = copy.deepcopy(model)", "see('N', twin(**batch(N)))"],
    "fewer rows": ["see('N', model(**batch(N, rows=6)))"],
    "positional": ["see('N', model(*batch(N).values()))"],
    "input gradient": [
        "given = batch(N)",
        "given['x'].requires_grad_()",
        "out = model(**given)",
        "LOSS.backward()",
        "see('N', out, given['x'].grad)",
        *_STEP,
    ],
    "freeze": ["model.head.weight.requires_grad_(False)"],
    "unfreeze": ["model.head.weight.requires_grad_(True)"],
    "set weight": ["with torch.no_grad():", "    model.lin.weight.mul_(0.5)"],
    "new group": ["opt.param_groups[0]['lr'] *= 0.5"],
    "hook on the whole": ["model.register_forward_hook(lambda mod, args, out: scaled(out, 0.5))"],
    "hook on a part": ["model.lin.register_forward_hook(lambda mod, args, out: out * 0.5)"],
    "gradient hook": ["model.head.weight.register_hook(lambda g: 2 * g)"],
}
_CALLS = ("train", "train", "train", "clip", "logits", "both", "accumulate", "sum", "no_grad")


@dataclass(frozen=True)
class Steps:
    """A script on a module. events: keys of EVENTS, or ``change K``: that of the piece with number K."""

    model: Model
    mesh: str
    events: tuple[str, ...]
    optimizer: str = OPTIMIZERS[0]

    @classmethod
    def of(cls, number: int) -> Steps:
        """The script of a number: with the change of every piece that has one, and a call behind it."""
        rng = random.Random(f"steps/{number}")
        model = systematic(number) or drawn(rng)
        events = ["train", "train"]
        changes = [f"change {n}" for n, p, _ in model.pieces() if p.change]
        for change in rng.sample(changes, len(changes)):
            events += [change, rng.choice(("train", "train", "no_grad"))]
        for _ in range(0 if systematic(number) else rng.choice((1, 1, 2, 3))):
            event = rng.choice(_CALLS if rng.random() < 0.6 else list(EVENTS))
            if event == "load":
                events.append("save")
            events.append(event)
        return cls(model, rng.choice(MESHES), (*events, "train"), rng.choice(OPTIMIZERS))

    def source(self) -> str:
        """The module and ``script(model, clip, see)``."""
        _, loss, logits = FORMS[self.model.form]
        lines = ["", "", "def script(model, clip, see):", f"    opt = torch.optim.{self.optimizer}"]
        pieces = {n: (p, owner) for n, p, owner in self.model.pieces()}
        for number, event in enumerate(self.events):
            if event.startswith("change "):
                own = int(event.split()[1])
                if own not in pieces:
                    continue
                piece, owner = pieces[own]
                found = [f"m = {owner}", *piece.lines("change", own)]
            else:
                found = EVENTS[event]
                if not logits and any("LOGITS" in line for line in found):
                    found = EVENTS["train"]
            for line in found:
                line = line.replace("batch(N", f"batch({number}").replace("'N'", f"'{number} {event}'")
                line = line.replace("(N, N + 50)", f"({number}, {number + 50})")
                lines.append("    " + line.replace("LOSS", f"({loss})").replace("LOGITS", logits))
        return f"# mesh {self.mesh}\n" + self.model.source("\n".join(lines))

    def smaller(self) -> list[Steps]:
        """With fewer events or a smaller module."""
        found = []
        for k in reversed(range(len(self.events))):
            found.append(replace(self, events=self.events[:k] + self.events[k + 1 :]))
        if not any(e.startswith("change") for e in self.events):
            found += [replace(self, model=m) for m in smaller(self.model)]
        else:
            found += [
                replace(self, model=m)
                for m in smaller(self.model)
                if [p.name for _, p, _ in m.pieces()] == [p.name for _, p, _ in self.model.pieces()]
            ]
            found += _without_one(self)
        if self.mesh != "dp=4":
            found.append(replace(self, mesh="dp=4"))
        if self.optimizer != OPTIMIZERS[0]:
            found.append(replace(self, optimizer=OPTIMIZERS[0]))
        return found


def _without_one(steps: Steps) -> list[Steps]:
    """Without a piece, the changes of those behind it numbered anew."""
    model, found = steps.model, []
    for k in range(len(model.root) + len(model.layer)):
        events = []
        for event in steps.events:
            own = int(event.split()[1]) if event.startswith("change") else -1
            if own != k:
                events.append(f"change {own - 1}" if own > k else event)
        cut = k - len(model.root)
        root = model.root if cut >= 0 else model.root[:k] + model.root[k + 1 :]
        layer = model.layer if cut < 0 else model.layer[:cut] + model.layer[cut + 1 :]
        found.append(replace(steps, model=replace(model, root=root, layer=layer), events=tuple(events)))
    return found
