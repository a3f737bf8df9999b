"""Read program text back. The text is parsed, never run: only known ops and literals are accepted."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf, nan
from typing import NoReturn

from autoshard.errors import VerificationError
from autoshard.ir import (
    DTYPES,
    Arg,
    Call,
    CallSite,
    Dtype,
    Graph,
    LocalOffset,
    LocalSize,
    Node,
    Origin,
    Port,
    Ref,
    ShardOf,
    TensorType,
    refs_of,
)
from autoshard.ir.collectives import COLLECTIVES
from autoshard.ir.lowered import Instruction, Lowered, LoweredSegment, PlacedValue, StagePart
from autoshard.ir.placement import Layout, Placement, Shard, parse_placement
from autoshard.ir.row_tiles import KINDS, TILES, tiles_of
from autoshard.ir.scans import SCAN, StepSlice, scan_of
from autoshard.program.text import NAMESPACES

_TYPE = re.compile(r"^(\w+)\[(\d*)(?:\*(\d{1,9})/(\d{1,9})(?:~(0\.\d{1,4}))?)?([\d, ]*)\] ?(.*)$")
_PART = re.compile(
    r"^(gather|count|forward|backward|weight|reduce)(?:_(0|[1-9]\d{0,4}))?(?:_s([1-9]\d{0,4}))?$"
)
_BEFORE = ("gather", "count", "forward")
_PORTS = ("param", "buffer", "input", "tangent", "const")
#: more than any real program has; a hostile text must not exhaust the parser
MAX_TEXT = 64 * 1024 * 1024


def _fail(what: str, node: ast.AST | None = None) -> NoReturn:
    where = f"line {node.lineno}" if node is not None and hasattr(node, "lineno") else ""
    raise VerificationError(
        f"not a program: {what}", where=where, hint="compile the program again; its text was changed"
    )


def parse_type(text: str, names: Sequence[str], node: ast.AST | None = None) -> PlacedValue:
    """``f32[2, 3] dp:S(0) tp:R`` as a type and a layout."""
    match = _TYPE.match(text)
    if not match or match.group(1) not in DTYPES:
        _fail(f"{text!r} is not a type", node)
    dims = [d for d in (match.group(2) + match.group(6)).replace(" ", "").split(",") if d]
    if any(len(d) > 15 for d in dims):
        _fail(f"{text!r} has an impossible size", node)
    shape = tuple(int(d) for d in dims)
    filled = None if match.group(3) is None else (int(match.group(3)), int(match.group(4)))
    if filled is not None and not (dims and 0 < filled[0] <= filled[1]):
        _fail(f"{text!r} is not filled like that", node)
    share = float(match.group(5) or 1.0)
    if not share:
        _fail(f"{text!r} has no rows", node)
    words = match.group(7).split()
    if len(words) != len(names):
        _fail(f"{text!r} does not place the value on the axes {', '.join(names)}", node)
    layout = tuple(_placement(w, n, shape, node) for w, n in zip(words, names, strict=True))
    return PlacedValue(TensorType(shape, match.group(1), filled, share), layout)


def _placement(word: str, axis: str, shape: tuple[int, ...], node: ast.AST | None) -> Placement:
    name, _, text = word.partition(":")
    try:
        placed = parse_placement(text)
    except ValueError:
        _fail(f"{word!r} is not a placement on axis {axis}", node)
    if name != axis:
        _fail(f"{word!r} is not a placement on axis {axis}", node)
    if isinstance(placed, Shard):
        parts, paired = placed.blocks * placed.inner, placed.outer > 0 or placed.outer % 2 == 0
        if placed.dim >= len(shape) or not parts or shape[placed.dim] % parts or not paired:
            _fail(f"{word!r} does not fit shape {list(shape)}", node)
    return placed


class _Reader:
    def __init__(self, names: Sequence[str], ops: Collection[str]) -> None:
        self.names, self.ops = tuple(names), frozenset(ops)
        #: those of the user's own ops as well
        self.namespaces = {*NAMESPACES, *(op.split(".")[0] for op in ops)} - {"aten"}

    # -- expressions -------------------------------------------------------------------------------

    def arg(self, node: ast.expr, known: Collection[str]) -> Arg:
        """An argument: a known value, a literal, a dtype, or a symbol."""
        if isinstance(node, ast.Name):
            if node.id in ("inf", "nan"):
                return {"inf": inf, "nan": nan}[node.id]
            if node.id not in known:
                _fail(f"{node.id!r} is used before it is made", node)
            return Ref(node.id)
        if isinstance(node, ast.Constant):
            if node.value is None or isinstance(node.value, bool | int | float | str):
                return node.value
            _fail(f"literal {node.value!r} is not allowed", node)
        if isinstance(node, ast.Tuple):
            return tuple(self.arg(e, known) for e in node.elts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.arg(node.operand, ())
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dt":
            if node.attr not in DTYPES:
                _fail(f"unknown dtype {node.attr!r}", node)
            return Dtype(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.symbol(node)
        _fail("an argument must be a value, a literal, a dtype or a symbol", node)

    def symbol(self, node: ast.Call) -> Arg:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        values = [self.arg(a, ()) for a in node.args]
        if node.keywords or not values or not isinstance(values[0], int):
            _fail(f"{name!r} is not a symbol", node)
        if name == "site" and len(values) == 1:
            return CallSite(values[0])
        if name in ("local", "offset"):
            shards = tuple(self.shard(v, node) for v in values[1:])
            return (LocalSize if name == "local" else LocalOffset)(values[0], shards)
        _fail(f"{name!r} is not a symbol", node)

    def shard(self, value: Arg, node: ast.AST) -> ShardOf:
        parts = (value,) if isinstance(value, str) else value
        if not isinstance(parts, tuple) or not parts or parts[0] not in self.names:
            _fail("a symbol names an axis that the mesh lacks", node)
        if not all(isinstance(p, int) and p != 0 for p in parts[1:]) or len(parts) not in (1, 3):
            _fail("a symbol has a wrong split", node)
        return ShardOf(*parts)

    def op(self, node: ast.expr) -> str:
        words: list[str] = []
        at = node
        while isinstance(at, ast.Attribute):
            words.insert(0, at.attr)
            at = at.value
        if not isinstance(at, ast.Name):
            _fail("only known ops may be called", node)
        words.insert(0, at.id)
        if words[0] not in self.namespaces:
            words.insert(0, "aten")
        if len(words) == 2:
            words.append("default")
        name = ".".join(words)
        if name not in self.ops:
            _fail(f"op {name!r} is not known", node)
        return name

    # -- statements --------------------------------------------------------------------------------

    def segment(self, fn: ast.FunctionDef, backward: bool) -> LoweredSegment:
        _plain_def(fn)
        inputs: list[tuple[str, TensorType]] = []
        layouts: dict[str, Layout] = {}
        for a in fn.args.args:
            placed = self.annotation(a.annotation, a)
            _new(a.arg, layouts, a)
            inputs.append((a.arg, placed.type))
            layouts[a.arg] = placed.layout
        nodes: list[Node] = []
        declared: dict[str, PlacedValue] = {}
        known = set(layouts)
        outputs: tuple[str, ...] | None = None
        for statement in fn.body:
            if outputs is not None:
                _fail("a statement after return", statement)
            if isinstance(statement, ast.Return):
                outputs = self.returned(statement, known)
                continue
            new = self.statement(statement, declared, known, backward)
            if new is None:
                continue
            for out, type_ in zip(new.outs, new.types, strict=True):
                _new(out, known, statement)
                known.add(out)
                if type_ is not None:
                    layouts[out] = declared[out].layout
            nodes.append(new)
        if outputs is None:
            _fail("a segment without return", fn)
        return LoweredSegment(Graph(fn.name, tuple(inputs), tuple(nodes), outputs), layouts, {})

    def annotation(self, node: ast.expr | None, at: ast.AST) -> PlacedValue:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            _fail("a type is missing", at)
        return parse_type(node.value, self.names, at)

    def statement(
        self, node: ast.stmt, declared: dict[str, PlacedValue], known: Collection[str], backward: bool
    ) -> Node | None:
        """One assignment of a known op; a bare annotation only declares a type."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared[node.target.id] = self.annotation(node.annotation, node)
            if node.value is None:
                return None
            outs: list[str] = [node.target.id]
            value = node.value
        elif (
            isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple)
        ):
            outs = [e.id for e in node.targets[0].elts if isinstance(e, ast.Name)]
            if len(outs) != len(node.targets[0].elts):
                _fail("only names may be assigned", node)
            value = node.value
        else:
            _fail("only assignments of known ops are allowed", node)
        if not isinstance(value, ast.Call):
            _fail("only calls of known ops may be assigned", node)
        op = self.op(value.func)
        args = tuple(self.arg(a, known) for a in value.args)
        kwargs = tuple(
            (k.arg or _fail("** is not allowed", node), self.arg(k.value, known)) for k in value.keywords
        )
        types = tuple(declared[o].type if o in declared else None for o in outs)
        new = Node(op, args, kwargs, tuple(outs), types, Origin(), backward)
        if op in (TILES, SCAN):
            self.body(new, node)
        return new

    def body(self, made: Node, node: ast.stmt) -> None:
        """Check the body of an op that runs others, which stands among its arguments."""
        check = _is_tile if made.op == TILES else _is_step
        try:
            fits = check(made, self.ops - {TILES, SCAN, *COLLECTIVES})
        except (TypeError, ValueError, AttributeError, KeyError, IndexError):
            fits = False
        if not fits:
            _fail(f"the body of {made.op.split('.')[1]} is not one", node)

    def returned(self, node: ast.Return, known: Collection[str]) -> tuple[str, ...]:
        if not isinstance(node.value, ast.Tuple):
            _fail("return must give a tuple of values", node)
        names = tuple(e.id for e in node.value.elts if isinstance(e, ast.Name))
        if len(names) != len(node.value.elts) or any(n not in known for n in names):
            _fail("return must give values that were made", node)
        return names


