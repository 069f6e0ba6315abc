// Blocks of 8 x 8: their coefficients from bits, their samples from coefficients, and what rows of
// samples become.

#ifndef MD_JPEG_BLOCKS_H
#define MD_JPEG_BLOCKS_H

#include "jpeg_bits.h"

#if MD_HOST

// Where in a block, row by row, the coefficients lie that are coded along its diagonals.
static const unsigned char md_natural[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

struct md_quantisation {
    alignas(32) md_u32 step[64];  // row by row
    bool known = false;
};

// --- bits to coefficients (T.81, F.2.2 and G.1.2) ----------------------------------------------

static inline void md_read_dc(md_bit_reader &bits, const md_huffman &table, int &last, int low,
                              int16_t *to) {
    bits.fill();
    const int size = table.symbol(bits);
    if (size > 15) bits.fail("a coefficient is too large");
    if (size) last += bits.take_signed(size);
    if (last > 32767 >> low || last < -32768 >> low) bits.fail("a coefficient is too large");
    bits.check();
    to[0] = int16_t(last * (1 << low));
}

// In clones, because AVX2's processors shift by any register.
MD_CLONES static void md_read_block(md_bit_reader &reader, const md_huffman &dc,
                                    const md_huffman &ac, int &last_dc, int16_t *to) {
    md_bit_reader bits = reader;  // in registers
    md_read_dc(bits, dc, last_dc, 0, to);
    int k = 1;
    while (k < 64) {
        bits.fill();
        int found = ac.look(bits);
        if (!found) {  // a long code
            const int symbol = ac.symbol(bits);
            found = (symbol & 15) << 8 | symbol;
        }
        const int size = found & 15;
        if (size == 0) {
            bits.skip(found >> 16);
            if ((found & 255) == 0) break;  // the rest is 0
            k += 16;
            if ((found & 255) != 0xF0) k = 65;
            continue;
        }
        k += found >> 4 & 15;
        if (k > 63) {
            k = 65;
            break;
        }
        to[md_natural[k++]] = int16_t(bits.peek_signed(size, found >> 16));
        bits.skip(found >> 8 & 255);
    }
    bits.check();
    if (k > 64) bits.fail("a block has more than 64 coefficients");
    reader = bits;
}

static inline void md_refine_dc(md_bit_reader &bits, int low, int16_t *to) {
    bits.fill();
    if (bits.take(1)) to[0] = int16_t(to[0] | 1 << low);
    bits.check();
}

// How many blocks, with this one, have no more coefficients in the band.
static inline ptrdiff_t md_end_of_band(md_bit_reader &bits, int run) {
    return (ptrdiff_t(1) << run) + (run ? ptrdiff_t(bits.take(run)) : 0);
}

static inline void md_read_band(md_bit_reader &bits, const md_huffman &table, int first, int last,
                                int low, ptrdiff_t &ended, int16_t *to) {
    for (int k = first; ended == 0 && k <= last; ++k) {
        bits.fill();
        const int symbol = table.symbol(bits), run = symbol >> 4, size = symbol & 15;
        if (size == 0 && run < 15) {
            ended = md_end_of_band(bits, run);
            break;
        }
        k += run;
        if (k > last) bits.fail("a block has more coefficients than its band");
        if (size) to[md_natural[k]] = int16_t(bits.take_signed(size) * (1 << low));
    }
    if (ended) --ended;
    bits.check();
}

// One bit more of those that are not 0, and between them new ones, of value 1 or -1.
static inline void md_refine_band(md_bit_reader &bits, const md_huffman &table, int first, int last,
                                  int low, ptrdiff_t &ended, int16_t *to) {
    const int one = 1 << low;
    int k = first;
    // Refine, from k on, until behind so many zeros; k is then at the next.
    auto refine = [&](int zeros) {
        for (; k <= last; ++k) {
            int16_t &c = to[md_natural[k]];
            if (c == 0) {
                if (zeros-- == 0) return;
                continue;
            }
            bits.fill();
            if (bits.take(1) && (c & one) == 0) c = int16_t(c + (c > 0 ? one : -one));
        }
    };
    for (; ended == 0 && k <= last; ++k) {
        bits.fill();
        const int symbol = table.symbol(bits), run = symbol >> 4, size = symbol & 15;
        if (size == 0 && run < 15) {
            ended = md_end_of_band(bits, run);
            break;
        }
        if (size > 1) bits.fail("a refined coefficient is too large");
        const int value = size == 0 ? 0 : bits.take(1) ? one : -one;
        refine(run);
        if (k > last && value) bits.fail("a block has more coefficients than its band");
        if (value) to[md_natural[k]] = int16_t(value);
    }
    if (ended) {
        refine(64);
        --ended;
    }
    bits.check();
}

// --- coefficients to samples -------------------------------------------------------------------

typedef md_u32 md_lanes __attribute__((vector_size(32)));  // of 32 bits that wrap around

// The inverse cosine transform of eight lanes, in place (Loeffler, Ligtenberg and Moschytz,
// "Practical fast 1-D DCT algorithms with 11 multiplications", 1989), times the root of 8. Numbers
// have 13 bits behind the point; the result is rounded to so many bits less.
MD_FN void md_cosines(md_lanes *x, int bits) {
    auto number = [](double c) MD_INLINE { return md_u32(int(c * 8192 + (c < 0 ? -0.5 : 0.5))); };
    const md_lanes turned = (x[2] + x[6]) * number(0.541196100);
    const md_lanes a = (x[0] + x[4]) << 13, b = (x[0] - x[4]) << 13;
    const md_lanes c = turned + x[6] * number(-1.847759065);
    const md_lanes d = turned + x[2] * number(0.765366865);
    const md_u32 half = 1u << (bits - 1);
    const md_lanes even[4] = {a + d + half, b + c + half, b - c + half, a - d + half};

    const md_lanes both = (x[7] + x[3] + x[5] + x[1]) * number(1.175875602);
    const md_lanes p = (x[7] + x[1]) * number(-0.899976223);
    const md_lanes q = (x[5] + x[3]) * number(-2.562915447);
    const md_lanes r = (x[7] + x[3]) * number(-1.961570560) + both;
    const md_lanes s = (x[5] + x[1]) * number(-0.390180644) + both;
    const md_lanes odd[4] = {
        x[1] * number(1.501321110) + p + s, x[3] * number(3.072711026) + q + r,
        x[5] * number(2.053119869) + q + s, x[7] * number(0.298631336) + p + r};
    typedef int md_signed __attribute__((vector_size(32)));
    for (int i = 0; i < 4; ++i) {
        x[i] = md_lanes(md_signed(even[i] + odd[i]) >> bits);
        x[7 - i] = md_lanes(md_signed(even[i] - odd[i]) >> bits);
    }
}

// Lane j of x[i] becomes lane i of x[j]: three perfect shuffles.
MD_FN void md_transpose(md_lanes *x) {
    for (int round = 0; round < 3; ++round) {
        md_lanes y[8];
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(x, y, sizeof y);
    }
}

MD_FN bool md_is_flat(const int16_t *block) {
    uint64_t words[16];
    memcpy(words, block, sizeof words);
    words[0] &= ~uint64_t(0xFFFF);  // the first in memory: x86 and ARM are little-endian
    uint64_t any = 0;
    for (uint64_t word : words) any |= word;
    return any == 0;
}

// A row of blocks into eight rows of samples that lie `stride` apart.
MD_CLONES static void md_inverse_cosines(ptrdiff_t blocks, const int16_t *coefficients,
                                         const md_u32 *step, ptrdiff_t stride,
                                         unsigned char *samples) {
    typedef int16_t md_short __attribute__((vector_size(16)));
    typedef int md_signed __attribute__((vector_size(32)));
    typedef unsigned char md_eight_bytes __attribute__((vector_size(8)));
    for (ptrdiff_t n = 0; n < blocks; ++n, coefficients += 64, samples += 8) {
        if (md_is_flat(coefficients)) {
            const int level = ((coefficients[0] * int(step[0]) * 4 + 16) >> 5) + 128;
            for (int i = 0; i < 8; ++i)
                memset(samples + i * stride, level < 0 ? 0 : level > 255 ? 255 : level, 8);
            continue;
        }
        md_lanes x[8];
        for (int i = 0; i < 8; ++i) {
            md_short row;
            md_lanes by;
            memcpy(&row, coefficients + 8 * i, sizeof row);
            memcpy(&by, step + 8 * i, sizeof by);
            x[i] = md_lanes(__builtin_convertvector(row, md_signed)) * by;
        }
        md_cosines(x, 13 - 2);
        md_transpose(x);
        md_cosines(x, 13 + 2 + 3);
        md_transpose(x);
        for (int i = 0; i < 8; ++i) {
            md_signed row = md_signed(x[i]) + 128;
            row = row < 0 ? 0 : row;
            row = row > 255 ? 255 : row;
            const md_eight_bytes out = __builtin_convertvector(row, md_eight_bytes);
            memcpy(samples + i * stride, &out, sizeof out);
        }
    }
}

// --- rows of samples ---------------------------------------------------------------------------

// Three quarters of one row and a quarter of the other.
MD_CLONES static void md_mix_rows(ptrdiff_t n, const unsigned char *row,
                                  const unsigned char *other, int rounding, unsigned char *out) {
    for (ptrdiff_t i = 0; i < n; ++i)
        out[i] = (unsigned char)((3 * row[i] + other[i] + rounding) >> 2);
}

MD_CLONES static void md_sum_rows(ptrdiff_t n, const unsigned char *row,
                                  const unsigned char *other, bool both, uint16_t *out) {
    if (both)
        for (ptrdiff_t i = 0; i < n; ++i) out[i] = uint16_t(3 * row[i] + other[i]);
    else
        for (ptrdiff_t i = 0; i < n; ++i) out[i] = row[i];
}

// Two pixels of each sample, to which the neighbour on their side gives a quarter; samples -1 and n
// are there too. Of sums of rows (`both`) the result is a quarter.
MD_CLONES static void md_widen_row(ptrdiff_t n, const uint16_t *in, bool both, unsigned char *out) {
    const int shift = both ? 4 : 2, left = both ? 8 : 1, right = both ? 7 : 2;
    for (ptrdiff_t i = 0; i < n; ++i) {
        out[2 * i] = (unsigned char)((3 * in[i] + in[i - 1] + left) >> shift);
        out[2 * i + 1] = (unsigned char)((3 * in[i] + in[i + 1] + right) >> shift);
    }
}

MD_FN unsigned char md_byte(int x) { return (unsigned char)(x < 0 ? 0 : x > 255 ? 255 : x); }

// JFIF's colours, with 16 bits behind the point.
MD_CLONES static void md_ycc_row(ptrdiff_t n, const unsigned char *__restrict y,
                                 const unsigned char *__restrict cb,
                                 const unsigned char *__restrict cr,
                                 unsigned char *__restrict out) {
    for (ptrdiff_t i = 0; i < n; ++i) {
        const int blue = cb[i] - 128, red = cr[i] - 128;
        out[3 * i] = md_byte(y[i] + ((91881 * red + 32768) >> 16));
        out[3 * i + 1] = md_byte(y[i] + ((-22554 * blue - 46802 * red + 32768) >> 16));
        out[3 * i + 2] = md_byte(y[i] + ((116130 * blue + 32768) >> 16));
    }
}

MD_CLONES static void md_rgb_row(ptrdiff_t n, const unsigned char *__restrict r,
                                 const unsigned char *__restrict g,
                                 const unsigned char *__restrict b,
                                 unsigned char *__restrict out) {
    for (ptrdiff_t i = 0; i < n; ++i)
        out[3 * i] = r[i], out[3 * i + 1] = g[i], out[3 * i + 2] = b[i];
}

static inline void md_grey_row(ptrdiff_t n, const unsigned char *y, unsigned char *out) {
    md_rgb_row(n, y, y, y, out);
}

#endif
#endif
