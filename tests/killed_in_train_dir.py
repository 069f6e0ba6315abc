"""Open a TrainDir, save, be killed, and look at the folder: a program that test_train_dir.py runs.

It works in forks of itself, as killed_while_saving.py, whose pieces it uses.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from killed_while_saving import SIZE, forked, kill_self_at_line, v

import minidist as md
from minidist import tensor_file, train_dir
from minidist.checkpoint import shards
from minidist.errors import DataError
from minidist.train_dir import folder as inside

FOLDER = Path(sys.argv[1])


def train(steps, **options):
    """Open the folder and save these steps, the last two of which are kept."""
    with md.TrainDir(FOLDER, keep=2, **options) as folder:
        for step in steps:
            v.assign(np.full(SIZE, step, "float32"))
            folder.save(step, v)


def whole_steps():
    """Return the steps that are there, each of which must be whole."""
    if not FOLDER.exists():
        return ()
    folder = md.TrainDir(FOLDER, write=False)
    for step in folder.steps():
        assert folder.load(v, step=step).step == step
        assert (v.numpy() == step).all()
    return folder.steps()


def names():
    return sorted(path.name for path in FOLDER.iterdir())


def killed_at_every_line():
    line = 1
    seen = set()
    while True:
        shutil.rmtree(FOLDER, ignore_errors=True)
        train([1, 2])

        def work(line=line):
            kill_self_at_line(line, train_dir, inside, shards, tensor_file)
            train([3])

        killed = forked(work)
        steps = whole_steps()
        seen.add(steps)
        # The older ones go only when the newer one is there for good.
        assert steps in [(1, 2), (1, 2, 3), (2, 3)], (line, steps)
        if not killed:
            break
        train([5])  # the lock is free, and what has been left is tidied up
        assert names() == ["lock", f"step-{steps[-1]}.safetensors", "step-5.safetensors"]
        line += 1
    assert len(seen) == 3 and line > 50, (seen, line)


def killed_at_every_line_of_the_first_save():
    line = 1
    while True:
        shutil.rmtree(FOLDER, ignore_errors=True)

        def work(line=line):
            kill_self_at_line(line, train_dir, inside, shards, tensor_file)
            train([1])

        killed = forked(work)
        assert whole_steps() in [(), (1,)]
        if not killed:
            return
        line += 1


def killed_in_the_middle_of_a_write():
    """The system itself ends a process that writes beyond a limit, wherever that is."""
    shutil.rmtree(FOLDER)
    train([1])
    for limit in (3, 100, 4096, 50_000, SIZE * 4):

        def work(limit=limit):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with md.TrainDir(FOLDER) as folder:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                folder.save(2, v)

        assert forked(work) == signal.SIGXFSZ
        assert "step-2.safetensors.partial" in names() and whole_steps() == (1,)
    md.TrainDir(FOLDER).close()
    assert names() == ["lock", "step-1.safetensors"]


def a_full_disk():
    for limit in (3, 4096, SIZE * 4):

        def work(limit=limit):
            with md.TrainDir(FOLDER, keep=1) as folder:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                with pytest.raises(DataError, match="cannot be saved: File too large"):
                    folder.save(2, v)

        assert forked(work) == 0
        assert names() == ["lock", "step-1.safetensors"] and whole_steps() == (1,)


def folders_that_may_not_be_written_to():
    """As another user, where this one may do everything."""
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name, "closed")
        shutil.copytree(FOLDER, closed)
        for mode, look in ((0o555, True), (0o000, False)):
            Path(name).chmod(0o555)
            closed.chmod(mode)

            def work(look=look):
                if os.getuid() == 0:
                    os.setuid(65534)
                for path in (closed, Path(name, "other"), closed / "below"):
                    with pytest.raises(DataError, match="saved there: Permission denied"):
                        md.TrainDir(path)
                if look:
                    assert md.TrainDir(closed, write=False).load(v).step == 1
                else:
                    with pytest.raises(DataError, match="cannot be read: Permission denied"):
                        md.TrainDir(closed, write=False)

            try:
                assert forked(work) == 0
            finally:
                Path(name).chmod(0o755)
                closed.chmod(0o755)


def two_processes():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        folder = md.TrainDir(FOLDER)
        os.write(writing, b".")
        signal.pause()
        folder.close()
    os.read(reading, 1)
    with pytest.raises(DataError, match=rf"another training \(process {child} on .*\) saves"):
        md.TrainDir(FOLDER)
    assert md.TrainDir(FOLDER, write=False).newest() == 1  # it may be looked at
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    train([2])
    assert whole_steps() == (1, 2)


if __name__ == "__main__":
    killed_at_every_line()
    killed_at_every_line_of_the_first_save()
    killed_in_the_middle_of_a_write()
    a_full_disk()
    folders_that_may_not_be_written_to()
    two_processes()
    print("whole")
