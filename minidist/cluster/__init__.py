"""The cluster: which processes there are, and what each of them is for.

    cluster = md.connect(num_ps=1)         # under mpiexec: who am I?
    if cluster.job == "ps":
        cluster.serve()                    # until the workers have ended
    else:
        strategy = md.Strategy("cpu*2", "parameter_server", cluster=cluster)

environment.py reads who a process is from the variables of its launcher; cluster.py has the roles.
"""

from __future__ import annotations

from minidist.cluster.cluster import Cluster, alone, connect, connected

__all__ = ["Cluster", "alone", "connect", "connected"]
