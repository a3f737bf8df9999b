"""What a stored signature may hold: nothing of it may import a module, call something, or fail later.

The trees of arguments and outputs are JSON that torch's ``treespec_loads`` reads. That function imports
whatever module an enum or the default of a defaultdict names, so that trees are looked through first.
"""

from __future__ import annotations

import ast
import enum
import json
import re
import sys
from collections.abc import Iterator, Mapping
from math import inf, nan
from typing import Any, NoReturn

import torch

from autoshard.errors import VerificationError
from autoshard.program.program import Signature
from autoshard.torch_adapters import records
from autoshard.torch_adapters.dtypes import torch_dtype

#: what a defaultdict may make of a missing key
_DEFAULTS = ("bool", "dict", "float", "int", "list", "set", "str", "tuple")
_NUMBERS = {"inf": inf, "-inf": -inf, "nan": nan}
_DEVICE = re.compile(r"^device\(type='([a-z]{1,16})'(?:, index=(\d{1,4}))?\)$")


def check_signature(signature: Signature, constants: Mapping[str, object]) -> None:
    """VerificationError unless the ends of a program fit each other and its constants."""
    _check_tree(signature.in_tree, len(signature.in_leaves), "arguments")
    _check_tree(signature.out_tree, len(signature.out_leaves), "outputs")
    for kind, text in signature.out_leaves:
        if kind == "static":
            _check_literal(text)
    if len(signature.input_names) != len(signature.in_leaves):
        _fail(f"{len(signature.input_names)} names for {len(signature.in_leaves)} arguments")
    for port in signature.ports:
        if port.kind == "input" and port.target != "seed":
            _check_position(port.target, signature.in_leaves, f"input {port.name}")
        if port.kind == "tangent":
            _check_position(port.target, signature.out_leaves, f"tangent {port.name}")
        if port.kind == "const":
            _check_constant(port.target, constants.get(port.target), port.type.shape, port.type.dtype)
    given = {(p.kind, p.target) for p in signature.ports}
    for result in signature.results:
        if result.kind == "output":
            _check_position(result.target, signature.out_leaves, f"output {result.value}")
        owner = {"grad": "param", "input_grad": "input", "buffer": "buffer"}.get(result.kind)
        if owner is not None and (owner, result.target) not in given:
            _fail(f"a {result.kind} of {result.target!r}, which is no {owner} of the program")


def _check_tree(text: str, leaves: int, what: str) -> None:
    if not isinstance(text, str):
        _fail(f"a tree of {what} that is no text")
    try:
        raw = json.loads(text)
        nodes = list(_nodes(raw[1]))
        for node in nodes:
            _check_node(node)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        _fail(f"a tree of {what} that cannot be read ({type(error).__name__}: {error})")
    count = sum(node["type"] is None for node in nodes)
    if count != leaves:
        _fail(f"a tree of {what} with {count} leaves, of which {leaves} are described")


def _nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += node["children_spec"]


def _check_node(node: Mapping[str, Any]) -> None:
    kind, context = node["type"], node["context"]
    if kind == records.NAME:
        records.check_record(context, node["children_spec"])
    if kind == "collections.defaultdict":
        new = (context["default_factory_module"], context["default_factory_name"])
        if new[0] != "builtins" or new[1] not in _DEFAULTS:
            _fail(f"a defaultdict whose default is {new[0]}.{new[1]}")
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return  # the name of a class, which torch only looks up among those that are registered
    for result in _dicts(context):
        if "__enum__" in result:
            _check_enum(str(result["fqn"]))


def _dicts(value: object) -> Iterator[Mapping[str, Any]]:
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _check_enum(name: str) -> None:
    """An enum may be named if it is there already: nothing is imported for a program."""
    module, _, path = name.partition(":")
    result: object = sys.modules.get(module)
    for word in path.split("."):
        result = vars(result).get(word) if result is not None and hasattr(result, "__dict__") else None
    if not (isinstance(result, type) and issubclass(result, enum.Enum)):
        _fail(
            f"{name!r}, which is no enum that is loaded", "import the module that defines it before loading"
        )


def _check_literal(text: str) -> None:
    try:
        literal(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        _fail(f"an output {text[:40]!r}, which is no literal")


def literal(text: str) -> Any:
    """The value of a static output: None, a truth value, a number, a text, a dtype or a device, by its repr.

    Raises ValueError (or another error of ``ast.literal_eval``) for anything else.
    """
    if text in _NUMBERS:
        return _NUMBERS[text]
    if text.startswith("torch."):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    device = _DEVICE.match(text)
    if device is not None:
        return torch.device(device[1]) if device[2] is None else torch.device(device[1], int(device[2]))
    return ast.literal_eval(text)


def _check_position(target: str, leaves: tuple[tuple[str, str], ...], what: str) -> None:
    if not (target.isascii() and target.isdigit()) or len(target) > 9 or int(target) >= len(leaves):
        _fail(f"{what} at position {target[:20]!r} of {len(leaves)}")


def _check_constant(target: str, value: object, shape: tuple[int, ...], dtype: str) -> None:
    if not isinstance(value, torch.Tensor):
        _fail(f"no value for constant {target!r}")
    if tuple(value.shape) != shape or value.dtype != torch_dtype(dtype):
        wanted = f"{torch_dtype(dtype)} {list(shape)}"
        _fail(f"constant {target!r} as {value.dtype} {list(value.shape)}, not {wanted}")


def _fail(what: str, hint: str = "compile the program again") -> NoReturn:
    raise VerificationError(f"the signature of the program has {what}", hint=hint)
