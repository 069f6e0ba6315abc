"""Flags of the input: how examples become what a model is fed, and who makes them ready."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.bench.flags.kinds import BOOLEAN, choice, flag, whole
from minidist.data.preprocess import PREPROCESSORS, RESIZE_METHODS
from minidist.data.preprocess.settings import ROUND_ROBIN, Settings

# What says how encoded images are read; the flags bear the settings' names.
OF_ENCODED = ("input_preprocessor", "resize_method", "distort_color_in_yiq", "skip_bad_records")


@dataclass(frozen=True)
class Input:
    """The way of examples to the model."""

    distortions: bool = flag(
        True,
        BOOLEAN,
        "distort images to train on: the colours of encoded ones; of CIFAR-10's the place and side",
    )
    input_preprocessor: str = flag(
        "default", choice(*PREPROCESSORS), "how encoded images are cropped, resized and scaled"
    )
    resize_method: str = flag(
        "bilinear",
        choice(*RESIZE_METHODS, ROUND_ROBIN),
        f"how encoded images are resized; {ROUND_ROBIN}: each example in another way",
    )
    distort_color_in_yiq: bool = flag(
        True, BOOLEAN, "change saturation and hue in YIQ, which is faster, and not in HSV"
    )
    skip_bad_records: bool = flag(
        False,
        BOOLEAN,
        "put the next good one of its file in the place of a record that cannot be read, and count "
        "these",
    )
    datasets_num_private_threads: int | None = flag(
        None,
        whole(0, 1024),
        "threads that read examples; 0: whoever reads batches ahead does; by default as many as "
        "there are cores for encoded images, else 0",
    )
    datasets_prefetch_buffer_size: int = flag(
        2, whole(1, 10_000), "batches on each device that are read ahead at most"
    )
    datasets_repeat_cached_sample: bool = flag(
        False, BOOLEAN, "read one batch of the training part and feed it again and again"
    )

    def settings(self) -> Settings:
        """Return what preprocessing is told."""
        names = ("distortions", *OF_ENCODED)
        return Settings(**{name: getattr(self, name) for name in names})
