"""Training folders: what is kept and what goes, who may write, and what is said of damage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import minidist as md
from minidist.errors import ContextError, DataError, UsageError
from minidist.train_dir import Saved


@pytest.fixture
def v():
    return md.Variable([1.0, 2.0], name="v")


@pytest.fixture
def folder(tmp_path):
    with md.TrainDir(tmp_path / "runs" / "first", keep=3) as folder:
        yield folder


def save(folder, v, *steps):
    for step in steps:
        v.assign([step, -step])
        folder.save(step, v)


def values(folder, v, step=None):
    v.assign([np.nan, np.nan])
    saved = folder.load(v, step=step)
    return saved.step, v.numpy().tolist()


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- saving and loading -------------------------------------------------------------------------


def test_the_newest_are_kept_and_any_of_them_loaded(folder, v):
    assert folder.steps() == () and folder.newest() is None
    save(folder, v, 0, 7, 10)
    assert folder.steps() == (0, 7, 10)
    save(folder, v, 100)
    assert folder.steps() == (7, 10, 100) and folder.newest() == 100
    assert values(folder, v) == (100, [100.0, -100.0])
    assert values(folder, v, 7) == (7, [7.0, -7.0])
    assert load_file(folder.file(10))["v"].tolist() == [10.0, -10.0]  # as every safetensors file


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.none() | st.integers(1, 4))
def test_what_is_kept_is_the_end_of_what_was_saved(tmp_path_factory, steps, keep):
    v = md.Variable(0.0, name="v")
    steps = sorted(steps)
    with md.TrainDir(tmp_path_factory.mktemp("runs"), keep=keep) as folder:
        for step in steps:
            folder.save(step, v)
        kept = sorted(set(steps))
        assert folder.steps() == tuple(kept if keep is None else kept[-keep:])


def test_a_step_saved_twice_is_the_later_one(folder, v):
    save(folder, v, 5)
    v.assign([8.0, 9.0])
    folder.save(5, v)
    assert values(folder, v) == (5, [8.0, 9.0]) and folder.steps() == (5,)


def test_an_optimizer_goes_on(folder, v):
    def trained(times, optimizer):
        for _ in range(times):
            optimizer.apply_gradients([(md.constant([1.0, 3.0]), v)])
        return v.numpy().tolist()

    optimizer = md.optim.Adam(0.1)
    trained(3, optimizer)
    folder.save(3, v, optimizer)
    expected = trained(2, optimizer)
    other = md.optim.Adam(0.1)
    assert folder.load(v, other).step == 3
    assert other.iterations == 3 and trained(2, other) == expected


def test_extra_comes_back(folder, v):
    extra = {"epoch": 3, "best": [0.5, None], "name": "Größe"}
    folder.save(1, v, extra=extra)
    assert folder.load(v) == Saved(1, extra)
    folder.save(2, v)
    assert folder.load(v) == Saved(2, {})
    with pytest.raises(UsageError, match="JSON cannot hold"):
        folder.save(3, v, extra={"array": np.zeros(2)})
    assert folder.newest() == 2


def test_saving_in_a_meeting(folder):
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            w = md.Variable(1.0, name="w")

        def step():
            replica = md.get_replica_context()
            replica.merge_call(lambda strategy: folder.save(strategy.step, w))

        strategy.run(step)
        strategy.run(step)
        with pytest.raises(ContextError):
            strategy.run(lambda: folder.save(9, w))
    assert folder.steps() == (1, 2)


@pytest.mark.parametrize("policy", ["independent", "parameter_server", "replicated"])
def test_a_meeting_in_which_saving_fails_ends_the_run_and_the_next_goes_on(folder, policy):
    with md.Strategy("cpu*2", policy) as strategy:
        with strategy.scope():
            w = md.Variable(1.0, name="w")

        def step():
            md.get_replica_context().merge_call(lambda strategy: folder.save(strategy.step, w))

        blocked = folder.file(1).with_name("step-1.safetensors.partial")
        blocked.mkdir()
        with pytest.raises(DataError, match=r"cannot be saved: Is a directory"):
            strategy.run(step)
        blocked.rmdir()
        strategy.run(step)
    assert folder.steps() == (2,)


# --- what is another's --------------------------------------------------------------------------


def test_what_was_not_saved_here_stays(folder, v):
    path = folder.path
    md.save(folder.file(1), v)  # the right name, but not saved by TrainDir
    save_file({"v": np.ones(2, "f4")}, folder.file(2))
    folder.file(3).write_text("no checkpoint at all")
    save(folder, v, 4)
    folder.file(4).rename(path / "mine")
    folder.file(4).symlink_to(path / "mine")
    names = ["notes.txt", "step-05.safetensors", "step-6.safetensors.bak", "step-7.partial"]
    for name in names:
        (path / name).touch()
    save(folder, v, 11, 12, 13, 14, 15)
    stays = {"lock", "mine", *names, *(f"step-{n}.safetensors" for n in (1, 2, 3, 4, 13, 14, 15))}
    assert set(os.listdir(path)) == stays


def test_a_checkpoint_that_md_save_has_put_there_is_loaded(folder, v):
    md.save(folder.file(3), v)
    assert folder.load(v) == Saved(3, {})


def test_what_a_killed_save_has_left_goes_when_a_writer_comes(folder, v):
    save(folder, v, 1)
    folder.close()
    left = folder.path / "step-2.safetensors.partial"
    left.touch()
    mine = folder.path / "other.partial"
    mine.touch()
    md.TrainDir(folder.path, write=False)
    assert left.exists()
    md.TrainDir(folder.path).close()
    assert not left.exists() and mine.exists()


# --- one writer ---------------------------------------------------------------------------------


def test_one_writes_and_others_look(folder, v):
    save(folder, v, 1)
    with pytest.raises(DataError, match=rf"another training \(process {os.getpid()} on .*\) saves"):
        md.TrainDir(folder.path)
    looking = md.TrainDir(folder.path, write=False)
    save(folder, v, 2)
    assert values(looking, v) == (2, [2.0, -2.0])
    with pytest.raises(UsageError, match="opened to load only"):
        looking.save(3, v)
    folder.close()
    folder.close()
    with pytest.raises(UsageError, match="closed"):
        folder.save(3, v)
    with md.TrainDir(folder.path) as following:
        save(following, v, 3)
    assert values(folder, v) == (3, [3.0, -3.0])


def test_a_dropped_folder_is_closed(tmp_path):
    folder = md.TrainDir(tmp_path)
    del folder
    gc.collect()
    md.TrainDir(tmp_path).close()


def test_a_folder_that_was_taken_away(folder, v):
    save(folder, v, 1)
    folder.path.rename(folder.path.with_name("moved"))
    with pytest.raises(DataError, match="was removed or replaced"):
        folder.save(2, v)
    with pytest.raises(DataError, match=r"first: cannot be read: No such file"):
        folder.steps()
    with md.TrainDir(folder.path), pytest.raises(DataError, match="was removed or replaced"):
        folder.save(2, v)


# --- what is refused ----------------------------------------------------------------------------


def test_what_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(DataError, match="is no folder"):
        md.TrainDir(path)
    with pytest.raises(DataError, match=r"below: no checkpoints can be saved there: Not a dir"):
        md.TrainDir(path / "below")
    for missing in (path, tmp_path / "none"):
        with pytest.raises(DataError, match=f"{missing}: cannot be read"):
            md.TrainDir(missing, write=False)


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none(tmp_path, keep):
    with pytest.raises(UsageError, match="keep must be at least 1"):
        md.TrainDir(tmp_path / "x", keep=keep)
    assert not (tmp_path / "x").exists()


def test_steps_that_are_none(folder, v):
    for step in (-1, 2**60):
        with pytest.raises(UsageError, match="a step is a whole number"):
            folder.save(step, v)
    with pytest.raises(TypeError):
        folder.save(1.5, v)
    folder.save(np.int64(7), v)
    assert folder.newest() == 7


def test_an_earlier_step_is_not_saved_over_newer_ones(folder, v):
    save(folder, v, 10)
    with pytest.raises(DataError, match="has a checkpoint of step 10, and step 3 would not be the"):
        folder.save(3, v)
    assert folder.steps() == (10,)


def test_steps_that_are_not_there(folder, v):
    with pytest.raises(DataError, match="there is no checkpoint to load"):
        folder.load(v)
    save(folder, v, 1, 2)
    with pytest.raises(DataError, match=r"no checkpoint of step 3 is there; it has: 1, 2"):
        folder.load(v, step=3)


def test_another_models_checkpoint(folder, v):
    save(folder, v, 1)
    w = md.Variable([1.0, 2.0, 3.0], name="v")
    with pytest.raises(DataError, match=r"'v' is float32\[2\] there and float32\[3\] here$"):
        folder.load(w)
    with pytest.raises(DataError, match="missing in the file: 'w'; unexpected in the file: 'v'"):
        folder.load(md.Variable([1.0, 2.0], name="w"))
    assert w.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_damaged_file_is_named_and_so_is_the_one_to_go_on_from(folder, v):
    save(folder, v, 1, 2, 3)
    damage(folder.file(3))
    v.assign([5.0, 5.0])
    for _ in range(2):
        with pytest.raises(DataError, match=r"step-3.*damaged.*step 2 is whole: to go on from it"):
            folder.load(v)
        damage(folder.file(2))
        with pytest.raises(DataError, match=r"step-3.*damaged.*step 1 is whole: .* move step-3"):
            folder.load(v)
        damage(folder.file(2))  # twice is none
    assert v.numpy().tolist() == [5.0, 5.0]
    folder.file(3).unlink()
    assert values(folder, v) == (2, [2.0, -2.0])
    folder.file(2).write_bytes(b"")
    folder.file(1).write_bytes(folder.file(1).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"step-2.*No older checkpoint here is whole"):
        folder.load(v)


def test_a_renamed_file(folder, v):
    save(folder, v, 1)
    folder.file(1).rename(folder.file(2))
    with pytest.raises(DataError, match=r"was saved as step 1; give it its name back$"):
        folder.load(v)


# --- killed -------------------------------------------------------------------------------------


def test_killed_at_any_moment_a_folder_has_only_whole_checkpoints(tmp_path):
    """And a full disk, folders without permission, two processes: forks that have no threads."""
    program = Path(__file__).parent / "killed_in_train_dir.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "run"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
