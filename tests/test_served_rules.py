"""What holds of variables on parameter servers beside their values after given gradients."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import ranks
from oracle import SHARED, Oracle, TwoLayers, split
from policies import CONSTANTS, optimizer, replica_id, same_bits
from policies import Trainer as LocalTrainer
from scenarios import global_batch, parts, two_layers
from served import SYNCHRONOUS, Trainer, by_worker, in_workers

import minidist as md
from minidist import errors
from minidist.cluster import alone
from minidist.optim.loss_scale import LossScale
from minidist.server.rows import Changed
from minidist.variable_mgr.pushing import Outgoing

RANKS = 5
STARTS = [np.arange(12, dtype=np.float32).reshape(3, 4), np.float32([3, 4]), np.float32([7])]


def given(cluster, step, starts=STARTS, devices=1):
    rng = np.random.default_rng(step)
    n = len(cluster.workers) * devices
    return [[rng.normal(size=s.shape).astype(s.dtype) for s in starts] for _ in range(n)]


# --- optimizers -----------------------------------------------------------------------------------


def clips_by_the_norm_over_all_ps(cluster):
    for rule, limit, large in (("momentum", 0.5, 1.0), ("adam", 2.0, 1e30), ("sgd", 1e9, 1.0)):
        alone = md.Strategy("cpu*2", "parameter_server")
        with alone.scope():
            variables = [md.Variable(start, name=f"v{i}") for i, start in enumerate(STARTS)]
        theirs, ours = (optimizer(rule, gradient_clip_norm=limit) for _ in range(2))
        with alone, Trainer(cluster, "parameter_server", STARTS, 1) as trainer:
            for step in range(3):
                gradients = given(cluster, step)
                gradients = [[g * g.dtype.type(large) for g in row] for row in gradients]
                trainer.apply(ours, gradients)
                alone.run(apply_own, theirs, variables, gradients)
                trainer.check([variable.numpy() for variable in variables])


def apply_own(opt, variables, gradients):
    mine = gradients[replica_id()]
    opt.apply_gradients([(md.constant(g), v) for g, v in zip(mine, variables, strict=True)])


def nothing_is_applied_that_is_not_finite(cluster):
    for policy in ("parameter_server", "parameter_server+staged_vars", "distributed_replicated"):
        scale = LossScale(4.0, automatic=True)
        opt = md.optim.SGD(1.0, loss_scale=scale)
        with Trainer(cluster, policy, [np.zeros(3), np.zeros(2)], 1) as trainer:
            bad = [[np.zeros(3), np.zeros(2)] for _ in cluster.workers]
            bad[-1][1][0] = np.nan
            trainer.apply(opt, bad)
            assert (scale.value, opt.iterations) == (2.0, 0)
            good = [[np.full(3, 2.0), np.full(2, 4.0)] for _ in cluster.workers]
            trainer.apply(opt, good)
            assert (scale.value, opt.iterations) == (2.0, 1)
            before = [np.zeros(3), np.zeros(2)] if "staged" in policy else None
            trainer.check([np.full(3, -1.0), np.full(2, -2.0)], before)


def a_model_trains_as_on_one_machine(cluster):
    """With one replica in each worker, bit for bit."""
    for policy, alike in (
        ("parameter_server", "parameter_server"),
        ("parameter_server+staged_vars", "parameter_server+staged_vars"),
        ("distributed_replicated", "replicated"),
    ):
        rng = np.random.default_rng(0)
        start = TwoLayers.start(rng, np.float32)
        with (
            Trainer(cluster, policy, start, 1) as trainer,
            LocalTrainer(alike, [start] * len(cluster.workers)) as local,
        ):
            optimizers = optimizer("adam"), optimizer("adam")
            for examples in (8, 7, 1, 8):
                counts = split(examples, len(cluster.workers))
                batches = parts(*global_batch(rng, examples, np.float32), counts)
                for one, opt in zip((trainer, local), optimizers, strict=True):
                    one.strategy.run(minimize, opt, one.variables, batches)
                trainer.check(
                    [variable.to_save() for variable in local.variables], local.weights()[0]
                )


def minimize(opt, variables, batches):
    x, labels = batches[replica_id()]
    opt.minimize(lambda: two_layers(variables, x, labels), variables, count=len(x))


def numbers_may_change_from_step_to_step(cluster):
    opt = md.optim.Momentum(lambda step: [1.0, 0.5, 0.25][step], momentum=0.5)
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 1) as trainer:
        one = [[np.ones(2)] for _ in cluster.workers]
        trainer.apply(opt, one)
        trainer.check([np.full(2, -1.0)])
        opt.momentum = 0.0
        trainer.apply(opt, one)
        trainer.check([np.full(2, -1.5)])
        opt.nesterov = True
        opt.gradient_clip = 0.5
        trainer.apply(opt, one)
        trainer.check([np.full(2, -1.625)])


def two_optimizers_keep_what_is_theirs(cluster):
    first, second = md.optim.Adam(0.5), md.optim.Momentum(0.5)
    gradients = given(cluster, 0)
    rows = {"adam": [g[:2] for g in gradients], "momentum": [g[1:] for g in gradients]}
    like = {}
    workers = len(cluster.workers)
    for rule, chosen in (("adam", slice(0, 2)), ("momentum", slice(1, 3))):
        constants = {**CONSTANTS[rule], "lr": 0.5}
        starts = [STARTS[chosen]] * workers
        like[rule] = Oracle(SHARED, rule, starts, combine=by_worker(workers, 1), **constants)
    with Trainer(cluster, "parameter_server", STARTS, 1) as trainer:
        for _ in range(3):
            for opt, rule, chosen in (
                (first, "adam", slice(0, 2)),
                (second, "momentum", slice(1, 3)),
            ):
                whole = trainer.variables
                trainer.variables = whole[chosen]
                trainer.apply(opt, rows[rule])
                like[rule].step(rows[rule])
                trainer.variables = whole
                shared = like[rule].weights[0][1 if rule == "adam" else 0]
                for other in like.values():  # both train the variable in the middle
                    at = 1 if other is like["adam"] else 0
                    other.weights = [[*w[:at], shared, *w[at + 1 :]] for w in other.weights]
        trainer.check([*like["adam"].weights[0], like["momentum"].weights[0][1]])
        assert (first.iterations, second.iterations) == (3, 3)


def a_new_optimizer_has_nothing_of_one_before_it(cluster):
    """Also where one was forgotten in between."""
    ones = [[np.ones(2)] for _ in cluster.workers]
    alone = {"cross_replica_sync": False}
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 1, **alone) as trainer:
        forgotten, before = (md.optim.Momentum(1.0, momentum=0.5) for _ in range(2))
        trainer.apply(forgotten, ones)
        trainer.apply(before, ones)
        trainer.check([np.full(2, -2.0)])
        forgotten = weakref.ref(forgotten)
        gc.collect()
        assert forgotten() is None
        new = md.optim.Momentum(1.0, momentum=0.5)
        trainer.apply(new, ones)
        trainer.check([np.full(2, -3.0)])  # -3.5 with the momentum of the one before
        assert (before.iterations, new.iterations) == (1, 1)


def messages_go_with_their_variables(cluster):
    for policy in SYNCHRONOUS:
        opt = md.optim.SGD(1.0)
        with Trainer(cluster, policy, STARTS, 1) as trainer:
            trainer.apply(opt, given(cluster, 0))
            (group,) = opt.groups.values()
            messages = weakref.ref(group.outgoing)
            del group, opt
            trainer.variables = None
            with trainer.strategy.scope():
                other = md.Variable(np.zeros(2), name="other")
            trainer.strategy.run(apply_own, md.optim.SGD(1.0), [other], [[np.ones(2)]] * 2)
            gc.collect()
            assert messages() is None, policy


# --- what is used, and how ------------------------------------------------------------------------


def what_nobody_uses_is_left_alone(cluster):
    opt = md.optim.SGD(1.0)
    for policy in SYNCHRONOUS:
        with Trainer(cluster, policy, [np.zeros(2), np.zeros(3)], 1) as trainer:
            workers = len(cluster.workers)
            one = [[np.ones(2), None] for _ in range(workers)]
            trainer.apply(opt, one)
            some = [[None, np.ones(3) * workers]] + [[np.zeros(2), None]] * (workers - 1)
            trainer.apply(opt, some)
            assert same_bits(trainer.variables[0].numpy(), -np.ones(2))
            assert same_bits(trainer.variables[1].numpy(), -np.ones(3))


def rows_travel_alone(cluster):
    """Of a large table only the rows that were used go to the ps and come back."""
    workers, rows, width = len(cluster.workers), 1000, 8
    for options in ({}, {"cross_replica_sync": False, "staleness_bound": 0}):
        start = np.zeros((rows, width), np.float32)
        with Trainer(cluster, "parameter_server", [start, np.zeros(3)], 1, **options) as trainer:
            table, other = trainer.variables
            opt = md.optim.SGD(1.0)

            used = np.array([3, cluster.task + 10, 3])
            pairs = [(ones_in(table, used), table), (md.constant(np.ones(3)), other)]
            trainer.each(lambda *_, opt=opt, pairs=pairs: opt.apply_gradients(pairs))
            cluster_wide(cluster)
            with md.Bytes(trainer.strategy) as moved:
                trainer.each(lambda *_, opt=opt, pairs=pairs: opt.apply_gradients(pairs))
            trainer.strategy.variable_mgr.servers.pull()
            cluster_wide(cluster)
            trainer.strategy.variable_mgr.servers.pull()
            expected = np.zeros((rows, width), np.float32)
            share = 1 if options else 1 / workers
            total = 2.0 * workers * share
            expected[3] = -2 * total
            for worker in range(workers):
                expected[10 + worker] = -2 * share
            assert same_bits(table.numpy(), expected), table.numpy()[:14]
            assert same_bits(other.numpy(), np.full(3, -total))
            sent = sum(n for link, n in moved.others["rows"].items() if link.startswith("worker"))
            came = sum(n for link, n in moved.others["rows"].items() if link.startswith("ps"))
            assert sent == 2 * (8 + 4 * width)
            assert came <= (workers + 1) * (8 + 4 * width)


def a_rule_that_changes_all_rows_sends_all(cluster):
    start = np.ones((50, 2), np.float32)
    with Trainer(cluster, "parameter_server", [start], 1) as trainer:
        (table,) = trainer.variables
        opt = md.optim.Momentum(1.0, momentum=0.5)
        for used in ([1], [2]):
            slices = ones_in(table, np.array(used))
            trainer.each(lambda *_, slices=slices: opt.apply_gradients([(slices, table)]))
        expected = start.copy()
        expected[1], expected[2] = 1 - 1 - 0.5, 0
        trainer.check([expected])


def rows_are_never_torn(cluster):
    """Asynchronous workers read rows that are always equal, however late they come to do so."""
    start = np.zeros((20_000, 1), np.float32)
    used = np.arange(6_700)  # just over a third: with its number a row has three times its bytes
    options = {"cross_replica_sync": False}
    over, sent = threading.Event(), threading.Event()
    send = Outgoing.send

    def told(*args, **kwargs):
        try:
            return send(*args, **kwargs)
        finally:
            sent.set()

    def be_busy():  # whenever the chief has sent a push, so that it is late to take the answer
        while not over.is_set():
            sent.wait()
            sent.clear()
            sum(range(500_000))  # one call, for which all other threads here wait

    busy = threading.Thread(target=be_busy)
    opt = md.optim.SGD(1.0)
    with Trainer(cluster, "parameter_server", [start], 1, **options) as trainer:
        (table,) = trainer.variables
        pairs = [(ones_in(table, used), table)]
        if cluster.is_chief:
            Outgoing.send = told
            busy.start()
        try:
            for step in range(20 if cluster.is_chief else 150):
                trainer.each(lambda *_: opt.apply_gradients(pairs))
                read = np.unique(table.numpy()[used])
                assert len(read) == 1, (step, read)
        finally:
            Outgoing.send = send
            over.set()
            sent.set()


def ones_in(table, rows):
    """Return a gradient that is one in some rows."""
    ones = np.ones((len(rows), *table.shape[1:]), table.dtype)
    return md.IndexedSlices(md.constant(ones), md.constant(rows), table.shape)


# --- values ---------------------------------------------------------------------------------------


def what_replicas_assign_is_on_the_ps_too(cluster):
    workers = len(cluster.workers)
    for policy in SYNCHRONOUS:
        with Trainer(cluster, policy, [np.zeros(2)], 2) as trainer:
            with trainer.strategy.scope():
                count = md.Variable(
                    0, name="count", trainable=False, aggregation=md.VariableAggregation.SUM
                )
                mean = md.Variable(0.0, name="mean", trainable=False, dtype="float64")

            def step(local, replica, count=count, mean=mean):
                count.assign_add(replica + 1)
                md.assign_moving_average(mean, float(replica), 0.5)

            trainer.each(step)
            if "staged" in policy:  # which subtracts it from moving averages after the next step
                gradients = [[np.zeros(2)]] * trainer.strategy.num_replicas
                for _ in range(2):
                    trainer.apply(md.optim.SGD(1.0), gradients)
            n = 2 * workers
            total = n * (n + 1) // 2
            assert count.numpy() == total
            assert mean.numpy() == (n - 1) / 2 / 2
            trainer.variables[0].assign(np.full(2, 5.0))
            trainer.strategy.variable_mgr.servers.pull()
            assert count.numpy() == total
            assert mean.numpy() == (n - 1) / 2 / 2
            trainer.check([np.full(2, 5.0)])


def additions_of_asynchronous_workers_add_up(cluster):
    workers = len(cluster.workers)
    options = {"cross_replica_sync": False}
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 2, **options) as trainer:
        assert trainer.strategy.num_replicas == 2
        with trainer.strategy.scope():
            count = md.Variable(
                0, name="count", trainable=False, aggregation=md.VariableAggregation.SUM
            )
        for _ in range(5):
            trainer.each(lambda local, _: count.assign_add(local + 1))
        count.assign_sub(1)
        count.assign_add(2)
        cluster_wide(cluster)
        trainer.strategy.variable_mgr.servers.pull()
        assert count.numpy() == workers * (5 * 3 + 1)
        cluster_wide(cluster)
        if cluster.is_chief:
            trainer.variables[0].assign([1.0, 2.0])
        cluster_wide(cluster)
        trainer.strategy.variable_mgr.servers.pull()
        assert same_bits(trainer.variables[0].numpy(), np.array([1.0, 2.0]))


def many_may_be_assigned_before_a_step(cluster):
    """So many that what a ps answers of their versions is long."""
    for policy in ("parameter_server", "distributed_replicated"):
        with Trainer(cluster, policy, [np.zeros(5)], 1) as trainer:
            with trainer.strategy.scope():
                many = [
                    md.Variable(0.0, name=f"many{i}", trainable=False, dtype="float64")
                    for i in range(520)
                ]
            opt = md.optim.SGD(1.0)
            for step in range(3):
                for variable in many:
                    variable.assign(float(step))
                trainer.apply(opt, [[np.ones(5)]] * len(cluster.workers))
            trainer.check([np.full(5, -3.0)])
            assert {float(variable.numpy()) for variable in many} == {2.0}


def variables_go_to_the_ps_with_the_fewest_bytes(cluster):
    starts = [np.zeros(100), np.zeros(10), np.zeros(10), np.zeros(79), np.zeros(1), np.zeros(1)]
    with Trainer(cluster, "parameter_server", starts, 1) as trainer:
        servers = trainer.strategy.variable_mgr.servers
        assert [servers.task_of(v) for v in trainer.variables] == [0, 1, 1, 1, 1, 0]
        with trainer.strategy.scope():
            own = md.Variable(
                0.0,
                name="own",
                synchronization=md.VariableSynchronization.ON_READ,
                aggregation=md.VariableAggregation.SUM,
            )
        assert servers.task_of(own) is None


def slots_are_on_the_ps_alone(cluster):
    opt = md.optim.Momentum(1.0)
    with (
        Trainer(cluster, "parameter_server", [np.zeros(2)], 1) as trainer,
        pytest.raises(errors.UsageError, match=r"'v0/Momentum' is on ps:0"),
    ):
        opt.slot(trainer.variables[0], "momentum")


# --- staged, whose last push is under way when its step is over -----------------------------------


def staged_strategies_follow_each_other(cluster):
    """All of the last step is there once the strategy is closed; the next one is not disturbed."""
    send, peers = Outgoing.send, cluster.peers()
    word = np.zeros(1)

    def late(*args, **kwargs):  # than worker 0 closes its strategy, which says so
        peers.wait([(0, peers.receive(0, word))], "hear that worker:0 closes")
        return send(*args, **kwargs)

    for number in range(3):
        start = np.full(5, float(number))
        opt = md.optim.SGD(1.0)
        try:
            with Trainer(cluster, "parameter_server+staged_vars", [start], 1) as trainer:
                for step in range(3):
                    if step == 2 and cluster.task == 1:
                        Outgoing.send = late
                    trainer.apply(opt, [[np.ones(5)]] * len(cluster.workers))
                if cluster.is_chief and peers.count > 1:
                    peers.send(1, word)
        finally:
            Outgoing.send = send
        assert same_bits(trainer.variables[0].numpy(), start - 3), trainer.variables[0].numpy()


def staged_optimizers_get_their_own_answers(cluster):
    """Of two in each step; the first one's answer is of many rows and long."""
    starts = [np.zeros((20_000, 1), np.float32), np.zeros(2000, np.float32)]
    used = np.arange(6_700)
    first, second = md.optim.SGD(1.0), md.optim.SGD(1.0)
    with Trainer(cluster, "parameter_server+staged_vars", starts, 1) as trainer:
        table, other = trainer.variables
        rows = [(ones_in(table, used), table)]
        ones = [(md.constant(np.ones(2000, np.float32)), other)]

        def step(*_):
            first.apply_gradients(rows)
            second.apply_gradients(ones)

        for _ in range(4):
            trainer.each(step)
    expected = np.zeros((20_000, 1), np.float32)
    expected[used] = -4
    assert same_bits(table.numpy(), expected), np.unique(table.numpy())
    assert same_bits(other.numpy(), np.full(2000, np.float32(-4))), np.unique(other.numpy())


