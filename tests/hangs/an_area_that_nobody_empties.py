"""A producer waits for room that nobody makes; the patience is the strategy's."""

import minidist as md
from minidist.errors import HangError

error = HangError, "nobody takes one"


def hang():
    area = md.StagingArea("float32", capacity=1)
    with md.Strategy("cpu*1", deadline=0.1) as strategy, strategy.scope():
        area.put(1.0)
        area.put(2.0)
