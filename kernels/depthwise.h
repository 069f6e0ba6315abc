// Depthwise convolution: each channel of an image has a filter of its own.
//
// Images are [n, h, w, c], channels last, filters [kh, kw, c]; windows lie as in window.h. Vectors
// are of channels, so nothing is added up across them, and all lengths of vectors give the same
// bits. Both directions do the same: a place of the result is a sum over taps, the elements of the
// filter that meet something, and places side by side whose taps are the same go together, so that
// a tap is loaded once for all of them. Sums run over the rows of the filter, and in them from the
// left of what is added.

#ifndef MD_DEPTHWISE_H
#define MD_DEPTHWISE_H

#include "vectors.h"
#include "window.h"

#if MD_HOST

// Along one axis: the taps of a place, and on which element of the source each of them lies.
struct md_reach {
    ptrdiff_t first, step, count;  // taps
    ptrdiff_t at, move;            // elements of the source

    bool like(const md_reach &other) const { return first == other.first && count == other.count; }
    md_reach backwards() const {
        return {first + (count - 1) * step, -step, count, at + (count - 1) * move, -move};
    }
};

// Going forward: those of a window that begins at `start` of an axis so long.
MD_FN md_reach md_reach_of_window(ptrdiff_t start, ptrdiff_t length, ptrdiff_t k) {
    const ptrdiff_t low = md_windows::low(start);
    return {low, 1, md_windows::high(start, length, k) - low, start + low, 1};
}

// Going back: those of an element, `place` after where the first window begins, from the first of
// the windows over it to the last.
MD_FN md_reach md_reach_of_element(ptrdiff_t place, ptrdiff_t windows, ptrdiff_t stride,
                                 ptrdiff_t k) {
    const ptrdiff_t from = place < k ? 0 : (place - k) / stride + 1;
    const ptrdiff_t beyond = std::min(place / stride + 1, windows);
    return {place - from * stride, -stride, std::max<ptrdiff_t>(beyond - from, 0), from, 1};
}

// What is the same for a whole row of results: taps down the source, which is `width` wide.
template <class T> struct md_depthwise_row {
    ptrdiff_t channels, kw, width;
    md_reach down;
    const T *source, *filter;
};

// Some channels of PLACES results, which lie `step` apart, and their sources `move` apart.
template <int PLACES, class V, class T>
MD_FN void md_depthwise_places(const md_depthwise_row<T> &row, md_reach across, ptrdiff_t move,
                               ptrdiff_t step, ptrdiff_t channel, T *out) {
    const ptrdiff_t c = row.channels;
    V sums[PLACES] = {};
    for (ptrdiff_t i = 0; i < row.down.count; ++i) {
        const ptrdiff_t y = row.down.at + i * row.down.move, p = row.down.first + i * row.down.step;
        const T *from = row.source + (y * row.width + across.at) * c + channel;
        const T *tap = row.filter + (p * row.kw + across.first) * c + channel;
        for (ptrdiff_t j = 0; j < across.count; ++j, from += c, tap += across.step * c) {
            const V weight = *reinterpret_cast<const V *>(tap);
            for (int k = 0; k < PLACES; ++k)
                sums[k] += *reinterpret_cast<const V *>(from + k * move * c) * weight;
        }
    }
    for (int k = 0; k < PLACES; ++k)
        *reinterpret_cast<V *>(out + k * step * c + channel) = sums[k];
}

// All channels of PLACES results, in vectors as far as there are whole ones.
template <int BYTES, int PLACES, class T>
MD_FN void md_depthwise_channels(const md_depthwise_row<T> &row, md_reach across, ptrdiff_t move,
                                 ptrdiff_t step, T *out) {
    using V = typename md_vector_of<BYTES, T>::type;
    constexpr ptrdiff_t LANES = BYTES / sizeof(T);
    ptrdiff_t channel = 0;
    for (; channel + LANES <= row.channels; channel += LANES)
        md_depthwise_places<PLACES, V>(row, across, move, step, channel, out);
    for (; channel < row.channels; ++channel)
        md_depthwise_places<PLACES, T>(row, across, move, step, channel, out);
}

