// Convolutions on AMX's tiles, which read windows where they are: no columns are written.
//
// Images are split into bfloat16 parts with zeros around them, some images at a time: a group, as
// many as the second-level cache takes. Images of a group alternate within a column: what follows
// each other in a row is (column, image), and so one tile reaches over several narrow images.
//
// The rows of a tile A are 16 windows of a row, its columns 32 channels of one pixel in them; B has
// the filter's. Of 16 channels, those of the pixel below are the other half. The gradient of the
// image is the same walk over dy, spread by the strides, with the filter turned around.
//
// For the gradient of the filter, A's rows are channels of dy and its columns 32 windows of a row,
// for which B has pairs of pixels, each of two images: so no window begins within a pair.

#ifndef MD_TILE_CONVOLUTION_H
#define MD_TILE_CONVOLUTION_H

#include "tiles.h"
#include "window.h"

#if MD_TILES

#include <algorithm>
#include <vector>

enum {
    MD_GROUP_BYTES = 1 << 20,  // of the parts of a group: half of a second-level cache
    MD_CACHED_STEPS = 4,       // whose tiles stay in the first one, for all blocks in turn
};

// Windows [n, rows, columns] on images [n, h, w, c] whose pixels are spread apart, and what they
// reach over: height x width pixels of each.
struct md_tiled_images : md_windows {
    ptrdiff_t k, spread_h, spread_w, height, width;
    ptrdiff_t group = 0;  // images at a time; 0 where tiles would be too empty

    md_tiled_images(const md_windows &g, ptrdiff_t k_, ptrdiff_t spread_h_, ptrdiff_t spread_w_)
        : md_windows(g), k(k_), spread_h(spread_h_), spread_w(spread_w_),
          height((rows - 1) * stride_h + kh), width((columns - 1) * stride_w + kw) {}

    // Whether windows begin where images are or above and to the left, and some group fills tiles.
    bool possible() const { return std::min(pad_top, pad_left) >= 0 && k % 16 == 0 && group > 0; }

    // Take the group, a multiple of `unit` images, that fills tiles of so many windows best.
    void choose(ptrdiff_t windows, ptrdiff_t unit, ptrdiff_t most, ptrdiff_t image_bytes) {
        double best = 0.4;
        for (ptrdiff_t one = unit; one < std::min(n + unit, most + 1); one += unit) {
            const ptrdiff_t in_row = columns * one, groups = (n + one - 1) / one;
            if (in_row < 16 || (one > unit && one * image_bytes > MD_GROUP_BYTES)) continue;
            const ptrdiff_t tiled = (in_row + windows - 1) / windows * windows * groups;
            const double full = double(columns * n) / double(tiled);
            if (full > best) best = full, group = one;
        }
    }

    // How far the windows of a row of the group are from the first one in the result; -1 for those
    // of images that a group of only so many lacks.
    std::vector<ptrdiff_t> places(ptrdiff_t images) const {
        std::vector<ptrdiff_t> at(columns * group);
        for (ptrdiff_t i = 0; i < columns * group; ++i)
            at[i] = i % group < images ? (i % group * rows * columns + i / group) * k : -1;
        return at;
    }

    // pixel(row, column, source) for every pixel of an image that windows reach.
    template <class Pixel> MD_METHOD void each_pixel(const float *image, Pixel pixel) const {
        const md_tiled_images g = *this;  // a copy, which nobody else can change meanwhile
        for (ptrdiff_t y = 0, row = g.pad_top; y < g.h && row < g.height; ++y, row += g.spread_h)
            for (ptrdiff_t x = 0, column = g.pad_left; x < g.w && column < g.width;
                 ++x, column += g.spread_w)
                pixel(row, column, image + (y * g.w + x) * g.c);
    }
};

