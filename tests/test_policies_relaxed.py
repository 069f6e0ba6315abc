"""Relaxed: each apply takes the gradients of the apply before, and the first one takes zeros."""

from __future__ import annotations

import numpy as np
import pytest
from policies import RELAXING, Trainer, optimizer

import minidist as md


@pytest.fixture(params=[1, 2, 3])
def trainer(request):
    (policy,) = RELAXING
    with Trainer(policy, [[np.float64(1.0), np.float64(1.0)]] * request.param) as trainer:
        yield trainer


def applied(trainer, opt, *gradients, counts=None):
    """Apply the same gradients in all replicas; return what the variables are then."""
    row = [None if g is None else np.float64(g) for g in gradients]
    trainer.apply(opt, [row] * trainer.n, None if counts is None else [counts] * trainer.n)
    weights = trainer.weights()
    assert all(own == weights[0] for own in weights)
    return [float(w) for w in weights[0]]


def test_a_gradient_is_applied_one_step_later(trainer):
    opt = md.optim.SGD(1.0)
    assert applied(trainer, opt, 1, 10) == [1, 1]
    assert applied(trainer, opt, 2, 20) == [0, -9]
    assert applied(trainer, opt, 4, 40) == [-2, -29]
    assert opt.iterations == 3


def test_the_first_step_is_one_momentum_and_decay_do_theirs(trainer):
    """Zeros, and not nothing: the weights decay, and Adam's count rises."""
    opt = md.optim.Momentum(1.0, 0.5, weight_decay=0.5)
    assert applied(trainer, opt, 0, 0) == [0.5, 0.5]
    assert applied(trainer, opt, 0, 0) == [0.0, 0.0]  # m = 0.5·0.5 + 0.5·0.5
    adam = optimizer("adam")
    applied(trainer, adam, 1, 1)
    assert adam.iterations == 1


def test_a_step_without_an_example_makes_the_next_one_none(trainer):
    opt = md.optim.SGD(1.0, weight_decay=0.5)
    assert applied(trainer, opt, 7, 7, counts=1) == [0.5, 0.5]  # zeros
    assert applied(trainer, opt, 9, 9, counts=0) == [-6.75, -6.75]  # the sevens
    assert opt.iterations == 2
    assert applied(trainer, opt, 1, 1, counts=1) == [-6.75, -6.75]  # nothing, not even decay
    assert opt.iterations == 2
    assert applied(trainer, opt, 0, 0, counts=1) == [-4.375, -4.375]  # the ones
    assert opt.iterations == 3


def test_what_was_not_used_is_left_alone_one_step_later(trainer):
    opt = md.optim.SGD(1.0, weight_decay=0.5)
    assert applied(trainer, opt, 0, None) == [0.5, 0.5]  # zeros for both
    assert applied(trainer, opt, 0, 0) == [0.25, 0.5]
    assert applied(trainer, opt, 0, 0) == [0.125, 0.25]


def test_each_group_of_variables_has_a_step_before_of_its_own(trainer):
    one, other = md.optim.SGD(1.0), md.optim.SGD(1.0)
    v, w = trainer.variables

    def step(g):
        gradient = md.constant(np.float64(g))
        one.apply_gradients([(gradient, v)])
        other.apply_gradients([(gradient, w)])

    seen = []
    for g in [1, 2, 4]:
        trainer.each(lambda replica, g=g: step(g))
        seen.append([float(x) for x in trainer.weights()[0]])
    assert seen == [[1, 1], [0, 0], [-2, -2]]


def test_after_an_update_that_failed_training_goes_on(trainer, monkeypatch):
    opt = md.optim.SGD(1.0)
    applied(trainer, opt, 1, 1)

    def fail(*_, **__):
        raise OSError("once")

    with monkeypatch.context() as patch:
        patch.setattr(md.optim.SGD, "_update", fail)
        with pytest.raises(OSError, match="once"):
            applied(trainer, opt, 2, 2)
    assert applied(trainer, opt, 4, 4) == [-1, -1]
    assert applied(trainer, opt, 8, 8) == [-5, -5]
