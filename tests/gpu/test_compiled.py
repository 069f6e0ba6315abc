"""Every .cu file compiles through NVRTC, as CuPy compiles it, for all kinds of GPU; none is needed.

What is looked at: the compiler has nothing to say, no kernel keeps anything in local memory, and
what goes over long arrays does so 16 bytes at a time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minidist.kernels.source import Module, kernel, modules

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra test-gpu")

# What CuPy adds to the options of a RawModule.
CUPYS = ("-ftz=true", "--device-as-default-execution-space")
ARCHITECTURES = ("70", "80", "90", "100", "120")
# Kernels that make few numbers of many, or whose threads have single elements.
NARROW = {
    "first_nonfinite",
    "square_chunks",
    "add_in_order",
    "softmax",
    "log_softmax",
    "softmax_cross_entropy",
    "scatter_add",
    "moments",
    "moments_together",
    "normalize_sums",
    "sums_together",
    "depthwise_together",
    "bias_together",
    "uniform",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_sums",
    "causal_softmax",
    "causal_softmax_backward",
}


def compiled(module: Module, *options: str) -> tuple[object, str]:
    """Return NVRTC's program and its log."""
    status, program = nvrtc.nvrtcCreateProgram(module.text.encode(), b"", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    given = [option.encode() for option in (*module.options, *CUPYS, *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.decode().rstrip("\0")
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    return program, text


def warnings_in(log: str) -> list[str]:
    """All lines but ptxas's report, and that some architecture is old."""
    lines = [line for line in log.splitlines() if line.strip()]
    return [line for line in lines if not re.match(r"ptxas( info|  +\.)|.*deprecated", line)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", modules(), ids=lambda module: "-".join(filter(None, module)))
def test_compiles_without_warnings_and_spills(module: Module, architecture: str) -> None:
    program, log = compiled(module, f"-arch=sm_{architecture}", "--ptxas-options=-v")
    assert warnings_in(log) == []
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    assert size > 1000
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(names) == sorted(module.kernels)
    memory = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", log)
    assert memory == [("0", "0", "0")] * len(names)


@pytest.mark.parametrize("module", modules(), ids=lambda module: "-".join(filter(None, module)))
def test_long_arrays_are_stored_16_bytes_at_a_time(module: Module) -> None:
    program, _ = compiled(module, "-arch=compute_80")
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    bodies = re.split(r"\.entry (\w+)\(", text.decode())
    for name, body in zip(bodies[1::2], bodies[2::2], strict=True):
        if name in NARROW:
            continue
        stores = re.findall(r"st\.global\.wb\.v[24]\.[a-z]+32", body)
        loads = re.findall(r"\bld\.(?:global\.|relaxed\.)*(v4\.[a-z]32|v2\.[a-z]64|v2\.u32)", body)
        assert stores and loads, f"{name} goes element by element"


def test_a_mistake_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The checks above look at words of the compiler: these must be the ones that it uses.
    monkeypatch.setattr("minidist.kernels.source.FOLDER", tmp_path)
    (tmp_path / "random.cu").write_text(
        'extern "C" __global__ void uniform(int *x) { int unused; int many[9]; many[*x] = 1; '
        "x[1] = many[x[2]]; }"
    )
    _, log = compiled(Module("random", "float32"), "-arch=sm_80", "--ptxas-options=-v")
    assert any("unused" in line for line in warnings_in(log))
    assert "0 bytes stack frame" not in log.replace("40 bytes", "many bytes")


def test_cupy_takes_a_module_without_compiling_it() -> None:
    pytest.importorskip("cupy", reason="needs the extra test-gpu")
    module = Module("update", "float32")
    adam = kernel(module, "adam")
    assert adam is kernel(module, "adam")
    assert (adam.name, adam.code, adam.options) == ("adam", module.text, module.options)
