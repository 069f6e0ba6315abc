"""What apply_gradients promises beside arithmetic: unused variables, order, errors, placement."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from oracle import RULES, TwoLayers, mean, total
from policies import (
    POLICIES,
    SYNCHRONOUS,
    Trainer,
    optimizer,
    oracle,
    replica_id,
    same_bits,
)

import minidist as md
from minidist import nn
from minidist.errors import ContextError, MergeMismatchError, ShapeError, UsageError

SHAPES = [(2, 3), (), (5,)]


@pytest.fixture
def rng():
    return np.random.default_rng(2)


def arrays(rng, n, shapes=SHAPES):
    return [[np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(n)]


def loss_of(trainer, batch):
    """Return the loss of the oracle's TwoLayers on a batch, as minidist computes it."""
    a, b, c, d, gain = trainer.variables
    x, labels = md.constant(batch[0]), md.constant(batch[1])
    h = md.ops.square(md.ops.matmul(x, a) + b)
    return md.ops.reduce_mean(
        md.ops.softmax_cross_entropy(gain * (md.ops.matmul(h, c) + d), labels)
    )


def batch(rng, size, dtype=float):
    x = rng.normal(size=(size, TwoLayers.features)).astype(dtype)
    return x, rng.integers(TwoLayers.classes, size=size)


# --- variables that are not used ----------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_none_in_one_replica_is_zeros_and_none_in_all_leaves_alone(policy, rule, rng):
    """223, and what is left alone is neither decayed nor moved on by its momentum."""
    n = 3
    starts = [arrays(rng, 1)[0]] * n
    expected = oracle(policy, rule, starts, weight_decay=0.01)
    opt = optimizer(rule, 0.01)
    unused = [[], [(1, 0)], [(0, 1), (2, 1)], [(0, 2), (1, 2), (2, 2)], [(0, 0)]]
    with Trainer(policy, starts) as trainer:
        for step, nones in enumerate(unused):
            gradients = arrays(rng, n)
            for replica, i in nones:
                gradients[replica][i] = None
            counts = [4, 2, 3] if step % 2 else None
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)


def test_independent_replicas_may_leave_different_variables_unused(rng):
    starts = arrays(rng, 2)
    expected = oracle("independent", "momentum", starts, weight_decay=0.01)
    opt = optimizer("momentum", 0.01)
    with Trainer("independent", starts) as trainer:
        for unused in [0, 1]:
            gradients = arrays(rng, 2)
            gradients[unused][2] = None
            trainer.apply(opt, gradients)
            expected.step(gradients)
            trainer.check(expected.weights)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_gradient_at_all_is_an_error(policy, n):
    """223."""
    starts = [[np.ones(2), np.ones(3)]] * n
    with Trainer(policy, starts) as trainer:
        with pytest.raises(ValueError, match="gradient"):
            trainer.apply(md.optim.SGD(1.0), [[None, None]] * n)
        with pytest.raises(ValueError, match="no variables"):
            trainer.each(lambda replica: md.optim.SGD(1.0).apply_gradients([]))
        trainer.check(starts)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_does_not_decay_is_not_decayed(policy, rng):
    decays = [True, False, False]
    starts = arrays(rng, 2)
    expected = oracle(policy, "momentum", starts, weight_decay=0.1, decays=decays)
    opt = optimizer("momentum", 0.1)
    with Trainer(policy, starts, decays=decays) as trainer:
        for counts in [None, [3, 1]]:
            gradients = arrays(rng, 2)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)


