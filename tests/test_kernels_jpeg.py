"""JPEGs against libjpeg's pixels, as Pillow has them, and against one written by hand."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.kernels.jpeg import Damaged, Jpeg

SUBSAMPLINGS = ["4:4:4", "4:2:2", "4:2:0", "4:1:1"]


def decoded(content: bytes, box: tuple[int, int, int, int] | None = None) -> np.ndarray:
    jpeg = Jpeg(content)
    top, left, height, width = box or (0, 0, jpeg.height, jpeg.width)
    out = np.empty((height, width, 3), np.uint8)
    jpeg.decode(out, top, left)
    return out


# -- against libjpeg -------------------------------------------------------------------------


def encoded(pixels: np.ndarray, **how: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **how)
    return file.getvalue()


def by_libjpeg(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def photo(height: int, width: int, seed: int, grey: bool = False) -> np.ndarray:
    """Broad shapes with some noise over them."""
    random = np.random.default_rng(seed)
    shapes = random.integers(0, 256, (height // 6 + 1, width // 6 + 1, 3))
    large = shapes.repeat(6, 0).repeat(6, 1)[:height, :width]
    pixels = np.clip(large + random.integers(-15, 16, large.shape), 0, 255).astype(np.uint8)
    return pixels[..., 0] if grey else pixels


HOW = st.fixed_dictionaries(
    {"quality": st.sampled_from([20, 75, 95, 100])},
    optional={
        "progressive": st.just(True),
        "optimize": st.just(True),
        "restart_marker_blocks": st.integers(1, 5),
    },
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), HOW, st.sampled_from([*SUBSAMPLINGS, "grey", "rgb"]))
def test_pixels_are_libjpegs_bit_for_bit(
    height: int, width: int, how: dict[str, Any], kind: str
) -> None:
    pytest.importorskip("PIL")
    if kind in SUBSAMPLINGS:
        how["subsampling"] = kind
    if kind == "rgb":
        how |= {"keep_rgb": True, "subsampling": 0}
    content = encoded(photo(height, width, height, kind == "grey"), **how)
    np.testing.assert_array_equal(decoded(content), by_libjpeg(content))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([*SUBSAMPLINGS, "grey"]), st.booleans())
def test_a_part_is_that_part_of_the_whole(data: Any, kind: str, progressive: bool) -> None:
    pytest.importorskip("PIL")
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    how = {} if kind == "grey" else {"subsampling": kind}
    content = encoded(photo(height, width, 1, kind == "grey"), progressive=progressive, **how)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    h, w = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    part = decoded(content)[top : top + h, left : left + w]
    np.testing.assert_array_equal(decoded(content, (top, left, h, w)), part)


def test_kinds_that_are_left_to_others_say_so() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("CMYK", (20, 30)).save(file, "JPEG")
    jpeg = Jpeg(file.getvalue())
    assert (jpeg.height, jpeg.width, jpeg.supported) == (30, 20, False)
    with pytest.raises(ValueError, match="is of a kind that cannot be"):
        jpeg.decode(np.empty((30, 20, 3), np.uint8))


# -- by hand ---------------------------------------------------------------------------------

# One block of 8 x 8, grey; all steps of quantisation are 1. The DC table has the codes 0 for a
# difference of 8 bits and 10 for one of 0 bits, the AC table 0 for the block's end and 10 for a
# single bit.
HEAD = (
    b"\xff\xd8\xff\xdb\x00\x43\x00" + b"\x01" * 64 + b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01"
    b"\x01\x11\x00\xff\xc4\x00\x15\x00\x01\x01" + b"\x00" * 14 + b"\x08\x00"
    b"\xff\xc4\x00\x15\x10\x01\x01" + b"\x00" * 14 + b"\x00\x01"
    b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
)


def by_hand(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    return HEAD + data + b"\xff\xd9"


def test_a_block_of_one_level() -> None:
    # DC 200 is a level of 200 / 8 above the middle.
    np.testing.assert_array_equal(decoded(by_hand("0" + "11001000" + "0")), 128 + 25)


def test_a_block_with_a_wave() -> None:
    # The second coefficient is 1 / 8 of cos(π (2 x + 1) / 16) / √2 · 2, too little to be seen;
    # of -1 and a level of 128.5 (DC 4 in 8 bits is written as its own 8 bits minus 255).
    pixels = decoded(by_hand("0" + "10000100" + "10" + "0" + "0"))
    wave = 128 + 132 / 8 - np.cos(np.pi * (2 * np.arange(8) + 1) / 16) * np.sqrt(1 / 32)
    np.testing.assert_array_equal(pixels[..., 0], np.broadcast_to(np.rint(wave), (8, 8)))


@pytest.mark.parametrize(
    ("content", "byte", "message"),
    [
        (b"", 0, "expected FF D8"),
        (b"GIF89a", 0, "expected FF D8"),
        (by_hand("0" + "11001000" + "0")[:-2], len(HEAD) + 2, "before the end of the image"),
        (HEAD + b"\xff\xd9", len(HEAD), "end early"),
        (by_hand("0" + "11001000" + "11" * 20), None, "no such Huffman code"),
        (
            by_hand("0" + "11001000" + "101" * 63).replace(
                b"\x00\x01\xff\xda", b"\x00\xf1\xff\xda"
            ),
            None,
            "more than 64 coefficients",
        ),
        (HEAD.replace(b"\x00\x08\x00\x08\x01", b"\xff\xff\xff\xff\x01"), len(HEAD), "too short"),
        (HEAD.replace(b"\x00\x08\x00\x08\x01", b"\x00\x00\x00\x08\x01"), None, "no height"),
        (HEAD.replace(b"\x43\x00\x01", b"\x43\x00\x00"), None, "a step of quantisation is 0"),
        (HEAD.replace(b"\x15\x00\x01\x01", b"\x15\x00\x03\x00"), None, "table is damaged"),
        (
            HEAD.replace(b"\x15\x00\x01\x01", b"\x16\x00\x03\x00").replace(
                b"\x08\x00\xff", b"\x08\x00\x01\xff"
            ),
            None,
            "too many codes",
        ),
        (HEAD.replace(b"\xff\xc0", b"\xff\xfe"), None, "a component that there is not"),
        (HEAD.replace(b"\x01\x01\x00\x00\x3f", b"\x01\x02\x00\x00\x3f"), None, "there is not"),
        (HEAD.replace(b"\x00\x3f\x00", b"\x00\x3f\x01"), None, "band of coefficients"),
        (HEAD[: HEAD.index(b"\xff\xda")] + b"\xff\xd9", None, "before its first scan"),
    ],
)
def test_damage_is_named_with_its_place(content: bytes, byte: int | None, message: str) -> None:
    with pytest.raises(Damaged, match=message) as error:
        decoded(content)
    assert 0 <= error.value.byte <= len(content)
    if byte is not None:
        assert error.value.byte == byte


def test_every_shortened_file_is_an_error() -> None:
    pytest.importorskip("PIL")
    for how in ({}, {"progressive": True}, {"restart_marker_blocks": 2}):
        content = encoded(photo(40, 30, 0), **how)
        for size in range(0, len(content) - 1, 7):
            with pytest.raises(Damaged):
                decoded(content[:size], (0, 0, 1, 1) if size % 2 else None)


def test_a_lost_restart_marker_is_an_error() -> None:
    pytest.importorskip("PIL")
    content = encoded(photo(40, 30, 0), restart_marker_blocks=2)
    with pytest.raises(Damaged, match="restart marker"):
        decoded(content.replace(b"\xff\xd1", b"", 1))


@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_mutated_files_are_decoded_or_refused(how: dict[str, Any]) -> None:
    pytest.importorskip("PIL")
    whole, random = encoded(photo(24, 40, 0), **how), np.random.default_rng(0)
    for _ in range(1000):
        content = bytearray(whole)
        for at in random.integers(2, len(whole), random.integers(1, 4)).tolist():
            content[at : at + int(random.integers(0, 4))] = random.bytes(int(random.integers(0, 4)))
        with contextlib.suppress(Damaged):
            jpeg = Jpeg(bytes(content))
            if jpeg.supported:
                jpeg.decode(np.empty((min(jpeg.height, 64), min(jpeg.width, 64), 3), np.uint8))


# -- mistakes --------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    content = by_hand("0" + "11001000" + "0")
    with pytest.raises(ValueError, match=r"out must be \[h, w, 3\]"):
        Jpeg(content).decode(np.empty((8, 8), np.uint8))
    with pytest.raises(ValueError, match=r"8x8 from \(1, 0\) on is no part of the image"):
        Jpeg(content).decode(np.empty((8, 8, 3), np.uint8), 1)
    jpeg = Jpeg(content)
    jpeg.decode(np.empty((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="this JPEG was decoded"):
        jpeg.decode(np.empty((8, 8, 3), np.uint8))
