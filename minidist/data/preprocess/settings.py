"""What can be chosen of preprocessing; names and defaults are those of the flags."""

from __future__ import annotations

from dataclasses import dataclass

from minidist.errors import UsageError

PREPROCESSORS = ("default", "official_models_imagenet")
RESIZE_METHODS = ("bilinear", "nearest", "bicubic", "area")
ROUND_ROBIN = "round_robin"  # each method in its turn, by the example's number


@dataclass(frozen=True)
class Settings:
    """How examples become inputs.

    input_preprocessor: for encoded images, one of PREPROCESSORS. resize_method: one of
    RESIZE_METHODS, or "round_robin". distortions: of encoded images the colours, of CIFAR-10 the
    place of the crop and the side that is left. distort_color_in_yiq: saturation and hue are
    changed in YIQ, by a matrix, and not in HSV. skip_bad_records: a record that cannot be read is
    replaced by the next good one of its file, and counted; else it is an error.
    Raises UsageError for names that there are not.
    """

    input_preprocessor: str = "default"
    resize_method: str = "bilinear"
    distortions: bool = True
    distort_color_in_yiq: bool = True
    skip_bad_records: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("input_preprocessor", PREPROCESSORS),
            ("resize_method", (*RESIZE_METHODS, ROUND_ROBIN)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name} must be one of {', '.join(allowed)}, but it is {getattr(self, name)!r}"
                )

    def method_for(self, number: int) -> str:
        """Return the resize method for the example of that number."""
        if self.resize_method == ROUND_ROBIN:
            return RESIZE_METHODS[number % len(RESIZE_METHODS)]
        return self.resize_method
