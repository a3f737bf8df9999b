"""What a manifest may hold: every number and every list of it is bounded before it is used."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from autoshard.cluster.mesh import Mesh
from autoshard.errors import UsageError, VerificationError
from autoshard.ir.decode import decoded
from autoshard.ir.joint import ResultKind
from autoshard.options import Codegen

#: of all programs there may be; the largest machines have a tenth of it
MAX_RANKS, MAX_AXES = 1 << 20, 16
MAX_MICROBATCHES = 1 << 16
#: entries of a list, and characters of a text in it
MAX_ENTRIES, MAX_TEXT = 1 << 20, 100_000

RECOMPILE = "compile the program again"
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Texts: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=MAX_ENTRIES)]
#: arguments and outputs of the model: a kind and, of a static one, its value
_Leaf: TypeAlias = tuple[Literal["tensor", "static"], Annotated[str, Meta(max_length=10_000)]]
_OutLeaf: TypeAlias = tuple[Literal["tensor", "static", "not made"], Annotated[str, Meta(max_length=10_000)]]
_Leaves: TypeAlias = Annotated[tuple[_Leaf, ...], Meta(max_length=MAX_ENTRIES)]
_Pairs: TypeAlias = Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=MAX_ENTRIES)]


class StoredSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Signature` without its ports, which are in the text; results: value, kind, target."""

    results: Annotated[tuple[tuple[Text, ResultKind, Text], ...], Meta(max_length=MAX_ENTRIES)]
    in_tree: Text
    in_leaves: _Leaves
    out_tree: Text
    out_leaves: Annotated[tuple[_OutLeaf, ...], Meta(max_length=MAX_ENTRIES)]
    input_names: _Texts
    tied: _Pairs
    frozen: _Texts
    training: bool
    batch_inputs: _Texts


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``manifest.json``: see `Program` for the fields. files: name -> digest."""

    format: int
    autoshard: Text
    torch: Text
    mesh: Text
    target: Text
    options: _Pairs
    user_ops: _Texts
    microbatches: Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
    sums: _Texts
    alone: _Texts
    offload: Text = ""
    codegen: Codegen = ""
    cuda_graphs: bool = False
    signature: StoredSignature
    original_results: _Texts
    files: Annotated[dict[Text, Text], Meta(max_length=MAX_ENTRIES)]


def manifest_of(raw: object) -> Manifest:
    """VerificationError, naming the entry, unless a manifest of this format has the form that it should."""
    manifest = decoded(raw, Manifest, "manifest.json", fail=VerificationError, hint=RECOMPILE)
    check_mesh(manifest.mesh, "mesh")
    return manifest


def check_mesh(text: str, where: str) -> Mesh:
    """The mesh of a text. VerificationError if it is none, or one of more ranks than there can be."""
    try:
        mesh = Mesh.parse(text)
    except UsageError as error:
        fail(where, error.what)
    if len(mesh.axes) > MAX_AXES:
        fail(where, f"a mesh of {len(mesh.axes)} axes")
    if mesh.world_size > MAX_RANKS:
        fail(where, f"a mesh of more than {MAX_RANKS} ranks")
    return mesh


def fail(where: str, what: str) -> NoReturn:
    """VerificationError about an entry of the manifest."""
    raise VerificationError(
        f"the manifest has {what}", where=f"manifest.json, {where or 'all of it'}", hint=RECOMPILE
    )
