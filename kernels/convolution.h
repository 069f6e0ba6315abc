// The gradient of a convolution's filter, straight from the images: no columns are written.
//
// In an image with its zeros around it, what one row of a window covers is kw * c numbers in a row.
// So for each row p of the filter the gradient is a matrix [kw * c, k], the sum over all windows of
// the outer products (row p of the window) x (dy of the window). A tile of this matrix is held in
// registers while the windows of some rows go by, each of them a few numbers of x times a few
// vectors of dy. Blocks of rows are chosen so that x and dy stay in the second-level cache.
//
// Products are added without rounding in between where the processor can, as in BLAS: the bits
// depend on the shapes and on the kind of processor.

#ifndef MD_CONVOLUTION_H
#define MD_CONVOLUTION_H

#include "vectors.h"
#include "window.h"

#if MD_HOST

#include <new>
#include <vector>

template <int LANES> struct md_vector {
    typedef float type __attribute__((vector_size(4 * LANES), aligned(4)));
};

// What a tile is computed from: the first row of windows, and the steps from row to row and from
// window to window, in floats.
struct md_passing {
    const float *x, *dy;
    ptrdiff_t rows, columns, x_row, x_step, dy_row, dy_step;
};

// dw[HEIGHT][WIDTH vectors] += the sum over all windows.
template <int LANES, int HEIGHT, int WIDTH>
MD_FN void md_tile(md_passing of, float *dw, ptrdiff_t dw_row) {
    using V = typename md_vector<LANES>::type;
    V sums[HEIGHT][WIDTH];
    for (int i = 0; i < HEIGHT; ++i)
        for (int j = 0; j < WIDTH; ++j)
            sums[i][j] = *reinterpret_cast<const V *>(dw + i * dw_row + j * LANES);
    for (ptrdiff_t r = 0; r < of.rows; ++r, of.x += of.x_row, of.dy += of.dy_row) {
        const float *x = of.x, *dy = of.dy;
        for (ptrdiff_t s = 0; s < of.columns; ++s, x += of.x_step, dy += of.dy_step) {
            V right[WIDTH];
            for (int j = 0; j < WIDTH; ++j)
                right[j] = *reinterpret_cast<const V *>(dy + j * LANES);
            for (int i = 0; i < HEIGHT; ++i)
                for (int j = 0; j < WIDTH; ++j) sums[i][j] += x[i] * right[j];
        }
    }
    for (int i = 0; i < HEIGHT; ++i)
        for (int j = 0; j < WIDTH; ++j)
            *reinterpret_cast<V *>(dw + i * dw_row + j * LANES) = sums[i][j];
}

// The same for a tile of `height` up to HEIGHT.
template <int LANES, int HEIGHT, int WIDTH>
MD_FN void md_tile_of(ptrdiff_t height, const md_passing &of, float *dw, ptrdiff_t dw_row) {
    if (height == HEIGHT)
        md_tile<LANES, HEIGHT, WIDTH>(of, dw, dw_row);
    else if constexpr (HEIGHT > 1)
        md_tile_of<LANES, HEIGHT - 1, WIDTH>(height, of, dw, dw_row);
}

// WIDTH vectors of a whole matrix [height, k], in tiles of nearly equal height.
template <int LANES, int HEIGHT, int WIDTH>
MD_FN void md_strip(ptrdiff_t height, md_passing of, float *dw, ptrdiff_t dw_row) {
    const float *x = of.x;
    const ptrdiff_t tiles = (height + HEIGHT - 1) / HEIGHT;
    for (ptrdiff_t tile = 0; tile < tiles; ++tile) {
        const ptrdiff_t from = height * tile / tiles, to = height * (tile + 1) / tiles;
        of.x = x + from;
        md_tile_of<LANES, HEIGHT, WIDTH>(to - from, of, dw + from * dw_row, dw_row);
    }
}

// What some rows of windows of an image add. `x` is its first row of them, with nothing missing
// around, and its rows are `x_row` apart.
template <int LANES>
MD_FN void md_filter_rows(const md_windows &g, ptrdiff_t k, const float *x, ptrdiff_t x_row,
                          const float *dy, ptrdiff_t rows, float *dw) {
    // Of 32 registers 24 hold sums, of the 16 of AVX2 12: more rows where k has fewer vectors.
    constexpr int WIDE = LANES == 16 ? 4 : 2, SUMS = LANES == 16 ? 24 : 12;
    const ptrdiff_t height = g.kw * g.c;
    for (ptrdiff_t j = 0, width; j < k; j += width * LANES) {
        const ptrdiff_t left = (k - j) / LANES;
        width = left >= WIDE ? WIDE : left >= 2 ? 2 : 1;
        md_passing of = {x,     dy + j, rows, g.columns, g.stride_h * x_row, g.stride_w * g.c,
                         g.columns * k, k};
        for (ptrdiff_t p = 0; p < g.kh; ++p, of.x += x_row) {
            float *into = dw + p * height * k + j;
            if (width == WIDE)
                md_strip<LANES, SUMS / WIDE, WIDE>(height, of, into, k);
            else if (width == 2)
                md_strip<LANES, SUMS / 2, 2>(height, of, into, k);
            else
                md_strip<LANES, 12, 1>(height, of, into, k);
        }
    }
}

