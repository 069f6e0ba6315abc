"""The file beneath a checkpoint: replaced at once or not at all, and refused where it is wrong."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from states import state_dict

import minidist as md
from minidist import tensor_file
from minidist.errors import DataError

ARRAYS = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.array(7, "i8")}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def read(path):
    with tensor_file.TensorFile(path) as file:
        return file.read({name: np.dtype(entry.dtype) for name, entry in file.entries.items()})


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


# --- what is written can be read, here and elsewhere --------------------------------------------


@given(
    arrays=st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.sampled_from([name for name in tensor_file.DTYPES if name != "bfloat16"]).flatmap(
            lambda dtype: arrays_of.arrays(
                dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
            )
        ),
        max_size=4,
    ),
    metadata=st.dictionaries(
        st.text().filter(lambda key: key != tensor_file.CHECKSUM), st.text(), max_size=2
    ),
)
def test_any_arrays_come_back_and_other_programs_read_them(tmp_path_factory, arrays, metadata):
    path = tmp_path_factory.mktemp("arrays") / "file"
    tensor_file.write(path, arrays, metadata)
    for found in (read(path), safetensors.numpy.load_file(path)):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()
    with tensor_file.TensorFile(path) as file:
        assert file.metadata == metadata


def test_arrays_in_any_order_of_memory_are_written_as_they_read(path):
    array = np.arange(12.0).reshape(3, 4)
    tensor_file.write(path, {"t": array.T, "s": array[::2, ::-1]}, {})
    assert np.array_equal(read(path)["t"], array.T)
    assert np.array_equal(read(path)["s"], array[::2, ::-1])


def test_arrays_of_the_other_byte_order_are_written_in_the_formats(path):
    tensor_file.write(path, {"a": np.arange(3, dtype=">f4")}, {})
    assert read(path)["a"].tobytes() == np.arange(3, dtype="<f4").tobytes()


def test_the_same_state_is_the_same_file_whose_arrays_begin_at_multiples_of_8(path):
    files = set()
    for metadata in ({"a": "é", "b": "y", "c": ""}, {"c": "", "b": "y", "a": "é"}) * 10:
        tensor_file.write(path, ARRAYS, metadata)
        files.add(path.read_bytes())
    assert len(files) == 1
    assert int.from_bytes(files.pop()[:8], "little") % 8 == 0


def test_bfloat16_is_read_as_the_bytes_that_it_is(path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(5).astype(ml_dtypes.bfloat16)
    tensor_file.write(path, {"h": array}, {})
    assert read(path)["h"].tobytes() == array.tobytes()


# --- replaced at once or not at all -------------------------------------------------------------


def test_a_process_killed_while_saving_leaves_the_old_or_the_new_file(tmp_path):
    program = Path(__file__).parent / "killed_while_saving.py"
    folder = tmp_path / "folder"
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, program, folder / "checkpoint"],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert (run.returncode, run.stdout) == (0, "whole\n"), run.stderr


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_end(path, monkeypatch):
    tensor_file.write(path, {"old": np.zeros(3)}, {})
    steps = []

    def sync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            steps.append("sync folder")
        else:
            assert os.path.getsize(f"/proc/self/fd/{descriptor}") > 8 + 24
            steps.append("sync file")

    def replace(source, target):
        steps.append("rename")
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    tensor_file.write(path, ARRAYS, {})
    assert steps == ["sync file", "rename", "sync folder"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "interrupted"])
def test_where_saving_fails_the_old_file_is_all_there_is(path, monkeypatch, step, full):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left") if full else KeyboardInterrupt("Ctrl-C")

    tensor_file.write(path, ARRAYS, {})
    before = path.read_bytes()
    monkeypatch.setattr(os, step, fail)
    error, match = (DataError, "cannot be saved: No space") if full else (KeyboardInterrupt, "Ctrl")
    with pytest.raises(error, match=match):
        tensor_file.write(path, {"new": np.zeros(3)}, {})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_only_one_saves_to_a_file_at_a_time(path):
    tensor_file.write(path, ARRAYS, {})
    before = path.read_bytes()
    partial = path.with_name("file.partial")
    with partial.open("wb") as other:
        other.write(b"of the other")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"file\.partial: somebody else is saving"):
            tensor_file.write(path, {"new": np.zeros(3)}, {})
        assert (path.read_bytes(), partial.read_bytes()) == (before, b"of the other")
    tensor_file.write(path, {"new": np.zeros(3)}, {})  # the other one has died: taken over
    assert list(read(path)) == ["new"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fate", ["renamed", "removed"])
def test_a_file_that_gets_its_name_between_opening_and_locking_is_not_touched(
    path, monkeypatch, fate
):
    partial = path.with_name("file.partial")
    partial.write_bytes(b"of the other")

    def flock(file, how):
        if fate == "renamed":
            os.replace(partial, path)
        else:
            partial.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DataError, match="somebody else is saving"):
        tensor_file.write(path, ARRAYS, {})
    assert fate == "removed" or path.read_bytes() == b"of the other"


def test_places_where_no_file_can_be(tmp_path):
    for path, match in [
        (tmp_path, "is a folder"),
        (Path(""), "is a folder"),
        (tmp_path / "none" / "file", "cannot be saved: No such file or directory"),
        (tmp_path / ("x" * 300), "cannot be saved: File name too long"),
    ]:
        with pytest.raises(DataError, match=match):
            tensor_file.write(path, ARRAYS, {})
    assert list(tmp_path.iterdir()) == []


# --- refused where it is wrong ------------------------------------------------------------------

TWICE = json.dumps(entry())
WRONG = {
    "empty": (b"", "byte 0: the file ends before the header's length: expected 8 bytes"),
    "short": (b"abc", "byte 3: the file ends before the header's length"),
    "length too long": (b"\x10" + bytes(7) + b"{}", "byte 10: the file ends before the header"),
    "length huge": (b"\xff" * 8 + b"{}", "byte 0: expected the length of a header"),
    "other magic": (b"\x80\x02}q\x00X\x05\x00hello", "byte 0: expected the length of a header"),
    "no header": (bytes(8), r"byte 8: expected '\{', with which a header begins"),
    "a list": (b"[]", r"byte 8: expected '\{'"),
    "space first": (b" {}", r"byte 8: expected '\{'"),
    "no JSON": (b'{"a": }', r"byte 14: expected JSON \("),
    "after an umlaut": ('{"ä": }'.encode(), r"byte 15: expected JSON \("),
    "more than JSON": (b"{}{}", r"byte 10: expected JSON \(Extra data"),
    "no UTF-8": (b'{"\xff"}', "byte 10: expected UTF-8"),
    "deep": (b'{"a":' + b"[" * 100_000, "JSON of a few levels"),
    "deep objects": (b'{"a":' * 100_000, "JSON of a few levels"),
    "long number": (b'{"a":' + b"9" * 10_000 + b"}", "byte 8: expected other JSON"),
    "twice": (f'{{"a":{TWICE},"a":{TWICE}}}'.encode(), "the key 'a' stands twice"),
    "twice inside": (b'{"a":{"dtype":"F32","dtype":"F64"}}', "the key 'dtype' stands twice"),
    "no object": ({"a": 3}, "byte 8: expected of array 'a' dtype, shape and data_offsets"),
    "lacks shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, "expected of array 'a'"),
    "more words": ({"a": entry(code="x")}, "and nothing else"),
    "dtype": ({"a": entry("F33")}, "a dtype out of BOOL, U8"),
    "dtype no text": ({"a": entry([])}, "a dtype out of BOOL, U8"),
    "shape no list": ({"a": {**entry(), "shape": 1}}, "a shape of at most 64 lengths"),
    "shape negative": ({"a": entry(shape=[-1, -1])}, "a shape of at most 64 lengths"),
    "shape float": ({"a": entry(shape=[1.0])}, "a shape of at most 64 lengths"),
    "shape true": ({"a": entry(shape=[True])}, "a shape of at most 64 lengths"),
    "shape long": ({"a": entry(shape=[1] * 65)}, "a shape of at most 64 lengths"),
    "shape huge": ({"a": entry(shape=[2**62] * 3)}, r"expected of array 'a' the bytes of F32"),
    "shape wraps": ({"a": entry(shape=[2**62 + 1])}, "and not 4 bytes"),
    "shape infinite": (b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', "a shape"),
    "offsets backward": ({"a": entry(offsets=[4, 0])}, "and not -4 bytes"),
    "offsets three": ({"a": entry(offsets=[0, 4, 4])}, "two data_offsets"),
    "offsets negative": ({"a": entry(offsets=[-4, 0])}, "two data_offsets"),
    "offsets null": ({"a": {**entry(), "data_offsets": None}}, "two data_offsets"),
    "far behind": (
        {"a": entry(shape=[2**40], offsets=[0, 2**42])},
        "the file ends before array 'a' does: expected 4398046511104 bytes from byte",
    ),
    "gap first": ({"a": entry(offsets=[4, 8])}, "expected array 'a' to begin here"),
    "gap": ({"a": entry(), "b": entry(offsets=[8, 12])}, "expected array 'b' to begin here"),
    "overlap": ({"a": entry(shape=[2], offsets=[0, 8]), "b": entry(offsets=[4, 8])}, "begin here"),
    "the same bytes": ({"a": entry(), "b": entry()}, "begin here"),
    "too many bytes": ({"a": entry()}, "expected the end of the file, but 12 bytes follow"),
    "metadata a list": ({"__metadata__": []}, "an object of texts as __metadata__"),
    "metadata numbers": ({"__metadata__": {"a": 1}}, "an object of texts as __metadata__"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_files_are_refused_by_name_and_byte(path, case):
    header, match = WRONG[case]
    if isinstance(header, bytes) and header[:1] not in (b"{", b"[", b" "):
        path.write_bytes(header)
    else:
        write(path, header, bytes(16))
    with pytest.raises(DataError, match=match) as caught:
        tensor_file.TensorFile(path)
    assert f"{path}: byte " in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, match in [
        ("none", "there is no such file"),
        ("", "but a folder or a device"),
        ("pipe", "but a folder or a device"),
        ("x" * 300, "cannot be read: File name too long"),
    ]:
        with pytest.raises(DataError, match=match):
            tensor_file.TensorFile(tmp_path / name)


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(DataError, match=r"pipe: is a device or the like"):
        tensor_file.write(tmp_path / "link", {}, {})
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_cut_off_while_it_is_read_is_refused(path):
    tensor_file.write(path, ARRAYS, {})
    with tensor_file.TensorFile(path) as file:
        size = path.stat().st_size
        os.truncate(path, size - 1)
        with pytest.raises(DataError, match=f"byte {size - 1}: the file ends before array 'a'"):
            file.read({"a": np.dtype("f4")})


def test_bytes_that_are_not_those_saved_are_refused_also_in_arrays_that_nobody_wants(path):
    tensor_file.write(path, ARRAYS, {"by": "me"})
    whole = path.read_bytes()
    for change in (
        lambda data: data[:-20] + bytes(20),  # the tail, as when the power failed
        lambda data: data.replace(b'"by"', b'"bx"'),
        lambda data: data.replace(b'"me"', b'"mo"'),
        lambda data: data.replace(b'"b":', b'"B":'),
        lambda data: data.replace(b"[2,3]", b"[3,2]"),
        lambda data: data.replace(b"I64", b"U64"),
    ):
        path.write_bytes(change(whole))
        assert path.read_bytes() != whole
        damaged = pytest.raises(DataError, match=r"file: the file is damaged.*load another copy")
        with tensor_file.TensorFile(path) as file, damaged:
            file.read({})


def test_files_without_a_checksum_are_of_other_programs_and_read(path):
    write(path, {"a": entry(), "__metadata__": {"by": "other"}}, b"\0\0\x80?")
    assert read(path)["a"].tolist() == [1.0]


@pytest.mark.parametrize("strict", [True, False])
def test_no_bit_of_a_checkpoint_can_flip_unseen(path, strict):
    w = md.Variable(np.array([1.5, -2.0], "f4"), name="w")
    flag = md.Variable(np.array([True, False]), name="flag", trainable=False)
    optimizer = md.optim.Momentum(0.1)
    optimizer.apply_gradients([(md.constant([1.0, 2.0]), w)])
    what = ([w, flag], optimizer)
    w.strategy.step = 3
    md.save(path, *what)
    whole = path.read_bytes()

    def everything():
        arrays = {key: array.tobytes() for key, array in state_dict(*what).items()}
        return arrays, optimizer.iterations, w.strategy.step, md.context.random_state()

    before = everything()
    try:
        harmless = []
        for bit in range(8 * len(whole)):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            w.strategy.step = 3
            try:
                keys = md.load(path, *what, strict=strict)
            except DataError as error:
                complaint = str(error)
            else:
                complaint = f"{path}: "
                assert keys == ((), ())
                harmless.append(whole[bit // 8 : bit // 8 + 1])
            assert complaint.startswith(f"{path}: ")
            assert everything() == before
        # Only spaces between words can be others (tabs, for instance): all is as it was saved.
        assert set(harmless) <= {b" "}
    finally:
        w.strategy.step = 0


def test_a_bool_is_0_or_1(path):
    write(path, {"a": entry("BOOL", [3], [0, 3])}, b"\x00\x01\x02")
    with pytest.raises(DataError, match="expected 0 or 1 in array 'a'"):
        read(path)


ABOUT = {
    "format": 1,
    "copies": 1,
    "step": 0,
    "seed": 0,
    "draws": {},
    "optimizer": None,
    "slots": [],
    "iterations": [],
    "loss_scale": None,
    "held": {},
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "has a newer minidist written"),
        ({"format": None}, "has a newer minidist written"),
        ({"copies": 0}, "expected 'copies' with another value"),
        ({"copies": True}, "expected 'copies'"),
        ({"step": -1}, "expected 'step'"),
        ({"step": 2**63}, "expected 'step'"),
        ({"step": None}, "expected 'step'"),
        ({"seed": 2**64}, "expected 'seed'"),
        ({"draws": {"x": 1}}, "expected 'draws'"),
        ({"draws": {"1": -1}}, "expected 'draws'"),
        ({"draws": []}, "expected 'draws'"),
        ({"optimizer": 1}, "expected 'optimizer'"),
        ({"slots": [1]}, "expected 'slots'"),
        ({"slots": "ab"}, "expected 'slots'"),
        ({"iterations": [0.5]}, "expected 'iterations'"),
        ({"loss_scale": 128.0}, "expected 'loss_scale'"),
        ({"loss_scale": {"value": 0.0, "counter": 0}}, "expected 'loss_scale'"),
        ({"loss_scale": {"value": 1.0, "counter": -1}}, "expected 'loss_scale'"),
        ({"held": []}, "expected 'held'"),
        ({"held": {"v/staged": "1"}}, "expected 'held'"),
        ({"slots": ["w/Momentum"]}, "arrays of the file, and not 'w/Momentum'"),
        ({"iterations": [1]}, "if there is an optimizer, and only then"),
        ({"optimizer": "SGD"}, "if there is an optimizer, and only then"),
    ],
)
def test_metadata_that_say_something_else_are_refused(path, change, match):
    v = md.Variable(1.0, name="v")

    def file(about):
        text = about if isinstance(about, str) else json.dumps(about)
        write(path, {"v": entry(shape=[]), "__metadata__": {"minidist": text}}, bytes(4))

    file({**ABOUT, **change})
    with pytest.raises(DataError, match=f"file: byte 8: in the metadata 'minidist', .*{match}"):
        md.load(path, v)
    for text in ("", "[]", "3", "[" * 100_000, '{"format": 1, "format": 1}', "\ud800"):
        file(text)
        with pytest.raises(DataError, match="byte 8: in the metadata"):
            md.load(path, v)
    file({name: said for name, said in ABOUT.items() if name != next(iter(change))})
    with pytest.raises(DataError, match="byte 8: in the metadata"):
        md.load(path, v)
    assert float(v) == 1.0
    file(ABOUT)
    with pytest.raises(DataError, match=r"expected 'minidist\.checksum' beside it; load an"):
        md.load(path, v)
    assert float(v) == 1.0
    tensor_file.write(path, {"v": np.array(0, "f4")}, {"minidist": json.dumps(ABOUT)})
    md.load(path, v)
    assert float(v) == 0.0


class Mutations:
    """Files that are wrong in one or a few places; some are still right, as another file."""

    def __init__(self, whole, seed):
        self.whole = whole
        self.random = np.random.default_rng(seed)
        self.end = 8 + int.from_bytes(whole[:8], "little")

    def any(self):
        return getattr(self, self.random.choice(["flip", "cut", "grow", "length", "move", "say"]))()

    def flip(self):
        """Change bytes, mostly of the header."""
        data = bytearray(self.whole)
        for _ in range(self.random.integers(1, 4)):
            end = self.end if self.random.random() < 0.8 else len(data)
            data[self.random.integers(end)] = self.random.integers(256)
        return bytes(data)

    def cut(self):
        return self.whole[: self.random.integers(len(self.whole))]

    def grow(self):
        return self.whole + self.random.bytes(self.random.integers(1, 20))

    def length(self):
        size = self.random.choice(
            [self.random.integers(2 * self.end), 2 ** self.random.integers(63)]
        )
        return int(size).to_bytes(8, "little") + self.whole[8:]

    def move(self):
        """Take a piece out, or put one in again."""
        start, end = np.sort(self.random.integers(len(self.whole), size=2))
        at = self.random.integers(len(self.whole))
        if self.random.random() < 0.5:
            return self.whole[:start] + self.whole[end:]
        return self.whole[:at] + self.whole[start:end] + self.whole[at:]

    def say(self):
        """Change what the header says, and keep it in order otherwise."""
        header = json.loads(self.whole[8 : self.end])
        name = str(self.random.choice([name for name in header if name != "__metadata__"]))
        said = header[name]
        what = self.random.choice(["shape", "data_offsets", "dtype", "name", "gone", "about"])
        if what in ("shape", "data_offsets") and said[what]:
            at = self.random.integers(len(said[what]))
            said[what][at] += int(self.random.choice([-4, -1, 1, 4, 2**40, 2**63]))
        elif what == "dtype":
            said["dtype"] = str(self.random.choice(["F32", "F64", "I32", "U8", "BF16", "f4", ""]))
        elif what == "name":
            header[name + "x"] = header.pop(name)
        elif what == "gone":
            del header[name]
        else:
            about = json.loads(header["__metadata__"]["minidist"])
            key = str(self.random.choice(list(about)))
            about[key] = [None, -1, 2**70, "x", [], {}, [[]], 1.5][self.random.integers(8)]
            header["__metadata__"]["minidist"] = json.dumps(about)
        raw = json.dumps(header).encode()
        return len(raw).to_bytes(8, "little") + raw + self.whole[self.end :]


@pytest.mark.parametrize("seed", range(4))
def test_of_many_mutated_files_each_is_refused_or_loaded_as_a_whole(path, seed):
    model = [md.Variable(np.ones((2, 3), "f4"), name="w"), md.Variable(np.ones(2, "f4"), name="b")]
    flag = md.Variable(np.array([True, False]), name="flag", trainable=False)
    optimizer = md.optim.Adam(0.1)
    what = ([*model, flag], optimizer)
    optimizer.apply_gradients([(md.constant(v.numpy()), v) for v in model])
    md.save(path, *what)
    mutations = Mutations(path.read_bytes(), seed)
    loaded = 0

    def state():
        return {key: array.tobytes() for key, array in state_dict(*what).items()}

    before = state()
    for _ in range(500):
        data = mutations.any()
        path.write_bytes(data)
        try:
            md.load(path, *what)
        except DataError as error:
            complaint = str(error)
        else:
            complaint = ""
            loaded += 1
            theirs = safetensors.numpy.load(data)
            before = {key: array.tobytes() for key, array in theirs.items()}
        assert state() == before
        assert not complaint or complaint.startswith(f"{path}: ")
    assert loaded < 100


def test_a_link_stays_a_link_and_a_private_file_private(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    tensor_file.write(real, {"a": np.zeros(2)}, {})
    real.chmod(0o600)
    link.symlink_to(real)
    tensor_file.write(link, {"a": np.ones(2)}, {})
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o600
    with tensor_file.TensorFile(real) as file:
        assert file.read({"a": np.dtype("float64")})["a"].tolist() == [1, 1]
