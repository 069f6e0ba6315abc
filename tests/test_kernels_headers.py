"""Each header compiles alone, for the host and as CUDA, and gives the same bits for any target."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from minidist.kernels import layer, update

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels"
HEADERS = sorted(path.name for path in KERNELS.glob("*.h"))
ARITHMETIC = [
    name for name in HEADERS if name == "base.h" or '#include "' in (KERNELS / name).read_text()
]
COMPILER = shutil.which("g++")
TARGETS = {  # flags of the compiler, and what /proc/cpuinfo calls what they need
    "sse2": (["-mno-avx"], set[str]()),
    "avx2": (["-mavx2", "-mfma"], {"avx2", "fma"}),
    "avx512": (
        ["-march=x86-64-v4"],
        {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "fma"},
    ),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# What a CUDA compiler defines, and what it knows without any include.
STAND_IN = """
#include <math.h>
#include <stddef.h>
#include <string.h>
#define __CUDACC__
#define __host__
#define __device__
#define __forceinline__ inline
"""

FORMULAS = """
#include "layer.h"
#include "norm.h"
#include "reduce.h"
#include "update.h"
#include "window.h"

template <class T> T formulas(T x) {
    md_u32 words[4];
    md_philox(1, 2, 3, 4, 5, 6, words);
    T w = x, a = x, b = x;
    const T g = md_gradient(md_preparation<T>{2, 5, 3}, x, w);
    md_step(md_sgd<T>{x}, g, w);
    md_step(md_momentum<T>{x, x, true}, g, w, a);
    md_step(md_rmsprop<T>{x, x, x, x, x}, g, w, a, b);
    md_step(md_adam<T>{x, x, x, x, x, x}, g, w, a, b);
    w += md_uniform(words[0]) + T(md_uniform(words[1], words[2]));
    w = md_dropout(md_relu_backward(md_relu(w), x), words[3], 5, x);
    md_float16 half;
    md_bfloat16 brain;
    md_round(float(w), half);
    md_round(float(w), brain);
    w += T(md_widen(half) + md_widen(brain)) + T(md_square(w));
    md_round(double(w), half);
    md_round(double(w), brain);
    md_moments<T> some = {}, more = {2, 3, 4};
    md_take(some, x, T(1));
    md_take(some, more);
    md_sums<T> sums = {};
    md_take(sums, {some.mean, some.squares});
    const md_channel<T> channel = {some.mean, some.squares, 3};
    w = md_normalize_backward(channel, x, md_normalize(channel, x, w), sums.first, sums.second);
    const md_windows windows = {1, 5, 5, 1, 5, 5, 3, 3, 1, 1, 1, 1};
    w += T(windows.leftmost(2) + windows.beyond(2) + windows.row_at(2, 1) + windows.real(2, 2));
    return md_beats(w, x) && md_finite(w) ? md_exp(-w) : md_term(w, x, md_log(x));
}
template float formulas(float);
template double formulas(double);
"""

# Reads n numbers, runs every loop over them in both types, and writes all results.
LOOPS = """
#include <stdio.h>
#include <vector>

#include "batch_norm.h"
#include "depthwise.h"
#include "layer.h"
#include "reduce.h"
#include "update.h"
#include "window.h"

#if defined(__AVX512F__)
constexpr int VECTOR = 64;  // bytes, the longest of the target
#elif defined(__AVX2__)
constexpr int VECTOR = 32;
#else
constexpr int VECTOR = 16;
#endif

static void alone(ptrdiff_t n, ptrdiff_t, int, md_body body, void *context) {
    body(context, 0, n);
}

static std::vector<double> read_numbers() {
    std::vector<double> numbers;
    for (double x; fread(&x, sizeof x, 1, stdin) == 1;) numbers.push_back(x);
    return numbers;
}

template <class T> static void write(const std::vector<T> &x) {
    fwrite(x.data(), sizeof(T), x.size(), stdout);
}

