"""Bytes: what policies and algorithms predict from shapes is what is counted where it moves."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from heard import Heard
from orders import ORDER
from policies import CACHING, EVERY

import minidist as md
from minidist import comm, observe
from minidist.comm.row import Row
from minidist.device import host
from minidist.optim.loss_scale import LossScale
from minidist.traffic import Outline

REPLICAS = [1, 2, 3, 5, 8]
PACKINGS = [{}, {"gradient_repacking": 3}, {"agg_small_grads_max_bytes": 50}]
ODD = [(5,), (), (3, 0), (7, 11), (1025,)]


# --- algorithms ---------------------------------------------------------------------------------


def summed(one, devices, kinds, places):
    """Return what is counted when these devices give rows of such kinds to one sum."""
    heard = Heard()
    sources = [Row.on(device, [np.ones(*kind) for kind in kinds]) for device in devices]
    destinations = [Row([np.ones(*kind) for kind in kinds], place) for place in places]
    with observe.attached(heard):
        one.all_reduce(sources, destinations, threads=1)
    return heard.links


def wanted(devices, kinds):
    """Return destinations: every replica, the host, and devices by turns, tensor by tensor."""
    n, k = len(devices), len(kinds)
    return [
        [[device] * k for device in devices],
        [[host()] * k],
        [[devices[3 * i % n] for i in range(k)]],
    ]


@pytest.mark.parametrize("spec", [*ORDER, "psgpu#4"])
def test_every_algorithm_moves_what_it_predicts(spec):
    for n, packing in product(REPLICAS, PACKINGS):
        if n == 1 and spec == "hierarchical_copy":
            continue
        devices = md.devices(f"cpu*{n}")
        for compact, dtypes in [
            (None, ("f4", "f8")),
            ("float16", ("f4", "f8")),
            ("bfloat16", ("f4",)),
            (None, ("f2",)),
        ]:
            kinds = [(shape, np.dtype(dtypes[i % len(dtypes)])) for i, shape in enumerate(ODD)]
            outlines = [Outline(int(np.prod(shape)), dtype) for shape, dtype in kinds]
            for reducers in ([host()], None):
                one = comm.make(
                    spec, devices, comm.packer(**packing), reducers=reducers, compact=compact
                )
                for places in wanted(devices, kinds):
                    moved = summed(one, devices, kinds, places)
                    assert one.predicted_bytes(outlines, places) == moved, (n, packing, compact)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_totals_are_those_of_the_page_on_reductions(n):
    """The closed forms of docs/reductions.md, for n·8 alike tensors of L bytes in all."""
    devices = md.devices(f"cpu*{n}")
    kinds = [((n * 8,), np.dtype("f4"))] * (n * 8)
    L = n * 8 * n * 8 * 4
    places = [[device] * len(kinds) for device in devices]
    for spec in ("copy", "pscpu", "pscpu#4", "psgpu", "psgpu#4", "xring", "xring#2", "rechd"):
        moved = summed(comm.make(spec, devices), devices, kinds, places)
        on_host = spec.startswith("pscpu")
        assert moved.total() == (2 * n * L if on_host else 2 * (n - 1) * L), spec
        for device in devices:
            into = sum(v for link, v in moved.items() if link.endswith(f"->{device.short}"))
            if spec != "rechd" or n & (n - 1) == 0:
                assert into == (L if on_host else 2 * (n - 1) * L // n), spec
    moved = summed(comm.make("hierarchical_copy", devices), devices, kinds, places)
    assert moved.total() == 2 * (n - 1) * L
    first = {device.short for device in devices[: (n + 1) // 2]}
    across = sum(v for link, v in moved.items() if len(first & set(link.split("->"))) == 1)
    assert across == 2 * L
    ring = summed(comm.make("xring", devices), devices, kinds, places)
    assert set(ring) == {f"cpu:{r}->cpu:{(r + 1) % n}" for r in range(n)}


# --- policies -----------------------------------------------------------------------------------


class Job:
    """Variables of odd shapes under a policy, and a step that minimizes by some of them."""

    def __init__(self, policy, n, shapes=ODD, dtype="f4", **options):
        name, policy_options = EVERY[policy]
        self.strategy = md.Strategy(f"cpu*{n}", name, **policy_options, **options)
        with self.strategy.scope():
            self.used = [
                md.Variable(np.ones(shape, "f8" if i == 1 else dtype), name=f"v{i}")
                for i, shape in enumerate(shapes)
            ]
            self.unused = md.Variable(np.ones(9, dtype), name="unused")
            self.kept = md.Variable(np.ones(4, dtype), name="kept", trainable=False)
        self.all = [*self.used, self.unused, self.kept]
        self.optimizer = md.optim.Momentum(0.01)

    def step(self):
        def loss():
            parts = [md.ops.reduce_sum(md.ops.cast(v * v, "float32")) for v in self.used]
            return sum(parts[1:], parts[0])

        return float(self.optimizer.minimize(loss, [*self.used, self.unused]))

    def measured(self, warm_up=2, steps=2):
        for _ in range(warm_up):
            self.strategy.run(self.step)
        with md.Bytes(self.strategy) as moved:
            for _ in range(steps):
                self.strategy.run(self.step)
        assert moved.steps == steps
        return moved.measured

    def predicted(self):
        return self.strategy.variable_mgr.predicted_bytes(self.all, read=self.used)


COMPACT = [False, "float16", "bfloat16"]
WAYS = [*product(PACKINGS, COMPACT, (False, True))]


@pytest.mark.parametrize("spec", ORDER)
@pytest.mark.parametrize("policy", EVERY)
def test_every_policy_moves_what_it_predicts(policy, spec):
    """What packing, rounding and overlapping each does with each number is tested by turns."""
    turn = 5 * list(ORDER).index(spec) + list(EVERY).index(policy)
    for n in REPLICAS:
        packing, compact, overlap = WAYS[(turn + n) % len(WAYS)]
        if n == 1 and spec == "hierarchical_copy":
            continue
        options = {"all_reduce_spec": spec, "compact_gradient_transfer": compact, **packing}
        job = Job(policy, n, overlap=overlap, bucket_cap_mb=0.001, **options)
        with job.strategy:
            measured = job.measured()
            assert dict(job.predicted()) == measured, (n, options, overlap)


def test_what_the_policies_move_in_closed_form():
    """Two replicas, gradients and variables of L bytes, one of 36 bytes that nobody uses."""
    L = sum(4 * int(np.prod(shape)) for shape in ODD) + 4
    up, down = {"cpu:0->host": L, "cpu:1->host": L}, {"host->cpu:0": L, "host->cpu:1": L}
    unread = 36 + 16  # areas hold also what is not used, and what is not trained
    expected = {
        "independent": {},
        "parameter_server": up | down,
        "parameter_server+staged_vars": up | {link: n + unread for link, n in down.items()},
        "replicated": {"cpu:0->cpu:1": L, "cpu:1->cpu:0": L},
        "replicated+relaxed": up | down,
    }
    for policy, moved in expected.items():
        with (job := Job(policy, 2, overlap=False)).strategy:
            assert job.measured() == dict(job.predicted()) == moved, policy
    with (job := Job("replicated", 2, overlap=False, all_reduce_spec="copy")).strategy:
        assert job.measured() == dict(job.predicted()) == up | down


@pytest.mark.parametrize("option", ["gradient_clip_norm", "loss_scale"])
def test_sums_that_are_looked_at_first_are_taken_on_the_host(option):
    value = {"gradient_clip_norm": 1.0, "loss_scale": LossScale(8.0, automatic=True)}[option]
    with (job := Job("replicated", 2, overlap=False)).strategy:
        job.optimizer = md.optim.SGD(0.01, **{option: value})
        measured = job.measured()
        assert dict(job.predicted()) == measured and "host->cpu:1" in measured


@pytest.mark.parametrize("policy", CACHING)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_caches(policy, n):
    """One variable has 64 Ki elements, so its cache is on a compute device."""
    with (job := Job(policy, n, [(64, 1024), (3,), (5,), (7,)])).strategy:
        assert job.measured() == dict(job.predicted())


def test_a_variable_that_is_read_and_not_trained():
    with (job := Job("parameter_server", 2)).strategy:
        trained, job.used = job.used, [*job.used, job.kept]
        manager = job.strategy.variable_mgr
        predicted = manager.predicted_bytes(job.all, read=job.used, summed=trained)
        assert job.measured() == dict(predicted)
        assert job.predicted() == predicted, "what is not trainable has no gradient"


@pytest.mark.parametrize("policy", EVERY)
def test_rows_of_sparse_gradients_are_counted_apart(policy):
    """Of a table no one knows before how many rows a batch uses."""
    name, options = EVERY[policy]
    with md.Strategy("cpu*2", name, **options) as strategy:
        with strategy.scope():
            table = md.Variable(np.ones((10, 3), "f4"), name="table")
            w = md.Variable(np.ones(3, "f4"), name="w")
        optimizer = md.optim.SGD(0.1)

        def step():
            rows = md.constant([md.get_replica_context().replica_id, 5])
            optimizer.minimize(
                lambda: md.ops.reduce_sum(md.ops.embedding(table, rows) * w), [table, w]
            )

        for _ in range(2):
            strategy.run(step)
        with md.Bytes(strategy) as moved:
            for _ in range(3):
                strategy.run(step)
        predicted = strategy.variable_mgr.predicted_bytes([table, w], summed=[w])
        assert moved.measured == dict(predicted)
        # A row is 3 floats and its index, 20 bytes. Two go to replica 0, and three to each copy;
        # where replicas update parts, replica 0 has the table, and writes three rows of 12 to both.
        in_parts = strategy.variable_mgr.apply.in_parts
        rows = {
            "independent": {},
            "parameter_server": {"cpu:1->cpu:0": 40, "cpu:0->host": 60},
            "parameter_server_device": {"cpu:1->cpu:0": 40},
            "replicated": {"cpu:1->cpu:0": 40, "cpu:0->cpu:1": 60 + 36 * in_parts},
        }
        kind = policy.removesuffix("_caching").partition("+")[0]
        assert moved.others.get("rows", {}) == rows[kind]


def test_of_several_batches_to_an_update_each_reads():
    for policy in EVERY:
        with (job := Job(policy, 2)).strategy:
            job.optimizer = md.optim.SGD(0.01, gradient_accumulation_steps=3)
            measured = job.measured(warm_up=6, steps=6)
            predicted = job.strategy.variable_mgr.predicted_bytes(job.all, read=job.used, runs=3)
            assert {link: 3 * nbytes for link, nbytes in measured.items()} == pytest.approx(
                dict(predicted)
            )


def test_a_replica_without_an_example_brings_nothing():
    """Its gradients have no say, so nobody reads them; it gets the sum like all."""
    with md.Strategy("cpu*3", all_reduce_spec="copy") as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(5, "f4"), name="w")
        optimizer = md.optim.SGD(0.1)

        def step():
            replica = md.get_replica_context().replica_id
            optimizer.minimize(lambda: md.ops.reduce_sum(w * w), [w], count=replica)

        with md.Bytes(strategy) as moved:
            strategy.run(step)
    up, down = {"cpu:1->host", "cpu:2->host"}, {f"host->cpu:{i}" for i in range(3)}
    assert moved.measured == dict.fromkeys(up | down, 20)


# --- what no policy moves -----------------------------------------------------------------------


def test_the_input_is_counted_apart_batch_by_batch():
    images = np.ones((6, 4), "f4")
    with md.Strategy("cpu*2") as strategy:
        with md.Bytes(strategy) as moved:
            for batch in strategy.distribute_dataset([images] * 5):
                strategy.run(lambda x: x, batch)
        assert moved.input == {"host->cpu:0": 48, "host->cpu:1": 48}
        assert moved.measured == {} and moved.steps == 5


def test_values_that_a_program_moves_itself():
    with md.Strategy("cpu*3") as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(5, "f4"), name="w")
        one = strategy.run(lambda: md.get_replica_context().replica_id + md.constant(np.ones(2)))
        there = md.ops.constant(np.ones(4, "f4"))  # on cpu:0
        run = strategy.run(lambda: None)

        def moved_by(do):
            with md.Bytes(strategy) as moved:
                do()
                strategy.run(lambda: None)
            return moved.others.get("values", {})

        assert run is None
        to_others = {"cpu:0->cpu:1", "cpu:0->cpu:2"}
        assert moved_by(lambda: strategy.broadcast(there)) == dict.fromkeys(to_others, 16)
        assert moved_by(lambda: strategy.gather(one, 0)) == {
            "cpu:1->cpu:0": 16,
            "cpu:2->cpu:0": 16,
        }
        with strategy.scope():
            hosts = moved_by(lambda: w.assign(np.zeros(5, "f4")))
            assert hosts == {f"host->cpu:{i}": 20 for i in range(3)}
            value = md.ops.constant(np.ones(5, "f4"))
            assert moved_by(lambda: w.assign(value)) == dict.fromkeys(to_others, 20)
        with md.Bytes(strategy) as moved:
            strategy.reduce("sum", one, destinations="cpu:2")
            strategy.run(lambda: None)
        assert moved.measured == {
            "cpu:0->host": 16,
            "cpu:1->host": 16,
            "cpu:2->host": 16,
            "host->cpu:2": 16,
        }


def test_a_staging_area_of_ones_own():
    with md.Strategy("cpu*2") as strategy, md.Bytes(strategy) as moved:
        area = md.StagingArea("float32", device="cpu:1")
        area.put(np.ones(3, "f4"))
        area.get()
        strategy.run(lambda: None)
        area.close()
    assert moved.others == {"staging": {"host->cpu:1": 12}}


# --- the instrument -----------------------------------------------------------------------------


def test_with_statements_add_up_and_pauses_do_not_count():
    with (job := Job("replicated", 2, all_reduce_spec="copy")).strategy:
        right = job.measured()
        moved = md.Bytes(job.strategy)
        for _ in range(2):
            with moved:
                job.strategy.run(job.step)
                with moved.paused():
                    job.strategy.run(job.step)
            job.strategy.run(job.step)
        assert moved.steps == 2 and moved.measured == right
        assert "host->cpu:1" in str(moved)


def test_nobody_watches_after_an_error():
    with md.Strategy("cpu*2") as strategy:
        with pytest.raises(ZeroDivisionError), md.Bytes(strategy), md.Staleness():
            strategy.run(lambda: 1 / 0)
        assert observe.counting == ()


def test_counting_is_no_watching():
    """Who counts does not make every place tell of times and order."""
    with md.Strategy("cpu*2") as strategy, md.Bytes(strategy), md.Staleness():
        assert len(observe.counting) == 2 and observe.watching == ()


def test_an_instrument_watches_once_at_a_time():
    with md.Strategy("cpu*2") as strategy:
        for instrument in (md.Bytes(strategy), md.Staleness()):
            with instrument, pytest.raises(ValueError, match="watches already"), instrument:
                pass
            with instrument:
                pass
