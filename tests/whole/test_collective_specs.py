"""Every collective has one row (`autoshard/ir/collectives.py`), and only the table tests ops by name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from whole.test_layout import ROOT, sources

from autoshard.ir import Node, Origin, TensorType, collectives
from autoshard.ir.collectives import (
    ALL_GATHER,
    BUCKET_COLLECTIVES,
    COLLECTIVES,
    EXPERT_EXCHANGES,
    TENSOR_COLLECTIVES,
    TensorTransfer,
    collective,
    is_message,
    spec_named,
    transfer_between,
    transfers_of,
)
from autoshard.ir.placement import P, Partial, R, Replicate, Shard
from autoshard.program.known_ops import known_ops
from autoshard.rules.attention import KEYS
from autoshard.runtime.collectives import GroupCollectives
from autoshard.simulate.op_work import product_of
from autoshard.verify.moves import MOVES

TABLE = ROOT / "autoshard/ir/collectives.py"
#: names of methods that read the end or the beginning of a name
READS = ("endswith", "startswith", "removesuffix", "removeprefix")
WHERES = {
    "all_gather": (1, 2, 1, None),
    "reduce_scatter": (0, 1, 4, 24),
    "slice": (0, 1, 1, None),
    "all_to_all": (0, 1, 2, 1),
    "all_reduce": (),
}


def test_the_ops_of_all_layers_are_those_of_the_table() -> None:
    assert {op for op in known_ops() if op.startswith("comm.")} == set(COLLECTIVES)
    assert {op for op in MOVES if op.startswith("comm.")} == {o for o, s in COLLECTIVES.items() if s.moves}
    run = {
        name
        for name, member in vars(GroupCollectives).items()
        if inspect.isfunction(member) and list(inspect.signature(member).parameters)[1:2] == ["view"]
    }
    assert run == {spec.name for spec in COLLECTIVES.values()}


def test_programs_say_no_other() -> None:
    said = {
        op
        for path in (ROOT / "tests/golden").rglob("*")
        if path.is_file()
        for op in re.findall(r"comm\.\w+", path.read_text(errors="ignore"))
    }
    assert said and {op for op in said if spec_named(op) is None} == set()


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_row_fits_its_name(op: str) -> None:
    spec = COLLECTIVES[op]
    assert (spec.op, spec_named(f"comm.{spec.name}")) == (op, spec)
    assert spec.bucket == spec.name.endswith("_bucket")
    assert bool(spec.product) == (spec in EXPERT_EXCHANGES or op in KEYS)
    tensors, told = (("q", "k", "v"), (True, 0.5)) if op in KEYS else (("rows",), (4,))
    node = Node(op, (tensors, "tp", *told), (), ("y",), ())
    assert is_message(node) == (spec.transfer != "slice")
    assert product_of(node).op == (spec.product or op)


def test_each_change_of_a_placement_has_one_collective() -> None:
    steps = {
        (Shard, Replicate): "all_gather",
        (Partial, Replicate): "all_reduce",
        (Partial, Shard): "reduce_scatter",
        (Shard, Shard): "all_to_all",
        (Replicate, Shard): "slice",
    }
    placed = (R, P, Partial("max"), Shard(0), Shard(1))
    for before, after in product(placed, repeat=2):
        none = before == after or (before == Partial("max") and isinstance(after, Shard))
        wanted = None if none else steps.get((type(before), type(after)))
        assert transfer_between(before, after) == wanted, (before, after)
    assert set(TENSOR_COLLECTIVES) == set(WHERES) == set(steps.values())


def test_a_second_row_of_a_transfer_replaces_none() -> None:
    rows = tuple(COLLECTIVES.values())
    second = replace(ALL_GATHER, op="comm.gather_that_no_row_has.default", between=None)
    assert collectives._first_layout((*rows, second), False) == TENSOR_COLLECTIVES
    assert list(collectives._once((*rows, second), "op").values()) == [*rows, second]
    for odd, field in (
        (replace(second, op=ALL_GATHER.op), "op"),
        (replace(second, between=ALL_GATHER.between), "between"),
    ):
        with pytest.raises(
            ValueError, match=f"the rows {ALL_GATHER.op} and {odd.op} .* have the same {field}"
        ):
            collectives._once((*rows, odd), field)


@pytest.mark.parametrize(
    ("transfer", "count"),
    [*((t, 1) for t in TENSOR_COLLECTIVES), *((t, 2) for t in BUCKET_COLLECTIVES)],
)
def test_what_is_written_is_read(transfer: str, count: int) -> None:
    moves = tuple(TensorTransfer(f"x{k}", f"y{k}", WHERES[transfer]) for k in range(count))
    types = [TensorType((24, 8), "f32")] * count
    node = collective(transfer, "tp", moves, types, Origin(), False)
    assert transfers_of(node) == moves
    assert transfers_of(Node(node.op, node.args[:1], (), node.outs, node.types)) is None


def _names_tested(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string by which code could tell collectives apart."""
    own = {spec.name for spec in COLLECTIVES.values()} - {spec.transfer for spec in COLLECTIVES.values()}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if isinstance(node, ast.Constant) and (re.match(r"comm\.(\w|$)", text) or text in own):
            yield node.lineno, text
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            for text in (c.value for a in node.args for c in ast.walk(a) if isinstance(c, ast.Constant)):
                if isinstance(text, str) and re.match(r"_(q_)?bucket$|_q$|comm", text):
                    yield node.lineno, text


def test_no_code_outside_the_table_tests_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sources()
        if path != TABLE
        for line, text in _names_tested(ast.parse(path.read_text()))
    ]
    assert found == []


def test_the_search_finds_such_tests() -> None:
    code = 'a = op == "comm.slice.default"\nb = name.endswith("_bucket")\nc = f"comm.{kind}.default"\n'
    assert {line for line, _ in _names_tested(ast.parse(code))} == {1, 2, 3}
