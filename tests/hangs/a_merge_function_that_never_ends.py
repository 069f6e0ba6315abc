"""All replicas have come, and wait for a merge function that waits for something of its own."""

import threading

import minidist as md
from minidist.errors import HangError

error = (
    HangError,
    r"all replicas wait .* for the merge function of merge_call number 1(?s:.*)never\.wait",
)


def hang():
    never = threading.Event()
    with md.Strategy("cpu*2", deadline=0.3) as strategy:
        try:
            strategy.run(
                lambda: md.get_replica_context().merge_call(lambda strategy: never.wait(10))
            )
        finally:
            never.set()