# --- instruments ----------------------------------------------------------------------------------


def predicted_bytes_are_measured(cluster):
    for policy in SYNCHRONOUS:
        with Trainer(cluster, policy, STARTS, 2) as trainer:
            opt = md.optim.Momentum(0.1)
            manager = trainer.strategy.variable_mgr
            gradients = [[np.ones_like(s) for s in STARTS]] * trainer.strategy.num_replicas

            def step(local, replica, opt=opt, trainer=trainer, gradients=gradients):
                for variable in trainer.variables:
                    variable.read()
                opt.apply_gradients(
                    [
                        (md.constant(g), v)
                        for g, v in zip(gradients[replica], trainer.variables, strict=True)
                    ]
                )

            for _ in range(2):
                trainer.each(step)
            with md.Bytes(trainer.strategy) as moved:
                for _ in range(3):
                    trainer.each(step)
            predicted = manager.predicted_bytes(trainer.variables)
            assert moved.measured == dict(sorted(predicted.items())), (
                policy,
                moved.measured,
                predicted,
            )
            sent = {link: n for link, n in moved.measured.items() if "ps:" in link}
            nbytes = sum(s.nbytes for s in STARTS)
            me = cluster.me
            assert sum(n for link, n in sent.items() if link.startswith(f"{me}->")) == nbytes
            assert sum(n for link, n in sent.items() if link.endswith(f"->{me}")) == nbytes


