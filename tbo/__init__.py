"""Two-batch overlap: hides expert-parallel communication behind computation.

Names are loaded when first used, so that the scheduler (`tbo.core`) can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tbo.batch import Phase, Thresholds
    from tbo.core import (
        YIELD,
        InjectFault,
        Instrument,
        Pending,
        Plan,
        Trace,
        Where,
        compile_plan,
        op,
        run,
    )
    from tbo.errors import (
        CheckpointError,
        DispatcherError,
        InternalError,
        MissingPackageError,
        OpDeclarationError,
        OpError,
        PeerError,
        PlanError,
        RanksDisagreeError,
        SplitError,
        TboError,
        UnsupportedModelError,
        UserError,
        WrapError,
    )
    from tbo.models.checkpoint import load_expert_parallel
    from tbo.models.expert_parallel import shard_experts
    from tbo.models.orders import DEEPSEEK_DECODE, PREFILL, QWEN_DECODE, Schedule
    from tbo.ops.link import Link
    from tbo.wrapping.handle import Handle, explain
    from tbo.wrapping.report import StepReport
    from tbo.wrapping.wrap import wrap

__version__ = "0.1.0"

_HOME = {
    "tbo.batch": ("Phase", "Thresholds"),
    "tbo.core": (
        "YIELD",
        "InjectFault",
        "Instrument",
        "Pending",
        "Plan",
        "Trace",
        "Where",
        "compile_plan",
        "op",
        "run",
    ),
    "tbo.errors": (
        "CheckpointError",
        "DispatcherError",
        "InternalError",
        "MissingPackageError",
        "OpDeclarationError",
        "OpError",
        "PeerError",
        "PlanError",
        "RanksDisagreeError",
        "SplitError",
        "TboError",
        "UnsupportedModelError",
        "UserError",
        "WrapError",
    ),
    "tbo.models.checkpoint": ("load_expert_parallel",),
    "tbo.models.expert_parallel": ("shard_experts",),
    "tbo.models.orders": ("DEEPSEEK_DECODE", "PREFILL", "QWEN_DECODE", "Schedule"),
    "tbo.ops.link": ("Link",),
    "tbo.wrapping.handle": ("Handle", "explain"),
    "tbo.wrapping.report": ("StepReport",),
    "tbo.wrapping.wrap": ("wrap",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_NEEDS_TRANSFORMERS = ("tbo.models", "tbo.wrapping")

__all__ = [
    "DEEPSEEK_DECODE",
    "PREFILL",
    "QWEN_DECODE",
    "YIELD",
    "CheckpointError",
    "DispatcherError",
    "Handle",
    "InjectFault",
    "Instrument",
    "InternalError",
    "Link",
    "MissingPackageError",
    "OpDeclarationError",
    "OpError",
    "PeerError",
    "Pending",
    "Phase",
    "Plan",
    "PlanError",
    "RanksDisagreeError",
    "Schedule",
    "SplitError",
    "StepReport",
    "TboError",
    "Thresholds",
    "Trace",
    "UnsupportedModelError",
    "UserError",
    "Where",
    "WrapError",
    "__version__",
    "compile_plan",
    "explain",
    "load_expert_parallel",
    "op",
    "run",
    "shard_experts",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'tbo' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if module.startswith(_NEEDS_TRANSFORMERS) and package in ("transformers", "safetensors"):
            from tbo.errors import MissingPackageError

            why = "which is not installed" if error.name == package else f"and not the installed one ({error})"
            raise MissingPackageError(
                f"tbo.{name} needs the package {package!r}, {why}",
                remedy='Install it with: pip install "two-batch-overlap[hf]"',
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted(__all__)
