"""A data set's next batch does not come."""

import threading

import minidist as md
from minidist.errors import HangError

error = HangError, r"is waited for since(?s:.*)never\.wait"


def hang():
    never = threading.Event()

    def batches():
        never.wait(10)
        yield [1.0, 2.0]

    with md.Strategy("cpu*2", deadline=0.2) as strategy:
        iterator = iter(strategy.distribute_dataset(batches()))
        try:
            next(iterator)
        finally:
            never.set()
            iterator.close()
