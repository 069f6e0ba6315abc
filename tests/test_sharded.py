"""Checkpoints of several ranks: an index and shards, replaced in one moment, refused where wrong.

The ranks are threads here, each with its own strategy; test_sharded_ranks.py has real processes.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from thread_ranks import as_ranks

import minidist as md
from minidist import context, tensor_file
from minidist.checkpoint import Keys, opened, shards
from minidist.errors import (
    ContextError,
    DataError,
    MergeMismatchError,
    PeerError,
    UsageError,
)
from minidist.state import state_dict

SHAPES = {"big": (7, 5), "flat": (12,), "one": (), "two": (2,)}


class Training:
    """A few variables with a momentum beside each; all from one number."""

    def __init__(self, strategy, number=0.0):
        with strategy.scope():
            self.variables = [
                md.Variable(np.full(shape, number + i, "f4"), name=name)
                for i, (name, shape) in enumerate(SHAPES.items())
            ]
        self.strategy = strategy
        self.optimizer = md.optim.Momentum(0.25)
        self.what = (self.variables, self.optimizer)

    def assign(self, number):
        for i, v in enumerate(self.variables):
            v.assign(np.full(v.shape, number + i, "f4"))
            self.optimizer.slot(v, "momentum").assign(np.full(v.shape, number - i, "f4"))
        self.optimizer.restore_iterations([int(number)])
        self.strategy.step = int(number)

    def state(self):
        arrays = {key: array.tobytes() for key, array in state_dict(*self.what).items()}
        return arrays, self.optimizer.iterations, self.strategy.step


def default():
    """Return a training of this process alone, under no strategy."""
    return Training(context.get_strategy())


def generation(path):
    """Return which number was saved there, by one look at all of it."""
    training = default()
    step = training.strategy.step
    try:
        assert md.load(path, *training.what) == Keys((), ())
        expected = default()
        expected.assign(training.optimizer.iterations)
        assert training.state() == expected.state()
        return training.optimizer.iterations
    finally:
        training.strategy.step = step


def save(path, number, count=2, **options):
    """Save a number as so many ranks; one of them is a process alone."""

    def work(strategy, rank):
        training = Training(strategy)
        training.assign(number)
        md.save(path, *training.what, **options)

    if count == 1:
        step = context.get_strategy().step
        work(context.get_strategy(), 0)
        context.get_strategy().step = step
        return
    assert as_ranks(work, count) == [None] * count


def names(path):
    """Return what is in the folder, without the numbers of saves."""
    found = []
    for each in path.parent.iterdir():
        save = each.name.split("-")[1:2] if "-of-" in each.name else []
        found.append(each.name.replace(*save, "N") if save else each.name)
    return sorted(found)


def shards_of(path):
    with opened.opened(path) as file:
        return file.files


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


# --- loading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_ranks_loads_what_any_other_has_saved(path, before, after):
    save(path, 6, before)

    def work(strategy, rank):
        training = Training(strategy)
        assert md.load(path, *training.what) == Keys((), ())
        assert strategy.step == 6
        return training.state()

    expected = as_ranks(lambda s, rank: (t := Training(s)).assign(6) or t.state(), 1)
    assert as_ranks(work, after) == expected * after


def test_of_independent_replicas_each_gets_its_own_again(path):
    """Also among other numbers of ranks and replicas; where there is none, replica 0's."""

    def make(strategy):
        with strategy.scope():
            v = md.Variable(lambda: np.full(2, -1, "f4"), name="v")
        return v, md.optim.Momentum(0.5)

    def saving(strategy, rank):
        v, optimizer = make(strategy)
        first = strategy.first_replica
        places = range(len(strategy.devices))
        for place in places:
            for copy in (v.copies[place], optimizer.slot(v, "momentum").copies[place]):
                copy.array[:] = first + place
        optimizer.restore_iterations([10 * (first + place) for place in places])
        md.save(path, v, optimizer)

    def loading(strategy, rank):
        v, optimizer = make(strategy)
        assert md.load(path, v, optimizer) == Keys((), ())
        slot = optimizer.slot(v, "momentum")
        counts = [optimizer.iterations_at(place) for place in range(len(strategy.devices))]
        values = [[float(copy.array[0]) for copy in each.copies] for each in (v, slot)]
        return list(zip(*values, counts, strict=True))

    for ranks, devices in [(2, "cpu*2"), (3, "cpu"), (1, "cpu*3")]:
        assert as_ranks(saving, ranks, devices, "independent") == [None] * ranks
        n = ranks * len(md.devices(devices))
        for others, theirs in [(2, "cpu*2"), (1, "cpu*2"), (3, "cpu*2"), (4, "cpu")]:
            found = as_ranks(loading, others, theirs, "independent")
            expected = [
                (float(i % n), float(i % n), 10 * i) if i < n else (0.0, 0.0, 0)
                for i in range(others * len(md.devices(theirs)))
            ]
            assert [each for row in found for each in row] == expected
        (row,) = as_ranks(loading, 1, "cpu*2", "replicated")
        assert row == [(0.0, 0.0, 0)] * 2