// block(m0, m, n0, n) for all blocks of m x n tiles that registers have room for.
template <class Block>
MD_FN void md_tile_blocks(ptrdiff_t tiles_m, ptrdiff_t tiles_n, Block block) {
    const ptrdiff_t most_m = tiles_n == 1 ? 3 : 2, most_n = tiles_m == 1 ? 3 : 2;
    for (ptrdiff_t n = 0; n < tiles_n; n += most_n)
        for (ptrdiff_t m = 0; m < tiles_m; m += most_m)
            block(m, std::min(most_m, tiles_m - m), n, std::min(most_n, tiles_n - n));
}

// A convolution; forwards x is the images, and backwards (`turned`) dy.
class md_tile_convolution : md_tiled_images {
    ptrdiff_t below, pixel, part, tiles_n, in_row;  // `pixel` and `part` in bytes
    std::vector<md_step> steps;
    bool turned;

  public:
    md_tile_convolution(const md_windows &g, ptrdiff_t k_, ptrdiff_t spread_h_,
                        ptrdiff_t spread_w_, bool turned_)
        : md_tiled_images(g, k_, spread_h_, spread_w_), below(c == 16 ? 2 : 1),
          pixel(2 * c * below), tiles_n(k / 16), turned(turned_) {
        choose(16, 1, stride_w == 1 ? 16 : 1, height * width * pixel * MD_PARTS);
        part = height * width * group * pixel;
        in_row = (columns * group + 15) / 16;
        for (ptrdiff_t p = 0; p < kh; p += below)
            for (ptrdiff_t q = 0; q < kw; ++q)
                for (ptrdiff_t from = 0; from < pixel; from += 64)
                    steps.push_back({(p * width + q) * group * pixel + from,
                                     ptrdiff_t(steps.size()) * tiles_n * MD_PARTS * MD_TILE_BYTES});
    }

    bool possible() const { return (c == 16 || c % 32 == 0) && md_tiled_images::possible(); }

    MD_ON_TILES void run(const float *x, const float *w_, const float *bias, float *y) const {
        const size_t filter_bytes = steps.size() * tiles_n * MD_PARTS * MD_TILE_BYTES;
        char *filter = md_room::of(filter_bytes + MD_PARTS * part + 4 * MD_TILE_BYTES);
        char *cells = filter + filter_bytes, *sums = cells + MD_PARTS * part;
        split_filter(w_, filter);
        memset(cells, 0, MD_PARTS * part);
        const md_tile_scope scope;
        for (ptrdiff_t image = 0; image < n; image += group) {
            const ptrdiff_t images = std::min(group, n - image);
            for (ptrdiff_t i = 0; i < images; ++i)
                split_image(x + (image + i) * h * w * c, cells + i * pixel);
            multiply(cells, filter, places(images), bias, sums, y + image * rows * columns * k);
        }
    }

  private:
    MD_ON_TILES void split_image(const float *image, char *to) const {
        const ptrdiff_t cell = group * pixel, line = width * cell, apart = part, channels = c;
        const bool twice = below == 2;
        each_pixel(image, [=](ptrdiff_t row, ptrdiff_t column, const float *from) MD_ON_TILES {
            char *at = to + row * line + column * cell;
            for (ptrdiff_t i = 0; i < channels; i += 16) {
                const md_parts x(_mm512_loadu_ps(from + i));
                md_store(x, at + 2 * i, apart);
                if (twice && row > 0) md_store(x, at - line + 2 * channels, apart);
            }
        });
    }

    // Tiles [step][16 of k][part], each of 16 pairs of channels by 16 of k.
    MD_ON_TILES void split_filter(const float *w_, char *to) const {
        for (ptrdiff_t p = 0; p < kh; p += below)
            for (ptrdiff_t q = 0; q < kw; ++q)
                for (ptrdiff_t i = 0; i < below * c; i += 32)
                    for (ptrdiff_t j = 0; j < k; j += 16, to += MD_PARTS * MD_TILE_BYTES)
                        for (ptrdiff_t pair = 0; pair < 16; ++pair) {
                            const ptrdiff_t of = i + 2 * pair, row = p + of / c, channel = of % c;
                            md_store_pairs(md_parts(filter_row(w_, row, q, channel, j)),
                                           md_parts(filter_row(w_, row, q, channel + 1, j)),
                                           to + 64 * pair, MD_TILE_BYTES);
                        }
    }

