"""A divided sequence whose parts are worked on, cut or joined as if they were others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.ir import Arg, Node
from autoshard.program.program import Program
from autoshard.rules.attention import is_windowed, keys_of, with_keys
from faults.edits import replaced, sites
from faults.fault import Fault, Kind, rules

#: programs with a sequence in a zigzag: causal alone, and with windows, documents and soft caps
CONTEXT = ("context", "documents")
DOCUMENTS = ("documents",)
#: programs with rings whose keys go as far as a window, in the order of positions and in a zigzag; and all
REACH = ("reach", "reach-zigzag")
RING_DOCUMENTS = ("ring-documents",)
RINGS = ("ring", *REACH, *RING_DOCUMENTS)
#: a program that merges attention over parts of the keys
MERGED = ("merged",)
#: a program whose convolutions have chunks of the sequence, with the ends of their neighbours
HALOS = ("halos",)
_SAID = rules("function", "arguments", "collective", "placement")


def _rows(program: Program) -> Iterator[tuple[str, int, Node]]:
    return (site for site in sites(program) if site[2].op.startswith("autoshard.sdpa_rows"))


def _first(node: Node) -> int:
    """Which argument says where the rows begin."""
    return 7 if "backward" in node.op else 4


def _told(node: Node, *args: Arg, behind: int = 0) -> Node:
    """Attention that is told something else, from where its rows begin on or ``behind`` that."""
    at = _first(node) + behind
    return replace(node, args=(*node.args[:at], *args, *node.args[at + len(args) :]))


def wrong_rows(program: Program) -> Iterator[Fault]:
    """Attention takes its rows for the first of the sequence: a wrong mask."""
    for name, number, node in _rows(program):
        wrong = _told(node, 0, True)
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def no_zigzag(program: Program) -> Iterator[Fault]:
    """Attention takes its rows for positions that follow each other: balance without its mask."""
    for name, number, node in _rows(program):
        wrong = _told(node, False, behind=1)
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def one_document(program: Program) -> Iterator[Fault]:
    """Attention takes the documents of a sequence for one."""
    for name, number, node in _rows(program):
        yield Fault(replaced(program, name, number, _told(node, None, behind=2)), _SAID, (node.outs[0],))


def wider_window(program: Program) -> Iterator[Fault]:
    """Attention reaches one key further than its window."""
    for name, number, node in _rows(program):
        window = node.args[_first(node) + 3]
        assert isinstance(window, int)
        yield Fault(
            replaced(program, name, number, _told(node, window + 1, behind=3)), _SAID, (node.outs[0],)
        )


def another_cap(program: Program) -> Iterator[Fault]:
    """Attention has a soft cap of half the height."""
    for name, number, node in _rows(program):
        softcap = node.args[_first(node) + 5]
        assert isinstance(softcap, float)
        yield Fault(
            replaced(program, name, number, _told(node, softcap / 2, behind=5)), _SAID, (node.outs[0],)
        )


def unordered_keys(program: Program) -> Iterator[Fault]:
    """Parts of a sequence are cut or joined in the order of the ranks: keys and positions are in the wrong
    place."""
    for name, number, node in sites(program):
        if node.op.startswith("comm.") and isinstance(node.kwarg("outer", 1), int):
            outer = node.kwarg("outer", 1)
            if outer < 0:
                kwargs = tuple((k, -outer if k == "outer" else v) for k, v in node.kwargs)
                wrong = replace(node, kwargs=kwargs)
                yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def _rings(program: Program) -> Iterator[tuple[str, int, Node]]:
    return (site for site in sites(program) if site[2].op.startswith("comm.ring_attention"))


def all_keys(program: Program) -> Iterator[Fault]:
    """Rows attend to all keys that come by, also to those behind them."""
    for name, number, node in _rings(program):
        wrong = replace(node, args=(*node.args[:2], False, *node.args[3:]))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def keys_for_values(program: Program) -> Iterator[Fault]:
    """What goes round as keys are the values, and the other way round."""
    for name, number, node in _rings(program):
        wrong = with_keys(node, *reversed(keys_of(node)))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def weights_of_other_rows(program: Program) -> Iterator[Fault]:
    """Parts are weighed by the gradient in place of the result that they were joined to."""
    for name, number, node in _rings(program):
        if "backward" in node.op:
            grad, *rest = node.args[0]
            given = (grad, *rest[:3], grad, *rest[4:])
            wrong = replace(node, args=(given, *node.args[1:]))
            yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def no_level(program: Program) -> Iterator[Fault]:
    """Keys go round among ranks of a node, which an axis has not: three of four; or two, with a window."""
    for name, number, node in _rings(program):
        wrong = replace(node, kwargs=(("inside", 2 if is_windowed(node) else 3),))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def _ring_told(program: Program, at: int, wrong: Callable[[Arg], Arg]) -> Iterator[Fault]:
    """Rings with a window in which another argument is wrong."""
    for name, number, node in _rings(program):
        if is_windowed(node):
            args = (*node.args[:at], wrong(node.args[at]), *node.args[at + 1 :])
            made = replaced(program, name, number, replace(node, args=args))
            yield Fault(made, _SAID, (node.outs[0],))


def ring_of_one_document(program: Program) -> Iterator[Fault]:
    """Keys that come are taken for those of the rows' document, whose numbers are left out."""
    for name, number, node in _rings(program):
        wrong = replace(node, args=(node.args[0][:-1], *node.args[1:]))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def wider_reach(program: Program) -> Iterator[Fault]:
    """Keys go round with a window that is one position too wide."""
    return _ring_told(program, 5, lambda window: int(window) + 1)