def ages_are_those_of_the_policy(cluster):
    for policy in SYNCHRONOUS:
        with Trainer(cluster, policy, [np.zeros(2)], 2) as trainer:
            opt = md.optim.SGD(0.1)

            def step(*_, opt=opt, trainer=trainer):
                variable = trainer.variables[0]
                opt.apply_gradients([(md.constant(variable.numpy() + 1), variable)])

            with md.Staleness() as ages:
                for _ in range(4):
                    trainer.each(step)
            staged = "staged" in policy
            assert ages.histogram == ({0: 2, 1: 6} if staged else {0: 8}), policy


# --- what goes wrong ------------------------------------------------------------------------------


def other_variables_are_named(cluster):
    strategy = md.Strategy("cpu:0", "parameter_server", cluster=cluster, cross_replica_sync=False)
    with strategy, strategy.scope():
        name = f"w{cluster.task}"
        if cluster.is_chief:
            md.Variable(0.0, name=name)
        else:
            with pytest.raises(
                errors.MergeMismatchError,
                match=r"ps:0 \(on .*\), asked by worker:1 to create variable 'w1': worker:1 creates"
                r" variable 'w1'.* and another worker 'w0'",
            ):
                md.Variable(0.0, name=name)
        cluster_wide(cluster)


def other_policies_are_named(cluster):
    compared = cluster.peers()
    options = {"cross_replica_sync": False, "staleness_bound": cluster.task}
    said = ""
    try:
        md.Strategy("cpu:0", "parameter_server", cluster=cluster, **options).close()
    except errors.MergeMismatchError as failure:
        said = str(failure)
    first, second = sorted(compared.meet("compare what was said", said.encode()))
    assert first == b""  # that of whom the ps has heard first
    assert b"makes a strategy with bound=" in second


