"""Data sets: the shipped digits, made-up images, and readers against files written here."""

from __future__ import annotations

import gzip
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from minidist import data
from minidist.data import Examples, Settings, Split, cifar10, digits, mnist
from minidist.errors import DataError, ShapeError, UsageError

Bytes = NDArray[np.uint8]


def read(split: Split) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return inputs and labels of all examples, in epoch 0 of seed 0."""
    inputs = np.empty((len(split), *split.shape), np.float32)
    labels = np.empty(len(split), np.int64)
    split.read(np.arange(len(split)), 0, 0, inputs, labels)
    return inputs, labels


# Examples and the table of names


def test_examples_refuse_other_shapes_and_dtypes() -> None:
    images, labels = np.zeros((2, 3, 3, 1), np.float32), np.zeros(2, np.int64)
    assert len(Examples(images, labels)) == 2
    with pytest.raises(ShapeError, match=r"float64 \[2, 3, 3, 1\]"):
        Examples(images.astype(np.float64), labels)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"images must be float32"):
        Examples(images[0], labels)
    with pytest.raises(ShapeError, match=r"int64 \[2\], one for each image"):
        Examples(images, labels[:1])
    with pytest.raises(ShapeError, match=r"int32"):
        Examples(images, labels.astype(np.int32))  # type: ignore[arg-type]


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'mnits' is unknown.*digits, mnist, cifar10, imagenet"):
        data.load("mnits")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_sets_that_read_no_folder_refuse_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name}.*reads no data_dir.*leave data_dir out"):
        data.load(name, tmp_path)


def test_real_data_refuse_another_shape(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"digits.*real data"):
        data.load("digits", image_shape=(8, 8, 1))
    with pytest.raises(UsageError, match=r"mnist.*real data"):
        data.load("mnist", tmp_path, classes=10)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_data_dir_must_be_a_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: data_dir does not exist"):
        data.load(name, tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file: data_dir is not a folder"):
        data.load(name, str(tmp_path / "file"))


# Digits


def test_digits_are_the_1797_of_uci() -> None:
    found = data.load("digits")
    labels = np.concatenate([found.train.labels, found.test.labels])
    assert (len(found.train), len(found.test)) == (1437, 360)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (found.name, found.classes, found.synthetic) == ("digits", 10, False)
    assert found.image_shape == (8, 8, 1)
    for part in (found.train, found.test):
        assert (part.images.min(), part.images.max()) == (-1, 1)
        assert np.array_equal(part.images * 8, np.rint(part.images * 8))  # a whole number of 8ths


def test_digits_parts_are_disjoint_complete_and_in_proportion() -> None:
    with gzip.open(digits.FILE, "rt") as lines:
        whole = sorted(tuple(map(int, line.split(","))) for line in lines)
    found = data.load("digits")
    rows = [
        (*np.rint((image.ravel() + 1) * 8).astype(int).tolist(), int(label))
        for part in (found.train, found.test)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert len(set(whole)) == len(whole)  # so that equal rows would show an overlap
    assert sorted(rows) == whole
    share = np.bincount(found.test.labels) / np.bincount(found.train.labels)
    assert np.all(np.abs(share - 0.25) < 0.01)


def test_digits_without_their_file_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = digits.FILE.read_bytes()
    damaged = tmp_path / "digits.csv.gz"
    monkeypatch.setattr(digits, "FILE", damaged)
    shorter = gzip.compress(gzip.decompress(whole)[:1300])
    for content in (None, whole[:-1], whole[:5000], b"hello", shorter, gzip.compress(b"a,b\n")):
        if content is not None:
            damaged.write_bytes(content)
        with pytest.raises(DataError, match=r"digits\.csv\.gz: .*install minidist again"):
            digits.load()


# Synthetic images


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (28, 28, 1), 10),
        ("cifar10", (32, 32, 3), 10),
        ("imagenet", (224, 224, 3), 1001),
        ("synthetic", (224, 224, 3), 1001),
    ],
)
def test_without_files_images_are_made_up(
    name: str, shape: tuple[int, int, int], classes: int
) -> None:
    made = data.load(name, examples=8)
    assert (made.name, made.image_shape, made.classes) == (name, shape, classes)
    assert made.synthetic
    assert (len(made.train), len(made.test)) == (8, 2)


def test_synthetic_images_are_the_ancestors_truncated_normal() -> None:
    made = data.load("synthetic", image_shape=(20, 25, 2), classes=7, examples=400)
    pixels = (made.train.images.ravel().astype(np.float64) + 1) * 127.5
    n = pixels.size
    # A standard normal cut at ±2 has variance 1 - 4 φ(2) / (Φ(2) - Φ(-2)) = 0.773741.
    deviation = 60 * 0.773741**0.5
    assert np.abs(pixels - 127).max() <= 120 + 1e-3
    assert abs(pixels.mean() - 127) < 5 * deviation / n**0.5
    assert abs(pixels.std() - deviation) < 5 * deviation / n**0.5
    # Uniform over all classes: chi-square with 6 degrees of freedom, above 27.9 once in 10,000.
    counts = np.bincount(made.train.labels, minlength=7)
    assert counts.size == 7
    assert ((counts - 400 / 7) ** 2 / (400 / 7)).sum() < 27.9


def test_synthetic_images_follow_from_the_seed() -> None:
    one, same, other = (
        data.load("mnist", examples=4, seed=seed).train.images for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.any(one == other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_shape": (0, 3, 1)}, r"three sizes of at least 1.*\(0, 3, 1\)"),
        ({"image_shape": (3, 3)}, r"three sizes.*\(3, 3\)"),
        ({"classes": 0}, "classes of synthetic data must be at least 1, but is 0"),
        ({"examples": 0}, "examples of synthetic data must be at least 1"),
        ({"seed": -1}, "seed of synthetic data must be at least 0"),
    ],
)
def test_impossible_synthetic_data_say_why(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        data.load("synthetic", **change)  # type: ignore[arg-type]


# MNIST


def idx(array: Bytes, kind: int = 8) -> bytes:
    header = struct.pack(">BBBB", 0, 0, kind, array.ndim)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def random_bytes(seed: int, *shape: int, below: int = 256) -> Bytes:
    return np.random.default_rng(seed).integers(below, size=shape, dtype=np.uint8)


PARTS = {
    "train-images-idx3-ubyte": random_bytes(0, 6, 5, 4),
    "train-labels-idx1-ubyte": random_bytes(1, 6, below=10),
    "t10k-images-idx3-ubyte": random_bytes(2, 3, 5, 4),
    "t10k-labels-idx1-ubyte": random_bytes(3, 3, below=10),
}


def write_mnist(
    path: Path,
    change: dict[str, bytes] | None = None,
    name: Callable[[str], str] = lambda name: name,
    encode: Callable[[bytes], bytes] = lambda content: content,
) -> Path:
    for part, array in PARTS.items():
        content = (change or {}).get(part, idx(array))
        (path / name(part)).write_bytes(encode(content))
    return path


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_comes_back_as_written(dotted: bool, packed: bool, tmp_path: Path) -> None:
    def name(part: str) -> str:
        return part.replace("-idx", ".idx" if dotted else "-idx") + (".gz" if packed else "")

    write_mnist(tmp_path, name=name, encode=gzip.compress if packed else bytes)
    found = data.load("mnist", tmp_path)
    assert (found.name, found.classes, found.synthetic) == ("mnist", 10, False)
    assert found.image_shape == (5, 4, 1)
    for part, stem in ((found.train, "train"), (found.test, "t10k")):
        pixels = PARTS[f"{stem}-images-idx3-ubyte"]
        images, labels = read(part)
        assert np.array_equal(np.rint((images[..., 0] + 1) * 127.5), pixels)
        assert np.abs(images).max() <= 1
        assert np.array_equal(labels, PARTS[f"{stem}-labels-idx1-ubyte"])


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4)), st.booleans())
def test_idx_of_any_shape_comes_back(
    tmp_path_factory: pytest.TempPathFactory, array: Bytes, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    assert np.array_equal(mnist.read_idx(path, array.ndim), array)


@pytest.mark.parametrize("missing", PARTS)
def test_mnist_names_the_missing_file(missing: str, tmp_path: Path) -> None:
    (write_mnist(tmp_path) / missing).unlink()
    with pytest.raises(DataError, match=f"missing: expected one of {missing}, {missing}.gz"):
        mnist.load(str(tmp_path))


def test_idx_cut_at_any_byte_says_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "images"
    whole = idx(random_bytes(0, 2, 3, 2))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"images: byte {length}: the file ends before"):
            mnist.read_idx(path, 3)


def test_gzip_cut_at_any_byte_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "images"
    whole = gzip.compress(idx(random_bytes(0, 2, 3, 2)))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"images: byte .*(ends before|too small|gzip)"):
            mnist.read_idx(path, 3)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_wrong_byte_of_gzip_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    array = random_bytes(0, 2, 3, 2)
    content = bytearray(gzip.compress(idx(array)))
    content[position % len(content)] ^= flip
    path = tmp_path_factory.mktemp("idx") / "images"
    path.write_bytes(content)
    try:
        found = mnist.read_idx(path, 3)
    except DataError:
        return
    assert np.array_equal(found, array)  # it was the time stamp or something as idle


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_after_the_end_are_an_error(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "labels"
    content = idx(PARTS["train-labels-idx1-ubyte"]) + b"\0"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match=r"labels: byte 14.*expected the end of the file"):
        mnist.read_idx(path, 1)


@pytest.mark.parametrize("byte", range(4))
def test_every_byte_of_the_magic_number_is_checked(byte: int, tmp_path: Path) -> None:
    path = tmp_path / "images"
    content = bytearray(idx(PARTS["train-images-idx3-ubyte"]))
    content[byte] = 13  # as type 13, 32-bit floats
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"images: byte {byte}: expected .*, but found 13"):
        mnist.read_idx(path, 3)


@pytest.mark.parametrize("axis", range(3))
def test_empty_dimensions_are_an_error(axis: int, tmp_path: Path) -> None:
    shape = [2, 2, 2]
    shape[axis] = 0
    path = tmp_path / "images"
    path.write_bytes(idx(np.zeros(shape, np.uint8)))
    with pytest.raises(DataError, match=f"byte {4 + 4 * axis}: dimension {axis} is empty"):
        mnist.read_idx(path, 3)


@pytest.mark.parametrize("packed", [False, True])
def test_huge_sizes_in_a_header_take_no_memory(packed: bool, tmp_path: Path) -> None:
    content = struct.pack(">BBBBIII", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(100)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if packed else content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"4294967295 × 4294967295 × 4294967295 elements"):
            mnist.read_idx(path, 3)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_labels_out_of_range_are_an_error(tmp_path: Path) -> None:
    labels = PARTS["t10k-labels-idx1-ubyte"].copy()
    labels[2] = 10
    write_mnist(tmp_path, {"t10k-labels-idx1-ubyte": idx(labels)})
    with pytest.raises(
        DataError, match=r"t10k-labels-idx1-ubyte: byte 10: expected a label of 0 to 9, .* 10"
    ):
        mnist.load(str(tmp_path))


def test_images_and_labels_must_be_equally_many(tmp_path: Path) -> None:
    write_mnist(tmp_path, {"train-labels-idx1-ubyte": idx(random_bytes(0, 7, below=10))})
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: byte 4: expected 7 .* has 6"):
        mnist.load(str(tmp_path))


def test_both_parts_must_have_one_image_size(tmp_path: Path) -> None:
    write_mnist(tmp_path, {"t10k-images-idx3-ubyte": idx(random_bytes(0, 3, 4, 5))})
    with pytest.raises(DataError, match=r"\(5, 4\) but test images are \(4, 5\)"):
        mnist.load(str(tmp_path))


def test_a_folder_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte").unlink()
    (tmp_path / "train-labels-idx1-ubyte").mkdir()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte: cannot be read: .*directory"):
        mnist.load(str(tmp_path))


# CIFAR-10


@pytest.fixture
def cifar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with CIFAR-10 as it is, but three records in a file where it has 10,000."""
    monkeypatch.setattr(cifar10, "RECORDS", 3)
    for number, name in enumerate([*cifar10.TRAIN_FILES, *cifar10.TEST_FILES]):
        (tmp_path / name).write_bytes(cifar_records(number).tobytes())
    return tmp_path


