"""Input of several workers: each reads a part of the data, and all come to an end together."""

from __future__ import annotations

from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import pytest
import ranks

import minidist as md
from minidist.data import Batches, Examples
from minidist.errors import PeerError, UsageError
from minidist.input import Share, split_sizes

PATIENCE = {"report_after": 2.0, "deadline": 20.0}


def strategy_of(cluster, devices):
    return md.Strategy(f"cpu*{devices}", "collective_all_reduce", cluster=cluster, **PATIENCE)


def lists(batch):
    """Return what each replica of this process has of a batch that is one PerReplica."""
    return [part.numpy().tolist() for part in md.local_results(batch)]


# --- global batches -----------------------------------------------------------------------------

SIZES = (12, 7, 3, 1, 5)


def whole_batches():
    starts = np.cumsum([0, *SIZES])
    return [np.arange(a, b) for a, b in pairwise(starts)]


class OnlyParts:
    """Global batches that must not be made whole."""

    def __iter__(self):
        raise AssertionError("a whole batch was asked for")

    def parts(self, rows):
        return [md.input.Part(batch[rows(len(batch))], len(batch)) for batch in whole_batches()]


def each_worker_gets_its_rows(cluster, devices=(1, 2)):
    for count in devices:
        with strategy_of(cluster, count) as strategy:
            n = len(cluster.workers) * count
            assert (strategy.num_replicas, strategy.first_replica) == (n, cluster.task * count)
            own = slice(strategy.first_replica, strategy.first_replica + count)
            expected = [
                np.split(batch, np.cumsum(split_sizes(len(batch), n))[:-1])[own]
                for batch in whole_batches()
            ]
            for source in (whole_batches(), OnlyParts(), iter(whole_batches())):
                got = [lists(batch) for batch in strategy.distribute_dataset(source)]
                assert got == [[part.tolist() for part in parts] for parts in expected]


def unequal_numbers_of_devices(cluster):
    """Worker 0 has two of three replicas, so two thirds of the examples."""
    with strategy_of(cluster, 2 - cluster.task) as strategy:
        (batch,) = strategy.distribute_dataset([np.arange(7)])
        assert lists(batch) == ([[0, 1, 2], [3, 4]], [[5, 6]])[cluster.task]


def batches_of_examples_are_read_in_part(cluster):
    examples = Examples(np.arange(10.0, dtype=np.float32).reshape(10, 1, 1, 1), np.arange(10))
    batches = Batches(examples, 4, seed=3, epochs=2)
    with strategy_of(cluster, 1) as strategy:
        got = []
        for images, labels in strategy.distribute_dataset(batches):
            assert images.values[0].numpy().ravel().tolist() == lists(labels)[0]
            got.append(lists(labels)[0])
    half = slice(0, None) if len(cluster.workers) == 1 else None
    for labels, (_, whole) in zip(got, batches, strict=True):
        parts = np.array_split(whole, len(cluster.workers))
        assert labels == (whole[half] if half else parts[cluster.task]).tolist()


# --- input functions ----------------------------------------------------------------------------


def contexts_are_of_all_workers(cluster):
    workers = len(cluster.workers)
    with strategy_of(cluster, 2) as strategy:
        seen = []

        def input_fn(ctx):
            seen.append(ctx)
            return md.shard(range(8), ctx.num_input_pipelines, ctx.input_pipeline_id)

        got = [lists(batch) for batch in strategy.make_input_fn_iterator(input_fn)]
        assert seen == [md.InputContext(workers, cluster.task, 2 * workers)]
        own = list(range(8))[cluster.task :: workers]
        assert got == [own[i : i + 2] for i in range(0, len(own), 2)]

        seen.clear()
        got = [lists(batch) for batch in strategy.make_input_fn_iterator(input_fn, "per_replica")]
        first = 2 * cluster.task
        assert seen == [md.InputContext(2 * workers, first + i, 2 * workers) for i in range(2)]
        own = [list(range(8))[first + i :: 2 * workers] for i in range(2)]
        assert got == [list(row) for row in zip(*own, strict=True)]


LENGTHS = (3, 5, 4)  # batches of each worker


def own_batches(task):
    return [np.full(2, 10 * task + k) for k in range(LENGTHS[task])]


def rounds(task, devices, ends):
    """Return what the replicas of a worker get, where every worker has some batches of its own."""
    workers = [[batch.tolist() for batch in own_batches(t)] for t in range(len(LENGTHS))]
    dealt = [list(zip_longest(*[iter(own)] * devices)) for own in workers]
    if ends == "drop":
        full = [sum(None not in row for row in rows) for rows in dealt]
        return [list(row) for row in dealt[task][: min(full)]]
    longest = max(map(len, dealt))
    if ends == "join":
        rows = dealt[task] + [(None,) * devices] * (longest - len(dealt[task]))
        return [[part or [] for part in row] for row in rows]
    # pad: a row that is not full is filled from the beginning, then all begins anew
    own, got = workers[task], []
    padded = list(zip(*[iter(own + own[: -len(own) % devices])] * devices, strict=True))
    while len(got) < longest:
        got += padded
    return [list(row) for row in got[:longest]]


