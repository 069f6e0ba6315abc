"""Trainings of several processes that go on from checkpoints, and what goes wrong meanwhile.

Real processes throughout. First in clusters side by side, then in programs that are killed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import ranks

import minidist as md
from minidist import context
from minidist.checkpoint import Keys
from minidist.errors import DataError, PeerError, UsageError

FOLDER = Path(os.environ.get("MINIDIST_TEST_FOLDER", "."))
STEPS, SAVED = 5, 2  # of a training, and after how many it is saved
ON_READ = md.VariableSynchronization.ON_READ


class Training:
    """All that has a state: batch norm, dropout, Adam, a loss scale, and each kind of ON_READ."""

    def __init__(self, cluster, policy, devices, seed=5, **options):
        context.seed(seed)
        where = {} if policy == "replicated" else {"cluster": cluster}
        self.cluster = cluster
        self.strategy = md.Strategy(f"cpu*{devices}", policy, **where, **options)
        with self.strategy.scope():
            self.model = md.nn.Sequential(
                [md.nn.Dense(5), md.nn.BatchNorm(), md.nn.Dropout(0.4), md.nn.Dense(1)]
            )
            self.model.build((3,))
            self.seen = [
                md.Variable(
                    np.zeros(2, "f4"),
                    name=f"seen/{how.name}",
                    synchronization=ON_READ,
                    aggregation=how,
                    trainable=False,
                )
                for how in md.VariableAggregation
            ]
        scale = md.optim.LossScale(8.0, automatic=True, every_n=2)
        self.optimizer = md.optim.Adam(0.1, gradient_clip_norm=0.5, loss_scale=scale)
        self.what = ([self.model, *self.seen], self.optimizer)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()

    def train(self, first, last=STEPS, after=lambda step: None):
        rng = np.random.default_rng(7)
        sizes = [6, 3, 4, 1, 5]
        batches = [
            (rng.normal(size=(n, 3)).astype("f4"), rng.normal(size=(n, 1)).astype("f4"))
            for n in sizes
        ]
        feed = iter(self.strategy.distribute_dataset(batches[first:last]))
        for step in range(first, last):
            self.strategy.run(self.step, *next(feed))
            after(step + 1)
        feed.close()

    def step(self, x, y):
        def loss():
            return md.ops.reduce_mean(md.ops.square(self.model(x, training=True) - y))

        self.optimizer.minimize(loss, self.model.trainable_variables, count=x.shape[0])
        replica = md.get_replica_context().replica_id
        for v in self.seen:
            v.assign_add(np.array([x.shape[0], replica], "f4"))

    def state(self):
        """Return all that is the same for every way to spread the replicas."""
        apart = self.seen[0]
        assert apart.aggregation is md.VariableAggregation.NONE
        arrays = {v.name: v.numpy().tobytes() for v in [*self.model.variables, *self.seen[1:]]}
        own = [copy.tensor.numpy().tolist() for copy in apart.copies]
        every = ranks_bring(self.strategy, own)
        scale = self.optimizer.loss_scale.state
        return arrays, every, self.optimizer.iterations, scale, self.strategy.step


def ranks_bring(strategy, own):
    """Return what all workers bring, one after the other."""
    import json

    brought = strategy.site.peers.meet("compare", json.dumps(own).encode())
    return [each for row in brought for each in json.loads(row)]


PLACES = {  # two replicas, which sum in one order wherever they are
    "one process": ("replicated", 1, 2, 0, {}),
    "two processes": ("collective_all_reduce", 2, 1, 0, {}),
    "one ps": ("parameter_server", 2, 1, 1, {}),
    "two ps": ("parameter_server", 2, 1, 2, {}),
    "shadow": ("distributed_replicated", 2, 1, 2, {}),
}
LATE = {
    "relaxed": ("collective_all_reduce", 2, 1, 0, {"variable_consistency": "relaxed"}),
    "relaxed in one": ("replicated", 1, 2, 0, {"variable_consistency": "relaxed"}),
    "staged in one": ("parameter_server", 1, 2, 0, {"staged_vars": True}),
    "staged": ("parameter_server", 2, 1, 1, {"staged_vars": True}),
    "staged with two ps": ("parameter_server", 2, 1, 2, {"staged_vars": True}),
}
ALIKE = [
    list(PLACES),
    ["relaxed", "relaxed in one"],
    ["staged in one", "staged", "staged with two ps"],
]


def in_workers(place, work):
    """Return a case: `work(training)` in each worker."""
    policy, workers, devices, ps, options = place

    def case(cluster):
        if cluster.job == "ps":
            cluster.serve()
            return
        try:
            with Training(cluster, policy, devices, **options) as training:
                work(training)
        finally:
            cluster.leave()

    return workers, ps, case


def saves(name):
    def work(training):
        training.train(0, SAVED)
        md.save(FOLDER / name, *training.what)
        training.train(SAVED)
        end = repr(training.state())
        if training.cluster.is_chief:
            (FOLDER / f"{name}.end").write_text(end)

    return work


def goes_on(name):
    def work(training):
        alike = next(names for names in ALIKE if name in names)
        expected = (FOLDER / f"{alike[0]}.end").read_text()
        for other in alike:
            assert (FOLDER / f"{other}.end").read_text() == expected, other
            context.seed(9)
            assert md.load(FOLDER / other, *training.what) == Keys((), ())
            training.train(SAVED)
            assert repr(training.state()) == expected, other

    return work


CASES = {}
for _name, _place in {**PLACES, **LATE}.items():
    CASES[f"{_name} saves"] = in_workers(_place, saves(_name))
for _name, _place in {**PLACES, **LATE}.items():
    CASES[f"{_name} goes on"] = in_workers(_place, goes_on(_name))


def in_a_meeting(training):
    """A merge function runs once in each worker: there all of them can save, and load."""
    path = FOLDER / "meeting"
    training.train(0, SAVED)
    expected = training.state()[0]

    def step():
        md.get_replica_context().merge_call(lambda strategy: md.save(path, *training.what))

    training.strategy.run(step)
    training.train(SAVED)
    md.load(path, *training.what)
    assert training.state()[0] == expected


CASES["in a meeting"] = in_workers(("collective_all_reduce", 2, 2, 0, {}), in_a_meeting)


# --- who trains apart ---------------------------------------------------------------------------


def independent_replicas(training):
    """Each replica's own model is there again, among more processes and fewer."""
    devices = len(training.strategy.devices)
    path = FOLDER / "independent"
    kernel = training.model.trainable_variables[0]

    def values():
        own = [copy.tensor.numpy().tolist() for copy in kernel.copies]
        counts = [training.optimizer.iterations_at(place) for place in range(devices)]
        return ranks_bring(training.strategy, own), ranks_bring(training.strategy, counts)

    training.train(0, SAVED)
    if not path.with_name("independent.index.json").exists():
        md.save(path, *training.what)
        expected = values()
        training.train(SAVED)
        assert values() != expected
    else:
        expected = None
    assert md.load(path, *training.what) == Keys((), ())
    found = values()
    assert len(found[0]) == training.strategy.num_replicas == 4
    assert len({str(each) for each in found[0]}) == 4 and found == (expected or found)
    if expected is None:
        assert repr(found) == (FOLDER / "independent.end").read_text()
    elif training.cluster.is_chief:
        (FOLDER / "independent.end").write_text(repr(found))