// One row of an image, from `left` columns before its beginning on, with zeros where it is not.
static inline void md_row_with_zeros(const md_windows &g, const float *image, ptrdiff_t y,
                                     ptrdiff_t width, float *row) {
    if (y < 0 || y >= g.h) {
        memset(row, 0, width * g.c * sizeof(float));
        return;
    }
    const ptrdiff_t begin = std::min(g.pad_left, width), end = std::min(g.pad_left + g.w, width);
    memset(row, 0, begin * g.c * sizeof(float));
    memcpy(row + begin * g.c, image + y * g.w * g.c, (end - begin) * g.c * sizeof(float));
    memset(row + end * g.c, 0, (width - end) * g.c * sizeof(float));
}

// Call rows(x, x_row, dy, how many) for blocks of rows of windows, in the images' order.
template <class Rows>
static void md_filter_blocks(const md_windows &g, ptrdiff_t k, const float *x, const float *dy,
                             Rows rows) {
    constexpr ptrdiff_t CACHE = (256 << 10) / sizeof(float);  // half of a second-level cache
    const ptrdiff_t width = (g.columns - 1) * g.stride_w + g.kw;  // that windows reach over
    const ptrdiff_t each = g.stride_h * width * g.c + g.columns * k;
    const ptrdiff_t most = std::clamp<ptrdiff_t>(CACHE / each, 1, g.rows);
    const ptrdiff_t blocks = (g.rows + most - 1) / most;
    const bool whole = g.pad_top == 0 && g.pad_left == 0 && width <= g.w &&
                       (g.rows - 1) * g.stride_h + g.kh <= g.h;
    std::vector<float> room(whole ? 0 : ((most - 1) * g.stride_h + g.kh) * width * g.c);
    for (ptrdiff_t n = 0; n < g.n; ++n, x += g.h * g.w * g.c)
        for (ptrdiff_t block = 0; block < blocks; ++block) {
            const ptrdiff_t first = g.rows * block / blocks, end = g.rows * (block + 1) / blocks;
            const float *of_dy = dy + (n * g.rows + first) * g.columns * k;
            if (whole) {
                rows(x + g.top(first) * g.w * g.c, g.w * g.c, of_dy, end - first);
                continue;
            }
            for (ptrdiff_t y = g.top(first); y < g.top(end - 1) + g.kh; ++y)
                md_row_with_zeros(g, x, y, width, &room[(y - g.top(first)) * width * g.c]);
            rows(room.data(), width * g.c, of_dy, end - first);
        }
}

#if MD_VECTORS
MD_VECTORS_16 static inline void md_filter_rows_16(
    const md_windows &g, ptrdiff_t k, const float *x, ptrdiff_t x_row, const float *dy,
    ptrdiff_t rows, float *dw) {
    md_filter_rows<16>(g, k, x, x_row, dy, rows, dw);
}
MD_VECTORS_8 static inline void md_filter_rows_8(
    const md_windows &g, ptrdiff_t k, const float *x, ptrdiff_t x_row, const float *dy,
    ptrdiff_t rows, float *dw) {
    md_filter_rows<8>(g, k, x, x_row, dy, rows, dw);
}
#endif

// Floats in a vector of this processor, such that k is a number of whole ones; 0 if there is none.
static inline int md_filter_lanes(ptrdiff_t k) {
    const int vector = md_vector_length();
    if (vector == 16 && k % 16 == 0) return 16;
    return vector > 0 && k % 8 == 0 ? 8 : 0;
}

// dw [kh, kw, c, k] from x and dy [n, rows, columns, k]; false where there was no memory.
static inline bool md_filter_gradient(const md_windows &g, ptrdiff_t k, const float *x,
                                      const float *dy, float *dw) {
    memset(dw, 0, g.kh * g.kw * g.c * k * sizeof(float));
    if (g.n * g.rows * g.columns * g.kh * g.kw * g.c * k == 0) return true;
#if MD_VECTORS
    const auto rows = md_filter_lanes(k) == 16 ? md_filter_rows_16 : md_filter_rows_8;
    try {
        md_filter_blocks(g, k, x, dy, [&](const float *from, ptrdiff_t x_row, const float *of_dy,
                                          ptrdiff_t count) {
            rows(g, k, from, x_row, of_dy, count, dw);
        });
    } catch (const std::bad_alloc &) {
        return false;
    }
#endif
    return true;
}

#endif
#endif
