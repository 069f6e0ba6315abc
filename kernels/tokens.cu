// What is done to each token by itself, on a GPU: layer normalisation, and GELU.
//
// Scale, offset and their gradients are of the type that is computed with. On the way back the
// moments of each row are taken anew, and kept from one kernel to the next.

#include "columns.cuh"
#include "tokens.h"
#include "warp.cuh"

MD_KERNEL gelu(ptrdiff_t n, const T *x, T *y) {
    md_map(n, x, y, [](W number) { return md_gelu(number); });
}

MD_KERNEL gelu_backward(ptrdiff_t n, const T *dy, const T *x, T *dx) {
    md_map(n, dy, x, dx, [](W d, W at) { return md_gelu_backward(d, at); });
}

// The moments of a row, by a warp.
MD_GPU md_channel<W> md_moments_of(ptrdiff_t columns, const T *x, int lane, W epsilon) {
    W sum = 0, squares = 0;
    for (ptrdiff_t i = lane; i < columns; i += MD_WARP) sum += md_widen(x[i]);
    const W mean = md_warp_sum(sum) / columns;
    for (ptrdiff_t i = lane; i < columns; i += MD_WARP) {
        const W apart = md_widen(x[i]) - mean;
        squares += apart * apart;
    }
    return md_row_of(mean, md_warp_sum(squares) / columns, epsilon);
}

MD_KERNEL layer_norm(ptrdiff_t rows, ptrdiff_t columns, const T *x, const W *scale,
                     const W *offset, W epsilon, T *y) {
    md_warp_rows(rows, [&](ptrdiff_t row, int lane) {
        const T *from = x + row * columns;
        const md_channel<W> moments = md_moments_of(columns, from, lane, epsilon);
        for (ptrdiff_t i = lane; i < columns; i += MD_WARP)
            md_round(md_layer_norm(moments, md_widen(from[i]), scale[i], offset[i]),
                     y[row * columns + i]);
    });
}

// dx, and what each row has: its mean, and 1 / sqrt(variance + epsilon).
MD_KERNEL layer_norm_backward(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x,
                              const W *scale, W epsilon, T *dx, md_sums<W> *of_rows) {
    md_warp_rows(rows, [&](ptrdiff_t row, int lane) {
        const T *from = x + row * columns, *d = dy + row * columns;
        const md_channel<W> moments = md_moments_of(columns, from, lane, epsilon);
        W plain = 0, along = 0;
        for (ptrdiff_t i = lane; i < columns; i += MD_WARP) {
            const W g = md_widen(d[i]) * scale[i];
            plain += g;
            along += g * md_normal(moments, md_widen(from[i]));
        }
        const W mean = md_warp_sum(plain) / columns, slope = md_warp_sum(along) / columns;
        for (ptrdiff_t i = lane; i < columns; i += MD_WARP)
            md_round(md_normalize_backward(moments, md_widen(d[i]) * scale[i], md_widen(from[i]),
                                           slope, mean),
                     dx[row * columns + i]);
        if (lane == 0) of_rows[row] = {moments.mean, moments.inverse};
    });
}

// Go down dy and store the sums of dy * normal(x) and of dy in parts[slab, column], which norm.cu
// takes together.
MD_KERNEL layer_norm_sums(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x,
                          const md_sums<W> *of_rows, md_sums<W> *parts, int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        md_sums<W> mine[N] = {};
        if (me.column < columns)
            md_down(me, rows, [&](ptrdiff_t row) {
                const ptrdiff_t at = row * columns + me.column;
                const auto dys = md_load<N>(dy + at);
                const auto xs = md_load<N>(x + at);
                // The factor is for dx, which is made elsewhere.
                const md_channel<W> moments = {of_rows[row].first, of_rows[row].second, 0};
                for (int k = 0; k < N; ++k) {
                    const W g = md_widen(dys.at[k]);
                    md_take(mine[k], {g * md_normal(moments, md_widen(xs.at[k])), g});
                }
            });
        md_together(me, columns, mine, [&](int k, const md_sums<W> &sums) {
            parts[blockIdx.y * columns + me.column + k] = sums;
        });
    });
}