def unequal_shares_end_together(cluster, ends):
    for devices in (1, 2):
        with strategy_of(cluster, devices) as strategy:
            dataset = strategy.make_input_fn_iterator(
                lambda ctx: own_batches(ctx.input_pipeline_id), ends=ends
            )
            for _ in range(2):  # it can be read again, also after a loop that was left early
                assert [lists(batch) for batch in dataset] == rounds(cluster.task, devices, ends)
                for batch in dataset:
                    assert lists(batch) == rounds(cluster.task, devices, ends)[0]
                    break


def joined(cluster):
    unequal_shares_end_together(cluster, "join")


def dropped(cluster):
    unequal_shares_end_together(cluster, "drop")


def padded(cluster):
    unequal_shares_end_together(cluster, "pad")


def drop_remainder_counts_the_examples_of_all(cluster):
    """The second round is short in one worker, so no worker gets it; the third one is full."""
    sizes = [(2, 2, 2), (2, 1, 2), (2, 2, 2)]
    with strategy_of(cluster, 1) as strategy:
        dataset = strategy.make_input_fn_iterator(
            lambda ctx: [np.full(n, k) for k, n in enumerate(sizes[ctx.input_pipeline_id])],
            drop_remainder=True,
        )
        assert [lists(batch) for batch in dataset] == [[[0, 0]], [[2, 2]]]


def a_worker_without_data(cluster):
    """It learns from the others what an empty batch looks like."""
    element = {"image": np.ones((2, 4), np.float32), "label": [np.ones(2, np.int64), None], "at": 7}
    with strategy_of(cluster, 1) as strategy:
        dataset = strategy.make_input_fn_iterator(lambda ctx: [element] if cluster.task else [])
        (batch,) = dataset
        own = md.select_replica(0, batch)
        assert own["image"].dtype == np.float32 and own["label"][0].dtype == np.int64
        assert own["image"].shape == ((2, 4) if cluster.task else (0, 4))
        assert own["label"][0].shape == ((2,) if cluster.task else (0,))
        assert own["label"][1] is None and own["at"].shape == ()


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


def a_worker_that_cannot_know_what_it_lacks(cluster):
    pairs = [Pair(np.ones(2), np.ones(2))]
    with strategy_of(cluster, 1) as strategy:
        dataset = strategy.make_input_fn_iterator(lambda ctx: pairs if cluster.task else [])
        if cluster.task == 0:
            with pytest.raises(UsageError, match="worker:0 has no data at all"):
                dataset.get_next()
        else:
            dataset.get_next()
            with pytest.raises(PeerError, match=r"worker:0 .* has failed .* no data at all"):
                dataset.get_next()


def padding_that_cannot_begin_anew(cluster):
    with strategy_of(cluster, 1) as strategy:
        batches = own_batches(cluster.task)
        dataset = strategy.make_input_fn_iterator(lambda ctx: iter(batches), ends="pad")
        wanted = r"worker:0.* nothing to repeat"
        with pytest.raises((UsageError, PeerError), match=wanted) as caught:
            for _ in dataset:
                pass
        assert caught.type is (PeerError if cluster.task else UsageError)


def data_that_fails_in_one_worker(cluster):
    def broken(ctx):
        yield np.zeros(1)
        if cluster.task == 1:
            raise OSError("the disk is on fire")
        yield np.zeros(1)

    with strategy_of(cluster, 1) as strategy:
        dataset = strategy.make_input_fn_iterator(broken)
        dataset.get_next()
        with pytest.raises((OSError, PeerError), match="the disk is on fire") as caught:
            dataset.get_next()
        if cluster.task != 1:
            assert "worker:1" in str(caught.value)


def a_worker_that_stops_early(cluster):
    strategy = strategy_of(cluster, 1)
    dataset = strategy.make_input_fn_iterator(lambda ctx: [np.zeros(1)] * 3)
    dataset.get_next()
    if cluster.task == 1:
        strategy.close()
        return
    with pytest.raises(PeerError, match=r"worker:1 .* has ended .* take batch 2 of a data set"):
        dataset.get_next()
    strategy.close()


