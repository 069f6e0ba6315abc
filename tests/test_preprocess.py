"""Encoded images become inputs: the same for the same numbers, and as the ancestor makes them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from minidist.data.preprocess import Settings, decode, make
from minidist.data.preprocess.boxes import random_box
from minidist.data.preprocess.colour import YIQ_OF_RGB, _in_yiq
from minidist.data.preprocess.decode import Encoded
from minidist.data.preprocess.draws import draws
from minidist.errors import ImageError, UsageError
from minidist.kernels import plain

image = pytest.importorskip("PIL.Image")
SHAPE = (32, 48, 3)


def encoded(height: int, width: int, form: str = "JPEG", mode: str = "RGB") -> bytes:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 200 / width + 20, y * 200 / height + 30, 250 - x - y / 2], -1)
    file = io.BytesIO()
    image.fromarray(pixels.astype(np.uint8)).convert(mode).save(file, form)
    return file.getvalue()


def pixels_of(content: bytes) -> np.ndarray:
    return np.asarray(image.open(io.BytesIO(content)).convert("RGB"))


def made(settings: Settings, train: bool, content: bytes, *who: int) -> np.ndarray:
    out = np.full(SHAPE, np.nan, np.float32)
    make(settings, SHAPE, train)(content, *(who or (1, 2, 3)), out)
    return out


# -- what is drawn ---------------------------------------------------------------------------


def test_draws_follow_from_seed_epoch_and_number() -> None:
    def first(*who: int) -> list[float]:
        return [next(one) for one in [draws(*who)] for _ in range(70)]

    who = [(1, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4)]
    assert first(*who[0]) == first(*who[0])
    assert len({tuple(first(*one)) for one in who}) == 4
    assert len(set(first(1, 2, 3))) == 70
    assert min(first(1, 2, 3)) >= 0 and max(first(1, 2, 3)) < 1


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (100, 1000), (3, 3), (1, 1)])
def test_boxes_lie_in_the_image_and_are_of_the_sizes_asked_for(size: tuple[int, int]) -> None:
    height, width = size
    chance = iter(np.random.default_rng(0).random(100_000).tolist())
    for _ in range(300):
        box = random_box(height, width, chance)
        assert 0 <= box.top <= height - box.height
        assert 0 <= box.left <= width - box.width
        assert box.height * box.width >= 0.1 * height * width
        if min(size) > 99 and box != (0, 0, height, width):
            assert 0.74 <= box.width / box.height <= 1.34


def test_boxes_reach_everywhere() -> None:
    chance = iter(np.random.default_rng(0).random(10_000).tolist())
    boxes = [random_box(300, 300, chance) for _ in range(1000)]
    assert min(box.top for box in boxes) == 0 == min(box.left for box in boxes)
    assert max(box.top + box.height for box in boxes) == 300
    assert max(box.height for box in boxes) > 290
    assert min(box.height * box.width for box in boxes) < 0.12 * 300 * 300


def test_what_no_box_fits_is_taken_whole() -> None:
    def lowest() -> Iterator[float]:
        while True:
            yield 0.0  # always a twentieth of the area, which is too little

    assert random_box(200, 300, lowest()) == (0, 0, 200, 300)


# -- whole ways ------------------------------------------------------------------------------


@pytest.mark.parametrize("preprocessor", ["default", "official_models_imagenet"])
@pytest.mark.parametrize("size", [(90, 120), (120, 60), (20, 31)])
def test_the_middle_is_tested_on(preprocessor: str, size: tuple[int, int]) -> None:
    content = encoded(*size)
    got = made(Settings(preprocessor), False, content)
    pixels = pixels_of(content)
    if preprocessor == "default":
        ratio = 1.145 * max(32 / size[0], 48 / size[1])
    else:
        ratio = 256 * 48 / 224 / min(size)
    rows, columns = max(32, int(size[0] * ratio)), max(48, int(size[1] * ratio))
    down = plain.resize_matrix("bilinear", size[0], rows, (rows - 32) // 2, 32)
    across = plain.resize_matrix("bilinear", size[1], columns, (columns - 48) // 2, 48)
    expected = np.einsum("yh,hwc,xw->yxc", down, pixels, across)
    if preprocessor == "default":
        expected = expected / 127.5 - 1
    else:
        expected = expected - [123.68, 116.78, 103.94]
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_a_random_part_is_trained_on() -> None:
    content = encoded(90, 120)
    pixels, mirrored = pixels_of(content), 0
    for number in range(20):
        got = made(Settings(distortions=False, resize_method="area"), True, content, 7, 1, number)
        chance = draws(7, 1, number)
        top, left, height, width = random_box(90, 120, chance)
        down = plain.resize_matrix("area", height, 32, 0, 32)
        across = plain.resize_matrix("area", width, 48, 0, 48)
        part = pixels[top : top + height, left : left + width]
        expected = np.einsum("yh,hwc,xw->yxc", down, part, across) / 127.5 - 1
        if next(chance) < 0.5:
            expected, mirrored = expected[:, ::-1], mirrored + 1
        np.testing.assert_allclose(got, expected, atol=1e-3)
    assert 0 < mirrored < 20


@pytest.mark.parametrize("in_yiq", [True, False])
def test_distorted_colours_stay_in_range_and_follow_from_the_number(in_yiq: bool) -> None:
    settings, content = Settings(distort_color_in_yiq=in_yiq), encoded(60, 60)
    ones = [made(settings, True, content, 1, 2, number) for number in range(8)]
    again = [made(settings, True, content, 1, 2, number) for number in range(8)]
    assert np.array_equal(ones, again)
    assert not np.array_equal(ones[0], made(settings, True, content, 1, 3, 0))
    assert np.min(ones) >= -1 and np.max(ones) <= 1
    assert len({one.tobytes() for one in ones}) == 8


def test_round_robin_takes_each_method_by_number() -> None:
    content = encoded(60, 60)
    one = Settings(resize_method="round_robin")
    for number, method in enumerate(["bilinear", "nearest", "bicubic", "area"]):
        for turn in (number, number + 4):
            got = made(one, False, content, 0, 0, turn)
            assert np.array_equal(got, made(Settings(resize_method=method), False, content))


def test_the_matrix_in_yiq_keeps_grey_and_turns_the_rest() -> None:
    matrix = _in_yiq(1.3, 0.4)
    np.testing.assert_allclose(matrix @ np.ones(3), np.ones(3), atol=4e-3)  # FCC's third row
    colour = YIQ_OF_RGB @ np.array([0.6, 0.3, 0.2])
    turned = YIQ_OF_RGB @ matrix @ np.array([0.6, 0.3, 0.2])
    assert turned[0] == pytest.approx(colour[0], abs=1e-6)
    phase, turned_phase = (complex(i, q) for _, i, q in (colour, turned))
    ratio = turned_phase / phase
    assert abs(ratio) == pytest.approx(1.3, abs=1e-5)
    assert np.angle(ratio) == pytest.approx(0.4, abs=1e-5)


# -- kinds of images, and damage -------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "mode"),
    [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "P"), ("BMP", "L")],
)
def test_kinds_of_images_are_read_as_pillow_reads_them(form: str, mode: str) -> None:
    content = encoded(20, 30, form, mode)
    one = Encoded(content)
    assert (one.height, one.width) == (20, 30)
    np.testing.assert_array_equal(one.pixels((3, 4, 10, 20)), pixels_of(content)[3:13, 4:24])


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch) -> None:
    monkeypatch.setattr(decode, "LARGEST", 599)
    with pytest.raises(ImageError, match="30×20 pixels are more than 599"):
        Encoded(encoded(20, 30, "PNG"))


@pytest.mark.parametrize(("dtype", "form"), [(np.uint16, "PNG"), (np.float32, "TIFF")])
def test_more_than_eight_bits_are_not_cut_off(dtype, form) -> None:
    file = io.BytesIO()
    image.fromarray(np.arange(64, dtype=dtype).reshape(8, 8) * 999).save(file, form)
    with pytest.raises(ImageError, match="have more than 8 bits"):
        Encoded(file.getvalue())


def test_without_pillow_an_image_that_needs_it_is_not_called_damaged(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'minidist\[images\]'"):
        Encoded(b"GIF89a")


def test_a_lack_of_memory_is_no_damaged_image(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(image, "open", fail)
    content = b"GIF89a"
    with pytest.raises(MemoryError):
        Encoded(content)


@pytest.mark.parametrize(
    "content", [b"", b"not an image", encoded(20, 30)[:200], encoded(20, 30, "PNG")[:60]]
)
def test_damage_is_an_image_error_with_its_place(content: bytes) -> None:
    with pytest.raises(ImageError) as error:
        made(Settings(), True, content)
    assert 0 <= error.value.byte <= len(content)


@pytest.mark.parametrize("name", ["input_preprocessor", "resize_method"])
def test_unknown_names_are_answered_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be one of .*, but it is 'x'"):
        Settings(**{name: "x"})  # type: ignore[arg-type]
