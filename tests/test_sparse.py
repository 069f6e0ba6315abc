"""IndexedSlices, the embedding that makes them, and their way through tape, policies and rules.

The oracle is the whole gradient: whatever is done with the rows must give its bits.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import RULES
from policies import POLICIES, Trainer, optimizer, oracle, replica_id, same_bits

import minidist as md
from minidist import nn
from minidist.errors import ContextError, ShapeError, UsageError


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def slices(values, indices, rows):
    values = np.asarray(values)
    return md.IndexedSlices(
        md.constant(values),
        md.constant(np.asarray(indices, np.int64)),
        (rows, *values.shape[1:]),
    )


def whole(values, indices, rows):
    """Return the tensor that the rows mean, added up one after the other."""
    dense = np.zeros((rows, *values.shape[1:]), values.dtype)
    for index, value in zip(indices, values, strict=True):
        dense[index] += value
    return dense


@st.composite
def some_rows(draw, rows=6):
    k = draw(st.integers(0, 12))
    indices = draw(st.lists(st.integers(0, rows - 1), min_size=k, max_size=k))
    shape = draw(st.sampled_from([(k,), (k, 1), (k, 3), (k, 2, 2), (k, 0)]))
    seed = draw(st.integers(0, 2**32 - 1))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return np.random.default_rng(seed).normal(size=shape).astype(dtype), indices, rows


# --- the object -----------------------------------------------------------------------------------


@given(some_rows())
def test_it_means_its_rows_added_up_in_order(given):
    sparse, dense = slices(*given), whole(*given)
    assert same_bits(sparse.to_dense(), dense)
    assert same_bits(sparse.numpy(), dense)
    assert same_bits(np.asarray(sparse), dense)
    assert (sparse.shape, sparse.ndim, sparse.dtype) == (dense.shape, dense.ndim, dense.dtype)
    assert sparse.device is md.devices("cpu")[0]


@given(some_rows())
def test_coalesced_has_each_index_once_and_the_same_bits(given):
    once = slices(*given).coalesced()
    assert once.indices.numpy().tolist() == sorted(set(given[1]))
    assert same_bits(once.to_dense(), whole(*given))


def test_the_order_of_duplicates_shows_in_the_bits():
    big = np.float32([[1e8], [1], [-1e8]])
    assert slices(big, [0, 0, 0], 1).numpy() == 0
    assert slices(big[[0, 2, 1]], [0, 0, 0], 1).numpy() == 1
    assert slices(big, [0, 0, 0], 1).coalesced().values.numpy() == 0


@given(some_rows(), st.floats(-4, 4, width=32))
def test_sums_stay_sparse_and_keep_duplicates_and_numbers_scale(given, factor):
    values, indices, rows = given
    one = slices(values, indices, rows)
    both = one + one
    assert isinstance(both, md.IndexedSlices)
    assert both.indices.numpy().tolist() == indices + indices
    assert same_bits(both.values, np.concatenate([values, values]))
    scaled = one * factor
    assert same_bits(scaled.values, values * values.dtype.type(factor))
    assert same_bits((factor * one).values, scaled.values)
    dense = md.constant(whole(values, indices, rows))
    assert same_bits(one + dense, whole(values, indices, rows) * 2)
    assert same_bits(dense + one, whole(values, indices, rows) * 2)


def test_a_copy_shares_no_memory():
    one = slices(np.ones((2, 3)), [0, 4], 5)
    copy = one.copy()
    assert not np.shares_memory(one.values.array, copy.values.array)
    assert not np.shares_memory(one.indices.array, copy.indices.array)
    assert same_bits(copy.to_dense(), one.to_dense())


def test_it_goes_to_another_device():
    first, second = md.devices("cpu*2")
    one = slices(np.ones((2, 3)), [0, 4], 5)
    assert one.to(first) is one
    moved = one.to(second)
    assert moved.device is second
    assert same_bits(moved.to_dense(), one.to_dense())
    assert (one + moved).device is first


def test_repr_says_how_much_of_what():
    assert repr(slices(np.ones((2, 3)), [0, 4], 5)) == (
        "<IndexedSlices 2 rows of float64[5, 3] on cpu:0>"
    )


@pytest.mark.parametrize(
    ("values", "indices", "shape", "error", "match"),
    [
        (np.ones((2, 3)), [0, 5], (5, 3), UsageError, "index 5 is not one of 0 … 4"),
        (np.ones((2, 3)), [-1, 0], (5, 3), ValueError, "index -1"),
        (np.ones((2, 3)), [0, 1, 2], (5, 3), ShapeError, "3 rows"),
        (np.ones((2, 3)), [0, 1], (5, 2), ShapeError, r"\[5, 2\]"),
        (np.ones((2, 3)), [[0, 1]], (5, 3), ShapeError, "rank 1"),
        (np.ones((2, 3)), [0.0, 1.0], (5, 3), ShapeError, "float32"),
        (np.float64(1), [0], (), ShapeError, "rows of a tensor"),
    ],
)
def test_what_does_not_fit_is_named(values, indices, shape, error, match):
    with pytest.raises(error, match=match):
        md.IndexedSlices(md.constant(values), md.constant(indices), shape)


def test_arrays_and_devices_that_do_not_go_together():
    with pytest.raises(TypeError, match="Tensors"):
        md.IndexedSlices(np.ones((1, 2)), md.constant([0]), (3, 2))
    with md.device("cpu:1"):
        elsewhere = md.constant([0])
    with pytest.raises(ContextError, match="cpu:1"):
        md.IndexedSlices(md.constant(np.ones((1, 2))), elsewhere, (3, 2))
    with pytest.raises(ShapeError, match="cannot be added up"):
        slices(np.ones((1, 2)), [0], 3) + slices(np.ones((1, 2)), [0], 4)


# --- the operation and the tape -------------------------------------------------------------------


def test_embedding_takes_rows(rng):
    table = rng.normal(size=(6, 2, 3)).astype(np.float32)
    for ids in [np.array([[0, 5], [5, 2]]), np.int32([1]), np.uint8(4), np.zeros((0, 3), int)]:
        assert same_bits(md.ops.embedding(md.constant(table), md.constant(ids)), table[ids])


def test_its_gradient_has_a_row_for_each_id(rng):
    table, ids = md.constant(rng.normal(size=(6, 3))), np.array([[4, 0], [4, 4]])
    with md.GradientTape() as tape:
        tape.watch(table)
        y = md.ops.embedding(table, md.constant(ids))
        loss = md.ops.reduce_sum(y * y * y)
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, md.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [4, 0, 4, 4]
    assert gradient.dense_shape == (6, 3)
    np.testing.assert_allclose(gradient.values, 3 * table.numpy()[ids.ravel()] ** 2, rtol=1e-14)


def test_it_is_the_product_with_one_hot_rows(rng):
    table, ids = md.constant(rng.normal(size=(5, 3))), rng.integers(5, size=8)
    weight = md.constant(rng.normal(size=(8, 3)))
    with md.GradientTape(persistent=True) as tape:
        tape.watch(table)
        a = md.ops.reduce_sum(md.ops.embedding(table, md.constant(ids)) * weight)
        b = md.ops.reduce_sum(md.ops.matmul(md.constant(np.eye(5)[ids]), table) * weight)
    np.testing.assert_allclose(tape.gradient(a, table), tape.gradient(b, table), rtol=1e-12)


def rows_of(table, ids):
    return md.ops.reduce_sum(md.ops.embedding(table, md.constant(ids)))


def test_two_uses_are_concatenated_in_backward_order():
    table = md.constant(np.zeros((4, 2)))
    with md.GradientTape() as tape:
        tape.watch(table)
        loss = rows_of(table, [0, 1]) + 2.0 * rows_of(table, [1, 3])
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, md.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [1, 3, 0, 1]
    assert gradient.values.numpy()[:, 0].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("sparse_first", [True, False])
def test_a_use_of_the_whole_table_makes_the_gradient_whole(sparse_first):
    table = md.constant(np.zeros((4, 2)))
    with md.GradientTape() as tape:
        tape.watch(table)
        uses = [lambda: rows_of(table, [1, 1]), lambda: md.ops.reduce_sum(table * 3.0)]
        first, second = uses if sparse_first else uses[::-1]
        loss = first() + second()
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, md.Tensor)
    assert gradient.numpy()[:, 0].tolist() == [3, 5, 3, 3]


def test_what_lies_before_the_table_gets_a_whole_gradient():
    x = md.constant(np.full((3, 2), 0.5))
    with md.GradientTape() as tape:
        tape.watch(x)
        loss = rows_of(x * x, [2, 2])
    gradient = tape.gradient(loss, x)
    assert isinstance(gradient, md.Tensor)
    assert gradient.numpy().tolist() == [[0, 0], [0, 0], [2, 2]]


def test_a_sink_gets_it_as_it_is_and_gradients_share_no_memory():
    table = md.Variable(np.zeros((4, 2)), name="table")
    ids = md.constant([3, 0])
    with md.GradientTape(persistent=True) as tape:
        loss = md.ops.reduce_sum(md.ops.embedding(table, ids))
    given = []
    tape.gradient(loss, [table], sink=lambda source, gradient: given.append((source, gradient)))
    ((source, gradient),) = given
    assert source is table
    assert isinstance(gradient, md.IndexedSlices)
    twice = tape.gradient(loss, [table, table])
    everything = [gradient, *twice]
    for i, one in enumerate(everything):
        assert not np.shares_memory(one.indices.array, ids.array)
        for other in everything[:i]:
            assert not np.shares_memory(one.values.array, other.values.array)
            assert not np.shares_memory(one.indices.array, other.indices.array)


def test_embedding_says_what_it_cannot_take():
    table = md.constant(np.zeros((4, 2)))
    with pytest.raises(UsageError, match="embedding: index 4"):
        md.ops.embedding(table, md.constant([0, 4]))
    with pytest.raises(ShapeError, match="integers"):
        md.ops.embedding(table, md.constant([0.0]))
    with pytest.raises(ShapeError, match="int64"):
        md.ops.embedding(md.constant([[1]]), md.constant([0]))
    with pytest.raises(ShapeError, match="needs rows"):
        md.ops.embedding(md.constant(1.0), md.constant([0]))
    with md.device("cpu:1"):
        ids = md.constant([0])
    with pytest.raises(ContextError, match="embedding"):
        md.ops.embedding(table, ids)


# --- policies and rules ---------------------------------------------------------------------------

ROWS = 5


def draw_rows(rng, k=4, dtype=np.float64):
    return rng.normal(size=(k, 3)).astype(dtype), rng.integers(ROWS, size=k)


def apply(trainer, opt, gradients, counts=None):
    """Apply `gradients[replica][i]`: arrays, (values, indices) of the table's rows, or None."""

    def step(replica):
        pairs = []
        for gradient, variable in zip(gradients[replica], trainer.variables, strict=True):
            if isinstance(gradient, tuple):
                gradient = slices(*gradient, ROWS)
            elif gradient is not None:
                gradient = md.constant(gradient)
            pairs.append((gradient, variable))
        opt.apply_gradients(pairs, count=counts and counts[replica])

    trainer.each(step)


