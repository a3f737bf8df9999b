"""A compiler that takes an unmodified PyTorch model and a device mesh and gives one program per rank.

    import autoshard

    model = autoshard.parallelize(model, "dp=2,tp=2", example_inputs=batch)   # under torchrun

or in steps: `plan` decides, `compile` makes the per-rank programs, `load` runs them without planning again.
Names are imported when they are first used, so that ``import autoshard`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard._version import __version__

if TYPE_CHECKING:
    from autoshard import errors, rules
    from autoshard.api import Compiled, compile, load, parallelize, plan, plan_lengths
    from autoshard.auditing.session import audit
    from autoshard.cluster import Cluster, Mesh
    from autoshard.errors import (
        AutoshardError,
        CaptureError,
        InfeasibleError,
        NoRuleError,
        UsageError,
        VerificationError,
    )
    from autoshard.interop.export import export
    from autoshard.interop.weights import LoadedWeights, load_weights
    from autoshard.options import PassOptions, PlanOptions
    from autoshard.planner.length_plans import LengthPlans
    from autoshard.planner.planned import Planned
    from autoshard.rules.user import UserRule, rule
    from autoshard.runtime.checkpoints import Checkpoints
    from autoshard.runtime.groups import init_process_group
    from autoshard.runtime.optim.adamw import AdamW
    from autoshard.runtime.optim.clip import clip_grad_norm_
    from autoshard.runtime.optim.grad_scaler import GradScaler
    from autoshard.runtime.optim.host_optimizer import HostOptimizer
    from autoshard.runtime.optim.layer_wise import LayerWiseOptimizer
    from autoshard.runtime.optim.muon import Muon
    from autoshard.verify.rule_check import WrongRule, check_rule

__all__ = [
    "AdamW",
    "AutoshardError",
    "CaptureError",
    "Checkpoints",
    "Cluster",
    "Compiled",
    "GradScaler",
    "HostOptimizer",
    "InfeasibleError",
    "LayerWiseOptimizer",
    "LengthPlans",
    "LoadedWeights",
    "Mesh",
    "Muon",
    "NoRuleError",
    "PassOptions",
    "PlanOptions",
    "Planned",
    "UsageError",
    "UserRule",
    "VerificationError",
    "WrongRule",
    "__version__",
    "audit",
    "check_rule",
    "clip_grad_norm_",
    "compile",
    "errors",
    "export",
    "full_tensors",
    "init_process_group",
    "load",
    "load_weights",
    "parallelize",
    "plan",
    "plan_lengths",
    "rule",
    "rules",
]


def _home(name: str) -> str | None:
    """The module that a public name lives in."""
    if name in (
        "plan",
        "plan_lengths",
        "compile",
        "load",
        "parallelize",
        "Planned",
        "LengthPlans",
        "Compiled",
    ):
        return "autoshard.api"
    if name in ("Mesh", "Cluster"):
        return "autoshard.cluster"
    if name in ("rule", "UserRule"):
        return "autoshard.rules.user"
    if name == "audit":
        return "autoshard.auditing.session"
    if name in ("check_rule", "WrongRule"):
        return "autoshard.verify.rule_check"
    if name in ("PlanOptions", "PassOptions"):
        return "autoshard.options"
    if name == "export":
        return "autoshard.interop.export"
    if name in ("load_weights", "LoadedWeights"):
        return "autoshard.interop.weights"
    if name == "init_process_group":
        return "autoshard.runtime.groups"
    if name == "full_tensors":
        return "autoshard.runtime.full_tensors"
    if name == "Checkpoints":
        return "autoshard.runtime.checkpoints"
    if name == "clip_grad_norm_":
        return "autoshard.runtime.optim.clip"
    if name == "AdamW":
        return "autoshard.runtime.optim.adamw"
    if name == "HostOptimizer":
        return "autoshard.runtime.optim.host_optimizer"
    if name == "LayerWiseOptimizer":
        return "autoshard.runtime.optim.layer_wise"
    if name == "Muon":
        return "autoshard.runtime.optim.muon"
    if name == "GradScaler":
        return "autoshard.runtime.optim.grad_scaler"
    return "autoshard.errors" if name.endswith("Error") and name in __all__ else None


def __getattr__(name: str) -> Any:
    if name in ("errors", "rules"):
        return import_module(f"autoshard.{name}")
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
