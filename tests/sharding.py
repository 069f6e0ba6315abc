"""Sharding: a small training that several ranks, as threads, save and load, and looks at it."""

from __future__ import annotations

import numpy as np
from states import state_dict
from thread_ranks import as_ranks

import minidist as md
from minidist import context
from minidist.checkpoint import Keys, opened

SHAPES = {"big": (7, 5), "flat": (12,), "one": (), "two": (2,)}


class Training:
    """A few variables with a momentum beside each; all from one number."""

    def __init__(self, strategy, number=0.0):
        with strategy.scope():
            self.variables = [
                md.Variable(np.full(shape, number + i, "f4"), name=name)
                for i, (name, shape) in enumerate(SHAPES.items())
            ]
        self.strategy = strategy
        self.optimizer = md.optim.Momentum(0.25)
        self.what = (self.variables, self.optimizer)

    def assign(self, number):
        for i, v in enumerate(self.variables):
            v.assign(np.full(v.shape, number + i, "f4"))
            self.optimizer.slot(v, "momentum").assign(np.full(v.shape, number - i, "f4"))
        self.optimizer.restore_iterations([int(number)])
        self.strategy.step = int(number)

    def state(self):
        arrays = {key: array.tobytes() for key, array in state_dict(*self.what).items()}
        return arrays, self.optimizer.iterations, self.strategy.step


def default():
    """Return a training of this process alone, under no strategy."""
    return Training(context.get_strategy())


def generation(path):
    """Return which number was saved there, by one look at all of it."""
    training = default()
    step = training.strategy.step
    try:
        assert md.load(path, *training.what) == Keys((), ())
        expected = default()
        expected.assign(training.optimizer.iterations)
        assert training.state() == expected.state()
        return training.optimizer.iterations
    finally:
        training.strategy.step = step


def save(path, number, count=2, **options):
    """Save a number as so many ranks; one of them is a process alone."""

    def work(strategy, rank):
        training = Training(strategy)
        training.assign(number)
        md.save(path, *training.what, **options)

    if count == 1:
        step = context.get_strategy().step
        work(context.get_strategy(), 0)
        context.get_strategy().step = step
        return
    assert as_ranks(work, count) == [None] * count


def names(path):
    """Return what is in the folder, without the numbers of saves."""
    found = []
    for each in path.parent.iterdir():
        save = each.name.split("-")[1:2] if "-of-" in each.name else []
        found.append(each.name.replace(*save, "N") if save else each.name)
    return sorted(found)


def shards_of(path):
    with opened.opened(path) as file:
        return file.files
