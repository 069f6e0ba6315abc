"""Replicas pass tensors through a list of their own, and nobody waits for who puts one in."""

import minidist as md


def program(meets):
    with md.Strategy("cpu*2") as strategy:
        board = [md.constant([0.0]), md.constant([0.0])]

        def nothing(strategy):
            pass

        def step():
            replica = md.get_replica_context()
            mine = board[replica.replica_id]
            mine.device.ops.fill(mine.array, 1)
            if meets:
                replica.merge_call(nothing)
            return md.ops.negative(board[1 - replica.replica_id])

        with md.device("cpu:0"):
            strategy.run(lambda: step())


def bug():
    program(meets=False)


def cure():
    program(meets=True)
