"""`python -m minidist.data`: write TFRecord files of a folder of images, or show some examples.

| exit status | meaning |
|---|---|
| 0 | it is done |
| 1 | an output takes no more, or there is no memory |
| 2 | an argument is unknown, or something that it needs is missing |
| 3 | a file is missing, not what it should be, or cannot be written |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.data import SOURCES, Settings, load
from minidist.data.preprocess import PREPROCESSORS, RESIZE_METHODS
from minidist.data.preprocess.settings import ROUND_ROBIN
from minidist.data.showing import show
from minidist.data.writing import SHARD_IMAGES, write
from minidist.errors import DataError, MinidistError, UsageError


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say; return the exit status. `--help` raises SystemExit(0)."""
    try:
        try:
            given = vars(_parser().parse_args(arguments))
            given.pop("do")(given)
        finally:
            sys.stdout.flush()  # while an output that takes no more can still become a sentence
        return 0
    except UsageError as error:
        return _say(error, 2)
    except DataError as error:
        return _say(error, 3)
    except MinidistError as error:
        return _say(error, 1)
    except OSError as error:
        return _output_failed(error) if error.filename is None else _say(error, 1)
    except MemoryError as error:
        return _say(f"not enough memory ({error}): take fewer examples at a time", 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130)


def _write(given: dict[str, Any]) -> None:
    write(given["folder"], given["target"], _tell, given["shard_images"], given["skip_bad_records"])


def _show(given: dict[str, Any]) -> None:
    names = ("input_preprocessor", "resize_method", "distortions", "skip_bad_records")
    settings = Settings(**{name: given[name] for name in names})
    dataset = load(given["data_name"], given["data_dir"], settings=settings)
    show(
        dataset,
        dataset.test if given["test"] else dataset.train,
        given["picture"],
        _tell,
        given["examples"],
        given["epochs"],
        given["tf_random_seed"],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m minidist.data", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    skip = "damaged images are left out and counted, and are no error"

    told = "write TFRecord files of a folder with train/CLASS/*.jpg and val/CLASS/*.jpg"
    one = commands.add_parser("write", help=told, description=_sentence(told), allow_abbrev=False)
    one.set_defaults(do=_write)
    one.add_argument("folder", type=Path, help="the folder with the images")
    one.add_argument("target", type=Path, help="the folder with the files, which is made")
    one.add_argument(
        "--shard_images", type=_positive, default=SHARD_IMAGES, help="at most so many in a file"
    )
    one.add_argument("--skip_bad_records", action="store_true", help=skip)

    told = "show examples as a model is fed them: a row for each, a column for each epoch"
    one = commands.add_parser("show", help=told, description=_sentence(told), allow_abbrev=False)
    one.set_defaults(do=_show)
    one.add_argument("data_name", choices=SOURCES, help=f"one of {', '.join(SOURCES)}")
    one.add_argument("picture", type=Path, nargs="?", help="the PNG file that is made of images")
    one.add_argument("--data_dir", help="the folder with the data set")
    one.add_argument("--test", action="store_true", help="examples to test on, not to train on")
    one.add_argument("--examples", type=_positive, default=8, help="so many of them")
    one.add_argument("--epochs", type=_positive, default=6, help="in so many epochs")
    one.add_argument("--tf_random_seed", type=_seed, default=1234, help="which examples, and how")
    one.add_argument("--input_preprocessor", default="default", help=", ".join(PREPROCESSORS))
    one.add_argument(
        "--resize_method", default="bilinear", help=", ".join((*RESIZE_METHODS, ROUND_ROBIN))
    )
    one.add_argument(
        "--nodistortions",
        dest="distortions",
        action="store_false",
        help="leave colours, and CIFAR-10's place and side, as they are",
    )
    one.add_argument("--skip_bad_records", action="store_true", help=skip)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, and not {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from 0 to 2**64 - 1, not {text!r}"
        )
    return int(text)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _tell(what: str) -> None:
    print(what, flush=True)


def _say(what: object, status: int) -> int:
    print(f"minidist.data: {what}", file=sys.stderr)
    return status


def _output_failed(error: OSError) -> int:
    """Say why standard output takes no more; nothing where its reader has left, as `head` does."""
    # The interpreter will try once more to write what is left.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if isinstance(error, BrokenPipeError) else _say(f"standard output: {error}", 1)


if __name__ == "__main__":
    if sys.stdout is None:  # closed by whoever started this
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it stays open
    sys.exit(main(sys.argv[1:]))
