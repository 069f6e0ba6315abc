// What is done to each token by itself: layer normalisation, and GELU.
//
// Layer normalisation is of each row, by its own mean and variance (Ba, Kiros and Hinton, 2016):
//
//     normal = (x - mean) / sqrt(variance + epsilon)    y = normal scale + offset
//
// and with g = dy scale its gradients are
//
//     dx = (g - mean of g - normal mean of (g normal)) / sqrt(variance + epsilon)
//     dscale = sum of dy normal over the rows    doffset = sum of dy
//
// A row is gone over several times while it is cached: for its mean, for the squares around it, and
// then for what is wanted. The way back takes the moments again rather than keep them. Sums over a
// row are those of sixteen lanes, element i in lane i % 16, which then are added up in their order:
// the bits depend on nothing but the row.

#ifndef MD_TOKENS_H
#define MD_TOKENS_H

#include "channel.h"
#include "norm.h"

// What norm.h has for a channel, for a row: the scale is each column's, and not in its factor but in
// g.
template <class T> MD_FN md_channel<T> md_row_of(T mean, T variance, T epsilon) {
    const T inverse = 1 / md_sqrt(variance + epsilon);
    return {mean, inverse, inverse};
}

template <class T> MD_FN T md_layer_norm(md_channel<T> row, T x, T scale, T offset) {
    return md_normal(row, x) * scale + offset;
}

// GELU with the hyperbolic tangent (Hendrycks and Gimpel, 2016): x (1 + tanh(z / 2)) / 2, where
//
//     z = 2 sqrt(2 / pi) (x + 0.044715 x^3)    (1 + tanh(z / 2)) / 2 = 1 / (1 + e^-z)
//
// With e = e^-|z|, which never overflows, that is 1 / (1 + e) above 0 and e / (1 + e) below, and its
// derivative by z is e / (1 + e)^2 on both sides.
constexpr double MD_GELU_STEEP = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double MD_GELU_CUBIC = 0.044715;
template <class T> struct md_sigmoid {
    T value, slope;
};
template <class T> MD_FN md_sigmoid<T> md_gelu_gate(T x) {
    const T z = T(MD_GELU_STEEP) * (x + T(MD_GELU_CUBIC) * x * x * x);
    const T e = md_exp(z < 0 ? z : -z), share = 1 / (1 + e);
    return {z < 0 ? e * share : share, e * share * share};
}

template <class T> MD_FN T md_gelu(T x) { return x * md_gelu_gate(x).value; }

// Where the gate is flat x^2 may be infinite, and counts for nothing.
template <class T> MD_FN T md_gelu_backward(T dy, T x) {
    const md_sigmoid<T> gate = md_gelu_gate(x);
    const T steep = T(MD_GELU_STEEP) * (1 + T(3 * MD_GELU_CUBIC) * x * x);
    return dy * (gate.value + (gate.slope > 0 ? x * gate.slope * steep : 0));
}

#if MD_HOST

// The sum of term(i) over a row.
template <class T, class Term> MD_FN T md_row_sum(ptrdiff_t columns, Term term) {
    enum { LANES = 16 };
    T lanes[LANES] = {};
    ptrdiff_t i = 0;
    for (; i + LANES <= columns; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] += term(i + lane);
    for (int lane = 0; i + lane < columns; ++lane) lanes[lane] += term(i + lane);
    T sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += lanes[lane];
    return sum;
}

template <class T>
MD_FN md_channel<T> md_row_moments(ptrdiff_t columns, const T *x, T epsilon) {
    const T mean = md_row_sum<T>(columns, [=](ptrdiff_t i) MD_INLINE { return x[i]; }) / columns;
    const T squares = md_row_sum<T>(columns, [=](ptrdiff_t i) MD_INLINE {
        return (x[i] - mean) * (x[i] - mean);
    });
    return md_row_of(mean, squares / columns, epsilon);
}

template <class T>
MD_CLONES static void md_layer_norm_rows(ptrdiff_t first, ptrdiff_t last, ptrdiff_t columns,
                                         const T *x_, const T *scale, const T *offset, T epsilon,
                                         T *y_) {
    for (ptrdiff_t at = first * columns; at < last * columns; at += columns) {
        const T *x = x_ + at;
        T *y = y_ + at;
        const md_channel<T> row = md_row_moments(columns, x, epsilon);
        MD_IVDEP
        for (ptrdiff_t i = 0; i < columns; ++i) y[i] = md_layer_norm(row, x[i], scale[i], offset[i]);
    }
}

