// Images of bytes on their way to a model: cropped, mirrored, resized, in other colours, as floats.
//
// Channels lie side by side, as everywhere. Each pass goes over an image's rows from top to bottom
// and writes each of the result once, already in the model's range: byte * scale + shift, which
// are given for each channel.

#ifndef MD_IMAGE_H
#define MD_IMAGE_H

#include <algorithm>
#include <vector>

#include "random.h"

#if MD_HOST

// --- crop and mirror -------------------------------------------------------------------------

// What random crops have in common. The image is padded with zeros, `pad` on each side, and a piece
// as large as itself is taken, and half of them are mirrored; both only where `distort` is set.
struct md_crops {
    ptrdiff_t h, w, c, pad;
    bool distort;
    md_stream stream;  // word 1 of the counter is the image's number
};

// Bytes of rows of n elements to floats. scale and shift: [n].
MD_CLONES static void md_bytes_to_floats(ptrdiff_t rows, ptrdiff_t n,
                                         const unsigned char *__restrict bytes,
                                         const float *__restrict scale,
                                         const float *__restrict shift, float *__restrict out) {
    for (ptrdiff_t i = 0; i < rows; ++i, bytes += n, out += n)
        for (ptrdiff_t j = 0; j < n; ++j) out[j] = float(bytes[j]) * scale[j] + shift[j];
}

// A row of pixels from right to left.
static inline void md_mirror(ptrdiff_t w, ptrdiff_t c, const unsigned char *row,
                             unsigned char *out) {
    unsigned char *to = out + (w - 1) * c;
    if (c == 3)  // whose copies are no calls
        for (ptrdiff_t x = 0; x < w; ++x, to -= 3, row += 3) memcpy(to, row, 3);
    else
        for (ptrdiff_t x = 0; x < w; ++x, to -= c, row += c) memcpy(to, row, c);
}

// Crop the image of that number; `bytes` has room for one, `scale` and `shift` are [w * c].
static void md_crop(const md_crops &g, const unsigned char *image, md_u64 number,
                    unsigned char *bytes, const float *scale, const float *shift, float *out) {
    const ptrdiff_t line = g.w * g.c;
    if (!g.distort) return md_bytes_to_floats(g.h, line, image, scale, shift, out);
    md_u32 words[4];
    md_philox(g.stream.key[0], g.stream.key[1], 0, md_u32(number), g.stream.counter[1],
              g.stream.counter[2], words);
    const md_u64 places = 2 * g.pad + 1;
    const ptrdiff_t down = ptrdiff_t(words[0] * places >> 32) - g.pad;  // of the window
    const ptrdiff_t right = ptrdiff_t(words[1] * places >> 32) - g.pad;
    const bool mirrored = words[2] >> 31;
    const ptrdiff_t first = std::min(std::max<ptrdiff_t>(-right, 0), g.w);  // column in the image
    const ptrdiff_t beyond = std::max(std::min(g.w - right, g.w), first);
    for (ptrdiff_t y = 0; y < g.h; ++y) {
        unsigned char *to = bytes + y * line;
        const ptrdiff_t from = y + down;
        if (from < 0 || from >= g.h) {
            memset(to, 0, line);
            continue;
        }
        const unsigned char *row = image + from * line + (first + right) * g.c;
        const ptrdiff_t start = mirrored ? g.w - beyond : first;
        memset(to, 0, start * g.c);
        if (mirrored)
            md_mirror(beyond - first, g.c, row, to + start * g.c);
        else
            memcpy(to + start * g.c, row, (beyond - first) * g.c);
        const ptrdiff_t end = start + beyond - first;
        memset(to + end * g.c, 0, (g.w - end) * g.c);
    }
    md_bytes_to_floats(g.h, line, bytes, scale, shift, out);
}

