"""What once was accepted in silence, or ended in an error that says nothing: each is a sentence."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import minidist as md
from minidist.errors import ContextError, MergeMismatchError, UsageError

SUM = md.VariableAggregation.SUM


@pytest.fixture
def strategy():
    with md.Strategy("cpu*3") as strategy:
        yield strategy


def test_moving_averages_of_another_strategys_variables(strategy):
    free = md.Variable(np.zeros(2, "f4"))
    norm = md.nn.BatchNorm()
    norm.build((2,))
    x = np.ones((4, 2), "f4")
    with md.Strategy("cpu*2") as other, other.scope():
        theirs = md.Variable(np.zeros(2, "f4"))
    for call in (
        lambda: md.assign_moving_average(free, np.ones(2, "f4"), 0.5),
        lambda: md.assign_moving_average(theirs, np.ones(2, "f4"), 0.5),
        lambda: norm(x, training=True),
    ):
        with pytest.raises(ContextError, match="Mixing different"):
            strategy.run(call)
    assert (free.numpy() == 0).all() and (norm.moving_mean.numpy() == 0).all()


def test_moving_averages_of_nonsense(strategy):
    with strategy.scope():
        v = md.Variable(0.0)
        local = md.Variable(
            0.0, synchronization=md.VariableSynchronization.ON_READ, aggregation=SUM
        )
    for count in (-1, 0.5):
        with pytest.raises(UsageError, match="number of examples"):
            strategy.run(lambda count=count: md.assign_moving_average(v, 1.0, 0.5, count=count))
    with pytest.raises(UsageError, match="ON_READ"):
        strategy.run(lambda: md.assign_moving_average(local, 1.0, 0.5))
    with pytest.raises(MergeMismatchError, match="momentum"):
        strategy.run(
            lambda: md.assign_moving_average(v, 1.0, 0.5 + md.get_replica_context().replica_id / 10)
        )


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int32", 2**40),
        ("uint8", np.array(300)),
        ("uint8", np.array(-1, "int64")),
        ("int64", 1.5),
        ("float32", None),
        ("float32", "x"),
    ],
)
def test_values_that_a_variable_cannot_hold(strategy, dtype, value):
    with strategy.scope():
        v = md.Variable(np.zeros((), dtype), name="v", aggregation=SUM)
        with pytest.raises(ValueError, match="variable 'v"):
            v.assign(value)
    if isinstance(value, int):
        with pytest.raises(ValueError, match="variable 'v'"):
            strategy.run(lambda: v.assign_add(value))
    assert all(part.array == 0 for part in v.copies)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.7, "int32"), (1.7, "abc"), (2**40, "int32"), ([[1, 2], [3]], None), (None, None)],
)
def test_values_that_no_variable_starts_from(value, dtype):
    with pytest.raises(UsageError, match="start from"):
        md.Variable(value, dtype=dtype)
    assert md.Variable(2.0, dtype="int32").numpy() == 2


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_another_byte_order_becomes_the_machines(strategy, dtype):
    source = np.arange(4).astype(dtype)
    native = source.dtype.newbyteorder("=")
    (batch,) = strategy.distribute_dataset([source])
    tensors = [md.constant(source), md.Variable(source).read(), *batch.values]
    for tensor in tensors:
        assert tensor.dtype == native and tensor.dtype.isnative
    assert (np.concatenate([part.numpy() for part in batch.values]) == np.arange(4)).all()
    v = md.Variable(source.astype(">f4"))
    md.optim.SGD(1.0).minimize(lambda: md.ops.reduce_sum(v * 2.0), [v])
    assert v.numpy().tolist() == [-2, -1, 0, 1]


def test_padding_in_a_replica(strategy):
    with pytest.raises(ContextError, match="outside run"):
        strategy.run(lambda: md.pad(np.ones(2)))


def test_different_increments_are_named(strategy):
    with strategy.scope():
        v = md.Variable(0.0, name="steps")
    with pytest.raises(TypeError, match="increment_var: the replicas add different amounts"):
        strategy.run(lambda: md.increment_var(v, md.get_replica_context().replica_id))


def test_a_shallow_copy_of_a_variable(strategy):
    v = md.Variable(1.0)
    with pytest.raises(ContextError, match="deepcopy"):
        copy.copy(v)


def test_components_of_another_number_of_replicas(strategy):
    with pytest.raises(UsageError, match="2 components"):
        strategy.reduce("sum", md.PerReplica(md.devices("cpu*2"), [1, 2]))


def test_summaries_of_what_is_no_number(tmp_path):
    writer = md.SummaryWriter(tmp_path / "summaries")
    with pytest.raises(UsageError, match="takes one number"):
        writer.scalar("loss", np.ones(2))
    writer.close()
    with pytest.raises(UsageError, match="is closed"):
        writer.scalar("loss", 1.0)


def test_devices_and_shards_of_nonsense():
    with pytest.raises(UsageError, match="is no device"):
        md.device(None)
    with pytest.raises(UsageError, match="is none of"):
        md.shard(range(7), 3.0, 0)


def test_creator_scopes_may_drop_options_but_not_invent_them(strategy):
    def drops(following, **kwargs):
        return following(initial_value=kwargs["initial_value"], name=kwargs["name"])

    def invents(following, **kwargs):
        return following(**kwargs, shape=(3,))

    with strategy.scope(), md.variable_creator_scope(drops):
        v = md.Variable(1.5, name="v")
    assert (v.name, v.trainable, v.numpy()) == ("v", True, 1.5)
    with pytest.raises(UsageError, match="a creator scope asks for shape"):  # noqa: SIM117
        with strategy.scope(), md.variable_creator_scope(invents):
            md.Variable(1.5, name="v")


def test_different_elements_of_a_round_are_named_as_the_user_knows_them(strategy):
    elements = [{"x": np.ones(2)}, {"x": (np.ones(2),)}, {"x": np.ones(2)}]
    rounds = iter(strategy.make_input_fn_iterator(lambda _: elements, "per_worker"))
    with pytest.raises(ValueError, match="differ in structure") as caught:
        next(rounds)
    assert "_Box" not in str(caught.value) and "ndarray" in str(caught.value)
