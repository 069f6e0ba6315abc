// Batch normalisation on a GPU, of [rows, columns] with a channel in each column.
//
// `packed` says that the number of columns and all addresses allow packs of MD_WIDTH. Arrays that
// are not there are null: what is added, the ReLU's result, and where its gradient is wanted.

#include "columns.cuh"
#include "norm.h"

// Go down x and store what each slab of each column has in parts[slab, column].
MD_KERNEL moments(ptrdiff_t rows, ptrdiff_t columns, const T *x, md_moments<W> *parts, int across,
                  bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        md_moments<W> mine[N] = {};
        if (me.column < columns)
            md_down(me, rows, [&](ptrdiff_t row) {
                const auto pack = md_load<N>(x + row * columns + me.column);
                const W share = 1 / (mine[0].count + 1);
                for (int k = 0; k < N; ++k) md_take(mine[k], md_widen(pack.at[k]), share);
            });
        md_together(me, columns, mine, [&](int k, const md_moments<W> &sum) {
            parts[blockIdx.y * columns + me.column + k] = sum;
        });
    });
}

// Mean and biased variance of each column, 0 and 0 of nothing.
MD_KERNEL moments_together(ptrdiff_t slabs, ptrdiff_t columns, const md_moments<W> *parts, W *mean,
                           W *variance, int across) {
    const md_thread<1> me(across);
    md_moments<W> mine[1] = {};
    if (me.column < columns)
        md_down(me, slabs, [&](ptrdiff_t slab) {
            md_take(mine[0], parts[slab * columns + me.column]);
        });
    md_together(me, columns, mine, [&](int, const md_moments<W> &sum) {
        mean[me.column] = sum.mean;
        variance[me.column] = sum.count > 0 ? sum.squares / sum.count : 0;
    });
}

MD_GPU md_channel<W> md_channel_of(ptrdiff_t column, const W *mean, const W *variance,
                                   const W *scale, W epsilon) {
    const W inverse = 1 / md_sqrt(variance[column] + epsilon);
    return {mean[column], inverse, scale[column] * inverse};
}

// To what is normalised `add` is added; then the ReLU is taken, if it is wanted.
MD_KERNEL normalize(ptrdiff_t rows, ptrdiff_t columns, const T *x, const W *mean,
                    const W *variance, const W *scale, const W *offset, W epsilon, const T *add,
                    bool relu, T *y, int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        if (me.column >= columns) return;
        md_channel<W> channel[N];
        W offsets[N];
        for (int k = 0; k < N; ++k) {
            channel[k] = md_channel_of(me.column + k, mean, variance, scale, epsilon);
            offsets[k] = offset[me.column + k];
        }
        md_down(me, rows, [&](ptrdiff_t row) {
            const ptrdiff_t at = row * columns + me.column;
            auto pack = md_load<N>(x + at);
            md_pack<T, N> more = {};
            if (add) more = md_load<N>(add + at);
            for (int k = 0; k < N; ++k) {
                W result = md_normalize(channel[k], md_widen(pack.at[k]), offsets[k]);
                if (add) result += md_widen(more.at[k]);
                md_round(relu ? md_relu(result) : result, pack.at[k]);
            }
            md_store<N>(y + at, pack);
        });
    });
}

// Go down dy, of which only that counts where the ReLU's result y is above 0, and store the sums of
// dy * normal(x) and of dy in parts[slab, column], and what counts in dz.
MD_KERNEL normalize_sums(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x, const T *y,
                         const W *mean, const W *variance, W epsilon, T *dz, md_sums<W> *parts,
                         int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        md_sums<W> mine[N] = {};
        if (me.column < columns) {
            md_channel<W> channel[N];
            for (int k = 0; k < N; ++k)
                channel[k] = md_channel_of(me.column + k, mean, variance, mean, epsilon);
            md_down(me, rows, [&](ptrdiff_t row) {
                const ptrdiff_t at = row * columns + me.column;
                const auto dys = md_behind_relu<N>(dy, y, at);
                const auto xs = md_load<N>(x + at);
                for (int k = 0; k < N; ++k) {
                    const W g = md_widen(dys.at[k]);
                    md_take(mine[k], {g * md_normal(channel[k], md_widen(xs.at[k])), g});
                }
                if (dz) md_store<N>(dz + at, dys);
            });
        }
        md_together(me, columns, mine, [&](int k, const md_sums<W> &sums) {
            parts[blockIdx.y * columns + me.column + k] = sums;
        });
    });
}

// The gradients of scale and offset.
MD_KERNEL sums_together(ptrdiff_t slabs, ptrdiff_t columns, const md_sums<W> *parts, W *dscale,
                        W *doffset, int across) {
    const md_thread<1> me(across);
    md_sums<W> mine[1] = {};
    if (me.column < columns)
        md_down(me, slabs, [&](ptrdiff_t slab) {
            md_take(mine[0], parts[slab * columns + me.column]);
        });
    md_together(me, columns, mine, [&](int, const md_sums<W> &sums) {
        dscale[me.column] = sums.first;
        doffset[me.column] = sums.second;
    });
}

// `per_row` is 1/rows where mean and variance are those of x itself, and else 0.
MD_KERNEL normalize_backward(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x, const T *y,
                             const W *mean, const W *variance, const W *scale, const W *dscale,
                             const W *doffset, W epsilon, W per_row, T *dx, int across,
                             bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        if (me.column >= columns) return;
        md_channel<W> channel[N];
        md_sums<W> means[N];
        for (int k = 0; k < N; ++k) {
            const ptrdiff_t column = me.column + k;
            channel[k] = md_channel_of(column, mean, variance, scale, epsilon);
            means[k] = {dscale[column] * per_row, doffset[column] * per_row};
        }
        md_down(me, rows, [&](ptrdiff_t row) {
            const ptrdiff_t at = row * columns + me.column;
            auto pack = md_behind_relu<N>(dy, y, at);
            const auto xs = md_load<N>(x + at);
            for (int k = 0; k < N; ++k)
                md_round(md_normalize_backward(channel[k], md_widen(pack.at[k]),
                                               md_widen(xs.at[k]), means[k].first, means[k].second),
                         pack.at[k]);
            md_store<N>(dx + at, pack);
        });
    });
}
