"""Rules 208-232: where a parameter server keeps variables; optimizers, metrics, moving averages."""

from __future__ import annotations

import json
import logging
from itertools import cycle

import numpy as np
import pytest
from policies import POLICIES, SYNCHRONOUS, Trainer, optimizer, oracle, replica_id

import minidist as md
from minidist import comm, nn
from minidist.device import host
from minidist.errors import ContextError, UsageError
from minidist.variable import AggregatingVariable, Variable
from minidist.variable_mgr import VariableMgr
from minidist.variable_mgr.apply import OnceApplies
from minidist.variable_mgr.combine import MeanAtVariable
from minidist.variable_mgr.read import ReadFetched
from minidist.variable_mgr.start import FromFirst

SUM = md.VariableAggregation.SUM
FIRST = md.VariableAggregation.ONLY_FIRST_REPLICA
COUNTS = [1, 2, 3]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def make(n, policy="replicated"):
    name, options = POLICIES[policy]
    return md.Strategy(f"cpu*{n}", name, **options)


def per_replica(strategy, fn):
    return strategy.run(lambda: fn(replica_id()))


def each(strategy, fn):
    """Return what the replicas return, one by one."""
    results = [None] * strategy.num_replicas

    def call():
        results[replica_id()] = fn(replica_id())

    strategy.run(call)
    return results


# --- where a parameter server keeps its variables -------------------------------------------------


@pytest.mark.parametrize("n", COUNTS)
def test_208_the_option_says_whether_variables_are_on_the_host_or_the_devices(n):
    """Overridden: for one device too it is local_parameter_device that decides, not the number."""
    with md.Strategy(f"cpu*{n}", "parameter_server") as strategy, strategy.scope():
        variables = [md.Variable(np.zeros(2)) for _ in range(3)]
        assert [[copy.device for copy in v.copies] for v in variables] == [[host()]] * 3
    with make(n, "parameter_server_device") as strategy, strategy.scope():
        variables = [md.Variable(np.zeros(2)) for _ in range(n)]
        assert [v.copies[0].device for v in variables] == list(strategy.devices)


class RoundRobin:
    """One copy, on each of some devices in turn, in the order in which variables are created."""

    def __init__(self, servers, replicas):
        self.kind = AggregatingVariable if len(replicas) > 1 else Variable
        self._turns = cycle(servers)

    def devices(self, nbytes, beside=None):
        return (beside or next(self._turns),)


def servers(compute, parameter):
    """Return a strategy whose variables take turns on the `parameter` devices."""
    devices = tuple(md.devices(compute))
    return md.Strategy(
        compute,
        VariableMgr(
            "parameter_server",
            devices,
            place=RoundRobin(md.devices(parameter), devices),
            read=ReadFetched(devices),
            combine=MeanAtVariable(comm.make("copy", devices), original=None),
            apply=OnceApplies(),
            start=FromFirst(),
        ),
    )


@pytest.mark.parametrize("n", COUNTS)
def test_209_variables_take_turns_on_several_servers(n, rng):
    first, second = md.devices(["cpu:6", "cpu:7"])
    with servers(f"cpu*{n}", ["cpu:6", "cpu:7"]) as strategy:
        with strategy.scope():
            made = [md.Variable(np.zeros(2), name=name) for name in ("n", "x", "z")]
        assert [v.copies[0].device for v in made] == [first, second, first]
        assert [len(v.copies) for v in made] == [1, 1, 1]
        opt = md.optim.Momentum(0.5)
        gradients = rng.normal(size=(n, 3, 2))
        each(
            strategy,
            lambda i: opt.apply_gradients(
                [(md.constant(g), v) for g, v in zip(gradients[i], made, strict=True)]
            ),
        )
        for i, variable in enumerate(made):
            np.testing.assert_allclose(variable.numpy(), -0.5 * gradients[:, i].mean(0), rtol=1e-14)
            assert opt.slot(variable, "momentum").copies[0].device is variable.copies[0].device