# --- the optimizer object -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_learning_rate_may_change_between_steps(policy, rule, rng):
    starts = arrays(rng, 2)
    expected = oracle(policy, rule, starts)
    opt = optimizer(rule)
    with Trainer(policy, starts) as trainer:
        for lr in [0.3, 0.01, 0.2]:
            opt.lr = expected.constants["lr"] = lr
            gradients = arrays(rng, 2)
            trainer.apply(opt, gradients)
            expected.step(gradients)
            trainer.check(expected.weights)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_optimizers_share_a_run_but_no_state(policy, rng):
    n = 3
    starts = arrays(rng, n)
    first = oracle(policy, "adam", [start[:1] for start in starts])
    second = oracle(policy, "rmsprop", [start[1:] for start in starts])
    adam, rmsprop = optimizer("adam"), optimizer("rmsprop")
    with Trainer(policy, starts) as trainer:
        for step in range(1, 4):
            gradients = arrays(rng, n)

            def both(replica, gradients=gradients, step=step):
                pairs = [
                    (md.constant(g), v)
                    for g, v in zip(gradients[replica], trainer.variables, strict=True)
                ]
                if step != 2:
                    adam.apply_gradients(pairs[:1])
                rmsprop.apply_gradients(pairs[1:])

            trainer.each(both)
            if step != 2:
                first.step([own[:1] for own in gradients])
            second.step([own[1:] for own in gradients])
            trainer.check([a + b for a, b in zip(first.weights, second.weights, strict=True)])
    assert (adam.iterations, rmsprop.iterations) == (2, 3)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_iterations_rise_once_a_step_whatever_the_number_of_replicas(policy, n, rng):
    """222."""
    opt = optimizer("momentum")
    assert opt.iterations == 0
    with Trainer(policy, arrays(rng, n)) as trainer:
        for step in range(1, 4):
            trainer.apply(opt, arrays(rng, n), [1] * n)
            assert opt.iterations == step


@pytest.mark.parametrize("policy", POLICIES)
def test_momenta_stand_beside_each_copy(policy, rng):
    """221."""
    n = 3
    starts = arrays(rng, n)
    expected = oracle(policy, "momentum", starts)
    opt = optimizer("momentum")
    with Trainer(policy, starts) as trainer:
        for _ in range(2):
            gradients = arrays(rng, n)
            trainer.apply(opt, gradients)
            expected.step(gradients)
        for i, variable in enumerate(trainer.variables):
            for replica, slot in enumerate(opt.slot(variable, "momentum").copies):
                slots = expected.slots[replica if policy == "independent" else 0]
                assert same_bits(slot.array, slots[i]["m"])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_applying_twice_in_a_run_builds_on_the_first_result(policy, n, rng):
    starts = arrays(rng, n)
    expected = oracle(policy, "momentum", starts, weight_decay=0.01)
    opt = optimizer("momentum", 0.01)
    gradients = [arrays(rng, n), arrays(rng, n)]
    with Trainer(policy, starts) as trainer:

        def twice(replica):
            seen = []
            for step in range(2):
                opt.apply_gradients(
                    [
                        (md.constant(g), v)
                        for g, v in zip(gradients[step][replica], trainer.variables, strict=True)
                    ]
                )
                seen.append([v.numpy() for v in trainer.variables])
            return seen

        seen = trainer.each(twice)
        for step in range(2):
            expected.step(gradients[step])
            for replica in range(n):
                for read, right in zip(seen[replica][step], expected.weights[replica], strict=True):
                    assert same_bits(read, right)
        trainer.check(expected.weights)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_only_read(policy, n, rng):
    """Decision: they are the replica's own arrays and never reduced in place."""
    shapes = [(2, 3), (20_011,)]
    given = arrays(rng, n, shapes)
    with Trainer(policy, arrays(rng, n, shapes)) as trainer:
        opt = optimizer("nesterov", 0.01)
        tensors = trainer.each(lambda replica: [md.constant(g) for g in given[replica]])
        for counts in [None, [2, *[1] * (n - 1)]]:
            trainer.each(
                lambda replica, counts=counts: opt.apply_gradients(
                    list(zip(tensors[replica], trainer.variables, strict=True)),
                    count=counts and counts[replica],
                )
            )
        for tensor, g in zip(chain(*tensors), chain(*given), strict=True):
            assert same_bits(tensor.numpy(), g)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_minimize_is_gradient_and_apply_gradients(policy, rule, dtype):
    def train(how):
        rng = np.random.default_rng(3)
        starts = [TwoLayers.start(rng, dtype) for _ in range(2)]
        opt = optimizer(rule, 0.01)
        losses = []
        with Trainer(policy, starts) as trainer:
            for sizes in [(4, 3), (2, 0), (1, 1)]:
                batches = [batch(rng, size, dtype) for size in sizes]
                losses.append(
                    trainer.each(
                        lambda replica, batches=batches: float(how(opt, trainer, batches[replica]))
                    )
                )
            return losses, trainer.weights()

    def minimize(opt, trainer, part):
        return opt.minimize(lambda: loss_of(trainer, part), trainer.variables, count=len(part[0]))

    def by_hand(opt, trainer, part):
        with md.GradientTape() as tape:
            loss = loss_of(trainer, part)
        gradients = tape.gradient(loss, trainer.variables)
        opt.apply_gradients(zip(gradients, trainer.variables, strict=True), count=len(part[0]))
        return loss

    losses, weights = train(minimize)
    losses_by_hand, weights_by_hand = train(by_hand)
    assert losses == losses_by_hand
    for a, b in zip(chain(*weights), chain(*weights_by_hand), strict=True):
        assert same_bits(a, b)