def asynchronous(training):
    """Saved is what the ps have once all pushes of all workers are in; all go on from there."""
    path = FOLDER / "asynchronous"
    training.train(0, SAVED + training.cluster.task)
    md.save(path, *training.what)
    kernel = training.model.trainable_variables[0]
    start = np.zeros(kernel.shape, "f4")
    with md.Strategy("cpu", "collective_all_reduce", cluster=training.cluster) as other:
        with other.scope():
            copy = md.Variable(start, name=kernel.name)
        optimizer = md.optim.Adam(0.1)
        md.load(path, copy, optimizer, strict=False)
    # Two workers, of which one has made one step more.
    assert optimizer.iterations == 2 * SAVED + 1
    training.train(0, 1)
    md.load(path, *training.what)
    assert kernel.numpy().tobytes() == copy.numpy().tobytes()
    training.train(0, 1)
    md.save(path, *training.what)
    md.load(path, *training.what)


CASES["independent"] = in_workers(("independent", 2, 2, 0, {}), independent_replicas)
CASES["independent, four"] = in_workers(("independent", 4, 1, 0, {}), independent_replicas)
CASES["independent, one"] = in_workers(("independent", 1, 4, 0, {}), independent_replicas)
CASES["asynchronous"] = in_workers(
    ("parameter_server", 2, 1, 2, {"cross_replica_sync": False}), asynchronous
)


# --- what goes wrong ----------------------------------------------------------------------------


def a_disk_that_is_full_for_one(training):
    """Of one rank, be it a worker or a ps: what was there before stays, and all go on."""
    path, cluster = FOLDER / f"full {training.strategy.variable_mgr.name}", training.cluster
    training.train(0, 1)
    md.save(path, *training.what)

    def names():  # without that of the lock, which is gone when worker 0 has raised
        return {each.name for each in FOLDER.glob(f"{path.name}*")} - {f"{path.name}.partial"}

    before = names()
    expected = training.state()
    training.train(1, 2)
    by = "ps:1" if cluster.servers else "worker:1"
    for _ in range(2):
        with pytest.raises(DataError, match=rf"{by}.*cannot be saved: No space left on device"):
            md.save(path, *training.what)
        assert names() == before
    training.train(2, 3)
    assert md.load(path, *training.what) == Keys((), ())
    assert training.state() == expected
    md.save(path, *training.what)
    assert names() != before


def full_for(who, case):
    """Let the second and the third file that a rank writes find the disk full."""
    workers, servers, work = case

    def limited(cluster):
        real, saved = os.fsync, []

        def fsync(descriptor):
            saved.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            files = [path for path in saved if path.endswith(".partial")]
            if saved[-1] in files and len(files) in (2, 3):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        os.fsync = fsync if cluster.me == who else real
        try:
            work(cluster)
        finally:
            os.fsync = real

    return workers, servers, limited