def test_210_only_colocate_vars_with_moves_a_variable():
    first, second = md.devices(["cpu:6", "cpu:7"])
    with servers("cpu*2", ["cpu:6", "cpu:7"]) as strategy, strategy.scope():
        x = md.Variable(0.0)
        with md.device("cpu:0"):
            y = md.Variable(0.0)
            assert md.constant(1.0).device is md.devices("cpu")[0]
        with strategy.colocate_vars_with(y):
            beside = [md.Variable(0.0), md.Variable(0.0)]
        z = md.Variable(0.0)
        assert [v.copies[0].device for v in (x, y, z)] == [first, second, first]
        assert [v.copies[0].device for v in beside] == [second, second]
    with make(2, "parameter_server_device") as strategy, strategy.scope():
        x = md.Variable(np.zeros(100))
        with strategy.colocate_vars_with(x):
            beside = md.Variable(np.zeros(100))
        y = md.Variable(0.0)
        first, second = strategy.devices
        assert [v.copies[0].device for v in (x, beside, y)] == [first, first, second]
    with make(2) as strategy, strategy.scope():
        x = md.Variable(0.0)
        with strategy.colocate_vars_with(x), md.device("cpu:1"):
            y = md.Variable(0.0)
        assert [c.device for c in y.copies] == [c.device for c in x.copies]


@pytest.mark.parametrize("n", COUNTS)
def test_211_assigning_happens_where_the_variable_is(n):
    (server,) = md.devices(["cpu:7"])
    with servers(f"cpu*{n}", ["cpu:7"]) as strategy:
        with strategy.scope():
            v = md.Variable(0.0, aggregation=SUM)
        seen = []

        def change(variable, amount):
            seen.append((md.get_update_device(), md.constant(1.0).device))
            variable.assign_add(amount)
            seen.append(variable.read().device)

        strategy.update(v, change, 1.0)
        assert seen == [(server, server), server]
        strategy.run(lambda: v.assign_add(md.constant(float(replica_id()))))
        assert v.numpy() == 1 + n * (n - 1) / 2
        assert v.copies[0].tensor.device is server


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_212_sum_adds_once_a_replica_and_only_first_replica_adds_once(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            v = md.Variable(10.0, aggregation=SUM)
            counter = md.Variable(0, dtype="int64", aggregation=FIRST)

        def step():
            v.assign_add(md.constant(1.0))
            counter.assign_add(1)

        for _ in range(3):
            strategy.run(step)
        assert v.numpy() == 10 + 3 * n
        assert counter.numpy() == 3


@pytest.mark.parametrize("n", COUNTS)
def test_213_the_replicas_of_one_worker_are_counted(n):
    with make(n, "parameter_server") as strategy:
        assert strategy.num_replicas == n
        assert each(strategy, lambda i: md.get_replica_context().num_replicas) == [n] * n


@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device"])
def test_215_update_of_a_server_takes_no_distributed_value(policy):
    with make(2, policy) as strategy:
        with strategy.scope():
            v = md.Variable(0.0)

        def assign(variable, value):
            variable.assign(value)

        with pytest.raises(TypeError, match="PerReplica"):
            strategy.update(v, assign, md.PerReplica(strategy.devices, [1.0, 2.0]))
        with pytest.raises(ValueError, match="not 3"):
            strategy.update(3, assign, 1.0)
        if policy == "parameter_server":  # the host has no component of what is on the devices
            with pytest.raises(ValueError, match="Mirrored"):
                strategy.update(v, assign, md.Mirrored(strategy.devices, [1.0, 1.0]))
        assert v.numpy() == 0


@pytest.mark.parametrize("n", COUNTS)
def test_216_summaries_are_written_by_one(n, tmp_path):
    """054 too. Of workers there is one on one machine."""
    path = tmp_path / "summaries"
    with make(n) as strategy, md.SummaryWriter(path) as writer:
        strategy.run(lambda: writer.scalar("id", replica_id()))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "tag": "id", "value": 0.0}]


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device"])
def test_218_a_server_is_updated_once_with_the_sum_over_its_replicas(policy, n, rng):
    start = [rng.normal(size=3)]
    expected = oracle(policy, "adam", [start] * n)
    opt = optimizer("adam")
    with Trainer(policy, [start] * n) as trainer:
        (copy,) = trainer.variables[0].copies
        for step in range(1, 4):
            gradients = [[rng.normal(size=3)] for _ in range(n)]
            trainer.apply(opt, gradients)
            expected.step(gradients)
            trainer.check(expected.weights)
            assert copy.version == opt.iterations == step


