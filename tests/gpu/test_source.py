"""The table of CUDA sources agrees with the sources, and the options follow the headers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.kernels import grid, source
from minidist.kernels.source import FOLDER, SOURCES, Module, modules


@pytest.mark.parametrize("name", SOURCES)
def test_the_table_has_every_kernel_of_a_source(name: str) -> None:
    kernels = re.findall(r"^MD_KERNEL (\w+)\(", (FOLDER / f"{name}.cu").read_text(), re.MULTILINE)
    assert sorted(kernels) == sorted(Module(name, "float32").kernels)


def test_the_table_has_every_source() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(SOURCES)
    assert len(set(modules())) == len(modules()) == 2 + 16 + 4 + 4 + 4 + 4 + 2 + 4 + 2


def test_python_and_the_headers_agree_on_sizes() -> None:
    text = (FOLDER / "reduce.h").read_text() + (FOLDER / "grid.cuh").read_text()
    assert f"MD_CHUNK = {grid.CHUNK}," in text
    assert f"MD_BLOCK = {grid.THREADS}," in text


def test_options_name_the_types_and_the_headers() -> None:
    options = Module("reduce", "bfloat16", "float32").options
    assert "-DMD_T=md_bfloat16" in options and "-DMD_TO=float" in options
    assert f"-I{FOLDER}" in options and "--fmad=false" in options
    assert not any(option.startswith("-DMD_TO") for option in Module("reduce", "float32").options)


def test_the_digest_changes_with_any_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    seen = set()
    for name, text in (("a.h", "1"), ("a.h", "2"), ("b.cuh", "2"), ("c.cu", "3"), ("c.cu", "4")):
        (tmp_path / name).write_text(text)
        source.digest.cache_clear()
        seen.add(source.digest())
    source.digest.cache_clear()
    assert len(seen) == 3  # a source is part of what CuPy compares itself


def test_nothing_of_cuda_is_imported_before_a_launch() -> None:
    program = (
        "import sys, minidist.kernels.gpu_update, minidist.kernels.gpu_window;"
        "assert not {'cupy', 'cuda.bindings'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