    // For 16 of k, from j on, what they have for a channel at (p, q).
    MD_ON_TILES __m512 filter_row(const float *w_, ptrdiff_t p, ptrdiff_t q, ptrdiff_t channel,
                                  ptrdiff_t j) const {
        if (p >= kh) return _mm512_setzero_ps();
        if (!turned) return _mm512_loadu_ps(w_ + ((p * kw + q) * c + channel) * k + j);
        const float *tap = w_ + (((kh - 1 - p) * kw + kw - 1 - q) * k + j) * c + channel;
        __m512 row;
        for (int i = 0; i < 16; ++i) row[i] = tap[i * c];
        return row;
    }

    MD_ON_TILES void multiply(char *cells, char *filter, const std::vector<ptrdiff_t> &at,
                              const float *bias, char *sums, float *y) const {
        const ptrdiff_t last = columns * group - 16;  // the last tile may begin in the one before
        md_tile_blocks(rows * in_row, tiles_n, [&](ptrdiff_t m0, ptrdiff_t m, ptrdiff_t n0,
                                                   ptrdiff_t n_) MD_ON_TILES {
            md_tiled a = {{}, stride_w * pixel, part}, b = {{}, 64, MD_TILE_BYTES};
            md_tiled start = {{}, 0, 0}, c_ = {{}, group == 1 ? 4 * k : 64, 0};
            float *into[4];
            ptrdiff_t first[4];
            for (ptrdiff_t t = 0; t < m * n_; ++t) {
                const ptrdiff_t i = m0 + t % m, j = n0 + t / m, row = i / in_row;
                first[t] = std::min(i % in_row * 16, last);
                into[t] = y + row * columns * k + j * 16;
                a.at[t % m] =
                    cells + (row * stride_h * width * group + first[t] * stride_w) * pixel;
                b.at[t / m] = filter + j * MD_PARTS * MD_TILE_BYTES;
                if (bias != nullptr) start.at[t] = (char *)(bias + j * 16);  // each of its rows
                c_.at[t] = group == 1 ? (char *)(into[t] + at[first[t]]) : sums + t * MD_TILE_BYTES;
            }
            md_tile_products(m, n_, a, b, steps.data(), ptrdiff_t(steps.size()),
                             bias == nullptr ? nullptr : &start, c_);
            if (group == 1) return;
            for (ptrdiff_t t = 0; t < m * n_; ++t)
                for (ptrdiff_t s = 0; s < 16; ++s)
                    if (const ptrdiff_t place = at[first[t] + s]; place >= 0)
                        memcpy(into[t] + place, c_.at[t] + 64 * s, 64);
        });
    }
};

// The gradient of a filter.
class md_tile_filter_gradient : md_tiled_images {
    ptrdiff_t tiles_m, tiles_n, row_bytes, pixel, part_a, part_b;
    std::vector<md_step> steps;

  public:
    md_tile_filter_gradient(const md_windows &g, ptrdiff_t k_)
        : md_tiled_images(g, k_, 1, 1), tiles_m(k / 16), tiles_n(kh * kw * c / 16) {
        choose(32, 2, stride_w == 1 ? 32 : 2,
               (height * width * c + rows * columns * k) * 2 * MD_PARTS);
        const ptrdiff_t in_row = (columns * group + 31) / 32;
        row_bytes = 64 * in_row, pixel = 2 * group * c;
        part_a = rows * k * row_bytes;
        part_b = height * width * pixel + 64 * 16 * stride_w * c;  // a last tile reads beyond
        for (ptrdiff_t row = 0; row < rows; ++row)
            for (ptrdiff_t t = 0; t < in_row; ++t)
                steps.push_back({row * k * row_bytes + 64 * t,
                                 row * stride_h * width * pixel + t * 16 * stride_w * c * 4});
    }

