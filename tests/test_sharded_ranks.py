"""Checkpoints of several processes: any number of workers, devices and ps goes on from any other.

Where arithmetic is exact, whatever the order and however many there are, all must come to the same
bits: weights and gradients are multiples of powers of two here, so every mean over 1 to 6 equal
gradients is exact.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import ranks

import minidist as md
from minidist.checkpoint import Keys

FOLDER = Path(os.environ.get("MINIDIST_TEST_FOLDER", "."))
SHAPES = {"big": (3, 5), "flat": (4,), "one": ()}
HALF = 2  # steps before a save, and after it

# --- everything from everything -----------------------------------------------------------------

STRONG, RELAXED, STAGED = "strong", "relaxed", "staged"  # those that go on from each other
OPTIONS = {STRONG: {}, RELAXED: {"variable_consistency": "relaxed"}, STAGED: {"staged_vars": True}}
EVERYTHING = os.environ.get("MINIDIST_TEST_ALL") == "1"  # not only a choice of places
TIMES = [(workers, devices) for workers in (1, 2, 3) for devices in (1, 2)]
SOME = TIMES if EVERYTHING else [(1, 2), (2, 2), (3, 1)]
WITH_PS = [(*times, ps) for times in TIMES for ps in (1, 2)]
SOME_WITH_PS = WITH_PS if EVERYTHING else [(1, 2, 1), (2, 1, 2), (2, 2, 1), (3, 1, 2)]
PLACES = {  # by kind: policy, workers, devices of each, ps
    STRONG: [
        *[("replicated", 1, devices, 0) for devices in (1, 2)],
        *[("collective_all_reduce", *times, 0) for times in TIMES],
        *[("parameter_server", *times) for times in SOME_WITH_PS],
        *[("distributed_replicated", workers, 2, 1) for workers in (1, 2)],
    ],
    RELAXED: [
        ("replicated", 1, 2, 0),
        *[("collective_all_reduce", *times, 0) for times in SOME],
    ],
    STAGED: [
        ("parameter_server", 1, 2, 0),
        *[("parameter_server", *times) for times in SOME_WITH_PS],
    ],
}


class Training:
    """Trains by gradients that depend on what is read, and on how many steps there were."""

    def __init__(self, cluster, policy, devices, kind):
        where = {} if policy == "replicated" else {"cluster": cluster}
        self.strategy = md.Strategy(f"cpu*{devices}", policy, **where, **OPTIONS[kind])
        with self.strategy.scope():
            self.variables = [
                md.Variable(np.full(shape, 8 + i, "f4"), name=name)
                for i, (name, shape) in enumerate(SHAPES.items())
            ]
            self.counter = md.Variable(
                np.array(0, "i4"),
                name="counter",
                synchronization=md.VariableSynchronization.ON_READ,
                aggregation=md.VariableAggregation.SUM,
            )
        self.optimizer = md.optim.Momentum(0.25, momentum=0.5)
        self.what = ([*self.variables, self.counter], self.optimizer)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def train(self, steps):
        def step():
            number = self.optimizer.iterations % 4
            self.counter.assign_add(5 if md.get_replica_context().replica_id == 0 else 0)
            gradients = [
                md.constant(v.read().numpy() * np.float32(0.5) + number) for v in self.variables
            ]
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

        for _ in range(steps):
            self.strategy.run(step)

    def state(self):
        values = np.concatenate([v.numpy().reshape(-1) for v in self.variables])
        counts = self.optimizer.iterations, self.strategy.step, int(self.counter.numpy())
        return values.tobytes(), counts


def path_of(kind, policy, workers, devices, ps):
    return FOLDER / f"{kind}-{policy}-{workers}-{devices}-{ps}.safetensors"


def case_name(verb, kind, place):
    return f"{verb}-{kind}-" + "-".join(map(str, place))


def saves(kind, place):
    policy, workers, devices, ps = place

    def case(cluster):
        if cluster.job == "ps":
            cluster.serve()
            return
        with Training(cluster, policy, devices, kind) as training:
            training.train(HALF)
            md.save(path_of(kind, *place), *training.what)
            training.train(HALF)
            end, counts = training.state()
            if cluster.is_chief:
                path_of(kind, *place).with_suffix(".end").write_bytes(end)
            assert counts == (2 * HALF, 2 * HALF, 10 * HALF)
        cluster.leave()

    return workers, ps, case


def goes_on(kind, place):
    policy, workers, devices, ps = place

    def case(cluster):
        if cluster.job == "ps":
            cluster.serve()
            return
        ends = [path_of(kind, *each).with_suffix(".end").read_bytes() for each in PLACES[kind]]
        with Training(cluster, policy, devices, kind) as training:
            for each, end in zip(PLACES[kind], ends, strict=True):
                assert end == ends[0], each
                assert md.load(path_of(kind, *each), *training.what) == Keys((), ()), each
                training.train(HALF)
                assert training.state() == (end, (2 * HALF, 2 * HALF, 10 * HALF)), each
        cluster.leave()

    return workers, ps, case


CASES = {}
for _kind, _places in PLACES.items():
    CASES |= {case_name("save", _kind, place): saves(_kind, place) for place in _places}
for _kind, _places in PLACES.items():
    CASES |= {case_name("from", _kind, place): goes_on(_kind, place) for place in _places}


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    names = ranks.chosen(request, CASES)
    return ranks.run(__file__, 5, *names, env={"MINIDIST_TEST_FOLDER": str(folder)})


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
