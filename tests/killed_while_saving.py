"""Save, be killed with SIGKILL, and look at the file: a program that test_tensor_file.py runs.

It works in forks of itself, which is why it is a program of its own: it has no other threads.
Each fork's file must be the old or the new one, whole, and hold at least what was said to be saved.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from minidist import tensor_file
from minidist.errors import DataError

PATH = Path(sys.argv[1])
SIZE = 30_000
v = md.Variable(np.zeros(SIZE, "float32"), name="v")


def save(generation):
    v.assign(np.full(SIZE, generation, "float32"))
    md.save(PATH, v)


def generation():
    """Return what the file holds, which must be of one save."""
    v.assign(np.full(SIZE, -1, "float32"))
    md.load(PATH, v)
    values = v.numpy()
    assert (values == values[0]).all(), values
    return int(values[0])


def forked(work):
    """Do work in a fork; return the signal that ended it, 0 for none."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status)


def kill_self_at_line(number, *modules, functions=None):
    """Kill this process before the n-th line of these modules that this thread runs from now on.

    functions: only lines of functions with these names count.
    """
    files = [module.__file__ for module in modules]
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if functions is not None and frame.f_code.co_name not in functions:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def killed_at_every_line():
    save(1)
    line, seen = 1, set()
    while True:

        def work(line=line):
            kill_self_at_line(line, tensor_file)
            save(2)

        killed = forked(work)
        seen.add(generation())
        if not killed:
            break
        assert killed == signal.SIGKILL
        if generation() == 2:  # renamed already: begin anew
            save(1)
        line += 1
    assert seen == {1, 2} and line > 15, (seen, line)
    assert [path.name for path in PATH.parent.iterdir()] == [PATH.name]  # the last one tidied up


def killed_at_any_time(times):
    generator = random.Random(0)
    save(0)
    last = 0
    for _ in range(times):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for new in range(last + 1, 1_000_000):
                save(new)
                os.write(writing, b".")  # one more is saved for certain
        os.close(writing)
        os.read(reading, 1)
        time.sleep(generator.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        certain = last + 1
        while more := os.read(reading, 65536):
            certain += len(more)
        os.close(reading)
        last = generation()
        assert certain <= last <= certain + 1, (certain, last)


def stopped_by_a_full_disk():
    """Files may not grow beyond a limit: writing fails at that byte."""
    save(1)
    for limit in (0, 1, 100, 4096, 100_000, SIZE * 4):

        def work(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with pytest.raises(DataError, match="cannot be saved"):
                save(2)

        assert forked(work) == 0
        assert generation() == 1
        assert [path.name for path in PATH.parent.iterdir()] == [PATH.name]


if __name__ == "__main__":
    killed_at_every_line()
    killed_at_any_time(40)
    stopped_by_a_full_disk()
    print("whole")
