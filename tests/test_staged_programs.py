"""Random programs with staged variables follow a model of a few lines."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import Staged

import minidist as md


class Model:
    """One variable: in step t + 1 replicas read what it was before apply t.

    But what has been assigned since apply t is read as it is.
    """

    def __init__(self, value):
        self.assign(value)

    @property
    def reads(self):
        return self.value if self.before is None else self.before

    def assign(self, value):
        self.value = value
        self.before = None  # before the last apply; None: assigned since
        self.pending = self.waiting = 0.0

    def subtract(self, value):
        self.pending += value

    def apply(self, applied):
        self.before = self.value
        self.value -= applied + self.waiting
        self.waiting, self.pending = self.pending, 0.0


class Program:
    """Variables of a strategy, each with its model; each method is something that may happen."""

    def __init__(self, n, stack):
        self.n, self.stack = n, stack
        self.staged = stack.enter_context(Staged(n))
        self.variables, self.models = [self.staged.w], [Model(0.0)]

    def check(self):
        def read():
            return [float(variable.read()) for variable in self.variables]

        assert [float(variable) for variable in self.variables] == [m.value for m in self.models]
        assert self.staged.run(read) == [[model.reads for model in self.models]]

    def create(self, trainable, value):
        self.variables.append(self._variable(len(self.variables), trainable, value))
        self.models.append(Model(value))

    def _variable(self, i, trainable, value):
        how = {"trainable": trainable, "aggregation": md.VariableAggregation.MEAN}
        return self.staged.variable(f"v{i}", value, **how)

    def apply(self, which):
        chosen = {0, *(i % len(self.variables) for i in which)}
        self.staged.run(lambda: self.staged.apply(*(self.variables[i] for i in chosen)))
        for i, model in enumerate(self.models):
            model.apply(float(i in chosen))

    def fail(self):
        def fail(*_, **__):
            raise OSError("once")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(md.optim.SGD, "_update", fail)
            with pytest.raises(OSError, match="once"):
                self.staged.run(self.staged.apply)
        for model in self.models:
            model.before = None

    def assign(self, which, value):
        i = which % len(self.variables)
        self.variables[i].assign(value)
        self.models[i].assign(value)

    def subtract(self, which, value):
        """In replicas, each of which subtracts the same: so does their mean."""
        i = 1 + which % len(self.variables)
        if i < len(self.variables):
            variable, model = self.variables[i], self.models[i]
            self.staged.run(lambda: variable.assign_sub(md.constant(np.float64(value))))
            if variable.trainable:
                model.assign(model.value - value)
            else:
                model.subtract(value)

    def resume(self):
        """Go on in a new strategy from a checkpoint."""
        path = Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "file"
        md.save(path, self.variables)
        self.staged = self.stack.enter_context(Staged(self.n))
        others = list(enumerate(self.variables))[1:]
        self.variables = [
            self.staged.w,
            *[self._variable(i, variable.trainable, 0.0) for i, variable in others],
        ]
        md.load(path, self.variables)


NUMBERS, WHICH = st.integers(-9, 9).map(float), st.integers(0, 9)
ACTIONS = st.one_of(
    st.tuples(st.just(Program.apply), st.sets(WHICH, max_size=3)),
    st.tuples(st.just(Program.create), st.booleans(), NUMBERS),
    st.tuples(st.just(Program.assign), WHICH, NUMBERS),
    st.tuples(st.just(Program.subtract), WHICH, NUMBERS),
    st.tuples(st.just(Program.fail)),
    st.tuples(st.just(Program.resume)),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.lists(ACTIONS, min_size=1, max_size=12))
def test_random_programs_read_what_the_model_says(n, actions):
    with contextlib.ExitStack() as stack:
        program = Program(n, stack)
        for action, *what in actions:
            action(program, *what)
            program.check()
