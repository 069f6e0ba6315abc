"""The cluster: which processes there are, and what each of them is for.

    cluster = md.connect(num_ps=1)         # under mpiexec: who am I?
    if cluster.job == "ps":
        cluster.serve()                    # until the workers have ended
    else:
        strategy = md.Strategy("cpu*2", "parameter_server", cluster=cluster)

connecting.py begins it. environment.py reads who a process is from the variables of its launcher,
roles.py finds who is worker and who is ps. places.py, line.py and pmi.py bring together processes
that no mpiexec has started; ending.py is how a rank ends that fails. cluster.py is what comes of
it; site.py is where the replicas of a strategy are. calls.py is what workers and ps say to each
other, wire.py what a push looks like.
"""

from __future__ import annotations

from minidist.cluster.cluster import Cluster, alone
from minidist.cluster.connecting import connect, connected, launched

__all__ = ["Cluster", "alone", "connect", "connected", "launched"]
