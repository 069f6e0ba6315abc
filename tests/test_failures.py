"""Faults planted in every phase of a step, under every policy: how the run ends, and what is next.

A fault is raised, hangs, runs out of memory, or is a NaN. It must reach the caller of `run` as it
is (a hang as a HangError that names who and where), nobody may be left behind, and the strategy
must train on.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from policies import EVERY, LATE, STAGING, optimizer

import minidist as md
from minidist import tensor_file, train
from minidist.device import get as get_device
from minidist.errors import HangError, NonFiniteError, ThreadError

N = 3
PHASES = ["forward", "backward", "reduce", "update", "staging", "save"]


class Planted(Exception):
    """Nobody else raises this."""


class Fault:
    """Does harm while it is armed. Its hangs end with `release`."""

    def __init__(self, kind):
        self.kind = kind
        self.armed = False
        self.release = threading.Event()

    def __call__(self, *_, **__):
        replica = md.get_replica_context()
        if not self.armed or (md.has_strategy() and replica and replica.replica_id != 1):
            return  # where each replica does it, only replica 1 suffers
        if self.kind == "raise":
            raise Planted("planted")
        if self.kind == "memory":
            raise MemoryError("planted")
        self.release.wait(60)

    @property
    def expected(self):
        return {"raise": Planted, "memory": MemoryError, "hang": HangError}[self.kind]


def before(fault, fn):
    def both(*args, **kwargs):
        fault(*args, **kwargs)
        return fn(*args, **kwargs)

    return both


class Job:
    """A small training, with places where a fault can be planted."""

    def __init__(self, policy, fault, phase, monkeypatch):
        name, options = EVERY[policy]
        if phase == "reduce" and policy == "replicated":  # which by itself sums in the updates
            options = {**options, "all_reduce_spec": "copy"}
        self.strategy = md.Strategy(f"cpu*{N}", name, deadline=0.4, report_after=0.2, **options)
        with self.strategy.scope():
            self.w = md.Variable(np.ones(24), name="w")  # a line of memory for each to update
        self.optimizer = optimizer("momentum")
        self.fault, self.phase = fault, phase
        manager = self.strategy.variable_mgr
        if phase == "reduce":
            sums = manager.combine.sums
            monkeypatch.setattr(sums, "sum_into", before(fault, sums.sum_into))
        elif phase == "update":
            monkeypatch.setattr(self.optimizer, "_update", before(fault, self.optimizer._update))
        elif phase == "staging":
            device = self.strategy.devices[1]
            monkeypatch.setattr(device, "copy", before(fault, device.copy))
        elif phase == "save":
            monkeypatch.setattr(tensor_file, "write", before(fault, tensor_file.write))

    def step(self):
        self.strategy.run(self._step)

    def suffer(self, path):
        """Do what runs into the fault: what happens in the background is heard of a step later."""
        if self.phase == "save":
            md.save(path, self.w, self.optimizer)
        for _ in range(3):
            self.step()

    def _step(self):
        def breaks(x):
            def backward(dy, needs):
                if self.phase == "backward":
                    self.fault()
                return [dy]

            return md.tape.record(x.array, (x,), backward)

        def loss():
            value = md.ops.reduce_sum(md.ops.square(breaks(self.w.read())))
            if self.phase == "forward":
                self.fault()
            return value

        self.optimizer.minimize(loss, [self.w])


def fits(policy, phase):
    return not (phase == "reduce" and policy == "independent") and not (
        phase == "staging" and policy not in STAGING
    )


CASES = [
    (policy, phase, kind)
    for policy in EVERY
    for phase in PHASES
    for kind in ("raise", "memory", "hang")
    # A save that hangs is the file system's: nobody waits for it who could tell.
    if fits(policy, phase) and (phase, kind) != ("save", "hang")
]


@pytest.mark.parametrize(("policy", "phase", "kind"), CASES)
def test_a_fault_ends_the_run_as_itself_and_the_next_one_trains(
    policy, phase, kind, monkeypatch, tmp_path
):
    fault = Fault(kind)
    job = Job(policy, fault, phase, monkeypatch)
    threads = threading.active_count()
    with job.strategy:
        for _ in range(3):
            job.step()
        start = job.w.copies[0].array.copy()
        fault.armed = True
        with pytest.raises(fault.expected) as caught:
            job.suffer(tmp_path / "x")
        fault.armed = False
        fault.release.set()
        if kind == "hang":
            assert "replica" in str(caught.value)
        elif phase != "save":
            assert any("raised in" in note for note in caught.value.__notes__)
        for _ in range(3):
            job.step()
        assert not np.array_equal(job.w.copies[0].array, start)
        assert np.isfinite(job.w.copies[0].array).all()
        if policy != "independent":
            for copy in job.w.copies[1:]:
                if phase != "update":  # copies of who had been updated when it failed differ
                    assert np.array_equal(copy.array, job.w.copies[0].array)
        md.save(tmp_path / "x", job.w, job.optimizer)
        md.load(tmp_path / "x", job.w, job.optimizer)
    assert threading.active_count() <= threads + N + 1  # streams of devices stay


DATA = np.ones((4, 1), "f")


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("minidist worker 0", lambda strategy: strategy.run(int)),
        ("minidist reader of .*", lambda strategy: next(iter(strategy.distribute_dataset([DATA])))),
        ("minidist cpu:7 copy stream", lambda strategy: get_device("cpu:7").stream("copy")),
    ],
)
def test_a_thread_that_the_system_does_not_start_is_a_sentence(monkeypatch, name, use):
    def start(thread):
        raise RuntimeError("can't start new thread")

    sentence = rf"the thread .{name}. could not be started, .* \(can't start .*: take fewer devices"
    with md.Strategy("cpu*2") as strategy:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", start)
            with pytest.raises(ThreadError, match=sentence):
                use(strategy)
        use(strategy)  # once there is memory again
    get_device("cpu:7").close()


@pytest.mark.parametrize("policy", EVERY)
def test_a_loss_that_is_no_number_ends_the_run_before_anything_is_trained_on_it(policy):
    name, options = EVERY[policy]
    rng = np.random.default_rng(0)
    with md.Strategy("cpu*2", name, **options) as strategy:
        with strategy.scope():
            model = md.models.build("mlp", (4, 4, 1), 3)
        opt = md.optim.SGD(0.1)

        def step(bad):
            images = rng.normal(size=(4, 4, 4, 1)).astype("f")
            if bad:
                images[3, 0, 0, 0] = np.nan  # in the second replica's half
            (batch,) = strategy.distribute_dataset([(images, np.arange(4) % 3)])
            return strategy.run(train.train_step, model, opt, *batch)

        for _ in range(2):
            step(False)
        with pytest.raises(NonFiniteError, match="the loss of replica 1 is nan in step 3"):
            step(True)
        for _ in range(2):
            step(False)
        assert all(np.isfinite(v.copies[0].array).all() for v in model.variables)


def test_a_loss_that_is_no_number_in_an_evaluation_is_told_as_one():
    with md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            model = md.models.build("mlp", (4, 4, 1), 3)
        opt = md.optim.SGD(0.1)
        images, labels = np.ones((4, 4, 4, 1), "f"), np.arange(4) % 3
        (batch,) = strategy.distribute_dataset([(images, labels)])
        strategy.run(train.train_step, model, opt, *batch)
        images[3, 0, 0, 0] = np.nan  # in the second replica's half
        with pytest.raises(NonFiniteError) as caught:
            train.evaluate(strategy, model, [(images, labels)])
    told = str(caught.value)
    assert told.startswith("the loss of replica 1 is nan in an evaluation, in which nothing is tr")
    assert "step" not in told


@pytest.mark.parametrize("policy", EVERY)
def test_a_gradient_that_is_no_number_is_left_out_by_an_automatic_loss_scale(policy):
    name, options = EVERY[policy]
    with md.Strategy("cpu*2", name, **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(2), name="w")
        opt = md.optim.SGD(1.0, loss_scale=md.optim.LossScale(8.0, automatic=True))

        def step(value):
            me = md.get_replica_context().replica_id
            gradient = np.full(2, value if me else 8.0)
            opt.apply_gradients([(md.constant(gradient), w)])

        late = policy in LATE and policy not in STAGING
        for value in (8.0, np.nan, 8.0):
            strategy.run(step, value)
        # Relaxed: zeros, the first gradient, and the NaN that is left out.
        assert np.array_equal(w.copies[0].array, np.full(2, -1.0 if late else -3.0))
        assert opt.loss_scale.value == 4.0


# --- what a failed run leaves behind ------------------------------------------------------------


@pytest.mark.parametrize("policy", ["replicated", "replicated+relaxed"])
def test_after_a_meeting_all_replicas_apply_or_none(policy):
    """Whoever fails right after it must not keep the others from what was combined there."""
    name, options = EVERY[policy]
    with md.Strategy("cpu*8", name, **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(3), name="w")
        opt = optimizer("momentum")

        def step(fails):
            opt.minimize(lambda: md.ops.reduce_sum(md.ops.square(w.read())), [w])
            if fails:
                raise Planted("after the step")

        for _ in range(60):
            with pytest.raises(Planted):
                strategy.run(step, True)
            arrays = [copy.array for copy in w.copies]
            assert all(np.array_equal(array, arrays[0]) for array in arrays)
        strategy.run(step, False)


def test_a_failed_update_says_that_copies_may_differ(monkeypatch):
    fault = Fault("raise")
    job = Job("replicated", fault, "update", monkeypatch)
    with job.strategy:
        job.step()
        fault.armed = True
        with pytest.raises(Planted) as caught:
            job.step()
        (note,) = [note for note in caught.value.__notes__ if "did not finish its update" in note]
        assert "copies of the variables may differ" in note
        assert "momenta, its count of updates) until a checkpoint of the training is loaded" in note


@pytest.mark.parametrize("policy", EVERY)
def test_a_failed_run_ends_what_replicas_have_accumulated(policy):
    name, options = EVERY[policy]
    with md.Strategy("cpu*2", name, **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(2), name="w")
        opt = md.optim.SGD(1.0, gradient_accumulation_steps=2)

        def step(value, fails=False):
            if fails and md.get_replica_context().replica_id == 1:
                raise Planted("planted")
            opt.apply_gradients([(md.constant(np.full(2, value)), w)])

        with pytest.raises(Planted):
            strategy.run(step, 100.0, True)
        for value in (1.0, 3.0, 0.0, 0.0):  # two windows, for the relaxed one
            strategy.run(step, value)
        assert np.array_equal(w.copies[0].array, np.full(2, -2.0))
        assert opt.iterations == 2


@pytest.mark.parametrize("policy", ["replicated", "replicated+relaxed", "parameter_server"])
def test_a_backward_pass_that_is_begun_anew_is_summed_once(policy):
    name, options = EVERY[policy]

    def weights(overlap):
        with md.Strategy("cpu*2", name, overlap=overlap, bucket_cap_mb=1e-9, **options) as strategy:
            with strategy.scope():
                a, b = md.Variable(np.ones(3), name="a"), md.Variable(np.ones(3), name="b")
            opt = md.optim.SGD(0.1)

            def step(number):
                broken = [number == 2 and md.get_replica_context().replica_id == 1]

                def breaks(x):
                    def backward(dy, needs):
                        if broken.pop():
                            broken.append(False)
                            raise Planted("once")
                        broken.append(False)
                        return [dy]

                    return md.tape.record(x.array, (x,), backward)

                def loss():
                    return md.ops.reduce_sum(md.ops.square(breaks(a.read())) + md.ops.square(b))

                try:
                    opt.minimize(loss, [a, b])
                except Planted:
                    opt.minimize(loss, [a, b])

            for number in range(5):
                strategy.run(step, number)
            return [a.numpy(), b.numpy()]

    for ours, plain in zip(weights(True), weights(False), strict=True):
        assert np.array_equal(ours, plain)


@pytest.mark.parametrize("policy", EVERY)
def test_a_strategy_keeps_no_model_that_was_dropped(policy):
    name, options = EVERY[policy]
    more = {} if policy == "independent" else {"overlap": True}
    with md.Strategy("cpu*2", name, **options, **more) as strategy:
        dropped = []
        for _ in range(2):
            with strategy.scope():
                w = md.Variable(np.ones(3), name="w")
            opt = optimizer("momentum")

            def step(w=w, opt=opt):
                opt.minimize(lambda: md.ops.reduce_sum(md.ops.square(w.read())), [w])

            for _ in range(3):
                strategy.run(step)
            dropped.append(weakref.ref(w))
            del w, opt, step
            strategy.run(lambda: None)
        for device in (*strategy.devices, get_device("host")):
            device.synchronize()  # what runs in the background refers to it
        gc.collect()
        assert [ref() for ref in dropped] == [None, None]
