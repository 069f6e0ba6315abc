"""Build the compiled core: every kernels/*.pyx becomes minidist.kernels.<name>."""

from __future__ import annotations

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

extensions = [
    Extension(
        f"minidist.kernels.{Path(source).stem}",
        [source],
        language="c++",
        include_dirs=["kernels", numpy.get_include()],
        depends=glob("kernels/*.h"),
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
    )
    for source in sorted(glob("kernels/*.pyx"))
]

setup(
    packages=[*find_packages(include=["minidist", "minidist.*"]), "minidist.kernels"],
    package_dir={"minidist.kernels": "kernels"},
    package_data={
        "minidist": ["py.typed", "data/*.gz", "data/*.md", "trace/page.*"],
        "minidist.kernels": ["*.h", "*.cu", "*.cuh", "*.pyx", "*.pxd", "*.pyi"],
    },
    ext_modules=cythonize(
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
    zip_safe=False,
)
