"""Metrics are ratios of sums over all replicas; summaries are replica 0's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policies import POLICIES, replica_id, same_bits

import minidist as md
from minidist.errors import ContextError, ShapeError, UsageError


@pytest.fixture(params=[(policy, n) for policy in POLICIES for n in (1, 3)], ids=str)
def strategy(request):
    policy, n = request.param
    name, options = POLICIES[policy]
    with md.Strategy(f"cpu*{n}", name, **options) as made:
        yield made


def mean(strategy):
    with strategy.scope():
        return md.metrics.Mean("loss")


# --- Mean -----------------------------------------------------------------------------------------


def test_nothing_counted_is_zero(strategy):
    metric = mean(strategy)
    assert metric.result() == 0
    metric.update(np.zeros((0, 4)))
    assert metric.result() == 0
    assert set(md.local_results(strategy.run(metric.result))) == {0.0}


def test_every_replica_counts_in_as_many_as_it_has(strategy):
    metric, n = mean(strategy), strategy.num_replicas
    values = [np.arange(i + 1.0) + i for i in range(n)]

    def step():
        metric.update(values[replica_id()])
        metric.update(10 + replica_id())
        return metric.result()

    everything = [*np.concatenate(values), *range(10, 10 + n)]
    results = md.local_results(strategy.run(step))
    assert results == pytest.approx([np.mean(everything)] * len(results))
    assert metric.result() == pytest.approx(np.mean(everything))
    with strategy.scope():
        assert metric.result() == pytest.approx(np.mean(everything))


def test_weights_for_each_for_each_row_and_for_all(strategy):
    metric = mean(strategy)
    x = np.arange(6.0).reshape(3, 2)
    weights = [np.array([1.0, 0.0, 3.0]), np.arange(6.0).reshape(3, 2), 2.0]

    def step():
        for w in weights:
            metric.update(md.constant(x), w)

    strategy.run(step)
    full = [np.broadcast_to(w[:, None] if np.shape(w) == (3,) else w, x.shape) for w in weights]
    total, count = sum((x * w).sum() for w in full), sum(w.sum() for w in full)
    assert metric.result() == pytest.approx(total / count)


def test_reset_forgets_everywhere_or_in_the_replica(strategy):
    metric, n = mean(strategy), strategy.num_replicas
    strategy.run(lambda: metric.update(replica_id()))
    metric.reset()
    assert metric.result() == 0
    strategy.run(lambda: metric.update(replica_id()))
    strategy.run(lambda: metric.reset() if replica_id() else None)
    assert metric.result() == 0
    strategy.run(lambda: metric.update(1.0))
    assert metric.result() == pytest.approx(n / (n + 1))


def test_in_cross_replica_context_components_count_each_and_the_rest_once(strategy):
    metric, n = mean(strategy), strategy.num_replicas
    losses = strategy.run(lambda: md.constant(float(replica_id() + 1)))
    metric.update(losses)
    metric.update(10.0)
    with strategy.scope():
        metric.update(10.0, weights=2.0)
    expected = (n * (n + 1) / 2 + 30) / (n + 3)
    assert metric.result() == pytest.approx(expected)
    assert float(metric.count) == n + 3


def test_without_a_strategy():
    metric = md.metrics.Mean()
    metric.update([1.0, 2.0])
    metric.update(6)
    assert metric.result() == 3
    metric.reset()
    assert metric.result() == 0


def test_made_in_the_replicas(strategy):
    def step():
        metric = md.metrics.Mean("inner")
        metric.update(replica_id() * 2.0)
        return metric.result()

    results = md.local_results(strategy.run(step))
    assert set(results) == {strategy.num_replicas - 1.0}


def test_sums_are_float64_whatever_the_values_are():
    metric = md.metrics.Mean()
    metric.update(np.full(3, 2**24, np.float32))
    metric.update(np.float32(1))
    metric.update(True)
    metric.update(0.1)
    assert metric.result() == (3 * 2**24 + 2 + 0.1) / 6


def test_it_is_nothing_to_a_tape():
    metric = md.metrics.Mean()
    w = md.Variable(2.0)
    with md.GradientTape() as tape:
        loss = w * w
        metric.update(loss)
        loss = loss * 1.0
    assert float(tape.gradient(loss, w)) == 4
    assert metric.total.trainable is False


def test_shapes_that_do_not_fit_are_named():
    metric = md.metrics.Mean()
    with pytest.raises(ShapeError, match=r"\(2,\).*\(3,\)"):
        metric.update(np.ones(3), np.ones(2))
    with pytest.raises(ShapeError, match=r"labels \(3,\) and predictions \(2,\)"):
        md.metrics.Accuracy().update([1, 2, 3], [1, 2])
    assert metric.result() == 0


def test_a_metric_of_another_strategy_is_refused():
    with md.Strategy("cpu*2") as one, md.Strategy("cpu*2") as other:
        metric = mean(one)
        with pytest.raises(ContextError, match="Mixing"):
            other.run(lambda: metric.update(1.0))


@given(
    st.lists(
        st.lists(st.integers(-100, 100).map(float), max_size=5), min_size=1, max_size=3
    ).flatmap(lambda parts: st.tuples(st.just(parts), st.integers(1, 3)))
)
def test_any_parts_give_the_mean_of_all(case):
    parts, rounds = case
    with md.Strategy(f"cpu*{len(parts)}") as strategy:
        metric = mean(strategy)
        for _ in range(rounds):
            strategy.run(lambda: metric.update(np.array(parts[replica_id()])))
        everything = [value for part in parts for value in part]
        expected = sum(everything) / len(everything) if everything else 0.0
        assert metric.result() == pytest.approx(expected)


# --- Accuracy -------------------------------------------------------------------------------------


def test_accuracy_of_classes_and_of_scores(strategy):
    with strategy.scope():
        metric = md.metrics.Accuracy()
    n = strategy.num_replicas
    labels = md.PerReplica(strategy.devices, [np.array([0, 1, 2][: i + 1]) for i in range(n)])
    scores = np.float32([[1, 0, 0], [2, 2, 1], [0, 0, 5]])

    def step(labels):
        metric.update(labels, md.constant(scores[: len(labels)]))
        metric.update(labels, np.array([0, 1, 0])[: len(labels)])
        return metric.result()

    right = sum([2, 3, 4][:n])  # the second example's scores are equal: the first class wins
    total = 2 * sum([1, 2, 3][:n])
    assert set(md.local_results(strategy.run(step, labels))) == {right / total}
    assert metric.result() == right / total


def test_accuracy_with_weights_and_in_cross_replica_context(strategy):
    with strategy.scope():
        metric = md.metrics.Accuracy()
    n = strategy.num_replicas
    predictions = md.PerReplica(strategy.devices, [np.array([i, 7]) for i in range(n)])
    metric.update(np.array([0, 7]), predictions, weights=np.array([3.0, 1.0]))
    assert metric.result() == pytest.approx((3 + n) / (4 * n))


def test_accuracy_of_no_examples_is_zero():
    metric = md.metrics.Accuracy()
    metric.update(np.zeros(0, int), np.zeros((0, 3)))
    assert metric.result() == 0


# --- summaries ------------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_summaries_of_a_run_are_replica_0s(tmp_path, strategy):
    path = tmp_path / "log.jsonl"
    with md.SummaryWriter(path) as writer:
        for _ in range(2):
            strategy.run(lambda: writer.scalar("loss", md.constant(0.5 + replica_id())))
        writer.scalar("done", 1, step=9)
        with strategy.scope():
            writer.scalar("scope", 2.0)
    assert lines(path) == [
        {"step": 1, "tag": "loss", "value": 0.5},
        {"step": 2, "tag": "loss", "value": 0.5},
        {"step": 9, "tag": "done", "value": 1.0},
        {"step": 2, "tag": "scope", "value": 2.0},
    ]


def test_a_merge_function_writes_once(tmp_path):
    path = tmp_path / "log.jsonl"
    with md.Strategy("cpu*2") as strategy, md.SummaryWriter(path) as writer:

        def step():
            md.get_replica_context().merge_call(lambda s: writer.scalar("x", 3))

        strategy.run(step)
    assert lines(path) == [{"step": 1, "tag": "x", "value": 3.0}]


def test_a_file_is_appended_to_and_each_line_is_there_at_once(tmp_path):
    path = tmp_path / "log.jsonl"
    for value in (1, 2):
        with md.SummaryWriter(path) as writer:
            writer.scalar("x", value, step=0)
            assert lines(path)[-1]["value"] == value
            writer.close()
    assert len(lines(path)) == 2


def test_what_is_not_finite_is_still_json(tmp_path):
    path = tmp_path / "log.jsonl"
    with md.SummaryWriter(path) as writer:
        for value in (np.nan, np.inf, -np.inf):
            writer.scalar("x", value, step=1)
    assert [line["value"] for line in lines(path)] == ["nan", "inf", "-inf"]


def test_a_per_replica_value_has_no_single_number(tmp_path):
    with md.SummaryWriter(tmp_path / "log.jsonl") as writer, md.Strategy("cpu*2") as strategy:
        value = md.PerReplica(strategy.devices, [1.0, 2.0])
        with strategy.scope(), pytest.raises(UsageError, match="reduce it first"):
            writer.scalar("x", value)
        strategy.run(lambda: writer.scalar("x", value))
    assert same_bits([line["value"] for line in lines(tmp_path / "log.jsonl")], [1.0])
