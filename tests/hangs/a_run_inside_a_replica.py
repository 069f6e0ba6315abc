"""A replica runs its own strategy, whose replicas are all busy with running it."""

import minidist as md
from minidist.errors import ContextError

error = ContextError, "merge_call"


def hang():
    with md.Strategy("cpu*2", deadline=0.3) as strategy:
        strategy.run(lambda: strategy.run(lambda: None))
