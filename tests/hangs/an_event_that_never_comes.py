"""An event is waited for whose stream does not come to it."""

import threading

import minidist as md
from minidist.errors import HangError

error = HangError, r"the copy stream of cpu:0 did not finish .* is now at\n(?s:.*)never\.wait"


def hang():
    never = threading.Event()
    (device,) = md.devices("cpu*1")
    stream = device.stream("copy")
    stream.submit(lambda: never.wait(10))
    try:
        stream.record().wait(0.1)
    finally:
        never.set()
        device.synchronize(10)