// dx of some rows; what they add to dscale and doffset is added there.
template <class T>
MD_CLONES static void md_layer_norm_backward_rows(ptrdiff_t first, ptrdiff_t last,
                                                  ptrdiff_t columns, const T *dy_, const T *x_,
                                                  const T *scale, T epsilon, T *dx_, T *dscale,
                                                  T *doffset) {
    for (ptrdiff_t at = first * columns; at < last * columns; at += columns) {
        const T *dy = dy_ + at, *x = x_ + at;
        T *dx = dx_ + at;
        md_channel<T> row = md_row_moments(columns, x, epsilon);
        const T plain = md_row_sum<T>(columns, [=](ptrdiff_t i) MD_INLINE {
            return dy[i] * scale[i];
        });
        const T along = md_row_sum<T>(columns, [=](ptrdiff_t i) MD_INLINE {
            return dy[i] * scale[i] * md_normal(row, x[i]);
        });
        const T mean = plain / columns, slope = along / columns;
        MD_IVDEP
        for (ptrdiff_t i = 0; i < columns; ++i) {
            const T d = dy[i];
            dscale[i] += d * md_normal(row, x[i]);
            doffset[i] += d;
            dx[i] = md_normalize_backward(row, d * scale[i], x[i], slope, mean);
        }
    }
}

template <class T> MD_CLONES static void md_gelu_loop(ptrdiff_t n, const T *x, T *y) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) y[i] = md_gelu(x[i]);
}

template <class T>
MD_CLONES static void md_gelu_backward_loop(ptrdiff_t n, const T *dy, const T *x, T *dx) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) dx[i] = md_gelu_backward(dy[i], x[i]);
}

static inline void md_gelu_all(md_parallel parallel, int threads, bool wide, ptrdiff_t n,
                               const void *x, void *y) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        md_elements(parallel, n, 8 * sizeof(T), threads, [&](ptrdiff_t first, ptrdiff_t count) {
            md_gelu_loop(count, static_cast<const T *>(x) + first, static_cast<T *>(y) + first);
        });
    });
}

static inline void md_gelu_backward_all(md_parallel parallel, int threads, bool wide, ptrdiff_t n,
                                        const void *dy, const void *x, void *dx) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        md_elements(parallel, n, 8 * sizeof(T), threads, [&](ptrdiff_t first, ptrdiff_t count) {
            md_gelu_backward_loop(count, static_cast<const T *>(dy) + first,
                                  static_cast<const T *>(x) + first,
                                  static_cast<T *>(dx) + first);
        });
    });
}

static inline void md_layer_norm_all(md_parallel parallel, int threads, bool wide, ptrdiff_t rows,
                                     ptrdiff_t columns, const void *x, const void *scale,
                                     const void *offset, double epsilon, void *y) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        md_share(parallel, rows, md_grain(2 * sizeof(T) * columns), threads,
                 [&](ptrdiff_t first, ptrdiff_t last) {
                     md_layer_norm_rows(first, last, columns, static_cast<const T *>(x),
                                        static_cast<const T *>(scale),
                                        static_cast<const T *>(offset), T(epsilon),
                                        static_cast<T *>(y));
                 });
    });
}

static inline bool md_layer_norm_backward_all(md_parallel parallel, int threads, bool wide,
                                              ptrdiff_t rows, ptrdiff_t columns, const void *dy,
                                              const void *x, const void *scale, double epsilon,
                                              void *dx, void *dscale, void *doffset) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        const md_rows shape(rows, columns);
        auto totals = md_totals<T>(
            parallel, threads, shape, 3 * sizeof(T), 2,
            [&](ptrdiff_t first, ptrdiff_t last, T *sums) {
                md_layer_norm_backward_rows(first, last, columns, static_cast<const T *>(dy),
                                            static_cast<const T *>(x),
                                            static_cast<const T *>(scale), T(epsilon),
                                            static_cast<T *>(dx), sums, sums + shape.room);
            },
            [&](double *totals, ptrdiff_t, const auto *more, ptrdiff_t apart, ptrdiff_t) {
                md_add_totals(columns, 2, totals, more, apart);
            });
        for (ptrdiff_t i = 0; i < columns; ++i) {
            static_cast<T *>(dscale)[i] = T(totals[i]);
            static_cast<T *>(doffset)[i] = T(totals[columns + i]);
        }
    });
}

#endif
#endif
