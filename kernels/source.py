"""CUDA sources: which kernels there are, and how a file of them is compiled for an element type.

Nothing is compiled before it is asked for, and CuPy, which does it and keeps the result on disk, is
imported no earlier. CuPy knows a module by its text and options but does not look into the headers
that it includes, so the options hold a digest of them.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent

# Of every source: its kernels, and the element types that it is compiled for.
WIDE = ("float32", "float64")
ALL = ("float32", "float64", "float16", "bfloat16")
SOURCES = {
    "update": ("sgd momentum rmsprop adam", WIDE),
    "reduce": ("sum cast copy first_nonfinite square_chunks add_in_order", ALL),
    "layer": (
        "relu relu_backward relu6 relu6_backward dropout softmax log_softmax softmax_cross_entropy "
        "scatter_add",
        ALL,
    ),
    "random": ("uniform", WIDE),
    "norm": (
        "moments moments_together normalize normalize_sums sums_together normalize_backward",
        ALL,
    ),
    "bias": ("bias bias_wide bias_sums bias_together", ALL),
    "tokens": (
        "gelu gelu_backward layer_norm layer_norm_backward layer_norm_sums",
        ALL,
    ),
    "attention": ("causal_softmax causal_softmax_backward", WIDE),
    "window": (
        "im2col col2im max_pool max_pool_backward average_pool average_pool_backward "
        "depthwise depthwise_backward_input depthwise_parts depthwise_together",
        ALL,
    ),
}
TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "md_float16",
    "bfloat16": "md_bfloat16",
}


class Module(NamedTuple):
    """A source, compiled for one element type, in `reduce` also for one type of results."""

    source: str
    dtype: str  # a name of TYPES
    to: str = ""  # likewise; "" is that of the elements

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return tuple(SOURCES[self.source][0].split())

    @property
    def text(self) -> str:
        """The CUDA C++."""
        return (FOLDER / f"{self.source}.cu").read_text()

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told; CuPy adds the architecture, and that subnormals become 0.

        Products and sums are not contracted, so that a formula gives the host's bits.
        """
        types = [f"-DMD_T={TYPES[self.dtype]}"]
        if self.to:
            types.append(f"-DMD_TO={TYPES[self.to]}")
        return ("--std=c++17", "--fmad=false", f"-I{FOLDER}", f"-DMD_HEADERS={digest()}", *types)


def modules() -> list[Module]:
    """Return all that may be asked for."""
    return [
        Module(source, dtype, to)
        for source, (_, types) in SOURCES.items()
        for dtype in types
        for to in (["", *(t for t in types if t != dtype)] if source == "reduce" else [""])
    ]


@cache
def digest() -> str:
    """Return a digest of all headers: it changes when any of them does."""
    texts = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cuh")]):
        texts.update(path.name.encode() + b"\0" + path.read_bytes())
    return texts.hexdigest()[:16]


@cache
def kernel(module: Module, name: str) -> Any:
    """Return what CuPy launches: kernel(grid, block, arguments), on the current device and stream.

    The module is compiled at the first launch of one of its kernels on a device, or read from
    CuPy's cache on disk.
    """
    import cupy

    return cupy.RawKernel(module.text, name, options=module.options, backend="nvrtc")