def dense(gradients):
    return [
        [whole(*part, ROWS) if isinstance(part, tuple) else part for part in row]
        for row in gradients
    ]


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_lead_to_the_same_bits_as_the_whole_gradient(policy, rule, weight_decay, rng):
    n, dtype = 3, np.float32
    start = [rng.normal(size=(ROWS, 3)).astype(dtype), rng.normal(size=4).astype(dtype)]
    expected = oracle(policy, rule, [start] * n, weight_decay=weight_decay)
    opt = optimizer(rule, weight_decay)
    with Trainer(policy, [start] * n) as trainer:
        for counts in [None, [3, 0, 2], [2, 2, 2], None]:
            gradients = [
                [draw_rows(rng, k, dtype), rng.normal(size=4).astype(dtype)] for k in (6, 0, 4)
            ]
            apply(trainer, opt, gradients, counts)
            expected.step(dense(gradients), counts)
            trainer.check(expected.weights)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("policy", POLICIES)
def test_some_replicas_without_a_gradient_or_with_a_whole_one(policy, rule, rng):
    start = [rng.normal(size=(ROWS, 3)), rng.normal(size=(ROWS, 3))]
    expected = oracle(policy, rule, [start] * 2)
    opt = optimizer(rule)
    whole_one = rng.normal(size=(ROWS, 3))
    programs = [
        [[draw_rows(rng), None], [None, draw_rows(rng)]],
        [[draw_rows(rng), whole_one], [whole_one, draw_rows(rng)]],
        [[draw_rows(rng), draw_rows(rng)], [draw_rows(rng), draw_rows(rng)]],
        [[None, draw_rows(rng)], [None, whole_one]],
    ]
    with Trainer(policy, [start] * 2) as trainer:
        for gradients in programs:
            apply(trainer, opt, gradients)
            expected.step(dense(gradients))
            trainer.check(expected.weights)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_with_an_embedding_learns_as_with_one_hot_rows(policy, n, rng):
    ids, labels = rng.integers(7, size=(8, 2)), rng.integers(3, size=8)

    def train(model, opt, x):
        with md.GradientTape() as tape:
            logits = model(md.constant(x), training=True)
            loss = md.ops.reduce_mean(md.ops.softmax_cross_entropy(logits, md.constant(labels)))
        variables = model.trainable_variables
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def table(shape, dtype, stream):
        return np.linspace(-1, 1, 14, dtype=dtype).reshape(7, 2)

    name, options = POLICIES[policy]
    with md.Strategy(f"cpu*{n}", name, **options) as strategy:
        with strategy.scope():
            sparse = nn.Sequential([nn.Embedding(7, 2, initializer=table), nn.Flatten()])
            sparse.build((2,), "float64")
            plain = nn.Sequential([nn.Dense(2, use_bias=False, kernel_initializer=table)])
            plain.build((7,), "float64")
            heads = [nn.Dense(3), nn.Dense(3)]
            for head in heads:
                head.build((4,), "float64")
        assert sparse.output_shape == (4,)
        hot = np.eye(7)[ids].reshape(16, 7)
        models = [
            lambda x, training: heads[0](sparse(x, training)),
            lambda x, training: heads[1](md.ops.reshape(plain(x, training), (8, 4))),
        ]
        first = heads[0].kernel.numpy()
        heads[1].kernel.assign(first)
        for model, layers, x in zip(
            models, [(sparse, heads[0]), (plain, heads[1])], [ids, hot], strict=True
        ):
            model.trainable_variables = [v for layer in layers for v in layer.trainable_variables]
            opt = md.optim.Momentum(0.5)
            for _ in range(3):
                strategy.run(train, model, opt, x)
        assert not np.allclose(heads[0].kernel.numpy(), first)
        for a, b in [(heads[0].kernel, heads[1].kernel), (sparse.variables[0], plain.variables[0])]:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12)


