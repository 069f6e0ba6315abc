"""The launcher's command line: its own options, and then the command that it starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from minidist.errors import UsageError
from minidist.launch.job import Plan
from minidist.launch.mpiexec import find, parse_hosts, read_hostfile

PURPOSE = """\
Start a program as several ranks with mpiexec. If one fails, say which and how, end the others, and
start all of them again if that is wanted. Nothing is left running.

The command is what Python would be given, "-m MODULE …" or "FILE.py …", or any other program. Its
standard input is empty."""


def parse(arguments: Sequence[str]) -> tuple[Plan, int, bool]:
    """Return what to start, how many times again at most, and whether lines bear their rank.

    Raises UsageError, and ClusterError where there is no mpiexec. `--help` prints it and raises
    SystemExit(0).
    """
    own, command = _divided(arguments)
    given = _parser().parse_args(own)
    if given.hosts is not None and given.hostfile is not None:
        raise UsageError("--hosts and --hostfile contradict each other: give one of them")
    hosts = parse_hosts(given.hosts) if given.hosts is not None else []
    if given.hostfile is not None:
        hosts = read_hostfile(given.hostfile)
    slots = sum(host.slots or 1 for host in hosts)
    count = given.n if given.n is not None else slots
    if not count:
        raise UsageError("say how many ranks to start, as -n 4")
    if not command:
        raise UsageError("say what to start, as -m minidist.bench --num_batches=100")
    plan = Plan(
        command=_program(command),
        count=count,
        mpiexec=find(given.mpiexec),
        hosts=hosts,
        start_timeout=given.start_timeout,
        grace=given.grace,
    )
    return plan, given.max_restarts, given.tag_output


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m minidist.launch",
        usage="%(prog)s -n N [options] [--] COMMAND …",
        description=PURPOSE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "-np", type=_number(int, 1), metavar="N", help="how many ranks to start")
    add(
        "--max_restarts",
        type=_number(int, 0),
        default=0,
        metavar="K",
        help="start all again at most so often when a rank has failed; MINIDIST_RESTART is how "
        "often that has happened (0)",
    )
    add("--hosts", metavar="A:2,B:2", help="the machines, with the number of ranks for each")
    add("--hostfile", metavar="FILE", help="the same, one a line")
    add("--mpiexec", metavar="PATH", help="which mpiexec; by default the one beside this Python")
    add("--tag_output", action="store_true", help="begin each line with its rank, as [2]")
    add(
        "--start_timeout",
        type=_number(float, 0),
        default=60.0,
        metavar="SECONDS",
        help="in which all ranks must have started (60)",
    )
    add(
        "--grace",
        type=_number(float, 0),
        default=5.0,
        metavar="SECONDS",
        help="that ranks have to end before they are killed (5)",
    )
    return parser


def _divided(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the launcher's own arguments, and the command."""
    actions = [action for action in _parser()._actions if action.nargs is None]
    valued = {name for action in actions for name in action.option_strings}
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--":
            return arguments[:at], arguments[at + 1 :]
        if argument in ("-m", "-c") or not argument.startswith("-"):
            break
        at += 2 if argument in valued else 1
    return arguments[:at], arguments[at:]


def _program(command: Sequence[str]) -> list[str]:
    if command[0] in ("-m", "-c"):
        if len(command) < 2:
            raise UsageError(f"{command[0]} needs what to run behind it")
        return [sys.executable, *command]
    if command[0].endswith(".py"):
        if not os.path.exists(command[0]):
            raise UsageError(f"there is no file {command[0]}")
        return [sys.executable, *command]
    return list(command)


def _number(kind: Callable[[str], float], least: int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = -1
        if not number >= least:
            kinds = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is no {kinds} from {least} on")
        return number

    return parse