def an_optimizer_that_the_ps_does_not_know_is_named(cluster):
    class Own(md.optim.SGD):
        pass

    with (
        Trainer(cluster, "parameter_server", [np.zeros(2)], 1) as trainer,
        pytest.raises(errors.UsageError, match=r"no optimizer .*Own is known here"),
    ):
        trainer.apply(Own(1.0), [[np.ones(2)]] * len(cluster.workers))


def who_waits_for_one_that_is_too_slow_is_told(cluster):
    """A worker that takes no step holds the others back, and is named after the deadline."""
    options = {"cross_replica_sync": False, "staleness_bound": 1, "deadline": 0.5}
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 2, **options) as trainer:
        opt = md.optim.SGD(1.0)
        if not cluster.is_chief:
            trainer.apply(opt, [[np.ones(2)]] * 2)
            with pytest.raises(
                errors.HangError,
                match=r"worker:1 has taken 2 steps and has waited .* s for worker:0, which are more"
                r" than staleness_bound=1 behind it \(worker:0 has taken 0\)",
            ):
                trainer.apply(opt, [[np.ones(2)]] * 2)
        cluster_wide(cluster)


def who_leaves_holds_nobody_back(cluster):
    options = {"cross_replica_sync": False, "staleness_bound": 0}
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 1, **options) as trainer:
        for _ in range(2 if cluster.is_chief else 6):
            trainer.apply(md.optim.SGD(1.0), [[np.ones(2)]])


