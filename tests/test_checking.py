"""The race checker: against a model of what is before what, and on everything that is right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import ORDER
from policies import EVERY

import minidist as md
from minidist import observe
from minidist.checking import Checker, verbs
from minidist.checking.clocks import Actor
from minidist.device.ops import Ops
from minidist.errors import RaceError

# --- against a model ----------------------------------------------------------------------------

ACTORS = 3
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), st.integers(0, ACTORS - 1), st.integers(0, 2)),
        st.tuples(st.just("take"), st.integers(0, ACTORS - 1), st.integers(0, 2)),
        st.tuples(
            st.sampled_from(["read", "write"]),
            st.integers(0, ACTORS - 1),
            st.integers(0, 5),
            st.integers(1, 3),
        ),
    ),
    max_size=25,
)


class Key:
    """Something to give to and take from."""


def model_has_race(steps):
    """Whether two accesses, one of them a write, have no path of orders between them."""
    before = [set() for _ in steps]  # of each step: all steps before it
    last = {}
    given = {}
    for i, (kind, actor, *about) in enumerate(steps):
        if actor in last:
            before[i] |= before[last[actor]] | {last[actor]}
        if kind == "take":
            for j in given.get(about[0], ()):
                before[i] |= before[j] | {j}
        if kind == "give":
            given.setdefault(about[0], []).append(i)
        last[actor] = i
        if kind in ("read", "write"):
            for j in range(i):
                other = steps[j]
                if other[0] in ("read", "write") and "write" in (kind, other[0]):
                    overlap = about[0] < other[2] + other[3] and other[2] < sum(about)
                    if overlap and j not in before[i]:
                        return True
    return False


class Played(Checker):
    """A checker that is told who does what."""

    def __init__(self):
        super().__init__()
        self.all = [Actor(i, f"actor {i}") for i in range(ACTORS)]

    def _actor(self):
        return self.all[self.now]


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_it_finds_a_race_exactly_where_the_model_has_one(steps):
    checker, keys = Played(), [Key() for _ in range(3)]
    memory = np.zeros(9, np.float32)
    for kind, actor, *about in steps:
        checker.now = actor
        if kind == "give":
            checker.gave(keys[about[0]])
        elif kind == "take":
            checker.took(keys[about[0]])
        else:
            part = [memory[about[0] : sum(about)]]
            reads, writes = (part, []) if kind == "read" else ([], part)
            checker.accessed(reads, writes, kind)
    assert bool(checker.races) == model_has_race(steps)


# --- what it says -------------------------------------------------------------------------------


def test_a_report_names_both_sides_their_places_the_memory_and_the_cure():
    with md.Strategy("cpu*2", "parameter_server") as strategy:
        with strategy.scope():
            w = md.Variable([1.0, 2.0], name="w")

        def step():
            if md.get_replica_context().replica_id == 0:
                array = w.copies[0].array
                w.copies[0].device.ops.fill(array, 0)
            return md.ops.reduce_sum(w)

        with pytest.raises(RaceError) as caught, md.check() as checking:
            strategy.run(step)
    assert len(checking.races) == 1
    race = checking.races[0]
    report = str(caught.value)
    assert "variable 'w' on host (float32[2])" in race.what
    assert all(line.startswith(f"{__file__}:") for line in race.lines)
    for words in ("write by replica 0 (cpu:0), in fill", "read by replica 1 (cpu:1), in copy"):
        assert words in report
    assert "merge_call" in report and "ops.fill(array, 0)" in report and "read.py" in report


def copy_and_look(times):
    (device,) = md.devices("cpu*1")
    buffer = device.allocate((4,), "float32")
    stream = device.stream("copy")
    for _ in range(times):
        stream.copy(buffer, np.ones(4, "float32"))
        device.ops.negative(buffer)


def test_work_of_a_stream_shows_where_it_was_given():
    with pytest.raises(RaceError) as caught, md.check():
        copy_and_look(times=1)
    report = str(caught.value)
    assert "write by the copy stream of cpu:0" in report and "was given this work at" in report
    assert "stream.copy(buffer" in report


def test_each_pair_of_places_is_reported_once():
    with pytest.raises(RaceError), md.check() as checking:
        copy_and_look(times=5)
    assert len(checking.races) == 1


# --- memory -------------------------------------------------------------------------------------


def test_what_the_allocator_gives_again_is_another_buffer():
    device = md.devices("cpu*1")[0]
    addresses = []

    def use():
        array = device.ops.full((1000,), 1, "float32")
        device.ops.negative(array)
        addresses.append(array.ctypes.data)

    with md.check():
        for _ in range(20):
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
    assert len(set(addresses)) < len(addresses)  # else this shows nothing


def test_freed_and_fresh_memory_is_poisoned():
    (device,) = md.devices("cpu*1")
    with md.check():
        assert np.isnan(device.allocate((3,), "float32")).all()
        lease = device.lease((3,), "int64")
        array = lease.array
        array[:] = 5
        lease.release()
        assert (array == -1).all()


def test_a_buffer_in_use_is_not_poisoned_before_its_event():
    (device,) = md.devices("cpu*1")
    begin, target = threading.Event(), device.allocate((3,), "float32")
    with md.check():
        stream = device.stream("copy")
        lease = device.lease((3,), "float32")
        array = lease.array
        device.ops.fill(array, 5)
        stream.submit(begin.wait)
        stream.copy(target, array)
        lease.release([stream.record()])
        assert (array == 5).all()
        begin.set()
        stream.synchronize()
        assert (target == 5).all()
        device.lease((3,), "float32").release()


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_nobody_can_write_to_a_view(dtype, shape):
    tensor = md.constant(np.ones(shape), dtype)
    with md.check():
        views = [tensor.numpy(), np.asarray(tensor)]
        if dtype != "bfloat16":
            views.append(np.from_dlpack(tensor))
    for view in views:
        assert view.shape == shape and view.dtype == tensor.dtype
        assert (view == tensor.array).all()
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_a_look_by_numpy_counts_as_a_read():
    with md.Strategy("cpu*2") as strategy:
        shared = md.constant([1.0, 2.0])

        def step():
            if md.get_replica_context().replica_id == 0:
                shared.numpy()
            else:
                shared.device.ops.fill(shared.array, 0)

        with pytest.raises(RaceError, match="in numpy"), md.check():
            strategy.run(step)


# --- verbs --------------------------------------------------------------------------------------


def test_every_verb_that_writes_is_known_by_all_its_names():
    assert set(verbs.WRITES) <= Ops.__abstractmethods__
    for name, written in verbs.WRITES.items():
        code = getattr(Ops, name).__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        places = {names[key] if isinstance(key, int) else key for key in written}
        assert places == {key for key in written if isinstance(key, str)}, name


class Unchanged(observe.Observer):
    """Looks whether what a verb only reads is the same when the next one begins."""

    def __init__(self):
        self.here = threading.local()
        self.verbs = set()

    def accessed(self, reads, writes, what):
        self.look()
        self.verbs.add(what)
        kept = [a for a in reads if not any(np.shares_memory(a, b) for b in writes)]
        self.here.reads = [(array, array.tobytes(), what) for array in kept]

    def look(self):
        for array, before, what in getattr(self.here, "reads", ()):
            assert array.tobytes() == before, what
        self.here.reads = []


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_a_verb_changes_nothing_but_what_it_is_said_to_write(model):
    net = md.models.build(model, (28, 28, 1), 10)
    x = md.constant(np.random.default_rng(0).normal(size=(3, 28, 28, 1)), "float32")
    y = md.constant([1, 2, 3], "int64")
    watch = Unchanged()
    verbs.VERBS.begin()
    try:
        with observe.attached(watch):
            for optimizer in (md.optim.Momentum(0.1), md.optim.Adam(0.1), md.optim.RMSProp(0.1)):
                loss = lambda: md.ops.reduce_mean(  # noqa: E731
                    md.ops.softmax_cross_entropy(net(x, training=True), y)
                )
                optimizer.minimize(loss, net.trainable_variables)
            watch.look()
    finally:
        verbs.VERBS.end()
    assert {"momentum", "adam", "rmsprop", "dense", "softmax_cross_entropy"} <= watch.verbs


# --- what is right is left alone ----------------------------------------------------------------

ALGORITHMS = [spec for spec in ORDER if spec not in ("pscpu", "psgpu", "xring", "auto:4:psgpu#2")]
EXTRAS = [
    {"overlap": True, "bucket_cap_mb": 1e-5},
    {"overlap": False, "gradient_repacking": 2},
    {"overlap": True, "compact_gradient_transfer": True},
    {"overlap": False, "agg_small_grads_max_bytes": 64},
]


def train(n, policy, options, steps=3):
    with md.Strategy(f"cpu*{n}", policy, deadline=30, **options) as strategy:
        with strategy.scope():
            net = md.nn.Sequential([md.nn.Dense(4), md.nn.BatchNorm(), md.nn.Dense(2)])
            net.build((3,))
        optimizer = md.optim.Momentum(0.05)

        def step():
            replica = md.get_replica_context()
            x = md.constant(np.full((2, 3), replica.replica_id + 1), "float32")
            loss = optimizer.minimize(
                lambda: md.ops.reduce_mean(md.ops.square(net(x, training=True))),
                net.trainable_variables,
            )
            return replica.all_reduce("mean", loss)

        for i in range(steps):
            strategy.run(step)
            if i == 1:
                net.trainable_variables[0].assign(net.trainable_variables[0].numpy() * 2)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("policy", EVERY)
def test_nothing_is_reported_of_any_policy_and_algorithm(policy, n):
    name, options = EVERY[policy]
    with md.check() as checking:
        if name == "independent":
            train(n, name, options)
            return
        for i, spec in enumerate(ALGORITHMS):
            more = EXTRAS[(i + n) % len(EXTRAS)]
            train(n, name, {**options, "all_reduce_spec": spec, **more})
    assert not checking.races


def test_input_staging_and_saving_are_clean(tmp_path):
    with md.Strategy("cpu*2") as strategy, md.check():
        with strategy.scope():
            w = md.Variable([1.0, 2.0], name="w")
        optimizer = md.optim.Adam(0.1)
        area = md.StagingArea("float32", device="cpu:1")

        def step(x):
            optimizer.minimize(lambda: md.ops.reduce_sum(w * x), [w])
            if md.get_replica_context().replica_id == 0:
                area.put(x)
            else:
                area.get()

        for batch in strategy.distribute_dataset([np.ones((4, 2), "float32")] * 3):
            strategy.run(step, batch)
            md.save(tmp_path / "saved", [w], optimizer)
            md.load(tmp_path / "saved", [w], optimizer)
        area.close()


def test_threads_queues_and_futures_of_pythons_own_hand_over():
    import queue
    from concurrent.futures import ThreadPoolExecutor

    (device,) = md.devices("cpu*1")
    with md.check():
        items: queue.Queue = queue.Queue()

        def produce():
            for i in range(3):
                items.put(device.ops.full((3,), i, "float32"))

        thread = threading.Thread(target=produce)
        thread.start()
        for _ in range(3):
            device.ops.fill(items.get(), 7)
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            device.ops.fill(pool.submit(device.ops.full, (3,), 1, "float32").result(), 2)
            again = device.ops.full((3,), 1, "float32")
            pool.submit(device.ops.fill, again, 3).result()  # a worker that was there before
        barrier, shared = threading.Barrier(2), device.ops.full((3,), 0, "float32")

        def other():
            device.ops.fill(shared, 1)
            barrier.wait(30)

        thread = threading.Thread(target=other)
        thread.start()
        barrier.wait(30)
        device.ops.fill(shared, 2)
        thread.join()


def test_a_wait_that_has_timed_out_orders_nothing():
    (device,) = md.devices("cpu*1")
    shared, event, go = device.ops.full((3,), 0, "float32"), threading.Event(), threading.Event()

    def work():
        device.ops.fill(shared, 1)
        go.wait(30)
        event.set()

    def program():
        with md.check():
            thread = threading.Thread(target=work)
            thread.start()
            assert not event.wait(0) and not event.is_set()
            device.ops.fill(shared, 2)
            go.set()
            thread.join()

    with pytest.raises(RaceError):
        program()


def test_checks_within_checks_end_threads_as_usual():
    ended = []
    with md.check(), md.check():
        thread = threading.Thread(target=lambda: ended.append(1))
        thread.start()
        thread.join()
    assert ended == [1]


# --- from when to when --------------------------------------------------------------------------

PROGRAM = """
import sys
import minidist as md
import numpy as np
if {looks}:
    print("minidist.checking" in sys.modules)
