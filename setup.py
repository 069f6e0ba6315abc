"""Build the compiled core: every kernels/*.pyx becomes minidist.kernels.<name>, and onednn.cpp too.

The latter is left out where oneDNN's headers, or pybind11, are not installed.
"""

from __future__ import annotations

import runpy
from glob import glob
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
CONTRACTED = {"attention", "convolution", "tiles"}

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


def onednn() -> list[Extension]:
    """Return the part that uses oneDNN, if it can be built here.

    The library is linked by its name, and not carried along: who imports the part loads it first.
    Who finds it then finds its files now, wherever its packages lie: pip builds in a folder of
    their own, and with --no-build-isolation, or by `python setup.py`, they are where the user's
    are. That module is run by its path: minidist cannot be imported before it is built.
    """
    where = runpy.run_path("minidist/device/cpu_onednn.py")
    try:
        import pybind11

        headers = where["files"](where["HEADERS_PACKAGE"], where["HEADER"])
        libraries = where["files"](where["PACKAGE"], where["LIBRARY"])
    except ImportError:
        return []
    if not headers or not libraries:
        return []
    folders = sorted({str(Path(path).parent) for path in headers})
    return [
        Extension(
            "minidist.kernels.onednn",
            ["kernels/onednn.cpp"],
            language="c++",
            depends=glob("kernels/*.h"),
            include_dirs=["kernels", pybind11.get_include(), *folders],
            extra_objects=[libraries[0]],
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