// Every number of 16 bits, and the n numbers from below their smallest to beyond their largest.
template <class Narrow> static void narrow_loops(const std::vector<double> &numbers) {
    std::vector<Narrow> all(1 << 16), rounded(numbers.size());
    for (int i = 0; i < 1 << 16; ++i) all[i].bits = md_u16(i);
    std::vector<float> wide(all.size()), scaled(numbers.begin(), numbers.end());
    md_cast_loop(all.size(), wide.data(), all.data());
    write(wide);
    for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = ldexpf(scaled[i], int(i % 48) - 28);
    md_cast_loop(scaled.size(), rounded.data(), scaled.data());
    write(rounded);

    const Narrow *const sources[] = {all.data(), all.data() + 999, all.data() + 4999};
    const float weights[] = {3, 0.1f, 7};
    float *const widened[] = {wide.data()};
    Narrow *const narrowed[] = {all.data(), rounded.data()};
    for (int replicas : {1, 2, 3}) {
        md_sum_block(1000, widened, sources, weights, replicas, 20000, 0.3f);
        md_sum_block(1000, narrowed, sources, weights, replicas, 20000, 0.3f);
        write(wide), write(all), write(rounded);
    }
}

template <class T> static void loops(const std::vector<double> &numbers) {
    const ptrdiff_t n = numbers.size(), columns = 17, rows = n / columns;
    const std::vector<T> g(numbers.begin(), numbers.end()), zero(n);
    std::vector<T> w = g, a = g, b(n), losses(rows);
    for (ptrdiff_t i = 0; i < n; ++i) b[i] = g[i] * g[i];

    const T inf = T(INFINITY);
    const md_preparation<T> decays{T(1 / 3.0), inf, T(0.1)}, clips{T(1 / 3.0), T(0.25), 0};
    const double root = sqrt(1 - 0.999);
    const auto adam = md_rounded<T>(md_adam<double>{0.9, 1 - 0.9, 0.999, 1 - 0.999,
                                                    0.01 * root / (1 - 0.9), 1e-8 * root});
    md_loop(adam, decays, n, g.data(), w.data(), a.data(), b.data());
    write(w), write(a), write(b);
    md_loop(md_rmsprop<T>{T(0.1), T(0.9), T(0.1), T(0.9), 1}, clips, n, g.data(), w.data(),
            b.data(), a.data());
    write(w);
    for (bool nesterov : {false, true})
        md_loop(md_momentum<T>{T(0.1), T(0.9), nesterov}, decays, n, g.data(), w.data(), a.data());
    write(w);
    md_loop(md_sgd<T>{T(0.1)}, clips, n, g.data(), w.data());
    write(w);

    write(std::vector<double>{md_square_chunk(n, w.data())});

    const T *const sources[] = {g.data(), w.data(), a.data()};
    const T weights[] = {3, T(0.1), 7};
    T *const one[] = {b.data()}, *const two[] = {b.data(), w.data()};
    md_sum_block(n, one, sources, weights, 3, 0, T(1 / 7.0));
    write(b);
    md_sum_block(n, two, sources, weights, 2, 0, T(1 / 7.0));
    write(b);

    std::vector<md_u32> words(2 * n);
    md_random_words({{1, 2}, {3, 4, 5}}, 6, n / 2, words.data());
    write(words);
    md_uniform_loop(n, words.data(), a.data());
    write(a);
    md_dropout_loop(n, w.data(), words.data(), a.data(), 1 << 23, T(2));
    write(a);

    std::vector<int64_t> labels(rows, 3);
    md_softmax_rows(0, rows, columns, g.data(), labels.data(), losses.data(), a.data());
    write(a), write(losses);

    const md_windows windows{1, rows, columns, 1, rows, columns, 3, 3, 1, 1, 1, 1};
    std::vector<T> seen(9 * rows * columns), image(n);
    md_im2col_rows(windows, 0, rows, g.data(), seen.data());
    md_col2im_rows(windows, 0, rows, seen.data(), image.data());
    write(image);
    md_average_pool_rows(windows, 0, rows, g.data(), image.data());
    md_average_pool_backward_rows(windows, 0, rows, image.data(), w.data());
    write(image), write(w);

    const bool wide = sizeof(T) == sizeof(double);
    const md_rows shape(rows, columns);
    std::vector<T> mean(columns), variance(columns), y(n), dx(n);
    md_moments_all(alone, 1, wide, shape, g.data(), mean.data(), variance.data());
    write(mean), write(variance);
    md_normalize_all(alone, 1, wide, shape, g.data(), mean.data(), variance.data(), w.data(),
                     w.data(), 0.001, image.data(), true, y.data());
    write(y);
    md_normalize_backward_all(alone, 1, wide, shape, w.data(), y.data(), g.data(), mean.data(),
                              variance.data(), w.data(), 0.001, true, dx.data(), a.data(),
                              b.data(), image.data());
    write(dx), write(a), write(b), write(image);
    md_bias_all(alone, 1, wide, shape, g.data(), w.data(), true, y.data());
    md_bias_backward_all(alone, 1, wide, shape, g.data(), y.data(), dx.data(), a.data());
    write(y), write(dx), write(a);

    const md_windows deep{1, 19, 3, 17, 10, 2, 3, 3, 2, 2, 1, 1};
    std::vector<double> totals(9 * 17);
    md_depthwise_rows<VECTOR>(deep, 0, 10, g.data(), w.data(), y.data());
    md_depthwise_backward_rows<VECTOR>(deep, 0, 19, y.data(), w.data(), dx.data());
    md_depthwise_filter<VECTOR>(deep, 0, 17, g.data(), y.data(), totals.data());
    write(y), write(dx), write(totals);
}