// The results from `first` on to `count`, each `step` after the one before. across(place) has taps.
template <int BYTES, class T, class Across>
MD_FN void md_depthwise_along(const md_depthwise_row<T> &row, ptrdiff_t first, ptrdiff_t count,
                              ptrdiff_t step, ptrdiff_t move, Across across, T *out) {
    constexpr int TOGETHER = 4;
    for (ptrdiff_t place = first; place < count;) {
        const md_reach taps = across(place);
        const ptrdiff_t last = place + (TOGETHER - 1) * step;
        T *into = out + place * row.channels;
        if (last < count && across(last).like(taps)) {
            md_depthwise_channels<BYTES, TOGETHER>(row, taps, move, step, into);
            place += TOGETHER * step;
        } else {
            md_depthwise_channels<BYTES, 1>(row, taps, move, step, into);
            place += step;
        }
    }
}

// Rows of windows [first, last), counted over all images.
template <int BYTES, class T>
MD_FN void md_depthwise_rows(const md_windows &g, ptrdiff_t first, ptrdiff_t last, const T *x,
                             const T *w, T *y) {
    for (ptrdiff_t r = first; r < last; ++r) {
        const md_depthwise_row<T> row = {g.c, g.kw, g.w,
                                         md_reach_of_window(g.top(r % g.rows), g.h, g.kh),
                                         x + r / g.rows * g.h * g.w * g.c, w};
        md_depthwise_along<BYTES>(
            row, 0, g.columns, 1, g.stride_w,
            [&](ptrdiff_t j) MD_INLINE { return md_reach_of_window(g.left(j), g.w, g.kw); },
            y + r * g.columns * g.c);
    }
}

// Rows of images [first, last), counted over all images. Of its elements those go together that
// lie a stride apart: they are met by the same taps.
template <int BYTES, class T>
MD_FN void md_depthwise_backward_rows(const md_windows &g, ptrdiff_t first, ptrdiff_t last,
                                      const T *dy, const T *w, T *dx) {
    for (ptrdiff_t r = first; r < last; ++r) {
        const md_reach up = md_reach_of_element(r % g.h + g.pad_top, g.rows, g.stride_h, g.kh);
        const md_depthwise_row<T> row = {g.c, g.kw, g.columns, up.backwards(),
                                         dy + r / g.h * g.rows * g.columns * g.c, w};
        for (ptrdiff_t phase = 0; phase < g.stride_w; ++phase)
            md_depthwise_along<BYTES>(
                row, phase, g.w, g.stride_w, 1,
                [&](ptrdiff_t place) MD_INLINE {
                    return md_reach_of_element(place + g.pad_left, g.columns, g.stride_w, g.kw);
                },
                dx + r * g.w * g.c);
    }
}

// -- the gradient of the filter ----------------------------------------------------------------

// Windows of one image from row `top` to before `bottom` and column `left` to before `right`.
struct md_block {
    ptrdiff_t top, bottom, left, right;
};

// Those of them of which the tap (p, q) lies in the image.
MD_FN md_block md_windows_of_tap(const md_windows &g, md_block of, ptrdiff_t p, ptrdiff_t q) {
    while (of.top < of.bottom && g.top(of.top) + p < 0) ++of.top;
    while (of.top < of.bottom && g.top(of.bottom - 1) + p >= g.h) --of.bottom;
    while (of.left < of.right && g.left(of.left) + q < 0) ++of.left;
    while (of.left < of.right && g.left(of.right - 1) + q >= g.w) --of.right;
    return of;
}

