// What layers compute element by element or row by row: ReLU, dropout, softmax cross-entropy.

#ifndef MD_LAYER_H
#define MD_LAYER_H

#include "random.h"

// NaN stays NaN, so that a broken model is seen in its loss.
template <class T> MD_FN T md_relu(T x) { return x < 0 ? 0 : x; }
template <class T> MD_FN T md_relu_backward(T dy, T y) { return y > 0 ? dy : 0; }
template <class T> MD_FN T md_relu6(T x) { return x > 6 ? 6 : md_relu(x); }
template <class T> MD_FN T md_relu6_backward(T dy, T y) { return y > 0 && y < 6 ? dy : 0; }

// `dropped` is the rate in units of 2^-24; `scale` is 1 / (1 - rate).
template <class T> MD_FN T md_dropout(T x, md_u32 word, int dropped, T scale) {
    return int(word >> 8) >= dropped ? x * scale : 0;
}

// e^x for x <= 0, which is all that a softmax needs, as 2^k e^r with |r| <= ln(2) / 2.
//
// Adding 1.5 * 2^23 (2^52 for double) to x log2(e) leaves the nearest integer k in the low bits
// of the sum. ln(2) is subtracted in two parts, of which the first has so few bits that k times
// it is exact. e^r is its Taylor series, whose rest is below half a unit of the last place after
// 8 terms (14 for double). Results below the smallest normal number are 0; NaN stays NaN. It is
// written here, and not libm's, so that loops of it are vectorised.
MD_FN float md_exp(float x) {
    const float shift = 12582912.0f, sum = x * 1.44269504f + shift, k = sum - shift;
    const float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    float e = 1.0f / 5040;
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    return x < -87.0f ? 0.0f : e * md_number((md_bits(sum) << 23) + md_bits(1.0f));
}
MD_FN double md_exp(double x) {
    const double shift = 6755399441055744.0, sum = x * 1.4426950408889634 + shift;
    const double k = sum - shift;
    const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double e = 1.0 / 6227020800;
    e = e * r + 1.0 / 479001600;
    e = e * r + 1.0 / 39916800;
    e = e * r + 1.0 / 3628800;
    e = e * r + 1.0 / 362880;
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    return x < -708.0 ? 0.0 : e * md_number((md_bits(sum) << 52) + md_bits(1.0));
}

#if MD_HOST

// Call body(first, count) on pieces of n elements, of which `bytes` are read and written each.
template <class Body>
static void md_elements(md_parallel parallel, ptrdiff_t n, ptrdiff_t bytes, int threads,
                        Body body) {
    const ptrdiff_t step = MD_BLOCK / 4;  // pieces begin where a cache line begins
    auto steps = [&](ptrdiff_t first, ptrdiff_t last) {
        body(first * step, std::min(last * step, n) - first * step);
    };
    md_share(parallel, (n + step - 1) / step, md_grain(bytes * step), threads, steps);
}

// `SIX` says that it is ReLU6.
template <bool SIX, class T> MD_CLONES static void md_relu_loop(ptrdiff_t n, const T *x, T *y) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) y[i] = SIX ? md_relu6(x[i]) : md_relu(x[i]);
}

template <bool SIX, class T>
MD_CLONES static void md_relu_backward_loop(ptrdiff_t n, const T *dy, const T *y, T *dx) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        dx[i] = SIX ? md_relu6_backward(dy[i], y[i]) : md_relu_backward(dy[i], y[i]);
}

template <class T>
MD_CLONES static void md_dropout_loop(ptrdiff_t n, const T *x, const md_u32 *words, T *y,
                                      int dropped, T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) y[i] = md_dropout(x[i], words[i], dropped, scale);
}

// One example a row. The largest logit is subtracted first, so that nothing overflows:
//     loss = log(sum e^(x - max)) - (x[label] - max);  d loss / d x = softmax(x) - onehot(label)
// The sum runs from the first class to the last. `d` may be the logits themselves.
template <class T>
MD_CLONES static void md_softmax_rows(ptrdiff_t first, ptrdiff_t last, ptrdiff_t classes,
                                      const T *logits, const int64_t *labels, T *losses, T *d_) {
    for (ptrdiff_t row = first; row < last; ++row) {
        const T *x = logits + row * classes;
        T *d = d_ + row * classes;
        T top = x[0], sum = 0;
        for (ptrdiff_t i = 1; i < classes; ++i) top = x[i] > top ? x[i] : top;
        const T chosen = x[labels[row]] - top;
        MD_IVDEP
        for (ptrdiff_t i = 0; i < classes; ++i) d[i] = md_exp(x[i] - top);
        for (ptrdiff_t i = 0; i < classes; ++i) sum += d[i];
        for (ptrdiff_t i = 0; i < classes; ++i) d[i] /= sum;
        d[labels[row]] -= 1;
        losses[row] = md_log(sum) - chosen;
    }
}

static inline void md_relu_all(md_parallel parallel, int threads, bool wide, bool six, ptrdiff_t n,
                               const void *x, void *y) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const auto loop = six ? md_relu_loop<true, T> : md_relu_loop<false, T>;
        md_elements(parallel, n, 2 * sizeof(T), threads, [&](ptrdiff_t first, ptrdiff_t count) {
            loop(count, static_cast<const T *>(x) + first, static_cast<T *>(y) + first);
        });
    });
}

static inline void md_relu_backward_all(md_parallel parallel, int threads, bool wide, bool six,
                                        ptrdiff_t n, const void *dy, const void *y, void *dx) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const auto loop = six ? md_relu_backward_loop<true, T> : md_relu_backward_loop<false, T>;
        md_elements(parallel, n, 3 * sizeof(T), threads, [&](ptrdiff_t first, ptrdiff_t count) {
            loop(count, static_cast<const T *>(dy) + first, static_cast<const T *>(y) + first,
                 static_cast<T *>(dx) + first);
        });
    });
}

// Word i of the stream decides on element i, in float64 as in float32.
static inline void md_dropout_all(md_parallel parallel, int threads, bool wide, ptrdiff_t n,
                                  const void *x, void *y, double rate, md_stream stream) {
    const int dropped = int(ceil(rate * 16777216));
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const T scale = T(1 / (1 - rate));
        md_with_words(parallel, stream, n, 1, threads,
                      [&](ptrdiff_t first, ptrdiff_t count, const md_u32 *words) {
                          md_dropout_loop(count, static_cast<const T *>(x) + first, words,
                                          static_cast<T *>(y) + first, dropped, scale);
                      });
    });
}

static inline void md_softmax_all(md_parallel parallel, int threads, bool wide, ptrdiff_t n,
                                  ptrdiff_t classes, const void *logits, const int64_t *labels,
                                  void *losses, void *d) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        md_share(parallel, n, md_grain(2 * sizeof(T) * classes), threads,
                 [&](ptrdiff_t first, ptrdiff_t last) {
                     md_softmax_rows(first, last, classes, static_cast<const T *>(logits), labels,
                                     static_cast<T *>(losses), static_cast<T *>(d));
                 });
    });
}

#endif
#endif