def other_order(program: Program) -> Iterator[Fault]:
    """Rows and keys that come are taken for those of other positions: of a zigzag, or of none."""
    return _ring_told(program, 6, lambda zigzag: not zigzag)


def fewer_hops(program: Program) -> Iterator[Fault]:
    """Keys go on once less than their window reaches."""
    return _ring_told(program, 7, lambda hops: int(hops) - 1)


def more_hops(program: Program) -> Iterator[Fault]:
    """Keys go on once more than their window reaches."""
    return _ring_told(program, 7, lambda hops: int(hops) + 1)


def _merges(program: Program) -> Iterator[tuple[str, int, Node]]:
    return (site for site in sites(program) if site[2].kwarg("op", "") == "attention")


def parts_added_up(program: Program) -> Iterator[Fault]:
    """Parts of attention are added up without their weights."""
    for name, number, node in _merges(program):
        yield Fault(replaced(program, name, number, replace(node, kwargs=())), _SAID, (node.outs[0],))


def merged_statistics(program: Program) -> Iterator[Fault]:
    """Parts of attention are merged as statistics of cross-entropy are."""
    for name, number, node in _merges(program):
        wrong = replace(node, kwargs=(("op", "lse"),))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def values_for_keys(program: Program) -> Iterator[Fault]:
    """A part of attention takes its values for keys, and the other way round."""
    for name, number, node in sites(program):
        if node.op == "autoshard.sdpa_parts.default":
            wrong = with_keys(node, *reversed(keys_of(node)))
            yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def _convolutions(program: Program) -> Iterator[tuple[str, int, Node]]:
    return (site for site in sites(program) if site[2].op.startswith("autoshard.causal_conv"))


def no_halo(program: Program) -> Iterator[Fault]:
    """Chunks begin as if there were none before them."""
    for name, number, node in _convolutions(program):
        at = 2 if "backward" in node.op else 1
        wrong = replace(node, args=(*node.args[:at], None, *node.args[at + 1 :]))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def other_neighbour(program: Program) -> Iterator[Fault]:
    """Chunks are given the ends of the neighbour on their other side."""
    for name, number, node in sites(program):
        if node.op == "aten.constant_pad_nd.default" and node.name.startswith("halo"):
            x, (*inner, left, right), value = node.args
            wrong = replace(node, args=(x, (*inner, right, left), value))
            yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


def other_dilation(program: Program) -> Iterator[Fault]:
    """A convolution of positions that are farther from each other."""
    for name, number, node in _convolutions(program):
        at = 5 if "backward" in node.op else 4
        wrong = replace(node, args=(*node.args[:at], node.args[at] + 1, *node.args[at + 1 :]))
        yield Fault(replaced(program, name, number, wrong), _SAID, (node.outs[0],))


KINDS: dict[str, Kind] = {
    "chunks without a halo": Kind(no_halo, HALOS),
    "halos of the other neighbour": Kind(other_neighbour, HALOS),
    "a convolution of other positions": Kind(other_dilation, HALOS),
    "parts of attention added up": Kind(parts_added_up, MERGED),
    "parts of attention merged as a loss": Kind(merged_statistics, MERGED),
    "keys for values in a part": Kind(values_for_keys, MERGED),
    "keys behind a row in a ring": Kind(all_keys, RINGS),
    "keys for values in a ring": Kind(keys_for_values, RINGS),
    "parts of a ring with wrong weights": Kind(weights_of_other_rows, RINGS),
    "a ring on levels that are none": Kind(no_level, RINGS),
    "documents taken for one in a ring": Kind(ring_of_one_document, RING_DOCUMENTS),
    "a ring with a wider window": Kind(wider_reach, REACH),
    "a ring in another order": Kind(other_order, REACH),
    "a hop less than a window needs": Kind(fewer_hops, REACH),
    "a hop more than a window needs": Kind(more_hops, REACH),
    "rows of another rank": Kind(wrong_rows, CONTEXT),
    "rows without a zigzag": Kind(no_zigzag, CONTEXT),
    "documents taken for one": Kind(one_document, DOCUMENTS),
    "a wider window": Kind(wider_window, DOCUMENTS),
    "another soft cap": Kind(another_cap, DOCUMENTS),
    "sequence in the order of ranks": Kind(unordered_keys, CONTEXT),
}