// What a block of windows adds to a tap: the sum of the products of image and dy, some channels.
template <class V, class T>
MD_FN void md_depthwise_products(const md_windows &g, md_block of, ptrdiff_t p, ptrdiff_t q,
                                 const T *image, const T *dy, V &total) {
    constexpr int CHAINS = 4;  // so that no sum waits for the one before it
    V sums[CHAINS] = {};
    for (ptrdiff_t i = of.top; i < of.bottom; ++i) {
        const T *x = image + ((g.top(i) + p) * g.w + g.left(of.left) + q) * g.c;
        const T *d = dy + (i * g.columns + of.left) * g.c, *end = d + (of.right - of.left) * g.c;
        const auto add = [&](int chain) MD_INLINE {
            sums[chain] += *reinterpret_cast<const V *>(x) * *reinterpret_cast<const V *>(d);
            x += g.stride_w * g.c, d += g.c;
        };
        for (const T *last = end - CHAINS * g.c; d <= last;)
            for (int chain = 0; chain < CHAINS; ++chain) add(chain);
        for (int chain = 0; chain < CHAINS - 1; ++chain)
            if (d < end) add(chain);
    }
    total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// What a block adds to all taps, as many channels as V has elements.
template <class V, class T>
MD_FN void md_depthwise_taps(const md_windows &g, md_block block, const T *image, const T *dy,
                             double *totals) {
    for (ptrdiff_t p = 0; p < g.kh; ++p)
        for (ptrdiff_t q = 0; q < g.kw; ++q, totals += g.c) {
            const md_block of = md_windows_of_tap(g, block, p, q);
            union {
                V all;
                T each[sizeof(V) / sizeof(T)];
            } sums;
            md_depthwise_products(g, of, p, q, image, dy, sums.all);
            for (size_t k = 0; k < sizeof(V) / sizeof(T); ++k) totals[k] += sums.each[k];
        }
}

// What all windows add to the channels [first, last) of totals [kh, kw, c]. They are gone through
// in blocks that stay in the first cache while all taps of some channels pass over them.
template <int BYTES, class T>
MD_FN void md_depthwise_filter(const md_windows &g, ptrdiff_t first, ptrdiff_t last, const T *x,
                               const T *dy, double *totals) {
    using V = typename md_vector_of<BYTES, T>::type;
    constexpr ptrdiff_t LANES = BYTES / sizeof(T), PIXELS = 64;
    const ptrdiff_t rows = std::max<ptrdiff_t>(PIXELS / std::max<ptrdiff_t>(g.columns, 1), 1);
    for (ptrdiff_t n = 0; n < g.n; ++n, x += g.h * g.w * g.c, dy += g.rows * g.columns * g.c)
        for (ptrdiff_t i = 0; i < g.rows; i += rows) {
            const md_block block = {i, std::min(i + rows, g.rows), 0, g.columns};
            ptrdiff_t e = first;
            for (; e + LANES <= last; e += LANES)
                md_depthwise_taps<V>(g, block, x + e, dy + e, totals + e);
            for (; e < last; ++e) md_depthwise_taps<T>(g, block, x + e, dy + e, totals + e);
        }
}

// -- what kernels call -------------------------------------------------------------------------

static inline void md_depthwise(md_parallel parallel, int threads, bool wide, const md_windows &g,
                                const void *x, const void *w, void *y) {
    md_window_rows(
        parallel, threads, wide, g, true, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_in_vectors([&](auto vector) MD_INLINE {
                md_depthwise_rows<decltype(vector)::value>(
                    g, first, last, static_cast<const T *>(x), static_cast<const T *>(w),
                    static_cast<T *>(y));
            });
        });
}

static inline void md_depthwise_backward_input(md_parallel parallel, int threads, bool wide,
                                               const md_windows &g, const void *dy, const void *w,
                                               void *dx) {
    md_window_rows(
        parallel, threads, wide, g, false, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_in_vectors([&](auto vector) MD_INLINE {
                md_depthwise_backward_rows<decltype(vector)::value>(
                    g, first, last, static_cast<const T *>(dy), static_cast<const T *>(w),
                    static_cast<T *>(dx));
            });
        });
}

// Channels are shared among threads. totals [kh, kw, c] are 0 before.
static inline void md_depthwise_backward_filter(md_parallel parallel, int threads, bool wide,
                                                const md_windows &g, const void *x, const void *dy,
                                                double *totals, void *dw) {
    const ptrdiff_t taps = g.kh * g.kw, together = 16;  // channels, a whole number of vectors
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const ptrdiff_t bytes = g.n * g.rows * g.columns * taps * together * sizeof(T);
        md_share(parallel, (g.c + together - 1) / together, md_grain(bytes), threads,
                 [&](ptrdiff_t first, ptrdiff_t last) {
                     md_in_vectors([&](auto vector) MD_INLINE {
                         md_depthwise_filter<decltype(vector)::value>(
                             g, first * together, std::min(last * together, g.c),
                             static_cast<const T *>(x), static_cast<const T *>(dy), totals);
                     });
                 });
        for (ptrdiff_t i = 0; i < taps * g.c; ++i) static_cast<T *>(dw)[i] = T(totals[i]);
    });
}

#endif
#endif
