"""What a command works on: ``module:callable``, ``file.py:callable`` or ``hf:path/to/config.json``.

A callable takes no arguments and returns ``(model, example_inputs)``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from autoshard.errors import AutoshardError, UsageError
from autoshard.rules.user import user_rules

BATCH, SEQ = 8, 128
_FORMS = "write module:callable, file.py:callable, or hf:path/to/config.json"


@dataclass(frozen=True)
class BuiltModel:
    """A model with example inputs (in any form that `autoshard.plan` takes), and notes for the reader."""

    model: nn.Module
    inputs: Any
    notes: tuple[str, ...] = ()


def is_config(target: str) -> bool:
    """Whether a target is a Hugging Face config, so that batch and seq apply to it."""
    return target.startswith("hf:")


def options_of(target: str, batch: int | None, seq: int | None) -> dict[str, int]:
    """Batch and sequence length of a target; UsageError if they are given for a callable."""
    if is_config(target):
        return {"batch": batch or BATCH, "seq": seq or SEQ}
    if batch is not None or seq is not None:
        config = target.endswith(".json")
        raise UsageError(
            "--batch and --seq only apply to hf: targets",
            where=target,
            why="a callable brings its own example inputs",
            hint=f"a config is written hf:{target}"
            if config
            else "give the example inputs the shape you want",
        )
    return {}


def build(
    target: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: Literal["meta", "cpu"] = "meta",
    seed: int = 0,
) -> BuiltModel:
    """The model of a target, on meta (nothing allocated) or on the CPU with weights that depend on the seed.

    Raises UsageError if the target cannot be found, fails, or returns something else.
    """
    options = options_of(target, batch, seq)
    if is_config(target):
        return _from_config(Path(target[3:]).expanduser(), options, device, seed)
    fn = find_callable(target)
    if device == "meta":
        try:
            return _call(fn, target, "meta", seed)
        except UsageError as error:
            note = f"{target} does not work on the meta device ({error.why}), so its weights are allocated"
            return BuiltModel(*_parts(_call(fn, target, "cpu", seed)), (note,))
    return _call(fn, target, "cpu", seed)


def _parts(built: BuiltModel) -> tuple[nn.Module, Any]:
    return built.model, built.inputs


def _from_config(path: Path, options: dict[str, int], device: str, seed: int) -> BuiltModel:
    if not path.exists():
        raise UsageError(
            f"there is no config {path}", hint="give the path of a config.json, or of its folder"
        )
    try:
        from autoshard.interop.huggingface import load_hf_config
    except ImportError as error:
        raise UsageError(
            "hf: targets need transformers", why=str(error), hint="install autoshard[hf]"
        ) from None
    try:
        model, new = load_hf_config(path, options["batch"], options["seq"], device=device, seed=seed)
    except AutoshardError:
        raise
    except Exception as error:
        raise _failed(f"hf:{path}", error) from error
    return BuiltModel(model, new.inputs, new.notes)


def find_callable(target: str) -> Callable[[], Any]:
    """The callable that a target names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{target!r} is not a target", hint=_FORMS)
    module = _load_file(Path(place), target) if place.endswith(".py") else _load_module(place, target)
    results = getattr(module, name, None)
    if not callable(results):
        why = "it is no callable" if results is not None else f"{place} has no {name!r}"
        raise UsageError(f"{target} cannot be used", why=why, hint="name a function without arguments")
    result: Callable[[], Any] = results
    return result


def load_rules(path: Path | None) -> ModuleType | None:
    """The user's file of rules, run once: a model that imports the same file gets the same module.

    Raises UsageError if there is no such file, it fails, or it holds no rule.
    """
    if path is None:
        return None
    module = _load_file(path, f"--rules {path}")
    if not user_rules(module):
        raise UsageError(
            f"{path} holds no rule", hint="decorate functions with @autoshard.rule('mine.op.default')"
        )
    return module


def _load_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint=_FORMS)
    known = sys.modules.get(path.stem)
    if known is not None and _is_from(known, path) and user_rules(known):
        return known  # the ops that stand beside rules may not be defined twice
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script, so that it finds its neighbours
    # pickles and dataclasses look their module up by name; a module of that name may exist already
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(target, error) from error
    return module


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path.resolve()


def _load_module(name: str, target: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name}", where=target, hint=_FORMS) from None
        raise _failed(target, error) from error
    except Exception as error:
        raise _failed(target, error) from error


def _call(fn: Callable[[], Any], target: str, device: Literal["meta", "cpu"], seed: int) -> BuiltModel:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        try:
            new = fn()
        except AutoshardError:
            raise
        except Exception as error:
            raise _failed(target, error) from error
    if not (isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], nn.Module)):
        what = f"{target} returns {type(new).__name__}"
        raise UsageError(what, hint="return a tuple (model, example_inputs)")
    return BuiltModel(new[0], new[1])


def _failed(target: str, error: Exception) -> UsageError:
    """The user's own code raised: say where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "autoshard" not in Path(f.filename).parts[-3:-1]]
    last = (own or list(frames))[-1]
    return UsageError(
        f"{target} cannot be built",
        where=f"{last.filename}:{last.lineno}",
        why=f"{type(error).__name__}: {error}",
    )
