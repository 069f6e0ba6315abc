"""Words: what phases say, in a table and in sentences for who has not seen the project."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.trace.phases import PHASES, OfReplica, Phases

NOTABLE = 0.1  # of a step: what a replica must be behind by to be called slow


def slowest(found: Phases) -> OfReplica | None:
    """Return the replica that is notably behind the fastest one, if there is one."""
    last = max(found.replicas, key=lambda each: each.behind)
    return last if last.behind > NOTABLE * found.step else None


def verdict(found: Phases | None) -> list[str]:
    """Return a few sentences: which replica was slow, who waited, what was hidden."""
    if found is None:
        return ["No step of a strategy was recorded."]
    count = len(found.replicas)
    said = [*_slow(found, count), *_hidden(found)]
    several = "one step" if found.steps == 1 else f"{found.steps} steps"
    return [*said, f"All figures are means over {several} of {found.step:.2f} ms."]


def _slow(found: Phases, count: int) -> list[str]:
    if count == 1:
        return ["There is one replica, so nobody waits for another."]
    slow = slowest(found)
    if slow is None:
        waiting = found.phases["waiting"]
        return [
            f"No replica was slow: the {count} needed about equally long.",
            f"They waited for each other {waiting:.2f} ms in each step"
            f" ({_share(waiting, found.step)} of it).",
        ]
    others = [each for each in found.replicas if each is not slow]
    fastest = min(others, key=lambda each: each.own)
    said = [
        f"Replica {slow.replica} ({slow.device}) was slow: in each step it needed {slow.own:.2f} ms"
        f" for its own work, {slow.behind:.2f} ms more than replica {fastest.replica}, which was"
        " the fastest."
    ]
    waits = [each.waited_for.get(slow.replica, 0.0) for each in others]
    whom = f"replica {others[0].replica}" if len(others) == 1 else "the others"
    each = "" if len(others) == 1 else " each, on average,"
    mean = sum(waits) / len(waits)
    said.append(
        f"Meanwhile {whom} waited for it:{each} {mean:.2f} ms in each step"
        f" ({_share(mean, found.step)} of it)."
    )
    return said


def _hidden(found: Phases) -> list[str]:
    if found.hidden_share is None:
        return []
    return [
        f"Of the time in which replicas exchanged data, {_share(found.hidden_share, 1)} was hidden"
        " behind computing."
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def lines(found: Phases) -> list[str]:
    """Return the lines on phases in a report."""
    figures = [f"{found.phases[name]:.2f}" for name in PHASES]
    pairs = [
        (name, figure, max(len(name), len(figure)) + 2)
        for name, figure in zip(PHASES, figures, strict=True)
    ]
    return [
        "Phases, in ms of a step",
        "".join(name.rjust(width) for name, _, width in pairs),
        "".join(figure.rjust(width) for _, figure, width in pairs),
        *verdict(found)[:-1],
    ]


def table(found: Phases) -> str:
    """Return a table of all figures: a row for each phase, a column for each replica."""
    heads = ["ms per step", *[f"replica {each.replica}" for each in found.replicas], "mean"]
    rows = [
        [name, *[f"{each.phases[name]:.3f}" for each in found.replicas], f"{mean:.3f}"]
        for name, mean in found.phases.items()
    ]
    rows.append(["all", *[f"{found.step:.3f}"] * (len(found.replicas) + 1)])
    rows.append([])
    rows.append(["own", *[f"{each.own:.3f}" for each in found.replicas], ""])
    rows.append(["behind the fastest", *[f"{each.behind:.3f}" for each in found.replicas], ""])
    for who in found.replicas:
        waits = [each.waited_for.get(who.replica) for each in found.replicas]
        if any(waits):
            cells = ["-" if ms is None else f"{ms:.3f}" for ms in waits]
            rows.append([f"waited for replica {who.replica}", *cells, ""])
    share = "-" if found.hidden_share is None else f"{found.hidden_share:.3f}"
    return f"{_laid_out([heads, *rows])}\n\nhidden share of communication: {share}"


def _laid_out(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows if row) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )
