// A bias for each column of [rows, columns], and ReLU, on a GPU: forwards and back.
//
// `packed` says that the number of columns and all addresses allow packs of MD_WIDTH. Arrays that
// are not there are null.

#include "columns.cuh"

// y = x + bias, or the ReLU of that. `From` is how x is stored.
template <class From>
MD_GPU void md_bias(ptrdiff_t rows, ptrdiff_t columns, const From *x, const T *bias, bool relu,
                    T *y, int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        if (me.column >= columns) return;
        const auto biases = md_load<N>(bias + me.column);
        md_down(me, rows, [&](ptrdiff_t row) {
            const ptrdiff_t at = row * columns + me.column;
            const auto from = md_load<N>(x + at);
            md_pack<T, N> pack;
            for (int k = 0; k < N; ++k) {
                const W biased = md_widen(from.at[k]) + md_widen(biases.at[k]);
                md_round(relu ? md_relu(biased) : biased, pack.at[k]);
            }
            md_store<N>(y + at, pack);
        });
    });
}
MD_KERNEL bias(ptrdiff_t rows, ptrdiff_t columns, const T *x, const T *bias, bool relu, T *y,
               int across, bool packed) {
    md_bias(rows, columns, x, bias, relu, y, across, packed);
}
// Of numbers that are not rounded yet, as a matrix product leaves them.
MD_KERNEL bias_wide(ptrdiff_t rows, ptrdiff_t columns, const W *x, const T *bias, bool relu, T *y,
                    int across, bool packed) {
    md_bias(rows, columns, x, bias, relu, y, across, packed);
}

struct md_sum {
    W total;
};
MD_GPU void md_take(md_sum &sum, md_sum more) { sum.total += more.total; }

// Go down dy, of which only that counts where the ReLU's result y is above 0, and store its sums in
// parts[slab, column], and what counts in dz.
MD_KERNEL bias_sums(ptrdiff_t rows, ptrdiff_t columns, const T *dy, const T *y, T *dz,
                    md_sum *parts, int across, bool packed) {
    md_by_width(packed, [&](auto width) {
        constexpr int N = decltype(width)::value;
        const md_thread<N> me(across);
        md_sum mine[N] = {};
        if (me.column < columns)
            md_down(me, rows, [&](ptrdiff_t row) {
                const ptrdiff_t at = row * columns + me.column;
                const auto dys = md_behind_relu<N>(dy, y, at);
                for (int k = 0; k < N; ++k) mine[k].total += md_widen(dys.at[k]);
                if (dz) md_store<N>(dz + at, dys);
            });
        md_together(me, columns, mine, [&](int k, md_sum sum) {
            parts[blockIdx.y * columns + me.column + k] = sum;
        });
    });
}

MD_KERNEL bias_together(ptrdiff_t slabs, ptrdiff_t columns, const md_sum *parts, T *dbias,
                        int across) {
    const md_thread<1> me(across);
    md_sum mine[1] = {};
    if (me.column < columns)
        md_down(me, slabs, [&](ptrdiff_t slab) {
            md_take(mine[0], parts[slab * columns + me.column]);
        });
    md_together(me, columns, mine, [&](int, md_sum sum) { md_round(sum.total, dbias[me.column]); });
}
