"""A program writes to what `numpy()` gave it, which is the variable's own memory."""

import minidist as md

error = ValueError, "WRITEABLE|read-only"


def program(copies):
    w = md.Variable([1.0, 2.0], name="w")
    values = md.ops.negative(w).numpy()
    if copies:
        values = values.copy()
    values.flags.writeable = True
    values[0] = 0


def bug():
    program(copies=False)


def cure():
    program(copies=True)
