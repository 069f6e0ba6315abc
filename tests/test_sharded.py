"""Checkpoints saved by several ranks: an index and shards, replaced in one moment or not at all.

The ranks are threads here, each with its own strategy; test_sharded_ranks.py has real processes.
test_sharded_loading.py is about what they load.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from sharding import SHAPES, Training, default, generation, names, save, shards_of
from thread_ranks import as_ranks

import minidist as md
from minidist import tensor_file
from minidist.checkpoint import opened, shards
from minidist.errors import (
    ContextError,
    DataError,
    MergeMismatchError,
    PeerError,
    UsageError,
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "training.safetensors"


# --- what is written ----------------------------------------------------------------------------


def test_an_index_of_the_ecosystems_kind_and_shards_that_every_program_reads(path):
    save(path, 3, count=3)
    index = json.loads(Path(f"{path}.index.json").read_text())
    arrays = {}
    for file in set(index["weight_map"].values()):
        found = safetensors.numpy.load_file(path.with_name(file))
        assert {index["weight_map"][name] for name in found} == {file}
        arrays.update(found)
    assert arrays.keys() == index["weight_map"].keys()
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays.values())}
    expected = default()
    expected.assign(3)
    assert {k: a.tobytes() for k, a in arrays.items()} == expected.state()[0]
    assert names(path) == [
        *(f"training-N-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "training.safetensors.index.json",
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_rank_writes_about_the_same(path, count):
    save(path, 1, count)
    sizes = [
        sum(a.nbytes for a in safetensors.numpy.load_file(f).values()) for f in shards_of(path)
    ]
    largest = 4 * np.prod(SHAPES["big"])
    assert max(sizes) - min(sizes) <= largest and max(sizes) <= sum(sizes) / count + largest


def test_more_ranks_than_arrays(path):
    def work(strategy, rank):
        with strategy.scope():
            v = md.Variable(7.0, name="v")
        md.save(path, v)

    assert as_ranks(work, 3) == [None] * 3
    assert names(path) == [
        "training-N-00001-of-00001.safetensors",
        "training.safetensors.index.json",
    ]
    v = md.Variable(0.0, name="v")
    md.load(path, v)
    assert float(v) == 7.0


@pytest.mark.parametrize("given", ["training.safetensors", "training.safetensors.index.json"])
def test_it_is_loaded_by_its_name_or_its_indexs(path, given):
    save(path, 5)
    assert generation(path.with_name(given)) == 5


@pytest.mark.parametrize("name", ["run", "run.safetensors", "run.index.json"])
def test_names_with_and_without_an_end(tmp_path, name):
    save(tmp_path / name, 1)
    save(tmp_path / name, 2)
    end = ".safetensors" if name.endswith(".safetensors") else ""
    assert names(tmp_path / name) == [
        f"run-N-00001-of-00002{end}",
        f"run-N-00002-of-00002{end}",
        f"run{end}.index.json",
    ]
    assert generation(tmp_path / name) == 2


def test_checkpoints_side_by_side_do_not_touch_each_other(tmp_path):
    paths = [tmp_path / name for name in ("a", "a.safetensors", "a-b.safetensors", "b")]
    for number, path in enumerate(paths):
        save(path, number)
    for number, path in enumerate(paths):
        save(path, number + 10)
        assert [generation(each) for each in paths] == [
            *range(10, number + 11),
            *range(number + 1, 4),
        ]


def test_extra_texts_come_back(path):
    save(path, 1, metadata={"by": "Größe", "total_size": "x"})
    with opened.opened(path) as file:
        assert file.metadata["by"] == "Größe" and file.metadata["total_size"] == "x"


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_checkpoint_of_any_kind_is_replaced_by_one_of_any_other(path, before, after):
    save(path, 1, before)
    save(path, 2, after)
    assert generation(path) == 2
    expected = ["training.safetensors"]
    if after > 1:
        expected = [f"training-N-0000{i}-of-0000{after}.safetensors" for i in range(1, after + 1)]
        expected.append("training.safetensors.index.json")
    assert names(path) == expected


def test_what_may_be_read_by_few_stays_so(path):
    save(path, 1, 1)
    path.chmod(0o600)
    save(path, 2, 2)
    save(path, 3, 3)
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    save(path, 4, 1)
    assert path.stat().st_mode & 0o777 == 0o600


def test_through_a_link(path, tmp_path):
    link = tmp_path / "link.safetensors"
    save(path, 1, 1)
    link.symlink_to(path)
    save(link, 2, 2)
    assert generation(path) == generation(link) == 2
    assert link.is_symlink() and not path.exists()


def test_what_killed_saves_have_left_goes_with_the_next(path):
    save(path, 1)
    for left in (
        "training-0123456789ab-00001-of-00009.safetensors.partial",
        "training.safetensors.partial",
    ):
        path.with_name(left).touch()
    stray = shards.shard_of(path, "ba9876543210", 2, 4)
    shards.write_shard(path, "ba9876543210", 2, 4, {"big": np.zeros(3)}, None)
    mine = path.with_name("training-ba9876543210-00001-of-00002.safetensors")
    mine.write_text("the name of a shard, but none")
    assert stray.exists() and generation(path) == 1
    save(path, 2)
    assert generation(path) == 2 and len(list(path.parent.iterdir())) == 4 and mine.exists()


# --- killed -------------------------------------------------------------------------------------


def test_processes_killed_at_any_moment_leave_the_old_or_the_new_checkpoint(tmp_path):
    program = Path(__file__).parent / "killed_by_ranks.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "run"], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_shards_and_index_reach_the_disk_in_that_order(path, monkeypatch):
    events = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(("sync", "index" if name == "training.safetensors.partial" else name[:5]))
        real_sync(descriptor)

    def replace(source, target):
        events.append(("name", "index" if str(target).endswith("json") else "shard"))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    save(path, 1)
    for event in (("name", "shard"), ("sync", "train")):
        last = len(events) - 1 - events[::-1].index(event)
        assert last < events.index(("sync", "index"))
    assert events[-3:] == [("sync", "index"), ("name", "index"), ("sync", "folde")]


# --- where one rank fails -----------------------------------------------------------------------


def failing(path, count, fail, monkeypatch=None):
    """Save 2 over 1 as ranks of which `fail` lets some fail; return what each has raised."""
    save(path, 1, count)
    before = {file: file.read_bytes() for file in path.parent.iterdir()}

    def work(strategy, rank):
        training = Training(strategy)
        training.assign(2)
        with pytest.raises((DataError, PeerError, MemoryError)) as caught:
            md.save(path, *training.what)
        training.assign(3)
        return caught.value, strategy, training

    fail()
    results = as_ranks(work, count)
    for each in results:
        assert isinstance(each, tuple), each
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
    assert generation(path) == 1
    return [failure for failure, _, _ in results]


@pytest.mark.parametrize("which", [1, 2, 3])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_is_full_for_one_rank(path, monkeypatch, which, step):
    real = getattr(os, step)

    def full(what, *more):
        name = os.readlink(f"/proc/self/fd/{what}") if step == "fsync" else str(what)
        if f"-0000{which}-of-00003" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(what, *more)

    failures = failing(path, 3, lambda: monkeypatch.setattr(os, step, full))
    for failure in failures:
        assert type(failure) is DataError
        assert str(failure).startswith(f"worker:{which - 1} (on here): {path.parent}/training-")
        assert str(failure).endswith("cannot be saved: No space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_is_full_when_the_index_is_written(path, monkeypatch, step):
    real = getattr(os, step)

    def full(what, *more):
        name = os.readlink(f"/proc/self/fd/{what}") if step == "fsync" else str(what)
        if name.endswith("training.safetensors.partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(what, *more)

    failures = failing(path, 2, lambda: monkeypatch.setattr(os, step, full))
    for failure in failures:
        assert "worker:0 (on here): " in str(failure) and "index.json: cannot be" in str(failure)


def test_a_folder_that_cannot_be_synced_after_the_index_has_its_name(path, monkeypatch):
    """The new checkpoint is there, though perhaps not on the disk: it must not lose its shards."""
    save(path, 1)
    real, renamed = tensor_file.sync, []

    def sync(folder):
        if renamed:
            raise OSError(errno.EIO, "Input/output error")
        real(folder)

    def replace(source, target):
        os.rename(source, target)
        if str(target).endswith("index.json"):
            renamed.append(target)

    def work(strategy, rank):
        training = Training(strategy)
        training.assign(2)
        with pytest.raises(DataError, match=r"worker:0 .*cannot be saved: Input/output error"):
            md.save(path, *training.what)

    monkeypatch.setattr(tensor_file, "sync", sync)
    monkeypatch.setattr(os, "replace", replace)
    assert as_ranks(work, 2) == [None] * 2
    assert generation(path) == 2


def test_an_error_of_no_kind_of_ours_is_itself_where_it_was_and_a_peers_elsewhere(
    path, monkeypatch
):
    real = tensor_file.write

    def write(file, *more, **how):
        if "-00002-of-00002" in file.name:
            raise MemoryError("no memory")
        return real(file, *more, **how)

    first, second = failing(path, 2, lambda: monkeypatch.setattr(tensor_file, "write", write))
    assert type(second) is MemoryError
    assert type(first) is PeerError and str(first) == "worker:1 (on here): no memory"


def test_a_shard_that_the_first_rank_does_not_see(path, monkeypatch):
    real = tensor_file.write

    def write(file, *more, **how):
        checksum = real(file, *more, **how)
        if "-00002-of-00002" in file.name:
            file.unlink()
        return checksum

    def fail():
        monkeypatch.setattr(tensor_file, "write", write)

    for failure in failing(path, 2, fail):
        assert "there is no such file, although worker:1 (on here) has written it" in str(failure)
        assert "must be in a folder that all their machines share" in str(failure)


def test_after_a_failed_save_all_go_on_and_save(path, monkeypatch):
    real, failed = tensor_file.write, []

    def write(file, *more, **how):
        if "-00002-of-00002" in file.name and not failed:
            failed.append(file)
            raise DataError("for once")
        return real(file, *more, **how)

    def work(strategy, rank):
        training = Training(strategy)
        training.assign(4)
        with pytest.raises(DataError, match=r"^worker:1 \(on here\): for once$"):
            md.save(path, *training.what)
        md.save(path, *training.what)

    monkeypatch.setattr(tensor_file, "write", write)
    assert as_ranks(work, 2) == [None] * 2
    assert generation(path) == 4 and len(list(path.parent.iterdir())) == 3


def test_ctrl_c_in_one_rank_reaches_the_others(path, monkeypatch):
    real = tensor_file.write

    def write(file, *more, **how):
        if "-00002-of-00002" in file.name:
            raise KeyboardInterrupt
        return real(file, *more, **how)

    save(path, 1)
    monkeypatch.setattr(tensor_file, "write", write)
    first, second = as_ranks(lambda s, rank: md.save(path, *Training(s).what), 2)
    assert isinstance(second, KeyboardInterrupt) and isinstance(first, PeerError)
    assert generation(path) == 1


def test_where_all_fail_alike_it_is_said_once(path):
    def work(strategy, rank):
        training = Training(strategy)
        with strategy.scope():
            training.variables.append(md.Variable(0.0, name="one"))
        md.save(path, *training.what)

    for failure in as_ranks(work, 2):
        assert type(failure) is UsageError
        assert str(failure).startswith("the name 'one' would mean both")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("shape", r"worker:0: 'extra' float32\[2\]; worker:1: 'extra' float32\[3\]"),
        ("dtype", r"worker:0: 'extra' float32\[2\]; worker:1: 'extra' float64\[2\]"),
        ("name", r"worker:0: 'extra' float32\[2\]; worker:1: 'other' float32\[2\]"),
        ("step", r"worker:0: step 0; worker:1: step 7"),
        ("optimizer", r"worker:0: optimizer SGD; worker:1: optimizer None"),
        ("metadata", r"worker:0: metadata 'a': 'x'; worker:1: metadata 'a': 'y'"),
    ],
)
def test_ranks_that_do_not_mean_the_same(path, change, match):
    def work(strategy, rank):
        here = change if rank else None
        with strategy.scope():
            extra = md.Variable(
                np.zeros(3 if here == "shape" else 2, "f8" if here == "dtype" else "f4"),
                name="other" if here == "name" else "extra",
            )
        if here == "step":
            strategy.step = 7
        optimizer = None if here == "optimizer" else md.optim.SGD(0.1)
        with pytest.raises(MergeMismatchError, match=match):
            md.save(path, extra, optimizer, metadata={"a": "y" if here == "metadata" else "x"})
        return "refused"

    assert as_ranks(work, 2) == ["refused"] * 2
    assert list(path.parent.iterdir()) == []


def test_somebody_else_saves_there_now(path):
    save(path, 1)
    with tensor_file.replacing(path, path.with_name("training.safetensors.partial")) as file:
        for failure in as_ranks(lambda s, rank: md.save(path, *Training(s).what), 2):
            assert type(failure) is DataError
            assert "worker:0 (on here)" in str(failure) and "somebody else is saving" in str(
                failure
            )
        file.write(path.with_name("training.safetensors.index.json").read_bytes())


def test_places_where_no_checkpoint_can_be(path):
    for place, match in [
        (path.parent, "is a folder, so nothing can be saved as it"),
        (path / "below", "cannot be saved: No such file or directory"),
        (path.with_name("x" * 300), "cannot be saved: File name too long"),
    ]:
        for failure in as_ranks(lambda s, rank, p=place: md.save(p, *Training(s).what), 2):
            assert type(failure) is DataError and match in str(failure)
        with pytest.raises(DataError, match=r"is a folder|cannot be saved"):
            md.save(place, default().variables)
        with pytest.raises(DataError, match=r"is no file|there is no such file|cannot be read"):
            md.load(place, default().variables)
    assert list(path.parent.iterdir()) == []


def test_only_outside_of_replicas(path):
    def work(strategy, rank):
        training = Training(strategy)
        for act in (md.save, md.load):
            with pytest.raises(ContextError, match="was called in replica"):
                strategy.run(lambda act=act: act(path, *training.what))
            strategy.failed_runs = 0
        return "refused"

    assert as_ranks(work, 1) == ["refused"]


def test_a_folder_of_several_ranks_is_asked_outside_of_replicas(path):
    def work(strategy, rank):
        with (
            md.TrainDir(path.parent, cluster=strategy.site.cluster) as folder,
            pytest.raises(ContextError, match="list the training folder folder together, which"),
        ):
            strategy.run(folder.steps)
        return "refused"

    assert as_ranks(work, 2) == ["refused"] * 2
