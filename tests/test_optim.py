"""Optimizers: rates, slots, step counts, missing gradients, and application from outside."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from oracle import RULES
from policies import POLICIES, SYNCHRONOUS, Trainer, optimizer, oracle, replica_id

import minidist as md
from minidist.errors import ContextError, UsageError


@pytest.fixture
def rng():
    return np.random.default_rng(8)


def arrays(rng, n, shapes=((2, 3), ())):
    return [[np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(n)]


def distributed(trainer, gradients):
    """Return (PerReplica gradient, variable) pairs from `gradients[replica][i]`."""
    columns = zip(*gradients, strict=True)
    return [
        (md.PerReplica(trainer.strategy.devices, column), variable)
        for column, variable in zip(columns, trainer.variables, strict=True)
    ]


# --- the rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_rate_may_be_a_function_of_the_steps_taken(policy, rule, rng):
    rates = [0.3, 0.01, 0.2]
    starts = arrays(rng, 2)
    expected = oracle(policy, rule, starts)
    opt = optimizer(rule)
    opt.lr = rates.__getitem__
    with Trainer(policy, starts) as trainer:
        for rate in rates:
            expected.constants["lr"] = rate
            gradients = arrays(rng, 2)
            trainer.apply(opt, gradients)
            expected.step(gradients)
            trainer.check(expected.weights)
    assert opt.iterations == 3


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_are_made_once_beside_each_copy_with_names(policy, rng):
    starts = arrays(rng, 3)
    opt = optimizer("adam")
    with Trainer(policy, starts) as trainer:
        assert not opt.has_slots(trainer.variables[0])
        trainer.apply(opt, arrays(rng, 3))
        for variable in trainer.variables:
            assert opt.has_slots(variable)
            for slot in ("first", "second"):
                kept = opt.slot(variable, slot)
                assert kept is opt.slot(variable, slot)
                assert kept.name == f"{variable.name}/Adam/{slot}"
                assert kept.trainable is False
                assert (kept.shape, kept.dtype) == (variable.shape, variable.dtype)
                assert [c.device for c in kept.copies] == [c.device for c in variable.copies]
                assert [c.name for c in kept.copies] == [
                    f"{variable.name}/Adam/{slot}" + (f"/replica_{i}" if i else "")
                    for i in range(len(variable.copies))
                ]


def test_slots_may_be_asked_for_before_the_first_step():
    w = md.Variable(np.ones(2), name="kernel")
    opt = md.optim.RMSProp(0.1)
    assert opt.slot(w, "square").numpy().tolist() == [1, 1]
    assert opt.slot(w, "momentum").numpy().tolist() == [0, 0]
    with pytest.raises(UsageError, match=r"'first'.*square, momentum"):
        opt.slot(w, "first")
    with pytest.raises(ValueError, match="none"):
        md.optim.SGD(0.1).slot(w, "momentum")


def test_least_loaded_devices_do_not_scatter_slots(rng):
    starts = arrays(rng, 2, [(4,), (1,), (2,)])
    opt = optimizer("adam")
    with Trainer("parameter_server_device", starts) as trainer:
        trainer.apply(opt, arrays(rng, 2, [(4,), (1,), (2,)]))
        for variable in trainer.variables:
            assert opt.slot(variable, "first").copies[0].device is variable.copies[0].device


# --- the count of steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_step_counts_go_on_from_what_is_restored(policy, rng):
    starts = arrays(rng, 2)
    expected = oracle(policy, "adam", starts)
    expected.steps = [7, 7]
    opt = optimizer("adam")
    opt.restore_iterations([7, 7])
    with Trainer(policy, starts) as trainer:
        gradients = arrays(rng, 2)
        trainer.apply(opt, gradients)
        expected.step(gradients)
        trainer.check(expected.weights)
    assert opt.iterations == 8
    assert opt.iterations_at(0) == 8


# --- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_variable_left_alone_is_told_once(policy, rng, caplog):
    with Trainer(policy, arrays(rng, 2)) as trainer, caplog.at_level(logging.WARNING, "minidist"):
        opt = md.optim.SGD(0.1)
        for _ in range(3):
            gradients = arrays(rng, 2)
            gradients[0][1] = gradients[1][1] = None
            trainer.apply(opt, gradients)
    messages = [record.message for record in caplog.records]
    assert messages == ["no gradient for v1; what is not used is left alone"]


def test_a_loss_that_is_no_function_is_refused():
    w = md.Variable(1.0)
    with pytest.raises(RuntimeError, match="pass the function"):
        md.optim.SGD(0.1).minimize(w * w, [w])


# --- from outside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("policy", POLICIES)
def test_distributed_apply_does_what_the_replicas_do(policy, rule, rng):
    n = 3
    starts = arrays(rng, n)
    expected = oracle(policy, rule, starts)
    opt = optimizer(rule)
    with Trainer(policy, starts) as trainer:

        def in_a_merge_function(gradients):
            mine = [md.constant(array) for array in gradients[replica_id()]]
            md.get_replica_context().merge_call(
                lambda s, merged: opt.distributed_apply(
                    zip(merged, trainer.variables, strict=True)
                ),
                mine,
            )

        for counts in [None, [1, 0, 2], [0, 0, 0]]:
            gradients = arrays(rng, n)
            opt.distributed_apply(distributed(trainer, gradients), counts)
            expected.step(gradients, counts)
            trainer.check(expected.weights)
        gradients = arrays(rng, n)
        with trainer.strategy.scope():
            opt.distributed_apply(iter(distributed(trainer, gradients)))
        expected.step(gradients)
        gradients = arrays(rng, n)
        trainer.strategy.run(in_a_merge_function, gradients)
        expected.step(gradients)
        trainer.check(expected.weights)
    assert opt.iterations == expected.iterations


@pytest.mark.parametrize("policy", SYNCHRONOUS)
def test_a_plain_gradient_is_every_replicas(policy, rng):
    starts = arrays(rng, 2)
    expected = oracle(policy, "sgd", starts)
    opt = optimizer("sgd")
    with Trainer(policy, starts) as trainer:
        one = arrays(rng, 1)[0]
        opt.distributed_apply(zip(one, trainer.variables, strict=True))
        expected.step([one, one])
        trainer.check(expected.weights)


def test_distributed_apply_says_what_is_wrong(rng):
    opt = md.optim.SGD(0.1)
    with Trainer("replicated", arrays(rng, 2)) as trainer:
        pairs = distributed(trainer, arrays(rng, 2))
        with pytest.raises(ContextError, match="call apply_gradients there"):
            trainer.each(lambda _: opt.distributed_apply(pairs))
        with pytest.raises(UsageError, match="no variables"):
            opt.distributed_apply([])
        with pytest.raises(UsageError, match="gradient"):
            opt.distributed_apply([(None, variable) for _, variable in pairs])
        three = md.PerReplica(None, [np.zeros((2, 3))] * 3)
        with pytest.raises(UsageError, match="3 components for 2"):
            opt.distributed_apply([(three, trainer.variables[0])])
        with pytest.raises(UsageError, match="-1"):
            opt.distributed_apply(pairs, [1, -1])
        with pytest.raises(UsageError, match="2 replicas"):
            opt.distributed_apply(pairs, [1])
        with md.Strategy("cpu*2") as other, other.scope(), pytest.raises(ContextError):
            opt.distributed_apply(pairs)
    assert opt.iterations == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trainable_variable_of_each_replicas_own_needs_a_policy_with_copies(policy):
    name, options = POLICIES[policy]
    with md.Strategy("cpu*2", name, **options) as strategy:
        with strategy.scope():
            own = md.Variable(
                np.ones(2),
                name="own",
                trainable=True,
                synchronization=md.VariableSynchronization.ON_READ,
            )
        opt = md.optim.SGD(1.0)

        def step():
            opt.apply_gradients([(np.full(2, 1.0 + replica_id()), own)])

        if policy.startswith("parameter_server"):
            with pytest.raises(UsageError, match="'own' is ON_READ"):
                strategy.run(step)
        else:
            strategy.run(step)
            means = [1, 2] if policy == "independent" else [1.5, 1.5]
            assert [copy.array[0] for copy in own.copies] == [1 - mean for mean in means]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda bad: md.optim.SGD(bad), "lr"),
        (lambda bad: md.optim.SGD(0.1, weight_decay=bad), "weight_decay"),
        (lambda bad: md.optim.Momentum(0.1, momentum=bad), "momentum"),
        (lambda bad: md.optim.RMSProp(0.1, decay=bad), "decay"),
        (lambda bad: md.optim.Adam(0.1, beta1=bad), "beta1"),
        (lambda bad: md.optim.Adam(0.1, epsilon=bad), "epsilon"),
    ],
)
@pytest.mark.parametrize("bad", ["x", None, -1, float("nan"), float("inf")])
def test_hyperparameters_are_checked_when_they_are_given(make, name, bad):
    with pytest.raises(ValueError, match=f"^{name} must be at least 0"):
        make(bad)
