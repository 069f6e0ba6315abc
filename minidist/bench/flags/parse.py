"""From a command line to Flags.

A flag is given as `--name=value` or `--name value`, a switch also as `--name` and `--noname`; the
last one counts.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import minidist
from minidist.bench.flags import GROUPS, Flags
from minidist.bench.flags.kinds import Kind
from minidist.errors import UsageError

PROGRAM = "python -m minidist.bench"


def parse(arguments: Sequence[str]) -> Flags:
    """Return the flags that the arguments of a command (without its name) give.

    Raises UsageError for flags or values that are unknown, missing or contradictory. `--help` and
    `--version` print and raise SystemExit(0).
    """
    try:
        namespace, unknown = _parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}: see --help") from None
    if unknown:
        _refuse(unknown[0])
    given: dict[str, str] = vars(namespace)
    values: dict[str, Any] = {}
    for item in fields(Flags):
        kind: Kind = item.metadata["kind"]
        for name in (item.name, *item.metadata["aliases"]):
            if name not in given:
                continue
            try:
                value = kind.parse(given[name])
            except UsageError as error:
                raise UsageError(f"--{name}: {error}") from None
            except ValueError:
                raise UsageError(f"--{name}={given[name]} is not {kind.allowed}") from None
            if values.setdefault(item.name, value) != value:
                raise UsageError(
                    f"--{item.name} and --{name} are the same flag, but were given "
                    f"{values[item.name]} and {value}: give only one of them"
                )
    return Flags(**values)


class _Parser(argparse.ArgumentParser):
    """argparse keeps silent where standard output takes no more; this one does not."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


def _parser() -> argparse.ArgumentParser:
    """Make the parser that only collects text by name; `parse` reads it."""
    parser = _Parser(
        usage=f"{PROGRAM} [--flag=value ...]",
        description="Train a model on several devices, and print speed, loss and accuracy.",
        epilog="What is true or false is given as --flag, --noflag or --flag=true. Of a flag given "
        "twice the last one counts.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    version = f"minidist {minidist.__version__}"
    parser.add_argument("--version", action="version", version=version)
    for group in GROUPS:
        section = parser.add_argument_group(group.__name__, group.__doc__)
        for item in fields(group):
            kind: Kind = item.metadata["kind"]
            words = f"{item.metadata['words']} ({kind.allowed})"
            if item.default is not None:
                words += f" [{str(item.default).lower() if kind.switch else item.default}]"
            if kind.switch:
                section.add_argument(
                    f"--{item.name}", nargs="?", const="true", metavar="X", help=words
                )
                section.add_argument(
                    f"--no{item.name}",
                    dest=item.name,
                    action="store_const",
                    const="false",
                    help=argparse.SUPPRESS,
                )
                continue
            section.add_argument(f"--{item.name}", metavar="X", help=words)
            for alias in item.metadata["aliases"]:
                section.add_argument(f"--{alias}", metavar="X", help=f"the same as --{item.name}")
    return parser


def _refuse(argument: str) -> NoReturn:
    if not argument.startswith("--"):
        raise UsageError(f"{argument!r} is not a flag: flags begin with --, see --help")
    name = argument.removeprefix("--").split("=")[0]
    known = [name for item in fields(Flags) for name in (item.name, *item.metadata["aliases"])]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean --{close[0]}?" if close else "."
    raise UsageError(f"--{name} is not a flag{guess} Flags are --{', --'.join(known)}.")
