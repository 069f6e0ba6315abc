"""From a command line to Flags.

A flag is given as `--name=value` or `--name value`, a switch also as `--name` and `--noname`; the
last one counts.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

import minidist
from minidist.bench.flags import GROUPS, Flags
from minidist.bench.flags.kinds import Kind
from minidist.errors import UsageError

PROGRAM = "python -m minidist.bench"
PURPOSE = "Train a model on several devices, and print speed, loss and accuracy."

T = TypeVar("T")


def parse(arguments: Sequence[str]) -> Flags:
    """Return the flags that the arguments of a command (without its name) give.

    Raises UsageError for flags or values that are unknown, missing or contradictory. `--help` and
    `--version` print and raise SystemExit(0).
    """
    return read(arguments, Flags, GROUPS, PROGRAM, PURPOSE)


def read(
    arguments: Sequence[str], flags: type[T], groups: Sequence[type], program: str, purpose: str
) -> T:
    """Return the flags of any command: `flags` is a dataclass that is made of `groups`.

    Raises what `parse` raises.
    """
    try:
        namespace, unknown = _parser(groups, program, purpose).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UsageError(f"{error.argument_name}: {error.message}: see --help") from None
    if unknown:
        _refuse(unknown[0], groups)
    given: dict[str, str] = vars(namespace)
    values: dict[str, Any] = {}
    for item in (item for group in groups for item in fields(group)):
        kind: Kind = item.metadata["kind"]
        for name in (item.name, *item.metadata["aliases"]):
            if name not in given:
                continue
            try:
                value = kind.parse(given[name])
            except UsageError as error:
                raise UsageError(f"{_dashed(name)}: {error}") from None
            except ValueError:
                raise UsageError(f"{_dashed(name)}={given[name]} is not {kind.allowed}") from None
            if values.setdefault(item.name, value) != value:
                raise UsageError(
                    f"--{item.name} and {_dashed(name)} are the same flag, but were given "
                    f"{values[item.name]} and {value}: give only one of them"
                )
    return flags(**values)


def _shown(default: Any) -> str:
    """Return a default as one would give it."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _dashed(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


class _Parser(argparse.ArgumentParser):
    """argparse keeps silent where standard output takes no more; this one does not."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


def _parser(groups: Sequence[type], program: str, purpose: str) -> argparse.ArgumentParser:
    """Make the parser that only collects text by name; `read` reads it."""
    parser = _Parser(
        usage=f"{program} [--flag=value ...]",
        description=purpose,
        epilog="What is true or false is given as --flag, --noflag or --flag=true. Of a flag given "
        "twice the last one counts.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    version = f"minidist {minidist.__version__}"
    parser.add_argument("--version", action="version", version=version)
    for group in groups:
        section = parser.add_argument_group(group.__name__, group.__doc__)
        for item in fields(group):
            kind: Kind = item.metadata["kind"]
            words = f"{item.metadata['words']} ({kind.allowed})"
            if item.default is not None:
                words += f" [{_shown(item.default)}]"
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
                same = f"the same as --{item.name}"
                section.add_argument(_dashed(alias), metavar="X", help=same)
    return parser


def _refuse(argument: str, groups: Sequence[type]) -> NoReturn:
    if not argument.startswith("--"):
        raise UsageError(f"{argument!r} is not a flag: flags begin with --, see --help")
    name = argument.removeprefix("--").split("=")[0]
    items = [item for group in groups for item in fields(group)]
    known = [name for item in items for name in (item.name, *item.metadata["aliases"])]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean --{close[0]}?" if close else "."
    raise UsageError(f"--{name} is not a flag{guess} Flags are {', '.join(map(_dashed, known))}.")