def a_worker_that_fails_is_named_to_those_that_wait(cluster):
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 1) as trainer:
        opt = md.optim.SGD(1.0)
        trainer.apply(opt, [[np.ones(2)]] * 2)
        if cluster.is_chief:
            with pytest.raises(errors.PeerError, match=r"worker:1 .* has failed"):
                trainer.apply(opt, [[np.ones(2)]] * 2)
        else:
            with pytest.raises(ZeroDivisionError):
                trainer.each(lambda *_: 1 / 0)
    with Trainer(cluster, "parameter_server", [np.zeros(2)], 1) as trainer:
        trainer.apply(opt, [[np.ones(2)]] * 2)
        trainer.check([-np.ones(2)])


def a_ps_that_does_not_serve_is_named(cluster):
    all_ranks = cluster.peers(ranks=(*cluster.workers, *cluster.servers))
    if cluster.job == "ps":
        all_ranks.meet("come to a line of a test")
        cluster.serve()
        return
    with pytest.raises(
        errors.HangError, match=r"worker:. has waited for ps:0 .* to make a strategy"
    ):
        md.Strategy("cpu:0", "parameter_server", cluster=cluster, deadline=0.3, report_after=0.2)
    all_ranks.meet("come to a line of a test")
    cluster.leave()


def without_ps_there_is_no_such_policy(cluster):
    for policy in ("parameter_server", "distributed_replicated"):
        with pytest.raises(errors.UsageError, match=r"keeps variables on parameter servers"):
            md.Strategy("cpu:0", policy, cluster=cluster)


