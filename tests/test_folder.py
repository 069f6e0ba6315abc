"""Images in a folder for each class: which there are, and what becomes of damaged ones."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("PIL")

from photos import album, jpeg

from minidist import data
from minidist.data import Settings, folder
from minidist.data.images import Images
from minidist.errors import DataError, UsageError

SHAPE = (16, 16, 3)


def load(path, **settings):
    return data.load("folder", path, image_shape=SHAPE, settings=Settings(**settings))


def read(split, numbers=None, seed=3, epoch=1):
    """Return inputs and labels of some examples, or of all."""
    numbers = np.arange(len(split)) if numbers is None else np.array(numbers)
    inputs = np.full((len(numbers), *split.shape), np.nan, split.dtype)
    labels = np.full(len(numbers), -1)
    split.read(numbers, seed, epoch, inputs, labels)
    return inputs, labels


# What there is


def test_a_class_to_train_on_has_images(tmp_path):
    album(tmp_path, {"cat": 1, "dog": 0}, {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match="train/dog: there is no image in it, so nothing"):
        load(tmp_path)


def test_classes_and_images_are_numbered_by_their_names(tmp_path):
    found = load(album(tmp_path, {"dog": 2, "cat": 1, "Emu": 3}, {"cat": 2}))
    assert (found.name, found.classes, found.synthetic) == ("folder", 3, False)
    assert found.names == ("Emu", "cat", "dog")
    assert (len(found.train), len(found.test), found.image_shape) == (6, 2, SHAPE)
    assert read(found.train)[1].tolist() == [0, 0, 0, 1, 2, 2]
    assert read(found.test)[1].tolist() == [1, 1]
    train, _ = folder.parts(str(tmp_path))
    assert train.path(4) == tmp_path / "train" / "dog" / "000.jpg"
    assert train.load(4) == (jpeg(0), 2)


def test_other_files_are_left_alone(tmp_path):
    album(tmp_path, {"a": 1, "b": 1}, {"a": 1})
    (tmp_path / "train" / "a" / "B.JPEG").write_bytes(jpeg(7))
    for name in ("notes.txt", ".hidden.jpg", "jpg"):
        (tmp_path / "train" / "a" / name).write_bytes(b"none of ours")
    (tmp_path / "train" / ".git").mkdir()
    (tmp_path / "train" / "readme").write_bytes(b"")
    found = load(tmp_path)
    assert (len(found.train), found.classes) == (3, 2)


def test_val_is_taken_before_test(tmp_path):
    album(tmp_path / "a", {"x": 1}, {"x": 2}, held_out="test")
    assert len(load(tmp_path / "a").test) == 2
    album(tmp_path / "b", {"x": 1}, {"x": 3})
    shutil.copytree(tmp_path / "b" / "val", tmp_path / "a" / "val")
    assert len(load(tmp_path / "a").test) == 3


def test_a_folder_that_is_not_laid_out_so_says_how(tmp_path):
    layout = r"expected train/CLASS/\*\.jpg, and val/CLASS/\*\.jpg or test/CLASS/\*\.jpg"
    with pytest.raises(DataError, match=r"train: there is no such folder: " + layout):
        load(tmp_path)
    (tmp_path / "train" / "x").mkdir(parents=True)
    with pytest.raises(DataError, match=r"there is no folder val or test in it: " + layout):
        load(tmp_path)
    (tmp_path / "val" / "x").mkdir(parents=True)
    with pytest.raises(DataError, match=r"train: there is no image in its folders: " + layout):
        load(tmp_path)
    (tmp_path / "train" / "x" / "1.jpg").write_bytes(jpeg(0))
    with pytest.raises(DataError, match=r"val: there is no image in its folders"):
        load(tmp_path)
    (tmp_path / "val" / "y").mkdir()
    with pytest.raises(DataError, match=r"val/y: no folder in .*train has that name"):
        load(tmp_path)


def test_a_folder_has_to_be_named_and_says_its_classes_itself(tmp_path):
    with pytest.raises(UsageError, match="'folder' has to be read: give its data_dir"):
        data.load("folder")
    with pytest.raises(UsageError, match="'folder' here is real data"):
        data.load("folder", tmp_path, classes=3)


def test_an_image_that_is_gone_is_an_error_also_where_damaged_ones_are_skipped(tmp_path):
    found = load(album(tmp_path, {"a": 2}, {"a": 1}), skip_bad_records=True)
    (tmp_path / "train" / "a" / "001.jpg").unlink()
    with pytest.raises(DataError, match=r"001\.jpg: there is no such file"):
        read(found.train)


# What is read


def test_examples_are_the_same_however_they_are_read(tmp_path):
    found = load(album(tmp_path, {"a": 5, "b": 4}, {"a": 1}))
    inputs, labels = read(found.train)
    assert np.abs(inputs).max() <= 1
    order = found.train.order(3, 1)
    assert sorted(order) == list(range(9))
    with ThreadPoolExecutor(4) as threads:
        for number, (one, label) in zip(
            order, threads.map(lambda n: read(found.train, [n]), order), strict=True
        ):
            assert one.tobytes() == inputs[number].tobytes()
            assert label == labels[number]


def test_what_is_random_follows_from_seed_epoch_and_number(tmp_path):
    found = load(album(tmp_path, {"a": 3}, {"a": 2}))
    first, again = (read(found.train, [0, 1])[0] for _ in range(2))
    assert first.tobytes() == again.tobytes()
    for seed, epoch in ((3, 2), (4, 1)):
        assert not np.array_equal(read(found.train, [0, 1], seed, epoch)[0], first)
        assert np.array_equal(*(read(found.test, None, *key)[0] for key in ((3, 1), (seed, epoch))))


# What is damaged


def damage(path, number):
    file = path / "train" / "a" / f"{number:03}.jpg"
    file.write_bytes(file.read_bytes()[:300])


def test_a_damaged_image_is_an_error_that_names_it(tmp_path):
    damage(album(tmp_path, {"a": 3}, {"a": 1}), 1)
    with pytest.raises(DataError, match=r"train/a/001\.jpg: "):
        read(load(tmp_path).train)


def test_a_damaged_image_is_replaced_by_the_next_good_one_of_its_class(tmp_path):
    """As if that were in its place: all others, and what is drawn for it, stay as they were."""
    for path in (tmp_path / "damaged", tmp_path / "twin"):
        album(path, {"a": 6, "b": 2}, {"a": 1})
    for number, next_good in ((2, 4), (3, 4), (5, 0)):
        damage(tmp_path / "damaged", number)
        twin = tmp_path / "twin" / "train" / "a"
        shutil.copy(twin / f"{next_good:03}.jpg", twin / f"{number:03}.jpg")
    wanted, labels = read(load(tmp_path / "twin").train)
    found = load(tmp_path / "damaged", skip_bad_records=True).train
    for numbers in (range(8), range(7, -1, -1)):  # whichever is met first
        inputs, same = read(found, list(numbers))
        assert inputs.tobytes() == wanted[list(numbers)].tobytes()
        assert same.tolist() == labels[list(numbers)].tolist()
        assert len(found.skipped) == 3


def test_where_nothing_good_is_left_there_is_nothing_to_skip_to(tmp_path):
    album(tmp_path, {"a": 2, "b": 1}, {"a": 1})
    damage(tmp_path, 0)
    damage(tmp_path, 1)
    found = load(tmp_path, skip_bad_records=True).train
    with pytest.raises(
        DataError, match=r"001\.jpg: .* so is everything that could stand in for it"
    ):
        read(found, [1])
    assert read(found, [2])[1] == [1]


class Mutated(folder.Folder):
    """A folder whose files hold something else than they did."""

    content = b""

    def load(self, number):
        return self.content, 0


def test_mutated_images_are_read_or_refused(tmp_path):
    """A JPEG has no checksum, so many are images still; none may fail in another way."""
    draw, reasons = random.Random(4), []
    album(tmp_path, {"a": 1}, {"a": 1})
    whole = jpeg(0)
    stored = Mutated(tmp_path / "train", ["a"])
    split = Images(stored, SHAPE, Settings(), train=True)
    for _ in range(1000):
        mutated = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(mutated))
            match draw.randrange(4):
                case 0 | 1:
                    mutated[place] = draw.randrange(256)
                case 2:
                    del mutated[place : place + draw.randint(1, 9)]
                case 3:
                    del mutated[place + 1 :]
        stored.content = bytes(mutated)
        try:
            inputs, _ = read(split)
            assert np.isfinite(inputs).all()
        except DataError as error:
            reasons.append(str(error))
    assert len(reasons) > 300
    assert all(reason.startswith(f"{stored.path(0)}: byte ") for reason in reasons)


@pytest.mark.parametrize("end", [0, 1, 2, 20, 200, 400, -3])
def test_an_image_that_ends_too_early_is_refused(end, tmp_path):
    album(tmp_path, {"a": 1}, {"a": 1})
    (tmp_path / "train" / "a" / "000.jpg").write_bytes(jpeg(0)[:end])
    with pytest.raises(DataError, match=r"000\.jpg: "):
        read(load(tmp_path).train)
