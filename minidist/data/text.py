"""Text as bytes: each is a token, to be guessed from those before it.

Where no files are given it is the reference on the Python language that comes with Python for its
`help()`: some hundred kilobytes of English and a little code, of the version that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidist.data.dataset import Dataset, shuffled
from minidist.data.files import folder, whole
from minidist.errors import DataError

CLASSES = 256  # what a byte can be
TOKENS = 64  # of a window
GRAIN = 2**16  # bytes that a thread cuts out at a time, so many that handing them over costs little
TOPICS = "pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A Split of a text, uint8 [bytes], which is cut into windows of so many tokens.

    Window i is bytes [i·tokens, (i+1)·tokens), and its labels are the bytes that follow each of
    these. So every byte is guessed once in an epoch, but for the first, and the last few, which
    fill no window.
    """

    text: NDArray[np.uint8]
    tokens: int = TOKENS

    def __len__(self) -> int:
        return max(len(self.text) - 1, 0) // self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.tokens,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64)

    @property
    def label_shape(self) -> tuple[int, ...]:
        return (self.tokens,)

    @property
    def grain(self) -> int:
        return max(1, GRAIN // self.tokens)

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return shuffled(len(self), seed, epoch)

    def read(
        self,
        numbers: NDArray[np.int64],
        seed: int,
        epoch: int,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
    ) -> None:
        windows = self.text[numbers[:, None] * self.tokens + np.arange(self.tokens + 1)]
        inputs[...] = windows[:, :-1]
        labels[...] = windows[:, 1:]


def python_reference() -> Dataset:
    """Return the text that comes with Python.

    Raises DataError where this Python was installed without it.
    """
    try:
        topics: dict[str, str] = import_module(TOPICS).topics
    except ImportError as error:
        raise DataError(
            f"{TOPICS}: this Python comes without the text for its help() ({error}): give a folder "
            "of .txt files as data_dir"
        ) from error
    return _parts("\n".join(topics[name] for name in sorted(topics)).encode(), TOPICS)


def load(data_dir: str) -> Dataset:
    """Return all .txt files of a folder, one after the other in the order of their names, as one.

    Raises DataError where there are none, or not enough for a window to train and one to test on.
    """
    path = folder(data_dir)
    files = sorted(file for file in path.glob("*.txt") if file.is_file())
    if not files:
        raise DataError(f"{path}: there is no text here: expected files whose names end in .txt")
    return _parts(b"".join(map(whole, files)), str(path))


def _parts(text: bytes, where: str) -> Dataset:
    """Return the first nine tenths of a text to train on, and the last to test on."""
    found = np.frombuffer(text, np.uint8)
    cut = len(found) * 9 // 10
    train, test = Text(found[:cut]), Text(found[cut:])
    if not len(test):
        raise DataError(
            f"{where}: the text has {len(found)} bytes; a tenth of it is to test on, and must have "
            f"more than the {TOKENS} of a window"
        )
    return Dataset("text", train, test, CLASSES, synthetic=False)
