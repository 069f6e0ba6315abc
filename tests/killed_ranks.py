"""Train as several processes, save after each step, and let one rank be killed with SIGKILL.

mpiexec -n N python tests/killed_ranks.py folder policy devices ps who line

`who`, as "worker:1", is killed before the n-th line of what writes that it runs; "nobody" trains to
the end. Under the launcher this happens only twice.
"""

from __future__ import annotations

import os
import sys

from killed_by_ranks import WRITE
from killed_while_saving import kill_self_at_line
from killing import STEPS
from test_sharded_ranks import STRONG, Training

import minidist as md
from minidist import tensor_file
from minidist.checkpoint import by_ranks, serving, shards
from minidist.train_dir import folder as inside


def main(where, policy, devices, ps, who, line):
    cluster = md.connect(num_ps=int(ps))
    restart = int(os.environ.get("MINIDIST_RESTART", "0"))  # what the launcher says
    if cluster.me == who and restart < 2:
        modules = (by_ranks, inside, serving, shards, tensor_file)
        kill_self_at_line(int(line), *modules, functions=WRITE)
    if cluster.job == "ps":
        cluster.serve()
        return
    with (
        md.TrainDir(where, keep=2) as folder,
        Training(cluster, policy, int(devices), STRONG) as training,
    ):
        first = folder.newest() or 0
        if first:
            folder.load(*training.what)
        for step in range(first, STEPS):
            training.train(1)
            folder.save(step + 1, *training.what)


if __name__ == "__main__":
    main(*sys.argv[1:])
