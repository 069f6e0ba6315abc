"""Rules 132 to 139: what a checkpoint holds of each kind of variable, and where it goes back."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import minidist as md

ON_READ, ON_WRITE = md.VariableSynchronization.ON_READ, md.VariableSynchronization.ON_WRITE
Aggregation = md.VariableAggregation
POLICIES = ["replicated", "parameter_server", "independent"]
COUNTS = [1, 2, 3, 5]
START = [1.0, 2.0, 4.0]


STRATEGIES = []


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "checkpoint"
    while STRATEGIES:
        STRATEGIES.pop().close()


def variable(replicas=0, policy="replicated", value=START, name="v", **options):
    """Return a variable of a new strategy, or (for no replicas) of none."""
    if not replicas:
        return md.Variable(value, name=name, **options)
    STRATEGIES.append(md.Strategy(f"cpu*{replicas}", policy))
    with STRATEGIES[-1].scope():
        return md.Variable(value, name=name, **options)


def copies(of):
    return [copy.tensor.numpy().tolist() for copy in of.copies]


def set_copies(of, values):
    """Let each replica assign its own value."""

    def assign(value):
        of.assign(value)

    of.strategy.run(assign, md.PerReplica(of.strategy.devices, values))


@pytest.mark.parametrize("replicas", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_132_a_mirrored_variable_saves_its_first_copy_and_restores_into_all(path, replicas, policy):
    saved = variable(replicas, policy)
    md.save(path, saved)
    assert load_file(path)["v"].tolist() == START
    other = variable(replicas, policy, value=[0.0, 0.0, 0.0])
    md.load(path, other)
    assert copies(other) == [START] * len(other.copies)


@pytest.mark.parametrize("replicas", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_133_checkpoints_of_mirrored_and_plain_variables_are_interchangeable(
    path, replicas, policy
):
    md.save(path, variable(replicas, policy))
    plain = variable(value=[0.0, 0.0, 0.0])
    md.load(path, plain)
    assert copies(plain) == [START]

    md.save(path, variable())
    mirrored = variable(replicas, policy, value=[0.0, 0.0, 0.0])
    md.load(path, mirrored)
    assert copies(mirrored) == [START] * len(mirrored.copies)


@pytest.mark.parametrize("replicas", COUNTS)
def test_134_sync_on_read_sum_saves_the_sum_and_restores_its_part_into_each(path, replicas):
    v = variable(replicas, value=0.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    set_copies(v, [float(2**i) for i in range(replicas)])
    md.save(path, v)
    assert load_file(path)["v"] == 2**replicas - 1
    set_copies(v, [0.0] * replicas)
    md.load(path, v)
    assert copies(v) == [pytest.approx((2**replicas - 1) / replicas)] * replicas


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_135_sync_on_read_mean_saves_the_mean_and_restores_it_into_each(path, replicas):
    v = variable(replicas, value=0.0, synchronization=ON_READ, aggregation=Aggregation.MEAN)
    set_copies(v, [float(2**i) for i in range(replicas)])
    md.save(path, v)
    mean = (2**replicas - 1) / replicas
    assert load_file(path)["v"] == mean
    set_copies(v, [0.0] * replicas)
    md.load(path, v)
    assert copies(v) == [mean] * replicas


@pytest.mark.parametrize("replicas", COUNTS)
def test_136_checkpoints_of_sync_on_read_and_plain_variables_are_interchangeable(path, replicas):
    total = variable(replicas, synchronization=ON_READ, aggregation=Aggregation.SUM)
    mean = variable(replicas, synchronization=ON_READ, aggregation=Aggregation.MEAN)
    md.save(path, variable())
    for v, part in ((total, replicas), (mean, 1)):
        set_copies(v, [[0.0] * 3] * replicas)
        md.load(path, v)
        assert copies(v) == [(np.array(START, "f4") / part).tolist()] * replicas

    for v, whole in ((total, replicas), (mean, 1)):
        set_copies(v, [START] * replicas)
        md.save(path, v)
        plain = variable(value=[0.0, 0.0, 0.0])
        md.load(path, plain)
        assert plain.numpy() == pytest.approx(np.array(START) * whole, rel=1e-6)


@pytest.mark.parametrize("replicas", COUNTS)
@pytest.mark.parametrize("policy", ["replicated", "parameter_server"])
def test_137_keys_are_common_names_without_a_replica(path, replicas, policy):
    strategy = md.Strategy(f"cpu*{replicas}", policy)
    STRATEGIES.append(strategy)
    optimizer = md.optim.Adam(0.1)

    def step():
        v = md.Variable(1.0, name="v")  # made in the replicas, under each one's name scope
        optimizer.apply_gradients([(md.constant(1.0), v)])
        return v

    with strategy.scope(), md.name_scope("outer"):
        w = md.Variable(1.0, name="w")
    v, *_ = md.local_results(strategy.run(step))
    md.save(path, [v, w], optimizer)
    names = ["v", "outer/w"]
    slots = [f"{name}/Adam/{slot}" for name in names for slot in ("first", "second")]
    assert sorted(load_file(path)) == sorted(names + slots)


@pytest.mark.parametrize("replicas", [1, 2, 4])  # powers of two: sums and means are exact
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("aggregation", list(Aggregation), ids=lambda item: item.name)
@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ], ids=lambda item: item.name)
def test_138_every_synchronization_and_aggregation_makes_the_round_trip(
    path, replicas, policy, aggregation, synchronization
):
    v = variable(replicas, policy, synchronization=synchronization, aggregation=aggregation)
    if synchronization is ON_READ:
        set_copies(v, [[float(2 << i)] * 3 for i in range(replicas)])
    before = copies(v)
    md.save(path, v)
    v.strategy.update(v, lambda v: v.assign([0.0, 0.0, 0.0]))
    md.load(path, v)
    if synchronization is ON_WRITE or aggregation is Aggregation.NONE:
        assert copies(v) == before  # of NONE nobody can make one value: each gets its own back
        return
    whole = {
        Aggregation.SUM: np.sum(before, axis=0),
        Aggregation.MEAN: np.mean(before, axis=0),
        Aggregation.ONLY_FIRST_REPLICA: np.array(before[0]),
    }
    assert v.numpy().tolist() == whole[aggregation].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_139_the_sum_is_divided_by_the_count_of_the_restoring_strategy(path, before, after, dtype):
    options = {"synchronization": ON_READ, "aggregation": Aggregation.SUM, "value": 0}
    saved = variable(before, dtype=dtype, **options)
    set_copies(saved, [np.array(10, dtype)] * before)
    md.save(path, saved)
    restored = variable(after, "independent", dtype=dtype, **options)
    md.load(path, restored)
    parts = copies(restored)
    whole = 10 * before
    if dtype.startswith("float"):
        assert parts == [float(np.array(whole / after, dtype))] * after
    else:  # whole numbers that add up
        assert sum(parts) == whole and max(parts) - min(parts) <= 1
    assert restored.numpy().dtype == dtype


def test_136_a_file_of_another_program_is_taken_too(path):
    save_file({"v": np.array(START, "f4")}, path)
    v = variable(2, value=[0.0, 0.0, 0.0])
    v.strategy.step = 7
    md.load(path, v)
    assert copies(v) == [START] * 2
    assert v.strategy.step == 7
