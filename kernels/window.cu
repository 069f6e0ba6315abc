// Windows that move over images, on a GPU: columns of a convolution, max and average pooling, and
// depthwise convolution.
//
// A thread makes a pack of channels of one place of the result, from all that it depends on, in the
// order of the loops on the host. So it writes where no other does, and sums have the host's bits;
// only those of a depthwise filter's gradient, which go over all images, are made in slabs.

#include "grid.cuh"
#include "window.h"

// Whether the channels may be taken in packs: given their number and all addresses of images.
template <class... Address> MD_GPU bool md_packed(ptrdiff_t channels, const Address *...addresses) {
    return channels % MD_WIDTH == 0 && (md_aligned(addresses) && ...);
}

// Call body(width, place, e) for packs of channels e of `places` places, shared by the whole grid.
template <class Body>
MD_GPU void md_places(bool packed, ptrdiff_t places, ptrdiff_t channels, Body body) {
    const ptrdiff_t me = ptrdiff_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const ptrdiff_t threads = ptrdiff_t(gridDim.x) * blockDim.x;
    md_by_width(packed, [&](auto width) {
        const ptrdiff_t packs = channels / decltype(width)::value;
        for (ptrdiff_t i = me; i < places * packs; i += threads)
            body(width, i / packs, i % packs * decltype(width)::value);
    });
}

// A row of a window is contiguous in x as in `out`; it is copied by pieces.
MD_KERNEL im2col(md_windows g, const T *x, T *out) {
    const ptrdiff_t places = g.n * g.rows * g.columns * g.kh * g.kw;
    md_places(md_packed(g.c, x, out), places, g.c, [&](auto width, ptrdiff_t place, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        const ptrdiff_t q = place % g.kw, p = place / g.kw % g.kh, window = place / g.kw / g.kh;
        const ptrdiff_t j = window % g.columns, r = window / g.columns;
        const ptrdiff_t row = g.top(r % g.rows) + p, column = g.left(j) + q;
        md_pack<T, N> pack = {};
        if (row >= 0 && row < g.h && column >= 0 && column < g.w)
            pack = md_load<N>(x + ((r / g.rows * g.h + row) * g.w + column) * g.c + e);
        md_store<N>(out + place * g.c + e, pack);
    });
}

// Call body(window, p, q) for each window over an element of an image and the element's place in
// it, in the order in which the host adds: by rows of the window, in them from the leftmost window.
template <class Body> MD_GPU void md_over(const md_windows &g, ptrdiff_t pixel, Body body) {
    const ptrdiff_t x = pixel % g.w, y = pixel / g.w % g.h, image = pixel / g.w / g.h;
    for (ptrdiff_t p = 0; p < g.kh; ++p) {
        const ptrdiff_t i = g.row_at(y, p);
        if (i < 0) continue;
        for (ptrdiff_t j = g.leftmost(x); j < g.beyond(x); ++j)
            body(image * g.rows + i, j, p, x - g.left(j));
    }
}

// The columns are of the type that is computed with, so that what overlaps is rounded once.
MD_KERNEL col2im(md_windows g, const W *columns, T *dx) {
    const bool packed = md_packed(g.c, columns, dx);
    md_places(packed, g.n * g.h * g.w, g.c, [&](auto width, ptrdiff_t pixel, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_over(g, pixel, [&](ptrdiff_t r, ptrdiff_t j, ptrdiff_t p, ptrdiff_t q) {
            const ptrdiff_t place = ((r * g.columns + j) * g.kh + p) * g.kw + q;
            const auto column = md_load<N>(columns + place * g.c + e);
            for (int k = 0; k < N; ++k) sum.at[k] += column.at[k];
        });
        md_pack<T, N> rounded;
        for (int k = 0; k < N; ++k) md_round(sum.at[k], rounded.at[k]);
        md_store<N>(dx + pixel * g.c + e, rounded);
    });
}

