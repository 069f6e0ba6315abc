"""Ten thousand orders of small programs: no race, no hang, and always the same results."""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist.checking import fuzz
from minidist.errors import HangError

ORDERS = 10_000
LR = 0.25  # everything below is exact in float32


def replica_id():
    return md.get_replica_context().replica_id


class Training:
    """A step of SGD with the loss (replica + 1) · Σ w, whose gradient is known."""

    late = 0  # by how many steps gradients are applied late
    stale = 0  # by how many steps what replicas read is old

    def __init__(self, n, policy, **options):
        self.strategy = md.Strategy(f"cpu*{n}", policy, deadline=20, **options)
        with self.strategy.scope():
            self.w = md.Variable(np.full(3, 64.0, "float32"), name="w")
            self.v = md.Variable(np.full((2, 2), 64.0, "float32"), name="v")
        self.optimizer = md.optim.SGD(LR)
        self.mean = sum(range(1, n + 1)) / n
        self.steps = 0

    def step(self):
        def loss():
            both = md.ops.reduce_sum(self.w) + md.ops.reduce_sum(self.v)
            return both * float(replica_id() + 1)

        return float(self.optimizer.minimize(loss, [self.w, self.v])) / (replica_id() + 1)

    def value(self, step):
        """Return each element after so many steps."""
        return 64.0 - LR * self.mean * max(0, step - self.late)

    def run(self):
        if self.steps == 100:
            for variable in (self.w, self.v):
                variable.assign(np.full(variable.shape, 64.0, "float32"))
            self.steps = 0
        self.losses = self.strategy.local_results(self.strategy.run(self.step))
        self.steps += 1

    def check(self):
        read = self.value(max(0, self.steps - 1 - self.stale))
        assert self.losses == (7 * read,) * self.strategy.num_replicas
        for variable in (self.w, self.v):
            for copy in variable.copies:
                assert (copy.array == self.value(self.steps)).all()

    def close(self):
        self.strategy.close()


class Relaxed(Training):
    late = 1

    def run(self):
        if self.steps == 100:  # what waits would be applied to the new values
            self.steps, self.late = 0, 0
            for variable in (self.w, self.v):
                variable.assign(np.full(variable.shape, 64.0, "float32"))
        super().run()


class Staged(Training):
    stale = 1


class Reducing:
    """All replicas sum what each of them has, and one writes the sum."""

    def __init__(self):
        self.strategy = md.Strategy("cpu*3", deadline=20, all_reduce_spec="xring")
        with self.strategy.scope():
            how = md.VariableAggregation.SUM
            self.total = md.Variable(np.zeros(5, "float32"), name="total", aggregation=how)
        self.runs = 0

    def step(self):
        replica = md.get_replica_context()
        mine = md.constant(np.arange(5, dtype="float32") + replica.replica_id)
        total = replica.all_reduce("sum", mine)
        self.total.assign(total)
        return replica.all_reduce("sum", total)

    def run(self):
        self.results = self.strategy.local_results(self.strategy.run(self.step))

    def check(self):
        total = 3 * np.arange(5) + 3
        for result in self.results:
            assert (result.numpy() == 3 * total).all()
        for copy in self.total.copies:
            assert (copy.array == 3 * total).all()

    def close(self):
        self.strategy.close()


class Staging:
    """A replica puts items into a small staging area, and the other takes them."""

    def __init__(self):
        self.strategy = md.Strategy("cpu*2", deadline=20)
        self.area = md.StagingArea("float32", capacity=1, device="cpu:1")

    def step(self):
        if replica_id() == 0:
            for i in range(3):
                self.area.put(md.constant(np.full(4, i, "float32")))
        else:
            self.results = [float(md.ops.reduce_sum(self.area.get()[0])) for _ in range(3)]

    def run(self):
        self.strategy.run(self.step)

    def check(self):
        assert self.results == [0, 4, 8]

    def close(self):
        self.area.close()
        self.strategy.close()


class Losing:
    """Two replicas count up in the same place, and write what they have read before."""

    def __init__(self):
        self.strategy = md.Strategy("cpu*2", deadline=20)
        self.array = md.constant(np.zeros(1, "float32")).array

    def step(self):
        ops = md.get_replica_context().device.ops
        ops.scatter(self.array, np.array([0]), ops.add(self.array, np.ones(1, "float32")))

    def run(self):
        self.array[:] = 0
        self.strategy.run(self.step)
        return float(self.array[0])


def test_a_seed_reproduces_its_order_and_its_result():
    program = Losing()
    results = {}
    with program.strategy:
        program.run()
        for seed in [*range(30), *range(30)]:
            with fuzz(seed) as order:
                result = program.run()
            assert results.setdefault(seed, (result, order.order)) == (result, order.order)
    assert {result for result, _ in results.values()} == {1, 2}  # some orders lose one


def test_a_failure_names_its_seed():
    with pytest.raises(ValueError, match="of its own") as caught, fuzz(17):
        raise ValueError("of its own")
    assert "fuzz(17)" in caught.value.__notes__[0]


def test_where_nobody_can_go_on_all_are_let_go_and_the_deadline_ends_it():
    area = md.StagingArea("float32")
    with pytest.raises(HangError), fuzz(0) as order:
        area.get(timeout=0.05)
    assert order.let_go


PROGRAMS = {
    "replicated": lambda: Training(2, "replicated"),
    "overlapped": lambda: Training(2, "replicated", overlap=True, bucket_cap_mb=1e-5),
    "cached": lambda: Training(3, "parameter_server", caching=True),
    "relaxed": lambda: Relaxed(2, "replicated", variable_consistency="relaxed"),
    "staged": lambda: Staged(2, "parameter_server", staged_vars=True),
    "reducing": Reducing,
    "staging": Staging,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_orders(name):
    program = PROGRAMS[name]()
    different = set()
    count = -(-ORDERS // len(PROGRAMS))
    try:
        program.run()  # makes what is made once
        program.check()
        with md.check() as checking:
            for seed in range(count):
                with fuzz(seed) as order:
                    program.run()
                    program.check()
                    checking.verify()
                    assert not order.let_go, "nobody could go on"
                different.add(tuple(order.order))
    finally:
        program.close()
    assert len(different) > count * 0.9