# --- scale --------------------------------------------------------------------------------------


def mean_of_replicas(gradients, counts, r):
    return mean(gradients, None, r)


def sum_over_replicas(gradients, counts, r):
    return total(gradients, None, r)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("policy", "combine"),
    [
        ("replicated", sum_over_replicas),
        ("parameter_server", mean_of_replicas),
        ("parameter_server_device", mean_of_replicas),
        ("independent", None),
    ],
)
def test_the_original_scale_is_each_policys_own_and_knows_no_counts(policy, combine, n, rng):
    """Replicated adds the replicas' gradients up, the parameter server takes their mean."""
    starts = arrays(rng, n)
    expected = oracle(policy, "nesterov", starts, weight_decay=0.01, combine=combine)
    opt = optimizer("nesterov", 0.01)
    with Trainer(policy, starts, gradient_scale="original") as trainer:
        for counts in [None, [3] * n, [4, *[1] * (n - 1)]]:
            gradients = arrays(rng, n)
            trainer.apply(opt, gradients, counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)


@pytest.mark.parametrize("policy", SYNCHRONOUS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_step_is_the_same_for_any_number_of_replicas_that_see_the_same(policy, n):
    """225: with the mean loss the step does not grow with the number of replicas."""
    with Trainer(policy, [[np.ones(3)]] * n) as trainer:
        trainer.apply(md.optim.SGD(0.5), [[np.full(3, 0.25)]] * n)
        trainer.check([[np.full(3, 0.875)]] * n)


# --- where variables live -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("policy", ["replicated", "independent"])
def test_a_copy_for_each_replica_is_on_its_device(policy, n):
    """90, 99."""
    with Trainer(policy, [[np.full(2, float(replica))] for replica in range(n)]) as trainer:
        variable = trainer.variables[0]
        assert [copy.device.short for copy in variable.copies] == [f"cpu:{i}" for i in range(n)]
        read = [weights[0][0] for weights in trainer.weights()]
        assert read == ([0.0] * n if policy == "replicated" else list(range(n)))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_parameter_server_is_the_host(n):
    with Trainer("parameter_server", [[np.ones(2), np.ones(())]] * n) as trainer:
        for variable in trainer.variables:
            assert [copy.device.short for copy in variable.copies] == ["host"]


def test_parameter_servers_on_the_devices_take_variables_least_loaded_first():
    sizes = [8, 4, 2, 1, 9, 3, 3, 3]
    with Trainer("parameter_server_device", [[np.ones(size) for size in sizes]] * 3) as trainer:
        load, right = [0] * 3, []
        for size in sizes:
            right.append(load.index(min(load)))
            load[right[-1]] += size
        places = [copy.device.short for v in trainer.variables for copy in v.copies]
        assert places == [f"cpu:{place}" for place in right]


@pytest.mark.parametrize("policy", ["parameter_server", "parameter_server_device"])
def test_what_a_replica_reads_from_a_parameter_server_is_a_copy_on_its_own_device(policy):
    with Trainer(policy, [[np.ones(3)]] * 2) as trainer:
        variable = trainer.variables[0]
        tensors = trainer.each(lambda replica: variable.read())
        arrays = [variable.copies[0].array, *(tensor.array for tensor in tensors)]
        assert [tensor.device.short for tensor in tensors] == ["cpu:0", "cpu:1"]
        # The replica that hosts the variable need not fetch what it has.
        hosted = variable.copies[0].device.short == "cpu:0"
        for i, a in enumerate(arrays):
            for b in arrays[i + 1 + (hosted and i == 0) :]:
                assert not np.shares_memory(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_assigned_between_runs_is_what_the_next_run_reads(policy):
    with Trainer(policy, [[np.ones(3)]] * 2) as trainer:
        trainer.weights()
        trainer.variables[0].assign(np.array([1.0, 2.0, 3.0]))
        trainer.check([[np.array([1.0, 2.0, 3.0])]] * 2)
        trainer.apply(md.optim.SGD(1.0), [[np.ones(3)]] * 2)
        trainer.check([[np.array([0.0, 1.0, 2.0])]] * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_of_strategies_do_not_disturb_each_other(policy, rng):
    """60."""
    starts, gradients = arrays(rng, 2), arrays(rng, 2)
    expected = oracle(policy, "momentum", starts)
    with Trainer(policy, starts) as one, Trainer(policy, starts) as other:
        opts = optimizer("momentum"), optimizer("momentum")
        for _ in range(2):
            expected.step(gradients)
            for opt, trainer in zip(opts, (one, other), strict=True):
                trainer.apply(opt, gradients)
        one.check(expected.weights)
        other.check(expected.weights)


# --- misuse -------------------------------------------------------------------------------------


@pytest.fixture(params=POLICIES)
def trainer(request):
    """A trainer for a test of a mistake, after which nothing has changed and the next run works."""
    with Trainer(request.param, [[np.ones(2), np.ones(3)]] * 3) as trainer:
        yield trainer
        trainer.check([[np.ones(2), np.ones(3)]] * 3)


def test_gradients_cannot_be_applied_in_cross_replica_context(trainer):
    """219."""
    opt = md.optim.SGD(1.0)
    with trainer.strategy.scope(), pytest.raises(ContextError, match="cross-replica"):
        opt.apply_gradients([(md.constant(np.ones(2)), trainer.variables[0])])
    with pytest.raises(RuntimeError, match="'v0'"):
        opt.apply_gradients([(md.constant(np.ones(2)), trainer.variables[0])])
    assert opt.iterations == 0


def test_a_gradient_of_another_shape_or_dtype_is_an_error(trainer):
    opt, variable = md.optim.SGD(1.0), trainer.variables[0]
    for gradient, words in [
        (np.ones(3), ["'v0'", "2", "3"]),
        (np.ones((2, 1)), ["'v0'", "2, 1"]),
        (np.ones(2, np.float32), ["'v0'", "float32", "float64"]),
    ]:
        with pytest.raises(ShapeError) as caught:
            trainer.each(
                lambda replica, g=gradient: opt.apply_gradients([(md.constant(g), variable)])
            )
        assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_one_replica_with_a_gradient_of_another_shape_fails_the_run(policy):
    starts = [[np.ones(2)]] * 3
    opt = md.optim.SGD(1.0)
    with Trainer(policy, starts) as trainer:
        with pytest.raises(ShapeError, match="'v0'"):
            trainer.apply(opt, [[np.ones(2 + (replica == 1))] for replica in range(3)])
        trainer.check(starts)


@pytest.mark.parametrize(
    "choose",
    [
        lambda pairs, replica: pairs[replica == 2 :][:1],
        lambda pairs, replica: pairs[: 2 - (replica == 2)],
        lambda pairs, replica: pairs[::-1] if replica == 2 else pairs,
    ],
    ids=["others", "fewer", "another order"],
)
@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_replicas_must_pass_the_same_variables(policy, choose):
    starts = [[np.ones(2), np.ones(3)]] * 3
    with Trainer(policy, starts) as trainer:
        opt = md.optim.SGD(1.0)
        with pytest.raises(MergeMismatchError, match=r"replicas 0 and 2.*v0.*v1"):
            trainer.each(
                lambda replica: opt.apply_gradients(
                    choose([(md.constant(np.ones(v.shape)), v) for v in trainer.variables], replica)
                )
            )
        trainer.check(starts)


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_replicas_must_use_the_same_optimizer(policy):
    """Otherwise the copies, each updated by its own replica's, would go apart in silence."""
    starts = [[np.ones(2)]] * 3
    opts = [md.optim.SGD(1.0), md.optim.SGD(1.0), md.optim.SGD(0.5)]
    with Trainer(policy, starts) as trainer:
        with pytest.raises(MergeMismatchError, match="optimizer"):
            trainer.each(
                lambda replica: opts[replica].apply_gradients(
                    [(md.constant(np.ones(2)), trainer.variables[0])]
                )
            )
        trainer.check(starts)


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_counts_are_given_by_all_replicas_or_by_none(policy):
    starts = [[np.ones(2)]] * 3
    opt = md.optim.SGD(1.0)
    with Trainer(policy, starts) as trainer:
        with pytest.raises(UsageError, match="count"):
            trainer.apply(opt, [[np.ones(2)]] * 3, [1, None, 1])
        with pytest.raises(ValueError, match="count"):
            trainer.apply(opt, [[np.ones(2)]] * 3, [1, -1, 1])
        trainer.check(starts)


def test_a_variable_of_another_strategy_is_an_error(trainer):
    with Trainer("replicated", [[np.ones(2)]] * 2) as other:
        stranger = other.variables[0]
        with pytest.raises(ContextError, match="'v0' belongs to"):
            trainer.each(
                lambda replica: md.optim.SGD(1.0).apply_gradients(
                    [(md.constant(np.ones(2)), stranger)]
                )
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"variable_update": "mirrored"},
            ["mirrored", "independent", "parameter_server", "replicated"],
        ),
        ({"gradient_scale": "sum"}, ["sum", "mean", "original"]),
        (
            {"variable_update": "parameter_server", "local_parameter_device": "disk"},
            ["disk", "cpu", "device"],
        ),
        ({"gradient_scaling": "mean"}, ["gradient_scaling", "gradient_scale"]),
    ],
)
def test_unknown_policies_and_options_are_errors_that_list_what_there_is(options, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        md.Strategy("cpu*2", **options)
    assert all(word in str(caught.value) for word in words)


# --- moving statistics --------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[4], [3, 3], [5, 2], [4, 4, 1], [3, 0, 2], [0, 6]])
@pytest.mark.parametrize("policy", POLICIES)
def test_moving_statistics_follow_the_mean_over_replicas_weighted_by_count(policy, counts, rng):
    """227, decision 6: what a replica without examples computed is worth nothing."""
    n, features, momentum = len(counts), 3, 0.8
    name, options = POLICIES[policy]
    moving_mean, moving_variance = np.zeros(features), np.ones(features)
    with md.Strategy(f"cpu*{n}", name, **options) as strategy:
        with strategy.scope():
            layer = nn.BatchNorm(momentum=momentum)
            layer.build((features,), "float64")
        statistics = [layer.moving_mean, layer.moving_variance]
        for _ in range(3):
            batches = [rng.normal(1, 2, (count, features)) for count in counts]

            def step(batches=batches):
                x = batches[replica_id()]
                return layer(md.constant(x), training=True)

            results = strategy.local_results(strategy.run(step))
            for x, y in zip(batches, results, strict=True):
                assert y.shape == x.shape
                if len(x):
                    right = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
                    np.testing.assert_allclose(y.numpy(), right, rtol=1e-9, atol=1e-9)
            used = [(len(x), x.mean(0), x.var(0)) for x in batches if len(x)]
            moving_mean, moving_variance = (
                momentum * old + (1 - momentum) * sum(c * v for c, v in new) / sum(counts)
                for old, new in [
                    (moving_mean, [(c, m) for c, m, _ in used]),
                    (moving_variance, [(c, v) for c, _, v in used]),
                ]
            )
            for variable, right in zip(statistics, (moving_mean, moving_variance), strict=True):
                np.testing.assert_allclose(variable.numpy(), right, rtol=1e-12)
                assert len({copy.array.tobytes() for copy in variable.copies}) == 1
    assert not layer.moving_mean.trainable
    assert not layer.moving_variance.trainable


def test_a_batch_without_any_example_leaves_moving_statistics_alone():
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            layer = nn.BatchNorm()
            layer.build((2,))
        strategy.run(lambda: layer(md.constant(np.zeros((0, 2), np.float32)), training=True))
        np.testing.assert_array_equal(layer.moving_mean.numpy(), [0, 0])
        np.testing.assert_array_equal(layer.moving_variance.numpy(), [1, 1])


@pytest.mark.parametrize("policy", ["replicated", "parameter_server"])
def test_a_replica_without_examples_has_no_say_not_even_with_a_nan(policy):
    with md.Strategy("cpu*3", variable_update=policy) as strategy:
        with strategy.scope():
            variable = md.Variable(np.ones(5, np.float32))
        optimizer = md.optim.SGD(1.0)
        counts = md.PerReplica(strategy.devices, [3, 1, 0])
        gradients = md.PerReplica(
            strategy.devices, [np.full(5, value, np.float32) for value in (1.0, 5.0, np.nan)]
        )
        strategy.run(
            lambda g, c: optimizer.apply_gradients([(g, variable)], count=c), gradients, counts
        )
        assert np.array_equal(variable.numpy(), np.full(5, 1 - (3 * 1 + 1 * 5) / 4, np.float32))


def test_a_variable_that_comes_twice_is_an_error():
    variable = md.Variable(1.0, name="twice")
    with pytest.raises(ValueError, match="'twice' comes with 2 gradients"):
        md.optim.SGD(1.0).apply_gradients([(md.constant(1.0), variable)] * 2)
