"""Server: what a parameter server (ps) does while it serves the workers of a cluster.

It holds variables, with what optimizers keep beside them, and applies to them what workers bring.

    service.py   one thread, to which all calls of all workers come
    shelf.py     the variables of one strategy, and the order in which its workers' calls are done
    rules.py     optimizers like those of the workers
    updates.py   what is done with the gradients that they push
    verbs.py     what else a worker can ask for, by name
"""

from __future__ import annotations

from minidist.server.service import serve

__all__ = ["serve"]
