"""What computes on the CPU: whether oneDNN can be used, and who chose which implementations."""

from __future__ import annotations

from minidist.device import cpu_linear, cpu_onednn, kernel_choice
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
    fixed = kernel_choice.of_file()
    why_not = "" if choices is None else choices.why_not_kept()
    if why_not:
        found.wrong(
            f"choices of what computes on the CPU cannot be kept ({why_not}), so every process "
            "measures anew, and the bits of two runs may differ",
            "let XDG_CACHE_HOME name a folder that can be written, or MINIDIST_KERNELS a file of "
            "choices",
        )
    elif choices is not None:
        facts["choices"], facts["count"] = str(choices.path), len(choices)
    elif fixed is not None:
        facts["choices"], facts["count"] = facts["chosen_by"], len(fixed)
    return found
