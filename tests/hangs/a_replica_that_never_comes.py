"""A replica waits for something of its own, and the others wait for it."""

import threading

import minidist as md
from minidist.errors import HangError

error = HangError, r"replicas wait since .* for replica 1 (?s:.*) is now at\n(?s:.*)never\.wait"


def hang():
    never = threading.Event()
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            replica = md.get_replica_context()
            if replica.replica_id == 1:
                never.wait(10)
            replica.merge_call(lambda strategy: None)

        try:
            strategy.run(step)
        finally:
            never.set()  # its thread has been abandoned, and may end now