def cifar_records(seed: int) -> Bytes:
    records = random_bytes(seed, 3, 3073)
    records[:, 0] %= 10
    return records


@pytest.mark.parametrize("nested", [False, True])
def test_cifar10_comes_back_as_written(nested: bool, cifar: Path) -> None:
    if nested:
        inner = cifar / "cifar-10-batches-bin"
        inner.mkdir()
        for file in cifar.glob("*.bin"):
            file.rename(inner / file.name)
    found = data.load("cifar10", cifar, settings=Settings(distortions=False))
    assert (found.name, found.classes, found.synthetic) == ("cifar10", 10, False)
    assert found.image_shape == (32, 32, 3)
    assert (len(found.train), len(found.test)) == (15, 3)
    for part, seeds in ((found.train, range(5)), (found.test, [5])):
        records = np.concatenate([cifar_records(seed) for seed in seeds])
        images, labels = read(part)
        assert labels.tolist() == records[:, 0].tolist()
        pixels = np.rint((images + 1) * 127.5).astype(np.uint8)
        for row, column, channel in ((0, 0, 0), (0, 31, 1), (31, 0, 2), (17, 5, 1)):
            stored = records[:, 1 + 1024 * channel + 32 * row + column]
            assert pixels[:, row, column, channel].tolist() == stored.tolist()


