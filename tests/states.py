"""States: all that a checkpoint would hold, as arrays to compare."""

from __future__ import annotations

from minidist.state import by_key, copies_of, held_of, slots_of, taken_out, variables_of


def state_dict(variables, optimizer=None):
    """Return copies of all arrays of the state, by name; on all workers together."""
    everything = variables_of(variables)
    everything += slots_of(everything, optimizer)
    arrays = taken_out(by_key(everything, copies_of(everything)))
    kept = held_of(everything)
    return arrays | {key: each.array for key, each in kept.items() if each.array is not None}