// Call body(p, q, from) for each place of a window that is not padding, row by row.
template <class Body>
MD_GPU void md_inside(const md_windows &g, ptrdiff_t window, const T *x, Body body) {
    const ptrdiff_t j = window % g.columns, r = window / g.columns;
    const ptrdiff_t top = g.top(r % g.rows), left = g.left(j);
    const T *image = x + r / g.rows * g.h * g.w * g.c;
    for (ptrdiff_t p = g.low(top); p < g.high(top, g.h, g.kh); ++p)
        for (ptrdiff_t q = g.low(left); q < g.high(left, g.w, g.kw); ++q)
            body(p, q, image + ((top + p) * g.w + left + q) * g.c);
}

MD_KERNEL max_pool(md_windows g, const T *x, T *y, int *argmax) {
    const bool packed = md_packed(g.c, x, y, argmax);
    const ptrdiff_t windows = g.n * g.rows * g.columns;
    md_places(packed, windows, g.c, [&](auto width, ptrdiff_t window, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<T, N> best = {};
        md_pack<int, N> chosen = {};
        bool begun = false;
        md_inside(g, window, x, [&](ptrdiff_t p, ptrdiff_t q, const T *from) {
            const auto pack = md_load<N>(from + e);
            for (int k = 0; k < N; ++k) {
                const bool wins = !begun || md_beats(md_widen(pack.at[k]), md_widen(best.at[k]));
                best.at[k] = wins ? pack.at[k] : best.at[k];
                chosen.at[k] = wins ? int(p * g.kw + q) : chosen.at[k];
            }
            begun = true;
        });
        md_store<N>(y + window * g.c + e, best);
        md_store<N>(argmax + window * g.c + e, chosen);
    });
}

MD_KERNEL max_pool_backward(md_windows g, const T *dy, const int *argmax, T *dx) {
    const bool packed = md_packed(g.c, dy, argmax, dx);
    md_places(packed, g.n * g.h * g.w, g.c, [&](auto width, ptrdiff_t pixel, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_over(g, pixel, [&](ptrdiff_t r, ptrdiff_t j, ptrdiff_t p, ptrdiff_t q) {
            const ptrdiff_t at = (r * g.columns + j) * g.c + e;
            const auto from = md_load<N>(dy + at);
            const auto chosen = md_load<N>(argmax + at);
            for (int k = 0; k < N; ++k)
                if (chosen.at[k] == p * g.kw + q) sum.at[k] += md_widen(from.at[k]);
        });
        md_pack<T, N> rounded;
        for (int k = 0; k < N; ++k) md_round(sum.at[k], rounded.at[k]);
        md_store<N>(dx + pixel * g.c + e, rounded);
    });
}

MD_KERNEL average_pool(md_windows g, const T *x, T *y) {
    const bool packed = md_packed(g.c, x, y);
    const ptrdiff_t windows = g.n * g.rows * g.columns;
    md_places(packed, windows, g.c, [&](auto width, ptrdiff_t window, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_inside(g, window, x, [&](ptrdiff_t, ptrdiff_t, const T *from) {
            const auto pack = md_load<N>(from + e);
            for (int k = 0; k < N; ++k) sum.at[k] += md_widen(pack.at[k]);
        });
        const W count = W(g.real(window / g.columns % g.rows, window % g.columns));
        md_pack<T, N> mean;
        for (int k = 0; k < N; ++k) md_round(sum.at[k] / count, mean.at[k]);
        md_store<N>(y + window * g.c + e, mean);
    });
}

MD_KERNEL average_pool_backward(md_windows g, const T *dy, T *dx) {
    const bool packed = md_packed(g.c, dy, dx);
    md_places(packed, g.n * g.h * g.w, g.c, [&](auto width, ptrdiff_t pixel, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_over(g, pixel, [&](ptrdiff_t r, ptrdiff_t j, ptrdiff_t, ptrdiff_t) {
            const auto from = md_load<N>(dy + (r * g.columns + j) * g.c + e);
            const W count = W(g.real(r % g.rows, j));
            for (int k = 0; k < N; ++k) sum.at[k] += md_widen(from.at[k]) / count;
        });
        md_pack<T, N> rounded;
        for (int k = 0; k < N; ++k) md_round(sum.at[k], rounded.at[k]);
        md_store<N>(dx + pixel * g.c + e, rounded);
    });
}

