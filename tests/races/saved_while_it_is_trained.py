"""A thread saves the variables while the next step updates them."""

import tempfile
import threading
from pathlib import Path

import minidist as md


def program(waits):
    with tempfile.TemporaryDirectory() as folder, md.Strategy("cpu*2") as strategy:
        with strategy.scope():
            w = md.Variable([1.0, 2.0], name="w")
        optimizer = md.optim.SGD(0.1)

        def step():
            optimizer.minimize(lambda: md.ops.reduce_sum(w.read()), [w])

        saving = threading.Thread(target=md.save, args=(Path(folder) / "saved", [w]))
        saving.start()
        if waits:
            saving.join()
        try:
            strategy.run(step)
        finally:
            saving.join()


def bug():
    program(waits=False)


def cure():
    program(waits=True)