else:
    with md.Strategy("cpu*2") as strategy:
        shared = md.constant([1.0])
        strategy.run(lambda: shared.device.ops.fill(shared.array, 0))
"""


@pytest.mark.parametrize(("value", "code"), [("1", 1), ("0", 0), ("", 0), ("false", 0), ("on", 1)])
def test_the_environment_switches_it_on(value, code):
    environment = {**os.environ, "MINIDIST_CHECK": value}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(looks=False)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("RaceError: nothing orders two accesses" in done.stderr) == bool(code)


def test_nobody_who_does_not_ask_pays_for_it():
    environment = {name: value for name, value in os.environ.items() if name != "MINIDIST_CHECK"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(looks=True)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False\n"


def test_checking_twice_is_fine_and_ends_as_it_began():
    plain = md.ops.negative(md.constant([1.0])).device.ops.negative.__func__
    with md.check():
        with md.check():
            assert len(observe.watching) == 2
        assert md.devices("cpu*1")[0].ops.negative.__func__ is not plain
    assert md.devices("cpu*1")[0].ops.negative.__func__ is plain
    assert not observe.watching and not observe.careful()


def test_a_check_that_is_ended_twice_leaves_later_ones_and_threads_alone():
    check = md.check()
    check.end()
    check.end()
    with pytest.raises(ValueError, match="this check has ended"), check:
        pass
    with md.check() as other:
        other.end()
    with md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: None)
        with md.check():
            strategy.run(lambda: None)
    with md.Strategy("cpu*2") as strategy:
        strategy.run(lambda: None)


def test_a_call_checks_until_it_is_ended():
    checking = md.check()
    try:
        with md.Strategy("cpu*2") as strategy:
            shared = md.constant([1.0])
            with pytest.raises(RaceError):
                strategy.run(lambda: shared.device.ops.fill(shared.array, 0))
            strategy.run(lambda: None)  # a race is raised once
        assert len(checking.races) == 1
    finally:
        checking.end()


def test_a_program_can_tell_how_it_hands_over_by_a_name():
    (device,) = md.devices("cpu*1")
    shared, lock = device.ops.full((3,), 0, "float32"), threading.Lock()

    def fill(key):
        with lock:
            observe.took(key)
            device.ops.fill(shared, 1)
            observe.gave(key)

    for key in ("the lock", 7, ("a", 1), lock):
        with md.check():
            threads = [threading.Thread(target=fill, args=(key,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