def cluster_wide(cluster):
    """Let all workers come to this line before any goes on."""
    cluster.peers().meet("come to a line of a test")


ONE_OF_EACH = [
    (a_model_trains_as_on_one_machine, 2, 2),
    (clips_by_the_norm_over_all_ps, 2, 2),
    (nothing_is_applied_that_is_not_finite, 2, 2),
    (numbers_may_change_from_step_to_step, 2, 1),
    (two_optimizers_keep_what_is_theirs, 2, 2),
    (a_new_optimizer_has_nothing_of_one_before_it, 1, 1),
    (messages_go_with_their_variables, 2, 2),
    (what_nobody_uses_is_left_alone, 3, 2),
    (rows_travel_alone, 2, 1),
    (a_rule_that_changes_all_rows_sends_all, 2, 1),
    (rows_are_never_torn, 2, 1),
    (what_replicas_assign_is_on_the_ps_too, 2, 2),
    (additions_of_asynchronous_workers_add_up, 3, 1),
    (many_may_be_assigned_before_a_step, 2, 1),
    (variables_go_to_the_ps_with_the_fewest_bytes, 2, 2),
    (slots_are_on_the_ps_alone, 1, 1),
    (predicted_bytes_are_measured, 2, 2),
    (staged_strategies_follow_each_other, 2, 1),
    (staged_optimizers_get_their_own_answers, 2, 1),
    (ages_are_those_of_the_policy, 2, 1),
    (other_variables_are_named, 2, 1),
    (other_policies_are_named, 2, 1),
    (an_optimizer_that_the_ps_does_not_know_is_named, 1, 1),
    (who_waits_for_one_that_is_too_slow_is_told, 2, 1),
    (who_leaves_holds_nobody_back, 3, 1),
    (a_worker_that_fails_is_named_to_those_that_wait, 2, 1),
    (without_ps_there_is_no_such_policy, 2, 0),
]
CASES = {fn.__name__: (workers, servers, in_workers(fn)) for fn, workers, servers in ONE_OF_EACH}
CASES["a_ps_that_does_not_serve_is_named"] = (2, 1, a_ps_that_does_not_serve_is_named)


