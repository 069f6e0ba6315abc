"""Checkpoints loaded by several ranks, whoever has saved them; refused if anything is wrong.

The ranks are threads here, as in test_sharded.py.
"""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import safetensors.numpy
from sharding import SHAPES, Training, default, generation, names, save, shards_of
from states import state_dict
from thread_ranks import as_ranks

import minidist as md
from minidist import context, tensor_file
from minidist.checkpoint import Keys, opened, shards
from minidist.errors import (
    DataError,
)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "training.safetensors"


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