CASES["a full disk"] = full_for(
    "worker:1", in_workers(PLACES["two processes"], a_disk_that_is_full_for_one)
)
CASES["a full disk of a ps"] = full_for(
    "ps:1", in_workers(PLACES["two ps"], a_disk_that_is_full_for_one)
)


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def a_folder_of_several(training):
    """One holds the lock, all go by what it finds, and whole sets are removed."""
    cluster = training.cluster
    folder = FOLDER / f"folder {training.strategy.variable_mgr.name}"
    with md.TrainDir(folder, keep=2, cluster=cluster) as kept:
        assert kept.newest() is None
        ends = {}

        def save(step):
            kept.save(step, *training.what, extra={"worker": 0})
            ends[step] = training.state()

        training.train(0, after=save)
        assert kept.steps() == (STEPS - 1, STEPS)
        names = sorted(path.name for path in folder.iterdir())
        assert sum(name.endswith(".index.json") for name in names) == 2
        assert all(name.split("-")[1].split(".")[0] in "45" for name in names if name != "lock")
        # Lock: another one of this job, and one process of it alone.
        with pytest.raises(DataError, match=r"another training \(process \d+ on .*\) saves"):
            md.TrainDir(folder, cluster=cluster)
        looking = md.TrainDir(folder, write=False, cluster=md.cluster.alone())
        assert looking.steps() == (STEPS - 1, STEPS)
        with pytest.raises(
            UsageError, match=r"was opened by worker:0 together, but the variables'"
        ):
            looking.load(*training.what)
        with pytest.raises(UsageError, match="a step is a whole number of at least 0"):
            kept.save(-1, *training.what)
        with pytest.raises(DataError, match=r"has a checkpoint of step 5, and step 3 would not be"):
            kept.save(3, *training.what)
        with pytest.raises(DataError, match=r"no checkpoint of step 1 is there; it has: 4, 5"):
            kept.load(*training.what, step=1)
        for step in (4, None):
            assert kept.load(*training.what, step=step) == (step or 5, {"worker": 0})
            assert training.state() == ends[step or 5]
        training.strategy.site.peers.meet("wait for all")
        shard = sorted(folder.glob("step-5-*"))[-1]
        if cluster.is_chief:
            damage(shard)
        training.strategy.site.peers.meet("wait for the damage")
        with pytest.raises(
            DataError,
            match=rf"{shard.name}: the file is damaged.*The one of step 4 "
            r"is whole: to go on from it, move step-5\.safetensors\.index\.json away",
        ):
            kept.load(*training.what)
        assert training.state() == ends[5]
        training.strategy.site.peers.meet("wait for all")
        if cluster.is_chief:
            folder.joinpath("step-5.safetensors.index.json").unlink()
        assert kept.newest() == 4
    with md.TrainDir(folder, cluster=cluster) as again:
        assert kept.steps() == again.steps() == (4,)
        assert not list(folder.glob("step-5*"))  # shards without an index are nobody's
        with pytest.raises(UsageError, match="was opened to load only, or closed"):
            kept.save(6, *training.what)


def folders_that_are_not_the_same(training):
    """Each rank has one of that name, on a disk of its own."""
    own = FOLDER / training.cluster.me / "run"
    if training.cluster.is_chief:
        own.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=r"^worker:1 \(on .*\): .*/worker:1/run: here it is not the "
            r"folder that worker:0 \(on .*\) has opened; .* must be in a folder that",
        ):
            md.TrainDir(own, cluster=training.cluster)
        own.mkdir(parents=True, exist_ok=True)
        if not training.cluster.is_chief:
            (own / "lock").write_text("process 1 on another")
    with pytest.raises(
        DataError, match=r"although worker:1 \(on .*\) has written it; .* machines share"
    ):
        md.save(own / "file", *training.what)
    assert [path.name for path in own.iterdir()] == ["lock"]
    with pytest.raises(DataError, match=r"there is no such file, nor an index of that name"):
        md.load(own / "file", *training.what)


for _name in ("two processes", "two ps"):
    CASES[f"a folder of {_name}"] = in_workers(PLACES[_name], a_folder_of_several)
CASES["folders that are not the same"] = in_workers(
    PLACES["two processes"], folders_that_are_not_the_same
)


def a_rank_that_raises_while_others_save(training):
    training.train(0, 1)
    if training.cluster.task == 1:
        with pytest.raises(ZeroDivisionError):
            training.strategy.run(lambda: 1 / 0)
    else:
        with pytest.raises(PeerError, match=r"worker:1 .*has failed.*ZeroDivisionError"):
            md.save(FOLDER / "never", *training.what)
    assert not list(FOLDER.glob("never*index*"))


CASES["a rank that raises while others save"] = in_workers(
    PLACES["two processes"], a_rank_that_raises_while_others_save
)


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    names = ranks.chosen(request, CASES)
    return ranks.run(__file__, 4, *names, env={"MINIDIST_TEST_FOLDER": str(folder)})


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


if __name__ == "__main__":
    ranks.main(CASES)
