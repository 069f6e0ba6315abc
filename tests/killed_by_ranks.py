"""Save as two ranks, be killed with SIGKILL, and look: a program that test_sharded.py runs.

It works in forks of itself, as killed_while_saving.py, whose pieces it uses. The ranks are threads
of a fork, so they die together, at each line that either of them comes to.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
from killed_while_saving import forked, kill_self_at_line
from thread_ranks import as_ranks

import minidist as md
from minidist import tensor_file
from minidist.checkpoint import by_ranks, shards
from minidist.train_dir import folder as inside

PATH = Path(sys.argv[1], "run.safetensors")
FOLDER = Path(sys.argv[1], "folder")
MODULES = [by_ranks, inside, shards, tensor_file]
WRITE = {  # what changes anything on the disk is in one of these
    "_alone",
    "_begin",
    "_commit",
    "_forget",
    "_make",
    "_remove",
    "_take_lock",
    "keep",
    "open",
    "remove",
    "replacing",
    "save",
    "sync",
    "unlink",
    "write",
    "write_file",
    "write_shard",
}
FOLDERS = {"_make", "_remove", "_take_lock", "keep", "open", "remove", "replacing", "unlink"}
v = md.Variable(np.zeros(300, "f4"), name="v")
w = md.Variable(np.zeros(200, "f4"), name="w")


def save(number, ranks, killed=None, line=0):
    """Save a number as so many ranks, one of which is killed, and with it all, at a line."""

    def work(strategy, rank):
        with strategy.scope():
            variables = [
                md.Variable(np.full(each.shape, number, "f4"), name=each.name) for each in (v, w)
            ]
        if rank == killed:
            kill_self_at_line(line, *MODULES, functions=WRITE)
        md.save(PATH, variables)
        sys.settrace(None)

    if ranks == 1:
        v.assign(np.full(v.shape, number))
        w.assign(np.full(w.shape, number))
        if killed == 0:
            kill_self_at_line(line, *MODULES, functions=WRITE)
        md.save(PATH, [v, w])
    else:
        assert as_ranks(work, ranks) == [None] * ranks


def number():
    """Return what is saved there, which must be of one save."""
    for each in (v, w):
        each.assign(np.full(each.shape, -1))
    md.load(PATH, [v, w])
    values = np.concatenate([v.numpy(), w.numpy()])
    assert (values == values[0]).all(), values
    return int(values[0])


def killed_at_every_line(before, after):
    """Save as `before` ranks, and over it as `after` ones that are killed."""
    for killed in range(min(before, after)):
        save(1, before)
        line, seen = 1, set()
        while True:
            died = forked(lambda line=line, killed=killed: save(2, after, killed, line))
            seen.add(number())
            if not died:
                break
            assert died == signal.SIGKILL
            if number() == 2:
                save(1, before)
            line += 1
        assert 2 in seen and line > 20, (seen, line)
        assert seen == {1, 2} or killed == 1, seen
    expected = 1 if after == 1 else after + 1
    assert len(list(PATH.parent.glob("run*"))) == expected  # the last one has tidied up


def train_dir_killed_at_every_line():
    """Two are kept; then a third is saved, by two ranks that are killed."""
    line, seen = 1, set()
    while True:
        shutil.rmtree(FOLDER, ignore_errors=True)

        def work(strategy, rank, steps, line=0):
            with strategy.scope():
                variable = md.Variable(np.zeros(300, "f4"), name="v")
                other = md.Variable(np.zeros(200, "f4"), name="w")
            if rank == 0 and line:
                kill_self_at_line(line, *MODULES, functions=FOLDERS)
            with md.TrainDir(FOLDER, keep=2, cluster=strategy.site.cluster) as folder:
                for step in steps:
                    variable.assign(np.full(300, step))
                    other.assign(np.full(200, step))
                    folder.save(step, [variable, other])
            sys.settrace(None)

        def train(*steps, line=0, work=work):
            results = as_ranks(lambda strategy, rank: work(strategy, rank, steps, line), 2)
            assert results == [None] * 2, results

        if line == 1:
            train(1, 2)
            shutil.copytree(FOLDER, FOLDER.with_name("prepared"))
        else:
            shutil.copytree(FOLDER.with_name("prepared"), FOLDER)
        died = forked(lambda line=line: train(3, line=line))
        folder = md.TrainDir(FOLDER, write=False)
        steps = folder.steps()
        for step in steps:
            assert folder.load([v, w], step=step).step == step
            assert (v.numpy() == step).all() and (w.numpy() == step).all()
        seen.add(steps)
        assert steps in [(1, 2), (1, 2, 3), (2, 3)], (line, steps)
        if not died:
            break
        if line % 5 == 0:
            train(5)
            assert len(list(FOLDER.iterdir())) == 7, list(FOLDER.iterdir())  # and the lock
        line += 1
    assert len(seen) == 3 and line > 50, (seen, line)


def killed_in_the_middle_of_a_write():
    """The system itself ends a process that writes beyond a limit, wherever that is."""
    save(1, 2)
    for limit in (3, 100, 500, 900):

        def work(limit=limit):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            save(2, 2)

        assert forked(work) == signal.SIGXFSZ
        assert number() == 1
    save(2, 2)
    assert len(list(PATH.parent.glob("run*"))) == 3


if __name__ == "__main__":
    PATH.parent.mkdir()
    os.fsync = lambda descriptor: None  # the system lives on, and knows what was written
    for before, after in [(2, 2), (1, 2), (2, 1)]:
        killed_at_every_line(before, after)
    train_dir_killed_at_every_line()
    killed_in_the_middle_of_a_write()
    print("whole")