def a_training_on_unequal_shares(cluster):
    """A mean weights all examples alike, also in rounds in which a worker has none."""
    with strategy_of(cluster, 1) as strategy:
        with strategy.scope():
            w = md.Variable(0.0, name="w")
        optimizer = md.optim.SGD(0.1)

        def step(x):
            def loss():
                return md.ops.reduce_mean(md.ops.square(w.read() - x))

            optimizer.minimize(loss, [w], count=x.shape[0])

        data = [[1.0, 2.0], [3.0, 4.0, 5.0]][cluster.task]
        dataset = strategy.make_input_fn_iterator(
            lambda ctx: [np.full(cluster.task + 1, x, np.float32) for x in data]
        )
        for batch in dataset:
            strategy.run(step, batch)
        expected = 0.0
        for row in ([1, 3, 3], [2, 4, 4], [5, 5]):
            expected -= 0.1 * 2 * (expected - np.mean(row))
        assert float(w.numpy()) == pytest.approx(expected, rel=1e-6)


CASES = {
    "rows of one worker": (1, 0, each_worker_gets_its_rows),
    "rows of two workers": (2, 0, each_worker_gets_its_rows),
    "rows of three workers": (3, 0, each_worker_gets_its_rows),
    "unequal numbers of devices": (2, 0, unequal_numbers_of_devices),
    "parts of Batches": (3, 0, batches_of_examples_are_read_in_part),
    "contexts": (2, 0, contexts_are_of_all_workers),
    "join": (3, 0, joined),
    "drop": (3, 0, dropped),
    "pad": (3, 0, padded),
    "drop_remainder": (3, 0, drop_remainder_counts_the_examples_of_all),
    "no data": (2, 0, a_worker_without_data),
    "no data of unknown looks": (2, 0, a_worker_that_cannot_know_what_it_lacks),
    "nothing to repeat": (3, 0, padding_that_cannot_begin_anew),
    "failing data": (3, 0, data_that_fails_in_one_worker),
    "stopping early": (2, 0, a_worker_that_stops_early),
    "training on unequal shares": (2, 0, a_training_on_unequal_shares),
}


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, 3, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_case(outcome, case):
    outcome.check(case)


# --- without ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["join", "drop", "pad"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_one_worker_alone_ends_by_the_same_rules(ends, devices):
    with md.Strategy(f"cpu*{devices}") as strategy:
        dataset = strategy.make_input_fn_iterator(lambda ctx: own_batches(1), ends=ends)
        got = [lists(batch) for batch in dataset]
    own = [batch.tolist() for batch in own_batches(1)]
    rest = -len(own) % devices
    if ends == "drop":
        own = own[: len(own) - len(own) % devices]
    else:
        own += [[]] * rest if ends == "join" else own[:rest]
    assert got == [own[i : i + devices] for i in range(0, len(own), devices)]


def test_an_end_that_there_is_not_is_an_error():
    with md.Strategy("cpu*2") as strategy:
        with pytest.raises(UsageError, match="'join', 'drop', 'pad', not 'stop'"):
            strategy.make_input_fn_iterator(lambda ctx: [], ends="stop")
        with pytest.raises(UsageError, match=r"pad.*drop_remainder"):
            strategy.make_input_fn_iterator(lambda ctx: [], ends="pad", drop_remainder=True)


def test_shares_are_a_partition_of_a_global_batch():
    for counts in [(1,), (2, 2), (1, 3, 2)]:
        n = sum(counts)
        shares = [Share(count, sum(counts[:w]), n) for w, count in enumerate(counts)]
        for examples in range(3 * n):
            ends = [0]
            for share in shares:
                own = share.ends(examples)
                assert own[0] == ends[-1] and len(own) == share.count + 1
                assert share.rows(examples) == slice(own[0], own[-1])
                ends += own[1:]
            assert np.diff(ends).tolist() == split_sizes(examples, n)


def test_a_part_of_another_size_is_an_error():
    class Wrong:
        def __iter__(self):
            return iter(())

        def parts(self, rows):
            return [md.input.Part(np.arange(3), 4)]

    with (
        md.Strategy("cpu*2") as strategy,
        pytest.raises(md.errors.ShapeError, match=r"4 of the 4 examples .* given 3"),
    ):
        strategy.distribute_dataset(Wrong()).get_next()


def test_parts_of_batches_are_rows_of_the_whole_ones():
    examples = Examples(np.arange(11.0, dtype=np.float32).reshape(11, 1, 1, 1), np.arange(11))
    for shuffle in (True, False):
        batches = Batches(examples, 4, seed=1, shuffle=shuffle, epochs=2, start=1)
        parts = list(batches.parts(lambda size: slice(1, size - 1)))
        whole = list(batches)
        assert [part.examples for part in parts] == [len(labels) for _, labels in whole]
        for part, (images, labels) in zip(parts, whole, strict=True):
            assert part.values[0].tolist() == images[1:-1].tolist()
            assert part.values[1].tolist() == labels[1:-1].tolist()


if __name__ == "__main__":
    ranks.main(CASES)