def _is_body(body: Graph, made: Node, ops: frozenset[str]) -> bool:
    """Whether a body of an op is of these ops, and uses what there is."""
    known = {name for name, _ in body.inputs}
    if len(known) != len(made.args[0]) or len(body.outputs) != len(made.outs):
        return False
    for inner in body.nodes:
        if inner.op not in ops or not known.issuperset(refs_of(inner)) or not known.isdisjoint(inner.outs):
            return False
        known.update(inner.outs)
    return known.issuperset(body.outputs)


def _is_step(made: Node, ops: frozenset[str]) -> bool:
    """Whether a loop has a body of these ops, and reads and writes within its tensors."""
    scan = scan_of(made)
    types, steps = scan.body.types(), scan.steps
    if type(steps) is not int or steps < 1 or not _is_body(scan.body, made, ops):
        return False
    values = [
        *zip((n for n, _ in scan.body.inputs), scan.given, strict=True),
        *zip(scan.body.outputs, scan.results, strict=True),
    ]
    for value, how in values:
        if isinstance(how, StepSlice):
            ends = how.at(0), how.at(steps - 1)
            if not (0 <= how.dim <= len(types[value].shape) and min(ends) >= 0 and max(ends) < how.size):
                return False
        elif how not in ("carry", "same", "sum"):
            return False
    return len(scan.carried) == list(scan.given).count("carry")


