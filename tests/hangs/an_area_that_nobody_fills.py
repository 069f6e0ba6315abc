"""A consumer waits for an item that nobody puts."""

import minidist as md
from minidist.errors import HangError

error = HangError, "nobody puts one"


def hang():
    with md.StagingArea("float32") as area:
        area.get(timeout=0.1)
