"""A program writes to what DLPack gave it."""

import numpy as np

import minidist as md

error = ValueError, "read-only"


def program(copies):
    values = np.from_dlpack(md.constant([1.0, 2.0]))
    if copies:
        values = values.copy()
    values[0] = 0


def bug():
    program(copies=False)


def cure():
    program(copies=True)
