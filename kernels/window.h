// Windows that move over images: the columns of a convolution, max and average pooling.
//
// Images are [n, h, w, c], channels last. Window (i, j) of an image covers the rows from
// i * stride_h - pad_top and the columns from j * stride_w - pad_left; what lies outside of the
// image is padding. Work is shared by rows: of windows going forward, of the image going back.
// Each row of the image gathers what all the windows over it hand back, in a fixed order, so no
// two threads write to one place and the sums never depend on the number of threads.

#ifndef MD_WINDOW_H
#define MD_WINDOW_H

#include "arrays.h"

// Whether x takes the place of the largest so far: the first of equals stays, and NaN wins.
template <class T> MD_FN bool md_beats(T x, T best) {
    return x > best || (x != x && best == best);
}

struct md_windows {
    ptrdiff_t n, h, w, c, rows, columns;  // images, and the rows and columns of windows of each
    ptrdiff_t kh, kw, stride_h, stride_w, pad_top, pad_left;

    // Window rows (or columns) at position i that lie in the image: [low, high).
    MD_METHOD static ptrdiff_t low(ptrdiff_t start) { return start < 0 ? -start : 0; }
    MD_METHOD static ptrdiff_t high(ptrdiff_t start, ptrdiff_t size, ptrdiff_t k) {
        return k < size - start ? k : size - start;
    }
    MD_METHOD ptrdiff_t top(ptrdiff_t i) const { return i * stride_h - pad_top; }
    MD_METHOD ptrdiff_t left(ptrdiff_t j) const { return j * stride_w - pad_left; }

    // The row of windows whose row p lies on row y of the image, or -1.
    MD_METHOD ptrdiff_t row_at(ptrdiff_t y, ptrdiff_t p) const {
        const ptrdiff_t t = y + pad_top - p;
        return t >= 0 && t % stride_h == 0 && t / stride_h < rows ? t / stride_h : -1;
    }
    // The columns of windows that lie on column x of the image: [leftmost, beyond).
    MD_METHOD ptrdiff_t leftmost(ptrdiff_t x) const {
        const ptrdiff_t t = x + pad_left - kw;
        return t < 0 ? 0 : t / stride_w + 1;
    }
    MD_METHOD ptrdiff_t beyond(ptrdiff_t x) const {
        const ptrdiff_t t = x + pad_left;
        return t < 0 ? 0 : t / stride_w < columns ? t / stride_w + 1 : columns;
    }
    // Elements of window (i, j) that are not padding.
    MD_METHOD ptrdiff_t real(ptrdiff_t i, ptrdiff_t j) const {
        return (high(top(i), h, kh) - low(top(i))) * (high(left(j), w, kw) - low(left(j)));
    }
};

#if MD_HOST

// memset and memcpy, without the price of a call for a handful of elements.
template <class T> MD_FN void md_clear_few(T *out, ptrdiff_t n) {
    if (n >= 16) {
        memset(out, 0, n * sizeof(T));
        return;
    }
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = 0;
}
template <class T> MD_FN void md_copy_few(T *out, const T *from, ptrdiff_t n) {
    if (n >= 16) {
        memcpy(out, from, n * sizeof(T));
        return;
    }
    for (; n >= 4; n -= 4, out += 4, from += 4) memcpy(out, from, 4 * sizeof(T));
    if (n & 2) memcpy(out, from, 2 * sizeof(T)), out += 2, from += 2;
    if (n & 1) *out = *from;
}

// Rows of windows [first, last), counted over all images. A row of one window is contiguous in x
// as in `out`.
template <class T>
static void md_im2col_rows(md_windows g, ptrdiff_t first, ptrdiff_t last, const T *x, T *out) {
    const ptrdiff_t line = g.kw * g.c;
    out += first * g.columns * g.kh * line;
    for (ptrdiff_t r = first; r < last; ++r) {
        const T *image = x + r / g.rows * g.h * g.w * g.c;
        const ptrdiff_t top = g.top(r % g.rows);
        for (ptrdiff_t j = 0; j < g.columns; ++j) {
            const ptrdiff_t left = g.left(j);
            const ptrdiff_t low = g.low(left) * g.c, high = g.high(left, g.w, g.kw) * g.c;
            for (ptrdiff_t y = top; y < top + g.kh; ++y, out += line) {
                if (y < 0 || y >= g.h) {
                    md_clear_few(out, line);
                    continue;
                }
                md_clear_few(out, low);
                md_copy_few(out + low, image + (y * g.w + left) * g.c + low, high - low);
                md_clear_few(out + high, line - high);
            }
        }
    }
}

