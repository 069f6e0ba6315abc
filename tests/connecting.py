"""What the ranks of tests/test_connect.py do, by the name that is the first argument."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import numpy as np

import minidist as md
from minidist import ops
from minidist.threads import cores


def tell(cluster):
    """Print who this is and who there is, and meet the other workers."""
    me = {"me": cluster.me, "rank": cluster.rank, "size": cluster.size, "cores": cores()}
    print(json.dumps(me), flush=True)
    if cluster.job == "worker":
        cluster.peers().meet("tell")


def plain(argument):
    tell(md.connect())


def served(num_ps):
    tell(md.connect(num_ps=int(num_ps)))


def as_told(by_rank):
    """by_rank: what each rank is told, in JSON; of a process of its own what that is told."""
    told = json.loads(by_rank)
    if isinstance(told, list):
        told = told[int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])]
    tell(md.connect(**told))


def hold():
    print(md.connect().me, flush=True)
    signal.pause()


def fail(argument):
    if md.connect().rank == 1:
        threading.Thread(target=threading.Event().wait).start()  # Python's own end waits for it
        raise ValueError("one of them fails")
    signal.pause()


def fail_by_hook(argument):
    sys.excepthook = lambda kind, failure, where: print("in its own way:", failure, flush=True)
    fail(argument)


def fail_in_thread(argument):
    cluster = md.connect()
    if cluster.rank == 1:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    tell(cluster)


def exit_early(status):
    cluster = md.connect()
    peers = cluster.peers()
    peers.meet("begin")
    if cluster.rank == 1:
        sys.exit(int(status))
    peers.meet("go on")


def exit_at_once(status):
    """Rank 1 ends when the others are about to make a strategy."""
    cluster = md.connect()
    if cluster.rank == 1:
        sys.exit(int(status))
    md.Strategy("cpu", "collective_all_reduce", cluster=cluster)


def one_step_fewer(argument):
    """Rank 1 comes to its end, as nothing is wrong for it."""
    cluster = md.connect()
    with md.Strategy("cpu", "collective_all_reduce", cluster=cluster) as strategy:
        with strategy.scope():
            w = md.Variable(np.ones(3), name="w")
        opt = md.optim.SGD(0.1)
        for _ in range(3 - cluster.rank):
            strategy.run(lambda: opt.minimize(lambda: ops.reduce_sum(w), [w]))


def die(argument):
    cluster = md.connect()
    with open("/proc/self/maps") as maps:
        shared = {line[line.find("/") :].strip() for line in maps if "/dev/shm/" in line}
    print(*(path for path in shared if not path.endswith("(deleted)")), flush=True)
    cluster.peers().meet("die")
    if cluster.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def fork(argument):
    """A child that is forked off a rank ends as any process, and is no rank."""
    cluster = md.connect()
    child = os.fork()
    if child == 0:
        sys.exit(5)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{status}\n".encode())  # at once, whatever the other rank prints
    tell(cluster)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
