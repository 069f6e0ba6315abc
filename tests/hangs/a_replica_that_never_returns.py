"""A replica does not come to the end of the step, where the others are."""

import threading

import minidist as md
from minidist.errors import HangError

error = HangError, r"replica 0 has returned(?s:.*)never\.wait"


def hang():
    never = threading.Event()
    with md.Strategy("cpu*2", deadline=0.3) as strategy:

        def step():
            if md.get_replica_context().replica_id == 1:
                never.wait(10)

        try:
            strategy.run(step)
        finally:
            never.set()