// Filters are w [kh, kw, c].
MD_KERNEL depthwise(md_windows g, const T *x, const T *w, T *y) {
    const bool packed = md_packed(g.c, x, w, y);
    md_places(packed, g.n * g.rows * g.columns, g.c, [&](auto width, ptrdiff_t window, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_inside(g, window, x, [&](ptrdiff_t p, ptrdiff_t q, const T *from) {
            const auto pack = md_load<N>(from + e);
            const auto tap = md_load<N>(w + (p * g.kw + q) * g.c + e);
            for (int k = 0; k < N; ++k) sum.at[k] += md_widen(pack.at[k]) * md_widen(tap.at[k]);
        });
        md_pack<T, N> rounded;
        for (int k = 0; k < N; ++k) md_round(sum.at[k], rounded.at[k]);
        md_store<N>(y + window * g.c + e, rounded);
    });
}

MD_KERNEL depthwise_backward_input(md_windows g, const T *dy, const T *w, T *dx) {
    const bool packed = md_packed(g.c, dy, w, dx);
    md_places(packed, g.n * g.h * g.w, g.c, [&](auto width, ptrdiff_t pixel, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        md_pack<W, N> sum = {};
        md_over(g, pixel, [&](ptrdiff_t r, ptrdiff_t j, ptrdiff_t p, ptrdiff_t q) {
            const auto from = md_load<N>(dy + (r * g.columns + j) * g.c + e);
            const auto tap = md_load<N>(w + (p * g.kw + q) * g.c + e);
            for (int k = 0; k < N; ++k) sum.at[k] += md_widen(from.at[k]) * md_widen(tap.at[k]);
        });
        md_pack<T, N> rounded;
        for (int k = 0; k < N; ++k) md_round(sum.at[k], rounded.at[k]);
        md_store<N>(dx + pixel * g.c + e, rounded);
    });
}

// What each of `slabs` of all windows adds to the gradient of each tap: parts [slabs, kh, kw, c].
MD_KERNEL depthwise_parts(md_windows g, const T *x, const T *dy, W *parts, int slabs) {
    const ptrdiff_t taps = g.kh * g.kw, windows = g.n * g.rows * g.columns;
    const ptrdiff_t slab = (windows + slabs - 1) / slabs;
    const bool packed = md_packed(g.c, x, dy, parts);
    md_places(packed, slabs * taps, g.c, [&](auto width, ptrdiff_t place, ptrdiff_t e) {
        constexpr int N = decltype(width)::value;
        const ptrdiff_t q = place % g.kw, p = place / g.kw % g.kh, first = place / taps * slab;
        const ptrdiff_t last = first + slab < windows ? first + slab : windows;
        md_pack<W, N> sum = {};
        for (ptrdiff_t window = first; window < last; ++window) {
            const ptrdiff_t r = window / g.columns;
            const ptrdiff_t row = g.top(r % g.rows) + p, column = g.left(window % g.columns) + q;
            if (row < 0 || row >= g.h || column < 0 || column >= g.w) continue;
            const auto from = md_load<N>(x + ((r / g.rows * g.h + row) * g.w + column) * g.c + e);
            const auto of = md_load<N>(dy + window * g.c + e);
            for (int k = 0; k < N; ++k) sum.at[k] += md_widen(from.at[k]) * md_widen(of.at[k]);
        }
        md_store<N>(parts + place * g.c + e, sum);
    });
}

// The sum of all slabs, in their order.
MD_KERNEL depthwise_together(md_windows g, const W *parts, T *dw, int slabs) {
    const ptrdiff_t size = g.kh * g.kw * g.c;
    md_places(false, g.kh * g.kw, g.c, [&](auto, ptrdiff_t tap, ptrdiff_t e) {
        W sum = 0;
        for (int slab = 0; slab < slabs; ++slab) sum += parts[slab * size + tap * g.c + e];
        md_round(sum, dw[tap * g.c + e]);
    });
}
