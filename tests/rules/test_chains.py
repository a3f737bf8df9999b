"""Which ops a compiler makes one kernel of, and what such a kernel moves."""

from __future__ import annotations

from autoshard.ir import Node, Ref, TensorType
from autoshard.ir.graph import Origin
from autoshard.rules.chains import FusedKernels

WIDE, ROW = (64, 32), (64, 1)


def op(name: str, out: str, *refs: str, rest: tuple[object, ...] = (), shape: tuple[int, ...] = WIDE) -> Node:
    return Node(
        f"aten.{name}", (*map(Ref, refs), *rest), (), (out,), (TensorType(shape, "bf16"),), Origin("", "")
    )


def moved(chains: FusedKernels, node: Node, *refs: str) -> set[str]:
    return {*refs, *node.outs} - chains.of_node(node).unmoved


def test_a_residual_is_written_for_the_sum_behind_a_product() -> None:
    nodes = [
        op("add.Tensor", "h", "x", "y"),
        op("relu.default", "r", "h"),
        op("mm.default", "m", "r", "w"),
        op("add.Tensor", "z", "h", "m"),
    ]
    chains = FusedKernels.of(nodes, ("z",))
    assert not chains.inside
    assert chains.kernels["h"] == chains.kernels["r"] != chains.kernels["z"]
    assert moved(chains, nodes[1], "h") == {"r"}  # made in its kernel
    assert moved(chains, nodes[3], "h", "m") == {"h", "m", "z"}
    assert chains.joined == {("r",)}
    assert chains.beside(nodes, "h") == ("h", "r")


def test_what_only_later_ops_read_is_computed_with_them() -> None:
    nodes = [
        op("neg.default", "n", "x"),
        op("mm.default", "m", "x", "w"),
        op("mul.Tensor", "z", "n", "m"),
    ]
    chains = FusedKernels.of(nodes, ("z",))
    assert chains.inside == {"n"}
    assert chains.kernels["n"] == chains.kernels["z"]


def test_ops_on_the_same_rows_read_them_once() -> None:
    nodes = [
        op("silu.default", "s", "g"),
        op("mul.Tensor", "a", "grad", "s"),
        op("mul.Tensor", "b", "grad", "u"),
        op("silu_backward.default", "c", "b", "g"),
    ]
    chains = FusedKernels.of(nodes, ("a", "c"))
    assert len(set(chains.kernels.values())) == 1
    assert moved(chains, nodes[1], "grad", "s") == {"grad", "a"}
    assert moved(chains, nodes[2], "grad", "u") == {"u"}
    assert moved(chains, nodes[3], "b", "g") == {"c"}


def test_parts_of_a_value_are_read_each_for_itself() -> None:
    nodes = [
        op("slice.Tensor", "gate", "x", rest=(1, 0, 16), shape=(64, 16)),
        op("slice.Tensor", "up", "x", rest=(1, 16, 32), shape=(64, 16)),
        op("silu.default", "s", "gate", shape=(64, 16)),
        op("mul.Tensor", "z", "s", "up", shape=(64, 16)),
        op("neg.default", "n", "gate", shape=(64, 16)),
    ]
    chains = FusedKernels.of(nodes, ("z", "n"))
    assert moved(chains, nodes[2], "gate") == {"gate"}
    assert moved(chains, nodes[3], "s", "up") == {"up", "z"}
    assert moved(chains, nodes[4], "gate") == {"n"}


def test_sums_over_rows_are_part_of_a_kernel_and_sums_over_columns_are_not() -> None:
    nodes = [
        op("mul.Tensor", "p", "x", "y"),
        op("sum.dim_IntList", "rows", "p", rest=((1,), True), shape=ROW),
        op("mul.Tensor", "z", "x", "rows"),
        op("mul.Tensor", "q", "x", "y"),
        op("sum.dim_IntList", "columns", "q", rest=((0,),), shape=(32,)),
    ]
    chains = FusedKernels.of(nodes, ("z", "columns"))
    assert chains.inside == {"p", "rows", "q"}
    assert chains.kernels["p"] == chains.kernels["rows"] == chains.kernels["z"]
    assert chains.kernels["q"] == chains.kernels["columns"] != chains.kernels["z"]
    assert moved(chains, nodes[2], "x", "rows") == {"z"}
    assert moved(chains, nodes[3], "x", "y") == {"x", "y"}
    assert chains.joined == {("rows",), ("z",), ("columns",)}