def test_cifar10_is_moved_and_mirrored_to_train_on_and_never_to_test_on(cifar: Path) -> None:
    plain = data.load("cifar10", cifar, settings=Settings(distortions=False))
    found = data.load("cifar10", cifar)
    assert np.array_equal(read(found.test)[0], read(plain.test)[0])
    distorted, images = read(found.train)[0], read(plain.train)[0]
    for one, image in zip(distorted, images, strict=True):
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), constant_values=-1)
        moved = [padded[y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
        assert any(
            np.array_equal(one, part) or np.array_equal(one, part[:, ::-1]) for part in moved
        )
    assert not np.array_equal(distorted, images)


def test_cifar10_files_have_10000_records() -> None:
    assert cifar10.RECORDS == 10_000


def test_cifar10_names_the_missing_file(cifar: Path) -> None:
    (cifar / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin .* is missing: expected data_batch_1"):
        cifar10.load(str(cifar), Settings())


@pytest.mark.parametrize("length", [0, 1, 3072, 3073, 3 * 3073 - 1])
def test_cifar10_cut_short_says_where_it_ends(length: int, cifar: Path) -> None:
    file = cifar / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DataError, match=rf"data_batch_2\.bin: byte {length}: the file ends"):
        cifar10.load(str(cifar), Settings())


def test_cifar10_with_more_records_is_an_error(cifar: Path) -> None:
    file = cifar / "test_batch.bin"
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(DataError, match=r"test_batch\.bin: byte 9219: expected the end"):
        cifar10.load(str(cifar), Settings())


def test_cifar10_labels_out_of_range_are_an_error(cifar: Path) -> None:
    file = cifar / "data_batch_5.bin"
    content = bytearray(file.read_bytes())
    content[3073] = 10
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_5\.bin: byte 3073: .*0 to 9.* found 10"):
        cifar10.load(str(cifar), Settings())


@pytest.mark.parametrize("pickled", ["data_batch_1", "cifar-10-batches-py"])
def test_pickled_cifar10_is_refused_with_the_cure(pickled: str, tmp_path: Path) -> None:
    (tmp_path / pickled).mkdir()
    with pytest.raises(DataError, match=r"pickled.*cifar-10-binary\.tar\.gz"):
        cifar10.load(str(tmp_path), Settings())


def test_pickled_cifar10_is_converted_by_the_command_that_the_error_names(
    cifar: Path, tmp_path: Path
) -> None:
    wanted = {file.name: file.read_bytes() for file in cifar.glob("*.bin")}
    for number, name in enumerate([*cifar10.TRAIN_FILES, *cifar10.TEST_FILES]):
        (cifar / name).unlink()
        records = cifar_records(number)
        batch = {b"labels": records[:, 0].tolist(), b"data": records[:, 1:]}
        (cifar / name.removesuffix(".bin")).write_bytes(pickle.dumps(batch))
    with pytest.raises(DataError) as refused:
        cifar10.load(str(cifar), Settings())
    command = str(refused.value).splitlines()[1]
    assert command.startswith("python -c ")
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, cwd=cifar, check=True)
    assert {file.name: file.read_bytes() for file in cifar.glob("*.bin")} == wanted
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "cifar-10-batches-py").symlink_to(cifar)
    assert cifar10.load(str(outer), Settings()).classes == 10
