// Batch normalisation on a GPU, of [rows, columns] with a channel in each column.
//
// A block is `across` threads wide, each with a pack of columns, and as tall as its threads allow:
// a thread keeps its columns and goes down the rows. Sums are taken in slabs of rows, one for each
// row of the grid, and a second launch, of one row of blocks, takes the slabs together. Who adds
// what, in which order, depends on grid and block alone, which follow from the shape.
//
// `packed` says that the number of columns and all addresses allow packs of MD_WIDTH.

#include "grid.cuh"
#include "norm.h"

template <int N> struct md_thread {
    int across, tall, y;  // the size of the block, and this thread's place down it
    ptrdiff_t column;     // its first column

    __device__ explicit md_thread(int across_)
        : across(across_), tall(blockDim.x / across_), y(threadIdx.x / across_),
          column((ptrdiff_t(blockIdx.x) * across_ + threadIdx.x % across_) * N) {}
};

// Call body(row) for this thread's rows in the slab of its block.
template <int N, class Body>
MD_GPU void md_down(const md_thread<N> &me, ptrdiff_t rows, Body body) {
    const ptrdiff_t slab = (rows + gridDim.y - 1) / gridDim.y, first = slab * blockIdx.y;
    const ptrdiff_t last = first + slab < rows ? first + slab : rows;
    for (ptrdiff_t row = first + me.y; row < last; row += me.tall) body(row);
}

// What the threads of a column have, taken together by halves; its uppermost thread calls
// store(k, sum) for each of its N columns. All threads of the block must come here.
template <int N, class Sum, class Store>
MD_GPU void md_together(const md_thread<N> &me, ptrdiff_t columns, Sum (&mine)[N], Store store) {
    __shared__ Sum lower[MD_BLOCK];
    for (int k = 0; k < N; ++k) {
        for (int tall = me.tall; tall > 1; tall = (tall + 1) / 2) {
            const int half = (tall + 1) / 2;
            if (me.y >= half && me.y < tall) lower[threadIdx.x] = mine[k];
            __syncthreads();
            if (me.y < tall - half) md_take(mine[k], lower[threadIdx.x + half * me.across]);
            __syncthreads();
        }
        if (me.y == 0 && me.column < columns) store(k, mine[k]);
    }
}

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
    return {mean[column], 1 / md_sqrt(variance[column] + epsilon), scale[column]};
}

MD_KERNEL normalize(ptrdiff_t rows, ptrdiff_t columns, const T *x, const W *mean,
                    const W *variance, const W *scale, const W *offset, W epsilon, T *y, int across,
                    bool packed) {
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
            auto pack = md_load<N>(x + row * columns + me.column);
            for (int k = 0; k < N; ++k)
                md_round(md_normalize(channel[k], md_widen(pack.at[k]), offsets[k]), pack.at[k]);
            md_store<N>(y + row * columns + me.column, pack);
        });
    });
}

// Go down dy and store the sums of dy * normal(x) and of dy in parts[slab, column].
MD_KERNEL normalize_sums(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x, const W *mean,
                         const W *variance, W epsilon, md_sums<W> *parts, int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        md_sums<W> mine[N] = {};
        if (me.column < columns) {
            md_channel<W> channel[N];
            for (int k = 0; k < N; ++k)
                channel[k] = md_channel_of(me.column + k, mean, variance, mean, epsilon);
            md_down(me, rows, [&](ptrdiff_t row) {
                const auto dys = md_load<N>(dy + row * columns + me.column);
                const auto xs = md_load<N>(x + row * columns + me.column);
                for (int k = 0; k < N; ++k) {
                    const W g = md_widen(dys.at[k]);
                    md_take(mine[k], {g * md_normal(channel[k], md_widen(xs.at[k])), g});
                }
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
MD_KERNEL normalize_backward(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *x,
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
            auto pack = md_load<N>(dy + row * columns + me.column);
            const auto xs = md_load<N>(x + row * columns + me.column);
            for (int k = 0; k < N; ++k)
                md_round(md_normalize_backward(channel[k], md_widen(pack.at[k]),
                                               md_widen(xs.at[k]), means[k].first, means[k].second),
                         pack.at[k]);
            md_store<N>(dx + row * columns + me.column, pack);
        });
    });
}
