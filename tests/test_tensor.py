"""Tensor: conversion in and out, operators, identity, and that nothing of it can be changed."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist import ops
from minidist.errors import ShapeError


def test_numpy_gives_a_read_only_view():
    t = md.constant([1.0, 2.0])
    view = t.numpy()
    assert np.shares_memory(view, t.array)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 3


def test_constant_copies_and_chooses_the_dtype():
    source = np.array([1.0, 2.0])
    t = md.constant(source)
    source[0] = 5
    assert t.numpy().tolist() == [1, 2]
    assert t.dtype == np.float64
    assert md.constant([1.0]).dtype == np.float32
    assert md.constant(1.5).dtype == np.float32
    assert md.constant([1, 2]).dtype == np.int64
    assert md.constant([True]).dtype == np.bool_
    assert md.constant([1, 2], "float64").dtype == np.float64
    assert md.constant(np.float64(2)).dtype == np.float64


def test_shape_and_numbers():
    t = md.constant([[1.0, 2.0, 3.0]])
    assert (t.shape, t.ndim, t.size, len(t)) == ((1, 3), 2, 3, 1)
    assert [row.shape for row in t] == [(3,)]
    one = md.constant([2])
    assert (float(one), int(one), bool(one), one.item()) == (2.0, 2, True, 2)
    assert [10, 11, 12][one] == 12
    with pytest.raises(ValueError, match="size"):
        float(t)
    with pytest.raises(TypeError, match="no length"):
        len(md.constant(1.0))
    with pytest.raises(TypeError, match="cannot be an index"):
        [1, 2][md.constant(1.0)]


def test_repr_shows_values_shape_dtype_and_device():
    assert repr(md.constant([1.0, 2.0])) == "<Tensor [1., 2.] (2,) float32 on cpu:0>"


def test_arrays_come_out_by_protocol():
    t = md.constant([[1.0, 2.0]])
    assert np.asarray(t).tolist() == [[1, 2]]
    assert np.asarray(t, "float64").dtype == np.float64
    changed = np.array(t)
    changed[0, 0] = 9
    assert t.numpy()[0, 0] == 1
    assert np.from_dlpack(t).tolist() == [[1, 2]]


A = np.array([[1.0, 2.0], [3.0, 4.0]])
B = np.array([[5.0, -6.0], [0.5, 4.0]])


@pytest.mark.parametrize(
    "formula",
    [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a / b,
        lambda a, b: a @ b,
        lambda a, b: -a,
        lambda a, b: a**2,
        lambda a, b: a**-0.5,
        lambda a, b: a < b,
        lambda a, b: a <= b,
        lambda a, b: a > b,
        lambda a, b: a >= b,
        lambda a, b: 2 + a,
        lambda a, b: 2 - a,
        lambda a, b: 2 * a,
        lambda a, b: 2 / a,
        lambda a, b: a + 2,
        lambda a, b: a - 2,
        lambda a, b: a * 0.5,
        lambda a, b: a / 2,
        lambda a, b: a > 2,
        lambda a, b: a >= 2,
        lambda a, b: a[1],
        lambda a, b: a[:, 0],
    ],
)
def test_operators_are_numpys(formula):
    result = formula(md.constant(A), md.constant(B))
    assert isinstance(result, md.Tensor)
    expected = formula(A, B)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_an_array_on_the_left_leaves_the_work_to_the_tensor():
    for result in (A + md.constant(B), A @ md.constant(B), np.float64(2) * md.constant(B)):
        assert isinstance(result, md.Tensor)
    np.testing.assert_array_equal(A - md.constant(B), A - B)


def test_numbers_take_the_tensors_dtype():
    assert (md.constant([1.0]) * 2).dtype == np.float32
    assert (md.constant([1.0]) * np.float64(0.1)).dtype == np.float32
    assert (md.constant([1]) + 2).dtype == np.int64
    with pytest.raises(ShapeError, match="float64"):
        md.constant([1.0]) * np.array([2.0])


def test_tensors_are_compared_by_identity_and_elements_by_equal():
    a, b = md.constant([1.0, 2.0]), md.constant([1.0, 3.0])
    assert a != md.constant([1.0, 2.0])
    assert len({a: 1, b: 2}) == 2
    assert ops.equal(a, b).numpy().tolist() == [True, False]


def test_rank_0_results_are_arrays_too():
    t = md.constant(3.0)
    for result in (t + t, -t, t * 2, ops.exp(t), ops.reduce_sum(t), ops.relu(t), t < 4, t[...]):
        assert isinstance(result.array, np.ndarray)
        assert result.shape == ()


def test_every_array_is_contiguous():
    t = md.constant(np.arange(24.0).reshape(2, 3, 4))
    for result in (t[:, 1], t[..., ::2], ops.transpose(t), ops.reduce_sum(t, 1), t[0] + t[1, :1]):
        assert result.array.flags.c_contiguous


def test_leaving_an_index_range_is_an_index_error():
    with pytest.raises(IndexError):
        md.constant([1.0])[1]
