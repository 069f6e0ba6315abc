"""Summaries: numbers on the way of a training, written by replica 0 alone, in one of three formats.

| the file's name | format |
|---|---|
| has "tfevents" in it | an event file, which TensorBoard shows (event_file.py) |
| ends with .csv | a table: a row for each step, a column for each tag (table.py) |
| any other | lines of JSON (json_lines.py) |

None of them needs another package. What has been written is in the file at once, so it outlives a
killed process. A training that goes on from a saved step says so (`resume_from`), and what was
written of later steps is cut off: write a step's summaries before its checkpoint is saved, and
after any number of such ends each step stands there once.
"""

from minidist.summary.histogram import Histogram
from minidist.summary.writer import SummaryWriter

__all__ = ["Histogram", "SummaryWriter"]