@pytest.fixture(scope="module")
def outcome(request):
    return ranks.run(__file__, RANKS, *ranks.chosen(request, CASES))


@pytest.mark.parametrize("case", CASES)
def test_it_is_so(outcome, case):
    outcome.check(case)


# --- in one process -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"staleness_bound": 1}, "say cross_replica_sync=False beside it"),
        ({"staleness_bound": -1, "cross_replica_sync": False}, "no whole number from 0"),
        ({"staged_vars": True, "cross_replica_sync": False}, "staged_vars and cross_replica_sync"),
        ({"caching": True, "cross_replica_sync": False}, "caching and cross_replica_sync"),
        ({"variable_update": "replicated", "cross_replica_sync": False}, "is for parameter_server"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, named):
    with pytest.raises(errors.UsageError, match=named):
        md.Strategy("cpu:0", **{"variable_update": "parameter_server", **options})


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("parameter_server", {}),
        ("parameter_server", {"cross_replica_sync": False, "staleness_bound": 0}),
        ("distributed_replicated", {}),
    ],
)
def test_who_is_alone_needs_no_ps(policy, options):
    with md.Strategy("cpu*2", policy, cluster=alone(), **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(2), name="w")
        opt = md.optim.SGD(1.0)
        gradients = [[np.array([1.0, 2.0])], [np.array([3.0, 6.0])]]
        strategy.run(apply_own, opt, [w], gradients)
        assert same_bits(w.numpy(), np.array([-2.0, -4.0]))
        assert strategy.variable_mgr.servers is None


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 10, 15, 16, 19, 20, 24, 25, 29, 30])
def test_rows_are_sent_where_they_are_shorter_than_the_table(dtype, width, count):
    """Each goes with its number, which has 8 bytes."""
    n = 30
    table = md.Variable(np.zeros((n, width), dtype), name="table")
    changed = Changed([0, 1], fresh=True)
    changed.rows(table, np.arange(count))
    row = width * np.dtype(dtype).itemsize
    news = changed.news(table, 0)
    if count * (8 + row) < n * row:
        assert news.tolist() == list(range(count))
    else:
        assert news is None
    if (width, dtype) == (1, "float32"):
        assert (news is not None) == (count < n / 3)
    assert changed.news(table, 0).tolist() == []  # it has been told


def test_a_worker_does_not_serve():
    with pytest.raises(errors.UsageError, match="worker:0 is no ps"):
        alone().serve()


if __name__ == "__main__":
    ranks.main(CASES)
