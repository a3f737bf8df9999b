"""What forward reads and writes in Python: attributes, globals, closures, caches."""

from __future__ import annotations

from fuzz.piece import Piece, pieces

_CLOSURE = """
def counted$():
    calls = [0]
    def call(h):
        calls[0] += 1
        return h * (1 + 0.1 * calls[0])
    return call
"""

PYTHON = pieces(
    Piece("step counter", "self.step$ += 1\nh = h * (1 + 0.1 * self.step$)", "self.step$ = 0"),
    Piece("counter that is only kept", "self.calls$ += 1", "self.calls$ = 0"),
    Piece("float", "h = h * self.scale$", "self.scale$ = 0.5 + 0.25 * (k == 1)", change="m.scale$ = 3.0"),
    Piece("int", "h = h[..., self.dim$:].mean(-1, keepdim=True) + h", "self.dim$ = 2", change="m.dim$ = 4"),
    Piece(
        "bool",
        "if self.on$:\n    h = h + 1.0",
        "self.on$ = k == 1",
        change="m.on$ = not m.on$",
    ),
    Piece("str", "h = getattr(torch, self.act$)(h)", 'self.act$ = "tanh"', change='m.act$ = "sigmoid"'),
    Piece("list", "h = h * self.list$[1]", "self.list$ = [1.0, 1.5]", change="m.list$[1] = 0.5"),
    Piece(
        "dict",
        'h = h * self.table$["b"][0]',
        'self.table$ = {"a": 1, "b": [2.0]}',
        change='m.table$["b"][0] = 0.5',
    ),
    Piece(
        "config",
        "h = h * self.config$.factor",
        "self.config$ = Config$()",
        "class Config$:\n    def __init__(self):\n        self.factor = 1.5",
        change="m.config$.factor = 0.5",
    ),
    Piece("class attribute", "h = h * self.gain$", body="gain$ = 1.25", change="type(m).gain$ = 0.5"),
    Piece(
        "property",
        "h = h * self.twice$",
        "self.half$ = 0.75",
        body="@property\ndef twice$(self):\n    return 2 * self.half$",
        change="m.half$ = 2.0",
    ),
    Piece("global", "h = h * GAIN$", top="GAIN$ = 1.5", change='globals()["GAIN$"] = 0.5'),
    Piece("global list", "SEEN$.append(1)\nh = h * (1 + 0.1 * len(SEEN$))", top="SEEN$ = []"),
    Piece("tensors collected in a global", "KEPT$.append(h.detach())", top="KEPT$ = []"),
    Piece("closure", "h = self.counted$(h)", "self.counted$ = counted$()", _CLOSURE),
    Piece(
        "contextvar",
        "h = h * VAR$.get()",
        top='VAR$ = contextvars.ContextVar("VAR$", default=1.5)',
        change="VAR$.set(0.5)",
    ),
    Piece(
        "environment",
        'h = h * float(os.environ["FUZZ_$"])',
        made='os.environ["FUZZ_$"] = "1.5"',
        change='os.environ["FUZZ_$"] = "0.5"',
    ),
    Piece(
        "lazy cache",
        "if self.cache$ is None:\n    self.cache$ = torch.arange(D, dtype=DT)\nh = h + self.cache$",
        "self.cache$ = None",
    ),
    Piece(
        "cache by shape",
        "if h.shape not in self.caches$:\n"
        "    self.caches$[h.shape] = torch.ones(h.shape[1:], dtype=DT).cumsum(0)\n"
        "h = h + self.caches$[h.shape]",
        "self.caches$ = {}",
    ),
    Piece("hidden kept on self", "self.last$ = h", "self.last$ = None"),
    Piece("hidden read again", "self.now$ = h.mean(1, keepdim=True)\nh = h * self.now$ + self.now$"),
    Piece(
        "memory of the call before",
        "h = h + 0.5 * self.memory$\nself.memory$ = h.detach().mean((0, 1))",
        "self.memory$ = 0.0",
    ),
    Piece(
        "plain tensor",
        "h = h * self.plain$",
        "self.plain$ = torch.full((D,), 1.5, dtype=DT)",
        change="m.plain$.mul_(2)",
    ),
    Piece(
        "plain tensor replaced",
        "h = h * self.plain$",
        "self.plain$ = torch.full((D,), 1.5, dtype=DT)",
        change="m.plain$ = torch.ones(D, dtype=DT)",
    ),
    Piece(
        "list of tensors",
        "h = h * self.tensors$[0] + self.tensors$[1]",
        "self.tensors$ = [torch.full((D,), 1.5, dtype=DT), torch.ones(D, dtype=DT)]",
        change="m.tensors$[1].zero_()",
    ),
    Piece(
        "partial",
        "h = self.partial$(h)",
        "self.partial$ = functools.partial(torch.mul, other=1.5)",
        change="m.partial$ = functools.partial(torch.mul, other=0.5)",
    ),
    Piece("lambda", "h = self.fun$(h)", "self.fun$ = lambda x: x * 1.5", change="m.fun$ = lambda x: x * 0.5"),
    Piece("python random", "h = h * self.random$.random()", "self.random$ = random.Random(3)"),
    Piece("hasattr", 'if hasattr(self, "extra$"):\n    h = h * 0.5', change="m.extra$ = True"),
    Piece("training flag", "h = h * (2.0 if self.training else 1.0)", change="m.train(not m.training)"),
    Piece("training flag of a part", "h = h * (2.0 if self.lin.training else 1.0)", made="m.lin.eval()"),
    Piece("grad enabled", "h = h * (2.0 if torch.is_grad_enabled() else 1.0)"),
    Piece("layer number", "h = h * (1 + 0.5 * self.number$)", "self.number$ = k"),
    Piece(
        "attribute of one layer",
        'h = h * getattr(self, "odd$", 1.0)',
        made="m.odd$ = 2.0",
    ),
    Piece(
        "loss kept on self",
        "self.penalty$ = h.pow(2).mean()\nh = h + 0.1 * self.penalty$",
    ),
    Piece(
        "forward replaced",
        made="old$ = m.lin.forward\nm.lin.forward = lambda x: 2 * old$(x)",
        change="m.lin.forward = lambda x: 0.5 * x",
    ),
    Piece(
        "forward of the whole replaced",
        made="whole$ = m.forward\nm.forward = lambda *args, **kwargs: scaled(whole$(*args, **kwargs), 2.0)",
    ),
    Piece(
        "method replaced",
        "h = self.method$(h)",
        body="def method$(self, x):\n    return x + 1.0",
        made="m.method$ = types.MethodType(lambda self, x: x - 1.0, m)",
        change="m.method$ = types.MethodType(lambda self, x: x + 2.0, m)",
    ),
)
