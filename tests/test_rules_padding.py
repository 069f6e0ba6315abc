"""Rules of padding, by number: shapes made equal, true sizes handed along."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md


def per_replica(*arrays):
    """Return a PerReplica with each array on its own device."""
    devices = md.devices(f"cpu*{len(arrays)}")
    tensors = []
    for device, array in zip(devices, arrays, strict=True):
        with md.device(device):
            tensors.append(md.constant(np.asarray(array)))
    return md.PerReplica(devices, tensors)


def parts(padded):
    """Return the Padded of each replica."""
    return [md.select_replica(i, padded) for i in range(len(md.local_results(padded.value)))]


X = per_replica(np.ones((2, 3)), np.ones((1, 5)), np.ones((2, 0)))


def test_199_maximum_has_the_structure_and_the_fixed_sizes_of_the_inputs():
    x = {"a": X, "b": X}
    for wrong in ({"a": (None, 8)}, [(None, 8), (None, 8)], {"a": None, "b": None, "c": None}):
        with pytest.raises(ValueError, match="structure of the inputs"):
            md.pad(x, wrong)
    assert md.pad(x, {"a": (None, 8), "b": None})["a"].value.values[0].shape == (2, 8)
    for wrong, message in [((2, 4), "above the maximum 4"), ((8,), "one size for each of 2")]:
        with pytest.raises(ValueError, match=message):
            md.pad(X, wrong)
    y = per_replica(np.ones((2, 3)), np.ones((2, 5)))
    with pytest.raises(ValueError, match=r"dimension 0, .* and maximum 4"):
        md.pad(y, (4, 8), axis=1)
    assert md.pad(y, (2, 8), axis=1).value.values[0].shape == (2, 8)


def test_200_what_cannot_differ_stays_as_it_is():
    label = per_replica(np.arange(2), np.arange(2))
    x = {
        "ids": per_replica(np.ones((2, 3)), np.ones((2, 4))),
        "label": label,
        "rate": 0.5,
        "no": None,
    }
    padded = md.pad(x, 7, axis=1)
    assert md.select_replica(0, padded["ids"]).value.shape == (2, 7)
    assert padded["rate"] == 0.5 and padded["no"] is None
    assert all(a is b for a, b in zip(padded["label"].values, label.values, strict=True))
    assert isinstance(padded["ids"], md.Padded)
    # and where nothing has to be padded, nothing is copied
    equal = per_replica(np.ones((2, 3)), np.ones((2, 3)))
    assert all(
        part.value is tensor
        for part, tensor in zip(parts(md.pad(equal)), equal.values, strict=True)
    )


@pytest.mark.parametrize("maximum", [(4, 7), (None, 7), (4, None)])
def test_201_202_zeros_at_the_end_up_to_the_maximum_or_the_largest(maximum):
    height, width = (most or largest for most, largest in zip(maximum, (2, 5), strict=True))
    for part, tensor, device in zip(parts(md.pad(X, maximum)), X.values, X.devices, strict=True):
        rows, columns = tensor.shape
        expected = np.zeros((height, width))
        expected[:rows, :columns] = 1
        assert part.value.numpy().tolist() == expected.tolist()
        assert part.value.dtype == tensor.dtype and part.value.device is device
        assert part.sizes == (rows, columns)


def test_202_one_number_is_the_maximum_of_the_first_dimension_that_may_differ():
    assert [part.value.shape for part in parts(md.pad(X, 4))] == [(4, 5)] * 3
    y = per_replica(np.ones((2, 3)), np.ones((2, 5)))
    assert [part.value.shape for part in parts(md.pad(y, 9, axis=-1))] == [(2, 9)] * 2


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=4),
    st.booleans(),
)
def test_203_204_results_are_as_if_unpadded(shapes, power_of_two):
    arrays = [1.0 + np.arange(a * b, dtype=np.float64).reshape(a, b) for a, b in shapes]
    x = per_replica(*arrays)

    def fn(p):
        masked = md.ops.reduce_sum(p.value * p.mask())
        assert float(masked) == float(md.ops.reduce_sum(p.value))
        mean = float(masked) / max(1, p.elements)
        count = float(md.ops.reduce_sum(md.ops.multiply(p.mask(), p.value * 0 + 1)))
        return mean, count, p.unpadded(), p.value.shape

    with md.Strategy(f"cpu*{len(arrays)}") as strategy:
        out = strategy.run(fn, md.pad(x, power_of_two=power_of_two))
        found = [md.select_replica(i, out) for i in range(len(arrays))]
    for array, (mean, count, true, _) in zip(arrays, found, strict=True):
        assert mean == (array.mean() if array.size else 0.0)
        assert count == array.size
        assert np.array_equal(true.numpy(), array) and true.shape == array.shape
    assert len({shape for *_, shape in found}) == 1


def test_203_the_mask_multiplies_what_was_computed_from_padded_inputs():
    ids = per_replica([[1, 2, 3]], [[4]])

    def step(p):
        losses = md.ops.exp(md.ops.cast(p.value, "float32") * 0)  # 1 for each, also for padding
        return float(md.ops.reduce_sum(losses * p.mask("float32"))), p.mask().dtype.name

    with md.Strategy("cpu*2") as strategy:
        sums = strategy.run(step, md.pad(ids, axis=1))
    assert [md.select_replica(i, sums) for i in range(2)] == [(3.0, "int64"), (1.0, "int64")]


def test_204_the_first_replica_need_not_be_the_longest():
    for lengths in [(1, 4), (4, 1), (2, 5, 3)]:
        x = per_replica(*(np.arange(float(length)) for length in lengths))
        with md.Strategy(f"cpu*{len(lengths)}") as strategy:
            sums = strategy.run(lambda p: md.ops.reduce_sum(p.value), md.pad(x))
            total = float(strategy.reduce("sum", sums))
        assert total == sum(length * (length - 1) / 2 for length in lengths)


def test_205_replicas_with_different_inputs_are_an_error():
    a = md.constant(np.zeros(2))
    for other, message in [
        ((a, a), "different inputs"),
        ((md.constant(np.zeros(2, np.int64)),), "same rank and dtype"),
        ((md.constant(np.zeros((2, 2))),), "same rank and dtype"),
        ((3.0,), "same rank and dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            md.pad(md.PerReplica(None, [(a,), other]))
    with pytest.raises(ValueError, match="different numbers of replicas"):
        md.pad((md.PerReplica(None, [a]), md.PerReplica(None, [a, a])))
    with pytest.raises(ValueError, match="not in axis=0"):
        md.pad(per_replica(np.zeros((1, 2)), np.zeros((1, 3))), axis=0)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=3), st.integers(70, 100) | st.none())
@settings(max_examples=30, deadline=None)
def test_206_up_to_the_next_power_of_two(lengths, maximum):
    x = per_replica(*(np.ones(length) for length in lengths))
    longest = max(lengths)
    powers = [0, 1, 2, 4, 8, 16, 32, 64, 128]
    expected = min(power for power in powers if power >= longest)
    expected = expected if maximum is None else min(expected, maximum)
    assert [part.value.shape for part in parts(md.pad(x, maximum, power_of_two=True))] == [
        (expected,)
    ] * len(lengths)


def test_206_only_dimensions_that_may_differ_are_rounded_up():
    x = per_replica(np.ones((2, 5, 300)), np.ones((2, 3, 300)))
    assert parts(md.pad(x, axis=1, power_of_two=True))[1].value.shape == (2, 8, 300)


def test_arrays_that_all_replicas_share_are_padded_once():
    shared = md.constant(np.ones(3))
    padded = md.pad({"shared": shared, "own": per_replica(np.ones(1), np.ones(2))}, 4)
    assert isinstance(padded["shared"].value, md.Tensor) and padded["shared"].sizes == (3,)
    alone = md.pad(np.ones(3), 4)
    assert alone.value.numpy().tolist() == [1, 1, 1, 0] and alone.sizes == (3,)


def test_gradients_pass_through_the_true_part():
    x = per_replica([1.0, 2.0], [3.0])

    def gradient(p):
        with md.GradientTape() as tape:
            tape.watch(p.value)
            loss = md.ops.reduce_sum(md.ops.square(p.unpadded()))
        return tape.gradient(loss, p.value)

    with md.Strategy("cpu*2") as strategy:
        got = strategy.run(gradient, md.pad(x, 3))
    assert [part.numpy().tolist() for part in got.values] == [[2, 4, 0], [6, 0, 0]]