# --- optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_219_gradients_are_applied_in_replicas(policy):
    with Trainer(policy, [[np.zeros(2)]] * 2) as trainer:
        with trainer.strategy.scope(), pytest.raises(RuntimeError, match="inside strategy"):
            md.optim.SGD(1.0).apply_gradients([(np.ones(2), trainer.variables[0])])
        with pytest.raises(RuntimeError):
            md.optim.SGD(1.0).apply_gradients([(np.ones(2), trainer.variables[0])])
        opt = md.optim.SGD(1.0)
        trainer.each(lambda _: opt.apply_gradients([(np.ones(2), trainer.variables[0])]))
        assert trainer.variables[0].numpy().tolist() == [-1, -1]


@pytest.mark.parametrize("n", [*COUNTS, 5])
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_220_gradients_are_reduced_to_their_variables_as_a_mean(policy, n):
    """Overridden: the mean, weighted by count, not the sum."""
    with Trainer(policy, [[np.zeros(2)]] * n) as trainer:
        trainer.apply(md.optim.SGD(1.0), [[np.full(2, 2.0**i)] for i in range(n)])
        np.testing.assert_allclose(trainer.variables[0].numpy(), -(2.0**n - 1) / n, rtol=1e-14)
        trainer.variables[0].assign(np.zeros(2))
        counts = [i + 1 for i in range(n)]
        trainer.apply(md.optim.SGD(1.0), [[np.full(2, 2.0**i)] for i in range(n)], counts)
        expected = sum(c * 2.0**i for i, c in enumerate(counts)) / sum(counts)
        np.testing.assert_allclose(trainer.variables[0].numpy(), -expected, rtol=1e-14)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_221_slots_are_made_once_and_mirrored_like_the_variable(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            kernel = md.Variable(np.ones(2), name="kernel")
        opt = md.optim.Momentum(0.1)

        def step():
            opt.apply_gradients([(np.ones(2), kernel)])
            return opt.slot(kernel, "momentum")

        slot = strategy.run(step)
        assert slot is strategy.run(step)
        assert isinstance(slot, type(kernel))
        names = ["kernel/Momentum", "kernel/Momentum/replica_1", "kernel/Momentum/replica_2"]
        assert [copy.name for copy in slot.copies] == names[: len(kernel.copies)]
        assert [copy.device for copy in slot.copies] == [copy.device for copy in kernel.copies]
        for values in each(strategy, lambda i: slot.numpy()):
            np.testing.assert_allclose(values, 1.9)


@pytest.mark.parametrize("n", [*COUNTS, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_222_the_global_step_rises_once_an_apply(policy, n):
    opt = md.optim.SGD(0.1)
    with Trainer(policy, [[np.zeros(2)]] * n) as trainer:
        for step in range(1, 4):
            trainer.apply(opt, [[np.ones(2)]] * n)
            assert opt.iterations == step


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_223_what_has_no_gradient_is_left_alone_with_a_warning(policy, n, caplog):
    with Trainer(policy, [[np.ones(2), np.ones(2)]] * n) as trainer:
        opt = md.optim.Momentum(1.0, weight_decay=0.1)
        with caplog.at_level(logging.WARNING, "minidist"):
            trainer.apply(opt, [[np.ones(2), None]] * n)
            trainer.apply(opt, [[np.ones(2), None]] * n)
        told = [record.message for record in caplog.records]
        assert told == ["no gradient for v1; what is not used is left alone"]
        assert trainer.variables[1].numpy().tolist() == [1, 1]
        with pytest.raises(ValueError, match="gradient"):
            trainer.apply(opt, [[None, None]] * n)
        with pytest.raises(ValueError, match="no variables"):
            trainer.each(lambda _: opt.apply_gradients([]))
        with pytest.raises(RuntimeError, match="pass the function"):
            trainer.each(lambda _: opt.minimize(md.constant(1.0), trainer.variables))


def one_step(n, loss_of, examples, **options):
    """Return the weight after one step from 1 with the loss of w·x, x = the replica's examples."""
    with md.Strategy(f"cpu*{n}", "replicated", **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.float64(1))
        opt = md.optim.SGD(0.5)

        def step(x):
            opt.minimize(lambda: loss_of(w * md.constant(x)), [w], count=len(x))

        strategy.run(step, md.PerReplica(strategy.devices, examples(n)))
        return w.item()


@pytest.mark.parametrize("n", [*COUNTS, 5])
def test_224_225_a_mean_loss_takes_the_same_step_for_any_number_of_replicas(n):
    """Overridden: what is applied is always the mean gradient, whatever the last loss was."""
    x = np.arange(1.0, 31.0)
    mean = one_step(n, md.ops.reduce_mean, lambda n: np.array_split(x, n))
    np.testing.assert_allclose(mean, 1 - 0.5 * x.mean(), rtol=1e-14)
    whole = one_step(n, md.ops.reduce_sum, lambda n: [x] * n)
    np.testing.assert_allclose(whole, 1 - 0.5 * x.sum(), rtol=1e-14)
    original = one_step(n, md.ops.reduce_sum, lambda n: [x] * n, gradient_scale="original")
    np.testing.assert_allclose(original, 1 - 0.5 * n * x.sum(), rtol=1e-14)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_226_gradients_of_all_replicas_are_applied_from_outside(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(2), name="w")
        opt = md.optim.Momentum(0.5)
        gradient = per_replica(strategy, lambda i: md.constant(np.full(2, i + 1.0)))
        for _ in range(2):
            opt.distributed_apply([(gradient, w)])
        mean = (n + 1) / 2
        np.testing.assert_allclose(w.numpy(), -0.5 * (mean + 1.9 * mean), rtol=1e-14)
        assert opt.iterations == 2


# --- moving averages ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("moving", ["mean", "first"])
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_227_batch_norm_averages_its_moments_over_the_replicas(policy, moving, n, rng):
    """Overridden: weighted by the numbers of examples."""
    parts = [rng.normal(size=(2 + i, 3)) for i in range(n)]
    with make(n, policy) as strategy:
        with strategy.scope():
            layer = nn.BatchNorm(momentum=0.75, moving=moving)
            layer.build((3,), "float64")
        strategy.run(
            lambda x: layer(md.constant(x), training=True), md.PerReplica(strategy.devices, parts)
        )
        seen = parts[:1] if moving == "first" else parts
        weights = [len(part) for part in seen]
        mean = np.average([part.mean(0) for part in seen], axis=0, weights=weights)
        variance = np.average([part.var(0) for part in seen], axis=0, weights=weights)
        np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean, rtol=1e-12)
        np.testing.assert_allclose(layer.moving_variance.numpy(), 0.75 + 0.25 * variance)
    with pytest.raises(UsageError, match="moving='last'"):
        nn.BatchNorm(moving="last")


def debiased(values, momentum):
    weights = momentum ** np.arange(len(values))[::-1]
    return (weights[:, None] * values).sum(0) / weights.sum()


@pytest.mark.parametrize("zero_debias", [True, False])
@pytest.mark.parametrize("n", [*COUNTS, 5])
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_228_a_moving_average_in_replicas_follows_their_mean(policy, n, zero_debias, rng):
    values = rng.normal(size=(3, n, 2))
    with make(n, policy) as strategy:
        with strategy.scope():
            v = md.Variable(np.zeros(2), name="v", trainable=False)
            updates = md.Variable(0, dtype="int64", trainable=False) if zero_debias else None
        for step in range(3):
            for_each = md.PerReplica(strategy.devices, [md.constant(x) for x in values[step]])
            strategy.run(lambda x: md.assign_moving_average(v, x, 0.75, updates=updates), for_each)
            means = values[: step + 1].mean(1)
            if zero_debias:
                expected = debiased(means, 0.75)
                assert updates.numpy() == step + 1
            else:
                expected = sum(0.25 * 0.75 ** (step - t) * mean for t, mean in enumerate(means))
            for copy in v.copies:
                np.testing.assert_allclose(copy.array, expected, rtol=1e-12)


def test_228_counts_weight_and_no_example_changes_nothing():
    with make(2) as strategy:
        with strategy.scope():
            v = md.Variable(np.float64(1))
            updates = md.Variable(0)

        def step(counts):
            md.assign_moving_average(
                v, 4.0 + 4 * replica_id(), 0.5, count=counts[replica_id()], updates=updates
            )

        strategy.run(step, [0, 0])
        assert (v.item(), updates.item()) == (1, 0)
        strategy.run(step, [3, 1])
        assert (v.item(), updates.item()) == (5, 1)
        with pytest.raises(RuntimeError, match="different variables"):
            strategy.run(lambda: md.assign_moving_average([v, updates][replica_id()], 1.0, 0.5))


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_229_in_cross_replica_context_a_moving_average_follows_one_value(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            v = md.Variable(np.float64(0), trainable=False)
            md.assign_moving_average(v, 4.0, 0.5)
            md.assign_moving_average(v, md.Mirrored(strategy.devices, [np.float64(4)] * n), 0.5)
            assert v.numpy() == 3
            value = md.PerReplica(strategy.devices, [np.float64(4)] * n)
            with pytest.raises(ValueError, match="reduce it first"):
                md.assign_moving_average(v, value, 0.5)
        md.assign_moving_average(v, 5.0, 0.5)
        assert [float(copy.array) for copy in v.copies] == [4] * len(v.copies)
        for momentum, updates in [(1.5, None), (-0.1, None), (1.0, v)]:
            with pytest.raises(ValueError, match="momentum"):
                md.assign_moving_average(v, 5.0, momentum, updates=updates)


# --- metrics and counters -------------------------------------------------------------------------


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_230_a_metric_is_a_ratio_of_sums_kept_by_the_replicas(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            metric = md.metrics.Mean("loss")
        for part in (metric.total, metric.count):
            assert isinstance(part, md.SyncOnReadVariable)
            assert part.aggregation is SUM
            assert not part.trainable
            assert len(part.copies) == n
        # Replica i brings i + 1 values of i: a mean of the replicas' means would be (n - 1)/2.
        results = each(
            strategy,
            lambda i: (metric.update(np.full(i + 1, float(i))), metric.result())[1],
        )
        expected = sum(i * (i + 1) for i in range(n)) / sum(i + 1 for i in range(n))
        assert results == pytest.approx([expected] * n)
        assert [float(copy.array) for copy in metric.count.copies] == [i + 1 for i in range(n)]
        assert metric.result() == pytest.approx(expected)


@pytest.mark.parametrize("n", [*COUNTS, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_231_means_and_accuracies_count_all_replicas_after_each_update(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            mean, accuracy = md.metrics.Mean(), md.metrics.Accuracy()
        seen = []
        for step in range(3):

            def update(step=step):
                mean.update(step + 10.0 * replica_id())
                labels = np.array([0, 1])
                accuracy.update(labels, np.array([0, replica_id() % 2]))

            strategy.run(update)
            seen += [step + 10.0 * i for i in range(n)]
            assert mean.result() == pytest.approx(np.mean(seen))
            assert accuracy.result() == pytest.approx((n + n // 2) / (2 * n))


@pytest.mark.parametrize("n", [*COUNTS, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_232_increment_var_adds_once_for_all_replicas(policy, n):
    with make(n, policy) as strategy:
        with strategy.scope():
            v = md.Variable(0, dtype="int64")

        def step():
            md.increment_var(v, 3)
            md.increment_var(v)
            return v.item()

        assert each(strategy, lambda i: step()) == [4] * n
        assert [int(copy.array) for copy in v.copies] == [4] * len(v.copies)
        with strategy.scope(), pytest.raises(ContextError, match="assign_add"):
            md.increment_var(v)
        if n > 1:
            with pytest.raises(TypeError, match="PerReplica"):
                strategy.run(lambda: md.increment_var(v, [1, 2, 3, 4, 5][replica_id()]))
        assert v.item() == 4
    md.increment_var(v := md.Variable(1.5), 2.0)
    assert v.numpy() == 3.5
