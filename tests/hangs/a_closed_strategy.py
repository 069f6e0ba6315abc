"""A strategy is run that was closed: its threads are gone."""

import minidist as md
from minidist.errors import ContextError

error = ContextError, "closed"


def hang():
    strategy = md.Strategy("cpu*2", deadline=0.3)
    strategy.close()
    strategy.run(lambda: None)
