"""Two streams wait for each other's events."""

import contextlib
import threading

import minidist as md
from minidist.errors import HangError

error = HangError, "did not finish its work"


def hang():
    (device,) = md.devices("cpu*1")
    one, other = device.stream("copy"), device.stream("communication")
    begin = threading.Event()
    one.submit(lambda: begin.wait(10))
    other.submit(lambda: begin.wait(10))
    events = []
    one.submit(lambda: events[0].wait(0.1))
    other.submit(lambda: events[1].wait(0.1))
    events += [other.record(), one.record()]
    begin.set()
    try:
        one.synchronize(10)
    finally:
        with contextlib.suppress(HangError):  # it had its own, or went on after the first one's
            other.synchronize(10)
