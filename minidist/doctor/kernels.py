"""What computes on the CPU: whether oneDNN can be used, and who chose which implementations."""

from __future__ import annotations

from minidist.device import cpu_linear, cpu_onednn
from minidist.doctor.findings import Findings
from minidist.errors import UsageError


def find() -> Findings:
    """Return oneDNN's version, or why it is not used, and where choices are remembered."""
    found = Findings()
    onednn = cpu_onednn.find()
    facts = {
        "onednn": None if onednn is None else onednn.version(),
        "why_not": cpu_onednn.why_not(),
        "chosen_by": None,
        "choices": None,
        "count": 0,
    }
    found.facts["kernels"] = facts
    try:
        facts["chosen_by"], choices = cpu_linear.kernels(), cpu_linear.choices()
    except UsageError as error:
        found.wrong(str(error), "unset MINIDIST_KERNELS")
        return found
    if choices is not None:
        facts["choices"], facts["count"] = str(choices.path), len(choices)
    return found
