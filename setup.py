"""Build the compiled core: every kernels/*.pyx becomes minidist.kernels.<name>, and onednn.cpp too.

The latter is left out where oneDNN's headers, or pybind11, are not installed.
"""

from __future__ import annotations

from glob import glob
from importlib import metadata
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup

# The same formula must give the same bits in every clone of a loop: no contraction of a*b+c into
# one rounding where the target has FMA, and never -ffast-math. -fno-math-errno and
# -fno-trapping-math change no result; they let sqrt and comparisons be vectorised.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
]
# A product of matrices is the exception, as in BLAS: its bits are those of a kind of processor.
CONTRACTED = {"convolution"}

extensions = [
    Extension(
        f"minidist.kernels.{Path(source).stem}",
        [source],
        language="c++",
        include_dirs=["kernels", numpy.get_include()],
        depends=glob("kernels/*.h"),
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
        extra_compile_args=[*FLAGS, "-ffp-contract=fast"]
        if Path(source).stem in CONTRACTED
        else FLAGS,
        extra_link_args=["-pthread"],
    )
    for source in sorted(glob("kernels/*.pyx"))
]


def files(package: str, name: str) -> list[Path]:
    """Return where an installed package has a file, wherever it was installed."""
    try:
        found = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(file.locate()).resolve() for file in found if file.name == name]


def onednn() -> list[Extension]:
    """Return the part that uses oneDNN, if it can be built here.

    The library is linked by its name, and not carried along: who imports the part loads it first.
    """
    headers = files("onednn-devel-cpu-gomp", "dnnl.hpp")
    libraries = files("onednn-cpu-gomp", "libdnnl.so.3")
    try:
        import pybind11
    except ImportError:
        return []
    if not headers or not libraries:
        return []
    return [
        Extension(
            "minidist.kernels.onednn",
            ["kernels/onednn.cpp"],
            language="c++",
            include_dirs=[pybind11.get_include(), *{str(path.parent) for path in headers}],
            extra_objects=[str(libraries[0])],
            extra_compile_args=["-O2", "-g0", "-std=c++17", "-fvisibility=hidden", "-fopenmp"],
            extra_link_args=["-fopenmp"],
        )
    ]


setup(
    packages=[*find_packages(include=["minidist", "minidist.*"]), "minidist.kernels"],
    package_dir={"minidist.kernels": "kernels"},
    package_data={
        "minidist": ["py.typed", "data/*.gz", "data/*.md", "trace/page.*"],
        "minidist.kernels": ["*.h", "*.cu", "*.cuh", "*.cpp", "*.pyx", "*.pxd", "*.pyi"],
    },
    ext_modules=[
        *cythonize(
            extensions,
            build_dir="build/cython",
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "initializedcheck": False,
                "cdivision": True,
            },
        ),
        *onednn(),
    ],
    zip_safe=False,
)