int main() {
    const auto numbers = read_numbers();
    loops<float>(numbers);
    loops<double>(numbers);
    narrow_loops<md_float16>(numbers);
    narrow_loops<md_bfloat16>(numbers);
}
"""


def build_flags() -> list[str]:
    """The flags that the build itself uses, read from setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLAGS":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no FLAGS")


def compile_text(text: str, *options: str) -> None:
    assert COMPILER is not None
    python = f"-I{sysconfig.get_path('include')}"
    command = [COMPILER, "-std=c++17", f"-I{KERNELS}", python, *options, "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("header", HEADERS)
def test_compiles_alone_for_the_host(header: str) -> None:
    compile_text(f'#include "{header}"\n', "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


@pytest.mark.parametrize("header", ARITHMETIC)
def test_compiles_alone_as_cuda(header: str) -> None:
    text = f'{STAND_IN}#include "{header}"\n'
    compile_text(text, "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


@pytest.mark.parametrize("target", ["", STAND_IN], ids=["host", "cuda"])
def test_every_formula_is_usable(target: str) -> None:
    compile_text(target + FORMULAS, "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1003)


@pytest.fixture(scope="module")
def sse2(numbers: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return run_loops("sse2", numbers, tmp_path_factory.mktemp("sse2"))


def run_loops(target: str, numbers: np.ndarray, folder: Path) -> bytes:
    flags, needed = TARGETS[target]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    present = {word for line in lines if line.startswith("flags") for word in line.split()}
    if not present:
        pytest.skip("not an x86 processor")
    if missing := needed - present:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    program = folder / "loops"
    compile_text(LOOPS, *build_flags(), *flags, "-DMD_CLONES=", "-Wno-unused", "-o", str(program))
    done = subprocess.run([program], input=numbers.tobytes(), capture_output=True, check=True)
    return done.stdout


@pytest.mark.parametrize("target", ["avx2", "avx512"])
def test_all_targets_give_the_same_bits(
    target: str, numbers: np.ndarray, sse2: bytes, tmp_path: Path
) -> None:
    got = np.frombuffer(run_loops(target, numbers, tmp_path), np.uint16)
    np.testing.assert_array_equal(got, np.frombuffer(sse2, np.uint16))


def test_the_compiled_modules_give_these_bits_too(numbers: np.ndarray, sse2: bytes) -> None:
    n, columns = len(numbers), 17
    g = numbers.astype(np.float32)
    w, m, v = g.copy(), g.copy(), g * g
    update.adam(
        [w],
        [g],
        [m],
        [v],
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        step=1,
        scale=1 / 3,
        weight_decay=[0.1],
    )
    single = np.frombuffer(sse2, np.float32, count=16 * n)
    for i, got in enumerate([w, m, v]):
        np.testing.assert_array_equal(got, single[i * n : (i + 1) * n])

    # The program writes three arrays of Adam, one each of RMSProp, momentum and SGD, a sum of
    # squares in double, two sums, 2n words, and two arrays of random numbers, before it comes to
    # the softmax.
    single = single[2:]
    softmax = single[12 * n : 13 * n]
    rows = n // columns
    logits = g[: rows * columns].reshape(rows, columns)
    losses, dlogits = np.empty(rows, np.float32), np.empty_like(logits)
    layer.softmax_cross_entropy(logits, np.full(rows, 3), losses, dlogits)
    np.testing.assert_array_equal(dlogits.ravel(), softmax[: rows * columns])
    np.testing.assert_array_equal(losses, single[13 * n : 13 * n + rows])
