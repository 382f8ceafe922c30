"""Checks what `tbo.wrap` is called with."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, get_args

import torch.distributed as dist
from torch import nn

from tbo.batch import MAX_SUB_BATCHES, Overlap, Thresholds
from tbo.core import Instrument
from tbo.errors import WrapError
from tbo.ops.link import Link

DISABLE_VARIABLE = "TBO_DISABLE"


def disabled() -> bool:
    """Whether the environment turns tbo off.

    Raises:
        WrapError: the variable is set to something that is neither yes nor no.
    """
    value = os.environ.get(DISABLE_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise WrapError(
            f"{DISABLE_VARIABLE}={value!r} is neither 0 nor 1", remedy=f"Set {DISABLE_VARIABLE}=1 or unset it."
        )
    return value == "1"


def check_options(
    model: Any,
    *,
    sub_batches: Any,
    overlap: Any,
    order: Any,
    link: Any,
    timeout: Any,
    instruments: Any,
    thresholds: Any,
) -> None:
    """Checks the plain options of `tbo.wrap`.

    Raises:
        WrapError: names the option, its value and what it may be.
    """
    _check_model_and_switches(model, sub_batches, overlap, order)
    if link is not None and not isinstance(link, Link):
        raise WrapError(
            f"link is a {type(link).__name__}", remedy="Pass tbo.Link(gigabytes_per_second, latency=seconds) or None."
        )
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not math.isfinite(timeout) or timeout <= 0:
        raise WrapError(f"timeout={timeout!r}", remedy="Give a number of seconds above 0.")
    if thresholds is not None and not isinstance(thresholds, Thresholds):
        raise WrapError(f"thresholds is a {type(thresholds).__name__}", remedy="Pass tbo.Thresholds(...) or None.")
    if not isinstance(instruments, Sequence):
        raise WrapError(f"instruments is a {type(instruments).__name__}", remedy="Pass a list of instruments.")
    for instrument in instruments:
        if not isinstance(instrument, Instrument):
            raise WrapError(f"instruments holds a {type(instrument).__name__}", remedy="Derive it from tbo.Instrument.")


def _check_model_and_switches(model: Any, sub_batches: Any, overlap: Any, order: Any) -> None:
    if not isinstance(model, nn.Module):
        raise WrapError(f"model is a {type(model).__name__}", remedy="Pass a transformers model (a torch.nn.Module).")
    if isinstance(sub_batches, bool) or not isinstance(sub_batches, int) or not 1 <= sub_batches <= MAX_SUB_BATCHES:
        raise WrapError(f"sub_batches={sub_batches!r}", remedy=f"Use a whole number from 1 to {MAX_SUB_BATCHES}.")
    if overlap not in get_args(Overlap):
        raise WrapError(f"overlap={overlap!r}", remedy=f"Use one of {', '.join(map(repr, get_args(Overlap)))}.")
    if order not in ("interleaved", "sequential"):
        raise WrapError(f"order={order!r}", remedy="Use 'interleaved' or 'sequential'.")


def world_size_of(ep_group: Any) -> int:
    """Ranks in the expert-parallel group; 1 for None.

    Raises:
        WrapError: not a process group, or this process is not in it.
    """
    if ep_group is None:
        return 1
    if not dist.is_available() or not dist.is_initialized():
        raise WrapError(
            "ep_group was given, but torch.distributed is not initialised",
            remedy="Call torch.distributed.init_process_group first (torchrun sets its environment).",
        )
    if ep_group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(ep_group, dist.ProcessGroup):
        raise WrapError(
            f"ep_group is a {type(ep_group).__name__}, not a process group this rank belongs to",
            remedy="Pass the group from torch.distributed.new_group, or torch.distributed.group.WORLD, on its members.",
        )
    return dist.get_world_size(ep_group)