// Rows of images [first, last), counted over all images. Columns are added in the order of the
// rows of the window, and within them from the leftmost window to the rightmost.
template <class T>
MD_CLONES static void md_col2im_rows(md_windows g, ptrdiff_t first, ptrdiff_t last, const T *in,
                                     T *dx) {
    const ptrdiff_t line = g.kw * g.c;
    for (ptrdiff_t r = first; r < last; ++r) {
        T *row = dx + r * g.w * g.c;
        memset(row, 0, g.w * g.c * sizeof(T));
        for (ptrdiff_t p = 0; p < g.kh; ++p) {
            const ptrdiff_t i = g.row_at(r % g.h, p);
            if (i < 0) continue;
            const T *from = in + ((r / g.h * g.rows + i) * g.columns * g.kh + p) * line;
            for (ptrdiff_t j = 0; j < g.columns; ++j, from += g.kh * line) {
                const ptrdiff_t left = g.left(j);
                const ptrdiff_t low = g.low(left) * g.c, high = g.high(left, g.w, g.kw) * g.c;
                T *into = row + left * g.c;
                MD_IVDEP
                for (ptrdiff_t e = low; e < high; ++e) into[e] += from[e];
            }
        }
    }
}

// `argmax` is the place of the largest in its window, p * kw + q.
template <class T>
MD_CLONES static void md_max_pool_rows(md_windows g, ptrdiff_t first, ptrdiff_t last, const T *x,
                                       T *y, int *argmax) {
    y += first * g.columns * g.c;
    argmax += first * g.columns * g.c;
    for (ptrdiff_t r = first; r < last; ++r) {
        const T *image = x + r / g.rows * g.h * g.w * g.c;
        const ptrdiff_t top = g.top(r % g.rows);
        for (ptrdiff_t j = 0; j < g.columns; ++j, y += g.c, argmax += g.c) {
            const ptrdiff_t left = g.left(j), low = g.low(left), high = g.high(left, g.w, g.kw);
            bool begun = false;
            for (ptrdiff_t p = g.low(top); p < g.high(top, g.h, g.kh); ++p)
                for (ptrdiff_t q = low; q < high; ++q, begun = true) {
                    const T *from = image + ((top + p) * g.w + left + q) * g.c;
                    const int place = int(p * g.kw + q);
                    MD_IVDEP
                    for (ptrdiff_t e = 0; e < g.c; ++e) {
                        const bool wins = !begun || md_beats(from[e], y[e]);
                        y[e] = wins ? from[e] : y[e];
                        argmax[e] = wins ? place : argmax[e];
                    }
                }
        }
    }
}

template <class T>
MD_CLONES static void md_max_pool_backward_rows(md_windows g, ptrdiff_t first, ptrdiff_t last,
                                                const T *dy, const int *argmax, T *dx) {
    for (ptrdiff_t r = first; r < last; ++r) {
        T *row = dx + r * g.w * g.c;
        memset(row, 0, g.w * g.c * sizeof(T));
        for (ptrdiff_t p = 0; p < g.kh; ++p) {
            const ptrdiff_t i = g.row_at(r % g.h, p);
            if (i < 0) continue;
            ptrdiff_t window = (r / g.h * g.rows + i) * g.columns;
            for (ptrdiff_t j = 0; j < g.columns; ++j, ++window) {
                const ptrdiff_t left = g.left(j), high = g.high(left, g.w, g.kw);
                const T *from = dy + window * g.c;
                const int *chosen = argmax + window * g.c;
                for (ptrdiff_t q = g.low(left); q < high; ++q) {
                    T *into = row + (left + q) * g.c;
                    const int place = int(p * g.kw + q);
                    MD_IVDEP
                    for (ptrdiff_t e = 0; e < g.c; ++e)
                        into[e] = chosen[e] == place ? into[e] + from[e] : into[e];
                }
            }
        }
    }
}

