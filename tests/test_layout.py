"""The rooms of the project and the arrows between them: what no linter checks, held by tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("ops", "models", "kernels")

# From the bottom up; a module may import from its own row and from those above it in this list.
# "tbo" itself is the public face: it re-exports everything lazily, so nothing below the last row may import from it.
LAYERS = (
    ("tbo.errors",),
    ("tbo.core",),
    ("tbo.batch",),
    ("tbo.kernels",),
    ("tbo.ops",),
    ("tbo.models",),
    ("tbo.timeline",),
    ("tbo.wrapping",),
    ("tbo.demo", "tbo.doctor", "tbo.cli", "tbo.__main__", "tbo"),
)

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

# Character classes keep these patterns from finding themselves.
UNFINISHED = re.compile(r"\b(TO[D]O|FIX[M]E|XX[X]|HAC[K])\b")
REGISTRY_HOST = re.compile(
    r"pypi\.(org|python\.org)|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com|npmjs\.(org|com)"
    r"|anaconda\.(org|com)|deb\.debian\.org|proxy\.golang\.org|static\.crates\.io|index\.crates\.io"
)


def _project_files() -> list[Path]:
    """Every file of the change at hand, relative to the root: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the list of tracked files needs a git checkout: {error}")
    names = sorted({name for name in listing.split("\0") if name})
    return [Path(name) for name in names if os.path.lexists(ROOT / name)]


def _python_files() -> list[Path]:
    return [path for path in _project_files() if path.suffix == ".py" and not (ROOT / path).is_symlink()]


def _installed_path(path: Path) -> Path | None:
    """Where a file of the checkout stands in site-packages, or None if it is not installed."""
    if path.parts[0] == "tbo":
        return path
    return Path("tbo") / path if path.parts[0] in LINKED else None


def _modules() -> dict[str, Path]:
    """Import name to file, for every module under `tbo`."""
    modules = {}
    for path in _python_files():
        installed = _installed_path(path)
        if installed is not None:
            parts = installed.with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _layer(module: str) -> int | None:
    for index, row in enumerate(LAYERS):
        if any(module == name or (name != "tbo" and module.startswith(name + ".")) for name in row):
            return index
    return None


class _RuntimeImports(ast.NodeVisitor):
    """Collects the modules a file imports when it runs, wherever the import stands."""

    def __init__(self, modules: dict[str, Path]) -> None:
        self.found: list[tuple[int, str]] = []
        self._modules = modules

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"line {node.lineno}: relative import"
        assert node.module is not None
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            is_module = submodule in self._modules or any(name.startswith(submodule + ".") for name in self._modules)
            self.found.append((node.lineno, submodule if is_module else node.module))


def _runtime_imports(path: Path, modules: dict[str, Path]) -> list[tuple[int, str]]:
    visitor = _RuntimeImports(modules)
    visitor.visit(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    return visitor.found


def _run_python(code: str) -> str:
    """Runs a fresh interpreter in the root, where the three folders are within reach of a wrong import."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("folder", LINKED)
def test_link_resolves_to_its_folder(folder: str) -> None:
    link = ROOT / "tbo" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder, "the link must be relative, or a clone elsewhere breaks"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", LINKED)
def test_root_folder_is_flat_and_no_package(folder: str) -> None:
    entries = [path for path in (ROOT / folder).iterdir() if path.name != "__pycache__"]
    assert entries, "an empty folder is not kept by git, and its link would point nowhere"
    assert not [path.name for path in entries if path.is_dir()]
    assert "__init__.py" not in {path.name for path in entries}


def test_packages_listed_for_setuptools_are_the_folders_that_hold_code() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {
        str(installed.parent).replace(os.sep, ".") for path in _python_files() if (installed := _installed_path(path))
    }
    assert sorted(listed) == sorted(folders)


def test_importing_core_imports_no_torch() -> None:
    assert _run_python("import sys, tbo.core; print('torch' in sys.modules)") == "False"


def test_importing_the_public_name_imports_no_torch() -> None:
    assert _run_python("import sys, tbo; print('torch' in sys.modules)") == "False"


def test_no_module_is_imported_past_the_public_name() -> None:
    modules = sorted(name for name in _modules() if not name.endswith("__main__"))
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
# transformers tries `from kernels import ...`, which leaves an empty namespace package; a module below it is a copy.
for name, module in list(sys.modules.items()):
    place = getattr(module, "__file__", None) or ""
    if name.startswith({tuple(f"{folder}." for folder in LINKED)!r}) and place.startswith({str(ROOT)!r}):
        print(name)
"""
    assert _run_python(code) == ""


def test_every_module_has_a_layer() -> None:
    homeless = [name for name in _modules() if _layer(name) is None]
    assert not homeless, "say in LAYERS where these stand"


def test_arrows_between_rooms_go_one_way() -> None:
    modules = _modules()
    upward = []
    for name, path in modules.items():
        own = _layer(name)
        for line, target in _runtime_imports(path, modules):
            layer = _layer(target)
            if own is not None and layer is not None and layer > own:
                upward.append(f"{path}:{line}: {name} imports {target}, which stands above it")
    assert not upward, "\n".join(upward)


def test_core_imports_only_the_standard_library() -> None:
    modules = _modules()
    allowed = sys.stdlib_module_names | {"tbo"}  # which part of tbo is the test above
    foreign = [
        f"{path}:{line}: {target}"
        for name, path in modules.items()
        if name == "tbo.errors" or name.startswith("tbo.core")
        for line, target in _runtime_imports(path, modules)
        if target.split(".")[0] not in allowed
    ]
    assert not foreign


def _copy_checkout(destination: Path, *, with_links: bool) -> None:
    """Copies the project's files. Without links, a link becomes what git writes then: a file holding its target."""
    for path in _project_files():
        source, copy = ROOT / path, destination / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not source.is_symlink():
            shutil.copy2(source, copy)
        elif with_links:
            copy.symlink_to(source.readlink())
        else:
            copy.write_text(str(source.readlink()), encoding="utf-8")


@pytest.mark.parametrize("with_links", [True, False], ids=["links", "no-links"])
def test_wheel_holds_exactly_the_files_of_the_checkout(tmp_path: Path, with_links: bool) -> None:
    checkout, output = tmp_path / "checkout", tmp_path / "wheels"
    _copy_checkout(checkout, with_links=with_links)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index"]
    build += ["--wheel-dir", str(output), str(checkout)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = output.iterdir()
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    code = {name for name in names if ".dist-info/" not in name}
    expected = {
        str(installed)
        for path in _project_files()
        if (installed := _installed_path(path)) and not (ROOT / path).is_symlink() and path.suffix != ".md"
    }
    assert code == expected, "a file of another kind than .py is named in [tool.setuptools.package-data]"
    assert {name.split("/")[0] for name in code} == {"tbo"}
    assert "tbo/py.typed" in code
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path}:{node.lineno}: {node.name}", node.end_lineno - node.lineno + 1


def test_files_and_functions_are_short() -> None:
    files = [path for path in _python_files() if path.parts[0] != "tests"]
    long = [
        f"{path}: {lines} lines"
        for path in files
        if (lines := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    long += [
        f"{name}: {lines} lines" for path in files for name, lines in _functions(path) if lines > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("pattern", [UNFINISHED, REGISTRY_HOST], ids=["unfinished", "registry-host"])
def test_no_file_holds(pattern: re.Pattern[str]) -> None:
    found = []
    for path in _project_files():
        if (ROOT / path).is_symlink():
            continue
        text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
        found += [
            f"{path}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found, "\n".join(found)
