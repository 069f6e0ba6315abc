"""The team of threads: several callers, forked children, and the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np

from minidist.kernels import reduce

WORK = """
import os, threading
import numpy as np
from minidist.kernels import reduce

x = np.arange(1 << 18, dtype=np.float64)

def work(threads=3):
    out = np.zeros_like(x)
    reduce.sum([[out]], [[x], [x]], threads=threads)
    assert (out == 2 * x).all()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WORK + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_several_callers_at_once_do_not_disturb_each_other() -> None:
    sources = [np.full(1 << 19, i, np.float32) for i in range(4)]
    failures: list[int] = []
    begin = threading.Barrier(4)

    def call(caller: int) -> None:
        out = np.empty_like(sources[0])
        begin.wait()
        for _ in range(50):
            out.fill(np.nan)
            reduce.sum([[out]], [[sources[caller]], [sources[3]]], threads=1 + caller)
            if not (out == caller + 3).all():
                failures.append(caller)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


def test_a_forked_child_has_a_team_of_its_own() -> None:
    done = run(
        """
work()
for _ in range(5):
    child = os.fork()
    if child == 0:
        work()
        work()
        os._exit(7)
    work()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    )
    assert done.returncode == 0, done.stderr


def test_fork_while_the_team_is_at_work() -> None:
    done = run(
        """
stop = threading.Event()
def keep_working():
    while not stop.is_set():
        work()
busy = threading.Thread(target=keep_working)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        work()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
busy.join()
"""
    )
    assert done.returncode == 0, done.stderr


def test_nothing_hangs_when_the_interpreter_ends() -> None:
    assert run("work()").returncode == 0
    at_work = """
def keep_working():
    while True:
        work()
threading.Thread(target=keep_working, daemon=True).start()
work()
"""
    done = run(at_work)
    assert done.returncode == 0, done.stderr