    bool possible() const { return c % 16 == 0 && md_tiled_images::possible(); }

    MD_ON_TILES void run(const float *x, const float *dy, const float *, float *dw) const {
        const size_t sums_bytes = tiles_m * tiles_n * MD_TILE_BYTES;
        char *sums = md_room::of(sums_bytes + MD_PARTS * (part_a + part_b));
        char *a = sums + sums_bytes, *b = a + MD_PARTS * part_a;
        memset(b, 0, MD_PARTS * part_b);
        const md_tile_scope scope;
        for (ptrdiff_t image = 0; image < n; image += group) {
            const ptrdiff_t images = std::min(group, n - image);
            for (ptrdiff_t i = 0; i < images; i += 2)
                split_images(x + (image + i) * h * w * c, i + 1 < images, b + 2 * i * c);
            split_gradient(dy + image * rows * columns * k, places(images), a);
            multiply(a, b, image == 0, sums);
        }
        each_block([=](ptrdiff_t m0, ptrdiff_t m, ptrdiff_t n0, ptrdiff_t n_,
                       ptrdiff_t place) MD_ON_TILES {
            for (ptrdiff_t i = 0; i < m * n_; ++i)
                turn(sums + (place + i) * MD_TILE_BYTES,
                     dw + (n0 + i / m) * 16 * k + (m0 + i % m) * 16);
        });
    }

  private:
    // block(m0, m, n0, n, how many tiles were before), in one order.
    template <class Block> MD_METHOD void each_block(Block block) const {
        ptrdiff_t before = 0;
        md_tile_blocks(tiles_m, tiles_n,
                       [&](ptrdiff_t m0, ptrdiff_t m, ptrdiff_t n0, ptrdiff_t n_) MD_ON_TILES {
                           block(m0, m, n0, n_, before);
                           before += m * n_;
                       });
    }

    // Pairs [row][column][two images][channel]; zeros for a second image that there is not.
    MD_ON_TILES void split_images(const float *image, bool two, char *to) const {
        const ptrdiff_t cell = pixel, line = width * cell, apart = part_b, channels = c;
        const ptrdiff_t next = h * w * c;
        each_pixel(image, [=](ptrdiff_t row, ptrdiff_t column, const float *from) MD_ON_TILES {
            for (ptrdiff_t i = 0; i < channels; i += 16)
                md_store_pairs(
                    md_parts(_mm512_loadu_ps(from + i)),
                    md_parts(two ? _mm512_loadu_ps(from + next + i) : _mm512_setzero_ps()),
                    to + row * line + column * cell + 4 * i, apart);
        });
    }

    // Channels by windows: [row][k][(column, image)], with zeros up to a whole tile.
    MD_ON_TILES void split_gradient(const float *dy, const std::vector<ptrdiff_t> &at,
                                    char *to) const {
        const ptrdiff_t windows = ptrdiff_t(at.size());
        for (ptrdiff_t row = 0; row < rows; ++row, dy += columns * k)
            for (ptrdiff_t j = 0; j < k; j += 16, to += 16 * row_bytes)
                for (ptrdiff_t i = 0; i < row_bytes / 2; i += 16) {
                    __m512 block[16];
#pragma GCC unroll 16
                    for (ptrdiff_t s = 0; s < 16; ++s)
                        block[s] = i + s < windows && at[i + s] >= 0
                                       ? _mm512_loadu_ps(dy + at[i + s] + j)
                                       : _mm512_setzero_ps();
                    md_transpose(block);
#pragma GCC unroll 16
                    for (ptrdiff_t s = 0; s < 16; ++s)
                        md_store(md_parts(block[s]), to + s * row_bytes + 2 * i, part_a);
                }
    }

