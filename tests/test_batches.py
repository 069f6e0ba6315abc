"""Batches: each example once per epoch, in an order that only the seed and the epoch decide."""

from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.data import Batches, Examples
from minidist.errors import UsageError


def numbered(count: int) -> Examples:
    """Examples whose label is their position, and whose one pixel is the label too."""
    labels = np.arange(count, dtype=np.int64)
    return Examples(labels.astype(np.float32).reshape(count, 1, 1, 1), labels)


def labels_of(batches: Batches, count: int | None = None) -> list[list[int]]:
    return [labels.tolist() for _, labels in islice(batches, count)]


sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
seeds = st.integers(0, 2**64 - 1)


@given(sizes, seeds, st.integers(1, 3), st.booleans())
def test_every_epoch_visits_each_example_once(
    size: tuple[int, int], seed: int, epochs: int, shuffle: bool
) -> None:
    count, batch_size = size
    batches = Batches(numbered(count), batch_size, seed=seed, epochs=epochs, shuffle=shuffle)
    got = labels_of(batches)
    per_epoch = -(-count // batch_size)
    assert batches.batches_per_epoch == per_epoch
    assert len(got) == epochs * per_epoch
    for epoch in range(epochs):
        part = got[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(batch) for batch in part[:-1]] == [batch_size] * (per_epoch - 1)
        assert sorted(chain.from_iterable(part)) == list(range(count))


@given(sizes, seeds)
def test_images_stay_with_their_labels(size: tuple[int, int], seed: int) -> None:
    count, batch_size = size
    for images, labels in Batches(numbered(count), batch_size, seed=seed, epochs=1):
        assert images.dtype == np.float32
        assert labels.dtype == np.int64
        assert images.shape == (len(labels), 1, 1, 1)
        assert images.flags.c_contiguous
        assert images.ravel().tolist() == labels.tolist()


@given(sizes, seeds, st.integers(0, 100), st.booleans(), st.booleans())
def test_start_equals_skipping(
    size: tuple[int, int], seed: int, start: int, drop: bool, shuffle: bool
) -> None:
    count, batch_size = size

    def batches(start: int) -> Batches:
        return Batches(
            numbered(count),
            batch_size,
            seed=seed,
            start=start,
            drop_remainder=drop,
            shuffle=shuffle,
        )

    assert labels_of(batches(start), 5) == labels_of(batches(0), start + 5)[start:]


@given(sizes, seeds)
def test_every_iteration_and_every_object_of_a_seed_gives_the_same(
    size: tuple[int, int], seed: int
) -> None:
    count, batch_size = size
    batches = Batches(numbered(count), batch_size, seed=seed, epochs=2)
    first = labels_of(batches)
    assert labels_of(batches) == first
    assert labels_of(Batches(numbered(count), batch_size, seed=seed, epochs=2)) == first


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        tuple(chain.from_iterable(labels_of(Batches(numbered(100), 10, seed=seed, start=s), 10)))
        for seed in (0, 1, 2**64 - 1)
        for s in (0, 10, 20)  # epochs 0, 1 and 2
    ]
    assert len(set(orders)) == 9
    assert tuple(range(100)) not in orders


def test_without_shuffling_the_order_is_the_examples_and_nothing_is_copied() -> None:
    examples = numbered(7)
    batches = Batches(examples, 3, seed=0, shuffle=False, epochs=1)
    assert labels_of(batches) == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(np.shares_memory(images, examples.images) for images, _ in batches)


def test_the_short_batch_can_be_dropped() -> None:
    batches = Batches(numbered(7), 3, seed=0, shuffle=False, epochs=2, drop_remainder=True)
    assert labels_of(batches) == [[0, 1, 2], [3, 4, 5]] * 2


def test_a_start_after_the_last_epoch_leaves_nothing() -> None:
    assert labels_of(Batches(numbered(7), 3, seed=0, epochs=2, start=6)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 8}, "batch of 8 examples is larger than the data set, which has 7"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"start": -1}, "start must be the number of a batch"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
    ],
)
def test_impossible_requests_say_why(change: dict[str, int], message: str) -> None:
    arguments = {"batch_size": 3, "seed": 0, **change}
    with pytest.raises(UsageError, match=message):
        Batches(numbered(7), **arguments)  # type: ignore[arg-type]