def _is_tile(made: Node, ops: frozenset[str]) -> bool:
    """Whether an op that runs in tiles has a body of these ops, which uses what there is."""
    tiles = tiles_of(made)
    body = tiles.body
    if not _is_body(body, made, ops):
        return False
    cut = ((tiles.kinds[v], t.shape) for v, t in body.types().items())
    told = all(len(kinds) == len(shape) and set(kinds) <= KINDS for kinds, shape in cut)
    return told and type(tiles.rows) is int and tiles.rows > 0


def _plain_def(fn: ast.FunctionDef) -> None:
    a = fn.args
    if fn.decorator_list or a.posonlyargs or a.kwonlyargs or a.vararg or a.kwarg or a.defaults or fn.returns:
        _fail(f"{fn.name} is not a plain function", fn)


def _new(name: str, taken: Collection[str], node: ast.AST) -> None:
    if name in taken:
        _fail(f"{name!r} is assigned twice", node)


def parse_program(
    text: str, names: Sequence[str], ops: Collection[str]
) -> tuple[Lowered, tuple[Port, ...], dict[StagePart, tuple[str, ...]]]:
    """(the program, its ports, what every part returns) of a text.

    ops: names of all ops that may be called. Raises VerificationError with the line of the first
    thing that is not allowed.
    """
    if len(text) > MAX_TEXT:
        _fail("the text is too long")
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _fail(f"the text is not Python ({type(error).__name__}: {error})")
    reader = _Reader(names, ops)
    ports: list[Port] = []
    values: dict[str, PlacedValue] = {}
    functions: dict[str, ast.FunctionDef] = {}
    for item in module.body:
        if isinstance(item, ast.FunctionDef):
            _new(item.name, functions, item)
            functions[item.name] = item
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            port, placed = _port(item, reader)
            _new(port.name, values, item)
            ports.append(port)
            values[port.name] = placed
        else:
            _fail("only segments and inputs may stand at the top", item)
    result = {name: _part_of(name) for name in functions}
    named = [(functions[name], part) for name, part in result.items() if part is not None]
    if not any(part.phase == "forward" for _, part in named):
        _fail("forward is missing")
    backward_segments = {n for fn, part in named if part.phase not in _BEFORE for n in _called(fn)}
    bodies = {name: fn for name, fn in functions.items() if result[name] is None}
    segments = {n: reader.segment(f, n in backward_segments) for n, f in bodies.items()}
    main: list[Instruction] = []
    parts: list[StagePart] = []
    returns: dict[StagePart, tuple[str, ...]] = {}
    new: dict[int, set[str]] = {}
    back: dict[int, set[str]] = {}
    for fn, part in named:
        own = new.setdefault(part.stage, {p.name for p in ports})
        if part.phase == "backward":
            # every slice may add to the same gradient, under its name
            own = own.copy()
        elif part.phase not in _BEFORE:
            own |= back.get(part.stage, set())
        items, ends = _main(fn, part.phase not in _BEFORE, reader, segments, values, own)
        if part.phase == "backward":
            back.setdefault(part.stage, set()).update(own)
        parts.append(replace(part, start=len(main), stop=len(main) + len(items)))
        main += items
        returns[parts[-1]] = ends
    if len({(p.stage, p.phase, p.slice) for p in parts}) < len(parts):
        _fail("a part of the program stands there twice")
    lowered = Lowered(segments, tuple(main), values, (), tuple(parts))
    return lowered, tuple(ports), returns