def test_sparse_gradients_differ_per_replica_and_reach_the_caller(rng):
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            table = md.Variable(rng.normal(size=(ROWS, 3)), name="table")

        def gradient():
            with md.GradientTape() as tape:
                loss = rows_of(table, [replica_id(), 4])
            return tape.gradient(loss, table)

        both = strategy.run(gradient)
        assert isinstance(both, md.PerReplica)
        assert [part.indices.numpy().tolist() for part in both.values] == [[0, 4], [1, 4]]


def test_a_gradient_that_does_not_fit_its_variable_is_named():
    v = md.Variable(np.zeros((3, 2)), name="table")
    for wrong in [slices(np.ones((1, 2)), [0], 4), slices(np.ones((1, 2), np.float32), [0], 3)]:
        with pytest.raises(ShapeError, match="'table'"):
            md.optim.SGD(1.0).apply_gradients([(wrong, v)])


def test_sgd_visits_only_the_rows_of_the_gradient():
    """An infinite rate would make a NaN of every weight that it is multiplied for."""
    v = md.Variable(np.ones((3, 2)), name="table")
    optimizer = md.optim.SGD(1.0)
    optimizer.lr = np.inf
    optimizer.apply_gradients([(slices(np.ones((1, 2)), [1], 3), v)])
    assert v.numpy().tolist() == [[1, 1], [-np.inf, -np.inf], [1, 1]]