template <class T>
MD_CLONES static void md_average_pool_rows(md_windows g, ptrdiff_t first, ptrdiff_t last,
                                           const T *x, T *y) {
    y += first * g.columns * g.c;
    for (ptrdiff_t r = first; r < last; ++r) {
        const T *image = x + r / g.rows * g.h * g.w * g.c;
        const ptrdiff_t i = r % g.rows, top = g.top(i);
        for (ptrdiff_t j = 0; j < g.columns; ++j, y += g.c) {
            const ptrdiff_t left = g.left(j), low = g.low(left), high = g.high(left, g.w, g.kw);
            memset(y, 0, g.c * sizeof(T));
            for (ptrdiff_t p = g.low(top); p < g.high(top, g.h, g.kh); ++p)
                for (ptrdiff_t q = low; q < high; ++q) {
                    const T *from = image + ((top + p) * g.w + left + q) * g.c;
                    MD_IVDEP
                    for (ptrdiff_t e = 0; e < g.c; ++e) y[e] += from[e];
                }
            const T count = T(g.real(i, j));
            for (ptrdiff_t e = 0; e < g.c; ++e) y[e] /= count;
        }
    }
}

template <class T>
MD_CLONES static void md_average_pool_backward_rows(md_windows g, ptrdiff_t first, ptrdiff_t last,
                                                    const T *dy, T *dx) {
    for (ptrdiff_t r = first; r < last; ++r) {
        T *row = dx + r * g.w * g.c;
        memset(row, 0, g.w * g.c * sizeof(T));
        for (ptrdiff_t p = 0; p < g.kh; ++p) {
            const ptrdiff_t i = g.row_at(r % g.h, p);
            if (i < 0) continue;
            const T *from = dy + (r / g.h * g.rows + i) * g.columns * g.c;
            for (ptrdiff_t j = 0; j < g.columns; ++j, from += g.c) {
                const ptrdiff_t left = g.left(j), high = g.high(left, g.w, g.kw);
                const T count = T(g.real(i, j));
                for (ptrdiff_t q = g.low(left); q < high; ++q) {
                    T *into = row + (left + q) * g.c;
                    MD_IVDEP
                    for (ptrdiff_t e = 0; e < g.c; ++e) into[e] += from[e] / count;
                }
            }
        }
    }
}

// Share rows of windows (`forward`) or of images among threads: body(zero, first, last).
template <class Body>
static void md_window_rows(md_parallel parallel, int threads, bool wide, const md_windows &g,
                           bool forward, Body body) {
    md_by_type(wide, [&](auto zero) {
        const ptrdiff_t bytes = g.columns * g.kh * g.kw * g.c * sizeof zero;
        md_share(parallel, g.n * (forward ? g.rows : g.h), md_grain(bytes), threads,
                 [&](ptrdiff_t first, ptrdiff_t last) { body(zero, first, last); });
    });
}

static inline void md_im2col(md_parallel parallel, int threads, bool wide, const md_windows &g,
                             const void *x, void *out) {
    md_window_rows(
        parallel, threads, wide, g, true, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_im2col_rows(g, first, last, static_cast<const T *>(x), static_cast<T *>(out));
        });
}

static inline void md_col2im(md_parallel parallel, int threads, bool wide, const md_windows &g,
                             const void *columns, void *dx) {
    md_window_rows(
        parallel, threads, wide, g, false, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_col2im_rows(g, first, last, static_cast<const T *>(columns), static_cast<T *>(dx));
        });
}

static inline void md_max_pool(md_parallel parallel, int threads, bool wide, const md_windows &g,
                               const void *x, void *y, int *argmax) {
    md_window_rows(
        parallel, threads, wide, g, true, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_max_pool_rows(g, first, last, static_cast<const T *>(x), static_cast<T *>(y),
                             argmax);
        });
}

static inline void md_max_pool_backward(md_parallel parallel, int threads, bool wide,
                                        const md_windows &g, const void *dy, const int *argmax,
                                        void *dx) {
    md_window_rows(
        parallel, threads, wide, g, false, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_max_pool_backward_rows(g, first, last, static_cast<const T *>(dy), argmax,
                                      static_cast<T *>(dx));
        });
}

static inline void md_average_pool(md_parallel parallel, int threads, bool wide,
                                   const md_windows &g, const void *x, void *y) {
    md_window_rows(
        parallel, threads, wide, g, true, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_average_pool_rows(g, first, last, static_cast<const T *>(x), static_cast<T *>(y));
        });
}

static inline void md_average_pool_backward(md_parallel parallel, int threads, bool wide,
                                            const md_windows &g, const void *dy, void *dx) {
    md_window_rows(
        parallel, threads, wide, g, false, [&](auto zero, ptrdiff_t first, ptrdiff_t last) {
            using T = decltype(zero);
            md_average_pool_backward_rows(g, first, last, static_cast<const T *>(dy),
                                          static_cast<T *>(dx));
        });
}

#endif
#endif