def test_a_rank_that_sees_no_checkpoint_or_another(path, tmp_path):
    save(path, 1)
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / path.name

    def work(strategy, rank):
        training = Training(strategy, 5.0)
        before = training.state()
        with pytest.raises(DataError) as caught:
            md.load(other if rank else path, *training.what)
        assert training.state() == before
        return str(caught.value)

    sees = f"{path}: worker:0 (on a) sees a checkpoint there, and worker:1 (on b) sees none; "
    for message in as_ranks(work, 2, hosts="ab"):
        assert message.endswith(f"{sees.split(': ', 1)[1]}{shards.SHARED}")
    save(other, 2)
    for message in as_ranks(work, 2, hosts="ab"):
        assert "worker:0 (on a) and worker:1 (on b) see different checkpoints there" in message
    for file in [*path.parent.iterdir(), *other.parent.iterdir()]:
        file.unlink()
    for message in as_ranks(work, 2, hosts="ab"):
        assert "there is no such file, nor an index of that name" in message


def test_where_one_rank_finds_damage_none_changes(path, monkeypatch):
    save(path, 1)
    real = tensor_file.TensorFile.read

    def work(strategy, rank):
        training = Training(strategy, 5.0)
        before = training.state()
        with pytest.raises(DataError, match=r"^worker:1 \(on here\): bad memory; bad memory$"):
            md.load(path, *training.what)
        assert training.state() == before
        return "refused"

    threads = []

    def read(self, dtypes):
        if threading.current_thread() in threads:
            raise DataError("bad memory")
        return real(self, dtypes)

    def begin(strategy, rank):
        if rank == 1:
            threads.append(threading.current_thread())
        return work(strategy, rank)

    monkeypatch.setattr(tensor_file.TensorFile, "read", read)
    assert as_ranks(begin, 2) == ["refused"] * 2


