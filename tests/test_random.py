"""Random numbers: the same place gives the same bits, another one others, spread as wanted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import context, initializers
from minidist.random import Stream, stream

N = 100_000


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 as Salmon et al. write it."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ k0, second % 2**32, first >> 32 ^ d ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def test_the_generator_gives_the_published_numbers():
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_are_53_bits_of_two_words():
    numbers = Stream((7, 0), (1, 2, 3)).uniform((5,), "float64")
    words = [word for block in range(3) for word in philox((7, 0), (block, 1, 2, 3))]
    pairs = list(zip(words[::2], words[1::2], strict=True))[:5]
    expected = [((high >> 5) * 2**26 + (low >> 6)) / 2**53 for high, low in pairs]
    assert numbers.tolist() == expected


def test_uniform():
    x = Stream((1, 0), (0, 0, 0)).uniform((N,), low=-2, high=4)
    assert x.dtype == np.float32
    assert x.min() >= -2
    assert x.max() <= 4
    assert abs(x.mean() - 1) < 0.03
    assert abs(x.std() - 6 / 12**0.5) < 0.02


def test_normal():
    x = Stream((1, 0), (0, 0, 0)).normal((N,), "float64", mean=3, stddev=2)
    z = (x - 3) / 2
    assert abs(z.mean()) < 0.015
    assert abs(z.std() - 1) < 0.01
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 0.01
    assert abs((z**4).mean() - 3) < 0.15


def test_truncated_normal_draws_again_what_is_beyond_two_sigma():
    x = Stream((1, 0), (0, 0, 0)).truncated_normal((N,), "float64", mean=1, stddev=3)
    z = (x - 1) / 3
    assert np.abs(z).max() <= 2
    assert abs(z.mean()) < 0.015
    assert abs(z.std() - 0.8796) < 0.01
    assert len(np.unique(z)) == N


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "float64"]))
def test_shapes_and_dtypes(shape, dtype):
    for kind in ("uniform", "normal", "truncated_normal"):
        x = getattr(Stream((1, 2), (3, 4, 5)), kind)(shape, dtype)
        assert x.shape == tuple(shape)
        assert x.dtype == dtype


def test_float32_values_are_the_float64_ones_rounded_once():
    for kind in ("uniform", "normal", "truncated_normal"):
        wide, narrow = (
            getattr(Stream((1, 2), (3, 4, 5)), kind)((99,), dtype) for dtype in ("d", "f")
        )
        np.testing.assert_array_equal(wide.astype("f"), narrow)


def test_a_stream_goes_on_and_starts_again_the_same():
    one, two = Stream((1, 2), (3, 4, 5)), Stream((1, 2), (3, 4, 5))
    first, second = one.normal((50,)), one.normal((50,))
    assert not np.isin(first, second).any()
    np.testing.assert_array_equal(first, two.normal((50,)))
    np.testing.assert_array_equal(second, two.normal((50,)))


def test_seed_step_replica_layer_and_draw_each_give_other_numbers():
    def drawn(seed: int = 1, step: int = 0, replica: int = 0, layer: int = 0, skip: int = 0):
        context.seed(seed)
        with context.entered(step=step, replica_id=replica, draws={}):
            for _ in range(skip):
                stream(layer)
            return stream(layer).uniform((20,), "float64")

    base = drawn()
    np.testing.assert_array_equal(base, drawn())
    seen = set(base.tolist())
    for change in (
        {"seed": 2},
        {"seed": 1 + 2**40},
        {"step": 1},
        {"replica": 1},
        {"layer": 1},
        {"skip": 1},
    ):
        other = set(drawn(**change).tolist())
        assert not seen & other, change
        seen |= other
    context.seed(0)


@pytest.mark.parametrize(
    ("initializer", "shape", "std"),
    [
        (initializers.glorot_uniform(), (300, 200), (2 / 500) ** 0.5),
        (initializers.glorot_uniform(), (3, 3, 50, 60), (2 / (9 * 110)) ** 0.5),
        (initializers.he_normal(), (300, 200), (2 / 300) ** 0.5),
        (initializers.he_normal(), (3, 3, 50, 60), (2 / 450) ** 0.5),
        (initializers.truncated_normal(0.5), (300, 200), 0.8796 * 0.5),
        (initializers.zeros(), (300,), 0),
    ],
)
def test_initialisers_have_the_spread_they_promise(initializer, shape, std):
    values = initializer(shape, "float32", Stream((1, 0), (0, 0, 0)))
    assert values.shape == shape
    assert values.dtype == np.float32
    assert abs(values.mean()) <= 0.02 * std
    assert values.std() == pytest.approx(std, rel=0.02)


def test_bounds_of_initialisers():
    glorot = initializers.glorot_uniform()((300, 200), "d", Stream((1, 0), (0, 0, 0)))
    assert np.abs(glorot).max() <= (6 / 500) ** 0.5
    he = initializers.he_normal()((300, 200), "d", Stream((1, 0), (0, 0, 0)))
    assert np.abs(he).max() <= 2 * (2 / 300) ** 0.5 / 0.8796
    assert (initializers.ones()((3,), "f", Stream((1, 0), (0, 0, 0))) == 1).all()
    tenths = initializers.constant(0.1)((3,), "f", Stream((1, 0), (0, 0, 0)))
    np.testing.assert_array_equal(tenths, np.float32([0.1, 0.1, 0.1]))
