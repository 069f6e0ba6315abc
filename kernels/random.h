// Random numbers without a state: a function of a key and a counter.
//
// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (2011). Block b of a stream is philox(key, {b, c1, c2, c3}), four words of 32 bits, so that any
// part of a stream can be made at any place, by any thread, and is always the same.

#ifndef MD_RANDOM_H
#define MD_RANDOM_H

#include "arrays.h"

struct md_stream {
    md_u32 key[2], counter[3];  // words 1 to 3 of the counter; word 0 is the number of the block
};

MD_FN void md_philox(md_u32 k0, md_u32 k1, md_u32 c0, md_u32 c1, md_u32 c2, md_u32 c3,
                     md_u32 *words) {
    for (int round = 0; round < 10; ++round) {
        const md_u64 p0 = md_u64(0xD2511F53u) * c0, p1 = md_u64(0xCD9E8D57u) * c2;
        c0 = md_u32(p1 >> 32) ^ c1 ^ k0;
        c1 = md_u32(p1);
        c2 = md_u32(p0 >> 32) ^ c3 ^ k1;
        c3 = md_u32(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// Uniform in [0, 1): the upper 24 bits of one word, or 53 bits of two.
MD_FN float md_uniform(md_u32 word) { return float(int(word >> 8)) * (1.0f / 16777216); }
MD_FN double md_uniform(md_u32 high, md_u32 low) {
    return (int(high >> 5) * 67108864.0 + int(low >> 6)) * (1.0 / 9007199254740992.0);
}

#if MD_HOST

enum { MD_WORDS = 1024 };  // words that are made at a time, in the first cache

MD_CLONES static void md_random_words(md_stream stream, md_u32 block, ptrdiff_t blocks,
                                      md_u32 *words) {
    for (ptrdiff_t i = 0; i < blocks; ++i)
        md_philox(stream.key[0], stream.key[1], block + md_u32(i), stream.counter[0],
                  stream.counter[1], stream.counter[2], words + 4 * i);
}

MD_CLONES static void md_uniform_loop(ptrdiff_t n, const md_u32 *words, float *out) {
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = md_uniform(words[i]);
}

MD_CLONES static void md_uniform_loop(ptrdiff_t n, const md_u32 *words, double *out) {
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = md_uniform(words[2 * i], words[2 * i + 1]);
}

// Call body(first, count, words) on pieces of n elements, each with the words of the stream that
// belong to it, `each` words an element.
template <class Body>
static void md_with_words(md_parallel parallel, md_stream stream, ptrdiff_t n, ptrdiff_t each,
                          int threads, Body body) {
    const ptrdiff_t step = MD_WORDS / each;  // elements of one piece
    auto pieces = [&](ptrdiff_t piece, ptrdiff_t last) {
        alignas(64) md_u32 words[MD_WORDS];
        for (; piece < last; ++piece) {
            const ptrdiff_t count = std::min(n - piece * step, step);
            md_random_words(stream, md_u32(piece * (MD_WORDS / 4)), (count * each + 3) / 4, words);
            body(piece * step, count, words);
        }
    };
    // Philox takes about as long as streaming 16 bytes a word.
    md_share(parallel, (n + step - 1) / step, md_grain(16 * MD_WORDS), threads, pieces);
}

static inline void md_uniform_fill(md_parallel parallel, int threads, bool wide, ptrdiff_t n,
                                   void *out, md_stream stream) {
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        md_with_words(parallel, stream, n, sizeof(T) / 4, threads,
                      [&](ptrdiff_t first, ptrdiff_t count, const md_u32 *words) {
                          md_uniform_loop(count, words, static_cast<T *>(out) + first);
                      });
    });
}

#endif
#endif
