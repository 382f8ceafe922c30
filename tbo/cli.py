"""The command `tbo`. Each subcommand is a module of its own with the four names of `Subcommand`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from tbo.errors import TboError, UserError

SUBCOMMANDS = ("tbo.demo.command", "tbo.doctor")
"""Modules of the subcommands, in the order of the help text. Importing one imports neither torch nor transformers."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Subcommand(Protocol):
    """What a subcommand's module offers."""

    NAME: str
    SUMMARY: str
    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the options."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""
        ...


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `tbo` with all subcommands."""
    parser = _Parser(
        prog="tbo",
        description="Two-batch overlap: hides expert-parallel communication behind computation.",
        epilog="tbo COMMAND --help lists a command's options.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version_text())
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name in SUBCOMMANDS:
        module = cast("Subcommand", importlib.import_module(name))
        command = commands.add_parser(
            module.NAME, help=module.SUMMARY, description=module.DESCRIPTION, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    command = commands.add_parser("version", help="print the version", description="Prints the version of tbo.")
    command.set_defaults(run=_print_version)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `tbo` and returns its exit code: 0, 1 for a failure, 2 for a mistake in how it was called.

    Args:
        arguments: those of the command line after the program's name; None: this process's own.

    Raises:
        SystemExit: after a help text, or with code 2 for options that do not parse.
    """
    parsed = build_parser().parse_args(arguments)
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except TboError as error:
        sys.stderr.write(f"tbo {parsed.command}: error: {error}\n")
        return EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"tbo {parsed.command}: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would try to flush it
        return EXIT_FAILED
    return code


def _version_text() -> str:
    from tbo import __version__

    return f"tbo {__version__}"


def _print_version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{_version_text()}\n")
    return 0