def _part_of(name: str) -> StagePart | None:
    """The part of main that a function is, still empty; None for a segment."""
    match = _PART.match(name)
    if match is None:
        return None
    return StagePart(int(match.group(2) or 0), match.group(1), 0, 0, int(match.group(3) or 0))  # type: ignore[arg-type]


def _called(fn: ast.FunctionDef) -> set[str]:
    return {n.func.id for n in ast.walk(fn) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _port(item: ast.AnnAssign, reader: _Reader) -> tuple[Port, PlacedValue]:
    assert isinstance(item.target, ast.Name)
    placed = reader.annotation(item.annotation, item)
    call = item.value
    if (
        not isinstance(call, ast.Call)
        or not isinstance(call.func, ast.Name)
        or call.func.id not in _PORTS
        or not 1 <= len(call.args) <= 2
        or not all(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in call.args)
        or call.keywords
    ):
        _fail("an input must be param(...), buffer(...), input(...), tangent(...) or const(...)", item)
    kind, (target, *stored) = call.func.id, [a.value for a in call.args if isinstance(a, ast.Constant)]
    if stored and (kind != "param" or stored[0] not in DTYPES):
        _fail("only a param(name, dtype) is stored in another type than the program takes", item)
    return Port(item.target.id, kind, target, placed.type, *stored), placed  # type: ignore[arg-type]


def _main(
    fn: ast.FunctionDef,
    backward: bool,
    reader: _Reader,
    segments: dict[str, LoweredSegment],
    values: dict[str, PlacedValue],
    own: set[str],
) -> tuple[list[Instruction], tuple[str, ...]]:
    """Instructions of a part and what it returns; own: values that its stage has made, which grow."""
    _plain_def(fn)
    items: list[Instruction] = []
    declared: dict[str, PlacedValue] = {}
    for statement in fn.body:
        if isinstance(statement, ast.Return):
            return items, reader.returned(statement, values)
        call = _segment_call(statement, segments, values, backward)
        if call is not None:
            graph = segments[call.segment]
            types = graph.graph.types()
            for out, inner in zip(call.outs, graph.graph.outputs, strict=True):
                _made(out, PlacedValue(types[inner], graph.layouts[inner]), values, own, statement)
            items.append(call)
            continue
        node = reader.statement(statement, declared, values, backward)
        if node is None:
            continue
        for out in node.outs:
            _made(out, declared[out], values, own, statement)
        items.append(node)
    _fail(f"{fn.name} without return", fn)


def _made(
    out: str, placed: PlacedValue, values: dict[str, PlacedValue], own: set[str], node: ast.AST
) -> None:
    """A stage makes a value; several may make the same one, in the same layout."""
    _new(out, own, node)
    if values.setdefault(out, placed) != placed:
        _fail(f"{out!r} is made in two layouts", node)
    own.add(out)


def _segment_call(
    node: ast.stmt, segments: dict[str, LoweredSegment], known: Collection[str], backward: bool
) -> Call | None:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return None
    func, target = node.value.func, node.targets[0]
    if not isinstance(func, ast.Name) or func.id not in segments:
        return None
    if not isinstance(target, ast.Tuple):
        _fail("a segment gives a tuple", node)
    outs = tuple(e.id for e in target.elts if isinstance(e, ast.Name))
    args = tuple(a.id for a in node.value.args if isinstance(a, ast.Name))
    graph = segments[func.id].graph
    sizes_fit = len(outs) == len(graph.outputs) == len(target.elts) and len(args) == len(graph.inputs)
    if not sizes_fit or len(args) != len(node.value.args) or any(a not in known for a in args):
        _fail(f"call of {func.id} does not fit its definition", node)
    site = 0
    for keyword in node.value.keywords:
        constant = keyword.value
        if (
            keyword.arg != "site"
            or not isinstance(constant, ast.Constant)
            or not isinstance(constant.value, int)
        ):
            _fail("a segment call takes site=N only", node)
        site = constant.value
    return Call(func.id, args, outs, "", backward, site)
