"""A consumer waits for an item when the producer closes the area."""

import threading

import minidist as md
from minidist.errors import ClosedError

error = ClosedError, "nothing is left in it"


def hang():
    area = md.StagingArea("float32")
    producer = threading.Thread(target=area.close)
    producer.start()
    try:
        area.get(timeout=10)
    finally:
        producer.join()