// Crop those of `images` [n, h, w, c] with these numbers [k] into out [k, h, w, c].
static void md_crop_all(const md_crops &g, ptrdiff_t k, const unsigned char *images,
                        const int64_t *numbers, const float *scale, const float *shift,
                        float *out) {
    const ptrdiff_t line = g.w * g.c;
    std::vector<float> scales(line), shifts(line);
    for (ptrdiff_t j = 0; j < line; ++j) scales[j] = scale[j % g.c], shifts[j] = shift[j % g.c];
    std::vector<unsigned char> bytes(g.h * line);
    for (ptrdiff_t i = 0; i < k; ++i)
        md_crop(g, images + numbers[i] * g.h * line, md_u64(numbers[i]), bytes.data(),
                scales.data(), shifts.data(), out + i * g.h * line);
}

// --- resize ----------------------------------------------------------------------------------

enum md_method { MD_BILINEAR, MD_NEAREST, MD_BICUBIC, MD_AREA };

// Along one axis: result i is the sum of weight[i * taps + t] * source[first[i] + t].
struct md_taps {
    ptrdiff_t taps;
    std::vector<ptrdiff_t> first;
    std::vector<float> weight;
};

// Keys, "Cubic convolution interpolation for digital image processing" (1981), with a = -0.75.
static inline float md_cubic(float x) {
    const float a = -0.75f;
    x = fabsf(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? a * (((x - 5) * x + 8) * x - 4) : 0;
}

// Resizing `in` to `whole`, of which results `begin` to begin + out - 1 are wanted. Result i lies
// at i * in / whole of the source, as in TensorFlow before it had half_pixel_centers; what would
// lie outside is what is at the edge.
static md_taps md_make_taps(md_method method, ptrdiff_t in, ptrdiff_t whole, ptrdiff_t begin,
                            ptrdiff_t out, bool mirrored) {
    const float step = float(in) / float(whole);
    md_taps to;
    const ptrdiff_t wanted = method == MD_NEAREST    ? 1
                             : method == MD_BILINEAR ? 2
                             : method == MD_BICUBIC  ? 4
                                                     : ptrdiff_t(ceilf(step)) + 1;
    to.taps = std::min(in, wanted);
    to.first.resize(out);
    to.weight.assign(out * to.taps, 0.0f);
    for (ptrdiff_t i = 0; i < out; ++i) {
        const ptrdiff_t at = mirrored ? out - 1 - i : i;
        const float x = float(begin + i) * step;
        const ptrdiff_t low = std::min(ptrdiff_t(x), in - 1);
        const ptrdiff_t lowest = method == MD_BICUBIC ? low - 1 : low;
        const ptrdiff_t first = std::max<ptrdiff_t>(0, std::min(lowest, in - to.taps));
        const float rest = x - float(low), end = float(begin + i + 1) * step;
        to.first[at] = first;
        for (ptrdiff_t t = 0; t < wanted; ++t) {
            const ptrdiff_t source = std::max<ptrdiff_t>(0, std::min(lowest + t, in - 1));
            const float place = float(lowest + t);
            const float weight =
                method == MD_NEAREST    ? 1
                : method == MD_BILINEAR ? (t == 0 ? 1 - rest : rest)
                : method == MD_BICUBIC
                    ? md_cubic(x - place)
                    : std::max(0.0f, std::min(end, place + 1) - std::max(x, place)) / step;
            to.weight[at * to.taps + source - first] += weight;
        }
    }
    return to;
}

// out = sum over t of weight[t] * row t; the rows lie n bytes apart.
MD_CLONES static void md_blend(ptrdiff_t n, ptrdiff_t taps, const unsigned char *__restrict rows,
                               const float *weight, float *__restrict out) {
    if (taps == 2) {
        const float a = weight[0], b = weight[1];
        for (ptrdiff_t j = 0; j < n; ++j) out[j] = float(rows[j]) * a + float(rows[n + j]) * b;
        return;
    }
    for (ptrdiff_t j = 0; j < n; ++j) out[j] = float(rows[j]) * weight[0];
    for (ptrdiff_t t = 1; t < taps; ++t) {
        const float a = weight[t];
        const unsigned char *row = rows + t * n;
        for (ptrdiff_t j = 0; j < n; ++j) out[j] += float(row[j]) * a;
    }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"
typedef float md_pixel __attribute__((vector_size(16)));  // of three channels, and what is next
#pragma GCC diagnostic pop

static inline md_pixel md_load_pixel(const float *from) {
    md_pixel pixel;
    memcpy(&pixel, from, sizeof pixel);
    return pixel;
}

// A row of results: each is the sum of TAPS pixels of `row`, or of `taps` where TAPS is 0.
template <ptrdiff_t TAPS>
static void md_resize_row(const md_taps &columns, ptrdiff_t n, const float *__restrict row,
                          md_pixel scale, md_pixel shift, float *__restrict out) {
    const ptrdiff_t taps = TAPS ? TAPS : columns.taps;
    const ptrdiff_t *first = columns.first.data();
    const float *weight = columns.weight.data();
    for (ptrdiff_t x = 0; x < n; ++x, out += 3, weight += taps) {
        const float *from = row + 3 * first[x];
        md_pixel sum = md_load_pixel(from) * weight[0];
        for (ptrdiff_t t = 1; t < taps; ++t) sum += md_load_pixel(from + 3 * t) * weight[t];
        sum = sum * scale + shift;
        memcpy(out, &sum, sizeof sum);  // the next pixel's place is written to as well
    }
}

// Resize an image whose rows have w pixels into out, as large as the two axes have results.
static void md_resize(ptrdiff_t w, const unsigned char *image, const md_taps &rows,
                      const md_taps &columns, const float *scale, const float *shift,
                      float *out) {
    const md_pixel by = {scale[0], scale[1], scale[2], 0}, to = {shift[0], shift[1], shift[2], 0};
    const ptrdiff_t n = columns.first.size(), line = 3 * w;
    std::vector<float> row(line + 1), made(3 * n + 1);  // a pixel is loaded as four floats
    for (size_t y = 0; y < rows.first.size(); ++y, out += 3 * n) {
        md_blend(line, rows.taps, image + rows.first[y] * line, &rows.weight[y * rows.taps],
                 row.data());
        const auto resize = columns.taps == 1   ? md_resize_row<1>
                            : columns.taps == 2 ? md_resize_row<2>
                            : columns.taps == 4 ? md_resize_row<4>
                                                : md_resize_row<0>;
        resize(columns, n, row.data(), by, to, made.data());
        memcpy(out, made.data(), 3 * n * sizeof(float));
    }
}

// --- colours ---------------------------------------------------------------------------------

// The order of things: brightness, then contrast and colour, or colour and contrast.
struct md_colours {
    float brightness;  // is added
    float contrast;    // the distances from the channels' means are multiplied by it
    float saturation;  // that of HSV is multiplied by it
    float hue;         // is added to that of HSV, in turns
    bool linear;       // the colour is not changed in HSV, but by this matrix, from columns
    float matrix[9];
    bool contrast_first;
};

enum { MD_CHUNK = 64 };  // pixels that are taken apart into channels at a time

static inline float md_clamp(float x, float low, float high) {
    return std::min(std::max(x, low), high);
}

// Multiply saturation and turn hue. With v the largest of the channels and d its distance from the
// smallest, a channel is v - d * clamp(min(k, 4 - k)) where k = (n + 6 * hue) mod 6, and n is
// 5, 3, 1 for red, green, blue (A. R. Smith's hexcone of 1978).
MD_FN void md_turn(float saturation, float turn, float *r, float *g, float *b) {
    const float v = std::max(std::max(*r, *g), *b), d = v - std::min(std::min(*r, *g), *b);
    const float by = d > 0 ? 1 / d : 0;
    const float sixth = v == *r   ? (*g - *b) * by
                        : v == *g ? (*b - *r) * by + 2
                                  : (*r - *g) * by + 4;
    const float most = std::min(d * saturation, v);  // a saturation above 1 there is not
    const float h = sixth + 6 * turn + 12;           // positive
    float *channels[3] = {r, g, b};
    for (int c = 0; c < 3; ++c) {
        const float at = h + float(5 - 2 * c);
        const float k = at - 6 * float(int(at * (1.0f / 6)));
        *channels[c] = v - most * md_clamp(std::min(k, 4 - k), 0, 1);
    }
}

// The colours of n pixels, channel by channel.
MD_CLONES static void md_colour_chunk(const md_colours &how, ptrdiff_t n, float *r, float *g,
                                      float *b) {
    if (!how.linear) {
        for (ptrdiff_t i = 0; i < n; ++i) md_turn(how.saturation, how.hue, r + i, g + i, b + i);
        return;
    }
    const float *m = how.matrix;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const float x = r[i], y = g[i], z = b[i];
        r[i] = m[0] * x + m[1] * y + m[2] * z;
        g[i] = m[3] * x + m[4] * y + m[5] * z;
        b[i] = m[6] * x + m[7] * y + m[8] * z;
    }
}

// Take pixels apart into channels, and put them together again.
MD_CLONES static void md_apart(ptrdiff_t n, const float *pixels, float *r, float *g, float *b) {
    for (ptrdiff_t i = 0; i < n; ++i)
        r[i] = pixels[3 * i], g[i] = pixels[3 * i + 1], b[i] = pixels[3 * i + 2];
}
MD_CLONES static void md_together(ptrdiff_t n, const float *r, const float *g, const float *b,
                                  float *pixels) {
    for (ptrdiff_t i = 0; i < n; ++i)
        pixels[3 * i] = r[i], pixels[3 * i + 1] = g[i], pixels[3 * i + 2] = b[i];
}

// out = clamp((x - mean) * contrast + mean, 0, 1) * scale + shift is two loops: the colour may
// stand between them.
MD_CLONES static void md_stretch(ptrdiff_t n, float contrast, float mean, float *x) {
    for (ptrdiff_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * contrast + mean;
}
MD_CLONES static void md_into_range(ptrdiff_t n, float scale, float shift, float *x) {
    for (ptrdiff_t i = 0; i < n; ++i) x[i] = md_clamp(x[i], 0, 1) * scale + shift;
}

// Change the colours of n pixels in 0 to 1, and store clamp(x, 0, 1) * scale + shift in place.
static void md_distort(const md_colours &how, ptrdiff_t n, const float *scale, const float *shift,
                       float *pixels) {
    alignas(64) float channels[3][MD_CHUNK];
    double sums[3] = {0, 0, 0};
    auto chunks = [&](auto body) {
        for (ptrdiff_t i = 0; i < n; i += MD_CHUNK) {
            const ptrdiff_t count = std::min<ptrdiff_t>(n - i, MD_CHUNK);
            md_apart(count, pixels + 3 * i, channels[0], channels[1], channels[2]);
            body(count);
            md_together(count, channels[0], channels[1], channels[2], pixels + 3 * i);
        }
    };
    auto colour = [&](ptrdiff_t count) {
        md_colour_chunk(how, count, channels[0], channels[1], channels[2]);
    };
    chunks([&](ptrdiff_t count) {
        for (auto &channel : channels)
            for (ptrdiff_t i = 0; i < count; ++i) channel[i] += how.brightness;
        if (!how.contrast_first) colour(count);
        for (int c = 0; c < 3; ++c)
            for (ptrdiff_t i = 0; i < count; ++i) sums[c] += channels[c][i];
    });
    chunks([&](ptrdiff_t count) {
        for (int c = 0; c < 3; ++c)
            md_stretch(count, how.contrast, float(sums[c] / double(n)), channels[c]);
        if (how.contrast_first) colour(count);
        for (int c = 0; c < 3; ++c) md_into_range(count, scale[c], shift[c], channels[c]);
    });
}

#endif
#endif