    MD_ON_TILES void multiply(char *of_a, char *of_b, bool fresh, char *sums) const {
        const ptrdiff_t all = ptrdiff_t(steps.size());
        for (ptrdiff_t step = 0; step < all; step += MD_CACHED_STEPS)
            each_block([&](ptrdiff_t m0, ptrdiff_t m, ptrdiff_t n0, ptrdiff_t n_,
                           ptrdiff_t place) MD_ON_TILES {
                md_tiled a = {{}, row_bytes, part_a}, b = {{}, stride_w * c * 4, part_b};
                md_tiled sum = {{}, 64, 0};
                for (ptrdiff_t i = 0; i < m; ++i) a.at[i] = of_a + (m0 + i) * 16 * row_bytes;
                for (ptrdiff_t j = 0; j < n_; ++j) {
                    const ptrdiff_t from = (n0 + j) * 16, tap = from / c;
                    b.at[j] = of_b + (tap / kw * width + tap % kw) * pixel + from % c * 4;
                }
                for (ptrdiff_t t = 0; t < m * n_; ++t)
                    sum.at[t] = sums + (place + t) * MD_TILE_BYTES;
                md_tile_products(m, n_, a, b, &steps[step],
                                 std::min<ptrdiff_t>(MD_CACHED_STEPS, all - step),
                                 fresh && step == 0 ? nullptr : &sum, sum);
            });
    }

    // A tile [16 of k, 16 of the filter's rows] becomes that part of dw.
    MD_ON_TILES void turn(const char *tile, float *dw) const {
        __m512 block[16];
        for (ptrdiff_t i = 0; i < 16; ++i)
            block[i] = _mm512_load_ps(reinterpret_cast<const float *>(tile + 64 * i));
        md_transpose(block);
        for (ptrdiff_t i = 0; i < 16; ++i) _mm512_storeu_ps(dw + i * k, block[i]);
    }
};

#endif

#if MD_HOST

enum md_direction { MD_FORWARD, MD_BACKWARD_INPUT, MD_BACKWARD_FILTER };

#if MD_TILES

// Call run with what computes a direction: images [n, h, w, c], windows of kh x kw, k filters.
template <class Run>
static auto md_with_tiles(md_direction direction, const md_windows &g, ptrdiff_t k, Run run) {
    if (direction == MD_BACKWARD_FILTER) return run(md_tile_filter_gradient(g, k));
    if (direction == MD_FORWARD) return run(md_tile_convolution(g, k, 1, 1, false));
    const md_windows back = {g.n,  g.rows, g.columns, k, g.h,  g.w,
                             g.kh, g.kw,   1,         1, g.kh - 1 - g.pad_top,
                             g.kw - 1 - g.pad_left};
    return run(md_tile_convolution(back, g.c, g.stride_h, g.stride_w, true));
}

// Whether there are tiles, and they can do this and would not be mostly empty.
static inline bool md_can_tile(md_direction direction, const md_windows &g, ptrdiff_t k) {
    return md_has_tiles() && md_with_tiles(direction, g, k, [](const auto &of) {
               return of.possible();
           });
}

// `first`, `second`, `bias` and `result` are x, w, bias or null, y; dy, w, null, dx; or
// x, dy, null, dw. False where there was no memory.
static inline bool md_tile(md_direction direction, const md_windows &g, ptrdiff_t k,
                           const float *first, const float *second, const float *bias,
                           float *result) {
    try {
        md_with_tiles(direction, g, k, [=](const auto &of) {
            of.run(first, second, bias, result);
        });
        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }
}

#else

static inline bool md_has_tiles() { return false; }
static inline bool md_can_tile(md_direction, const md_windows &, ptrdiff_t) { return false; }
static inline bool md_tile(md_direction, const md_windows &, ptrdiff_t, const float *,
                           const float *, const float *, float *) {
    return false;
}

#endif
#endif
#endif