def test_no_bit_of_an_index_or_a_shard_can_flip_unseen(path):
    def small(strategy, rank):
        with strategy.scope():
            w = md.Variable(np.array([1.5, -2.0], "f4"), name="w")
            flag = md.Variable(np.array([True, False]), name="flag", trainable=False)
        return [w, flag], md.optim.SGD(0.5)

    def saving(strategy, rank):
        md.save(path, *small(strategy, rank))

    assert as_ranks(saving, 2) == [None] * 2
    variables, optimizer = small(context.get_strategy(), 0)
    md.load(path, variables, optimizer)

    def everything():
        arrays = {key: array.tobytes() for key, array in state_dict(variables).items()}
        return arrays, optimizer.iterations, context.random_state()

    before = everything()
    for file in path.parent.iterdir():
        whole = file.read_bytes()
        harmless = set()
        for bit in range(8 * len(whole)):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            complaint = str(path.parent)
            try:
                assert md.load(path, variables, optimizer) == ((), ())
            except DataError as error:
                complaint = str(error)
            else:
                harmless.add(whole[bit // 8 : bit // 8 + 1])
            assert complaint.startswith(str(path.parent)) and everything() == before
        file.write_bytes(whole)
        # Only white space between words can be other white space: all is as it was saved.
        assert harmless <= {b" ", b"\n"}, (file, harmless)


def test_an_index_that_has_lost_our_part_is_no_other_programs(path):
    save(path, 1)
    index = shards.index_of(path)
    index.write_bytes(index.read_bytes().replace(b'  "minidist": {', b'  "minidisu": {', 1))
    with pytest.raises(DataError, match=r"expected 'minidist', which an index of training-"):
        md.load(path, default().variables)


def test_all_damaged_shards_are_named(path):
    save(path, 1, 3)
    first, second, third = shards_of(path)
    for shard in (first, third):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with pytest.raises(DataError) as caught:
        generation(path)
    for shard in (first, third):
        assert f"{shard}: the file is damaged" in str(caught.value)
    assert str(second) not in str(caught.value)


def test_a_shard_that_is_missing_or_of_another_save(path):
    save(path, 1)
    before = [shard.read_bytes() for shard in shards_of(path)]
    save(path, 2)
    first, second = shards_of(path)
    whole = second.read_bytes()
    second.write_bytes(before[1])
    with pytest.raises(DataError, match=f"{second}: is damaged, or of another save"):
        generation(path)
    second.write_bytes(whole)
    assert generation(path) == 2
    first.unlink()
    with pytest.raises(DataError, match=rf"index\.json: its shard '{first.name}' is missing"):
        generation(path)


def test_a_single_shard_is_no_checkpoint(path):
    save(path, 1)
    with pytest.raises(DataError, match=r"is shard 1 of 2 of training\.safetensors; load that"):
        generation(shards_of(path)[0])


class Reader:
    """Loads while others save: a checkpoint that is replaced meanwhile is opened anew."""

    def __init__(self, monkeypatch, meanwhile):
        self.real = opened.ShardedFile, opened.TensorFile
        self.meanwhile = meanwhile
        for name in ("ShardedFile", "TensorFile"):
            monkeypatch.setattr(opened, name, self.opening(getattr(opened, name)))

    def opening(self, real):
        def open_later(*arguments, **how):
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            return real(*arguments, **how)

        return open_later


@pytest.mark.parametrize("before", [1, 2])
@pytest.mark.parametrize("after", [1, 2])
def test_a_checkpoint_that_is_replaced_while_it_is_opened(path, monkeypatch, before, after):
    save(path, 1, before)
    with monkeypatch.context() as patched:
        Reader(patched, lambda: save(path, 2, after))
        with opened.opened(path) as file:
            arrays = file.read({"big": np.dtype("f4")})
    assert (arrays["big"] == 2).all()


# --- indexes of other programs ------------------------------------------------------------------


def foreign(path, weight_map, **more):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map, **more}
    path.with_name(path.name + ".index.json").write_text(json.dumps(index))


def test_an_index_of_another_program_is_loaded(path):
    arrays = {
        name: np.random.default_rng(i).normal(size=shape).astype("f4")
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    files = {name: f"model-0000{1 + (name == 'one')}-of-00002.safetensors" for name in arrays}
    for file in set(files.values()):
        of_it = {name: array for name, array in arrays.items() if files[name] == file}
        safetensors.numpy.save_file(of_it, path.with_name(file))
    foreign(path, files)
    training = default()
    assert md.load(path, training.variables) == Keys((), ())
    for v in training.variables:
        assert v.numpy().tobytes() == arrays[v.name].tobytes()
    save(path, 9)  # over it: the foreign shards are not ours to remove
    assert generation(path) == 9 and len(names(path)) == 5


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "\ud800", "none.safetensors"],
)
def test_shards_are_files_of_the_same_folder(path, name):
    safetensors.numpy.save_file({"v": np.zeros(1, "f4")}, path.parent.parent / "secret")
    foreign(path, {"v": name})
    with pytest.raises(
        DataError,
        match=r"index\.json: (expected shards that are files in the same"
        r" folder, and not|its shard .* is missing)",
    ):
        md.load(path, md.Variable(np.ones(1, "f4"), name="v"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"byte 0: expected JSON"),
        ("[]", "expected an object that has texts by the names"),
        ("{}", "expected an object that has texts by the names"),
        ('{"weight_map": []}', "expected an object that has texts by the names"),
        ('{"weight_map": {"v": 3}}', "expected an object that has texts by the names"),
        ('{"weight_map": {"v": "s", "v": "s"}}', "the key 'v' stands twice"),
        ('{"weight_map": {"v": "s"}, "minidist": 3}', "expected checksum, shards and texts"),
        (
            '{"weight_map": {"v": "s"}, "minidist": {"checksum": "", "shards": [], "texts": {}}}',
            "expected objects of texts",
        ),
        (
            '{"weight_map": {"v": "s"}, "minidist": {"checksum": "", "shards": {}, "texts": {}}}',
            "the index is damaged",
        ),
        ('{"weight_map": {"v": "s", "w": "s"}}', "in only one of the two is 'w'"),
        ('{"weight_map": {"v": "folder"}}', "is no file that could be read"),
    ],
)
def test_wrong_indexes_are_refused(path, text, match):
    path.with_name("folder").mkdir()
    safetensors.numpy.save_file({"v": np.zeros(1, "f4")}, path.with_name("s"))
    path.with_name(path.name + ".index.json").write_text(text)
    with pytest.raises(DataError, match=match):
        md.load(path, md.Variable(np.ones(1, "f4"), name="v"))


def test_huge_indexes_are_refused(path, monkeypatch):
    monkeypatch.setattr(opened, "HEADER_LIMIT", 100)
    foreign(path, {"v" * 100: "s"})
    with pytest.raises(DataError, match="expected an index of at most 100 bytes"):
        generation(path)
