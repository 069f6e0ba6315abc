// Products of float32 matrices on AMX's tiles, which multiply bfloat16 and add in float32.
//
// A float32 is the exact sum of three bfloat16: what it rounds to, what the rest rounds to, and
// what is then left. Each is at most 2^-9 of the one before, so of the nine products of the parts
// of two numbers three are smaller than a product's rounding, and six make one:
//     a b = a0 b0 + (a0 b1 + a1 b0) + (a0 b2 + a1 b1 + a2 b0).
// A part below float32's normal numbers counts as zero: numbers under 2^-106 or so lose digits, and
// those that are not normal themselves all of them. What rounds to no bfloat16, above 3.39e38, counts
// as an infinity, and an infinity becomes a NaN.
//
// A tile has 16 rows of 64 bytes. C's are 16 x 16 floats, A's 16 rows of 32 bfloat16; those of B
// are 32 rows of 16 too, but two rows stand side by side as pairs. All begin where a cache line
// does: a row across two lines takes six times as long to load.

#ifndef MD_TILES_H
#define MD_TILES_H

#include "vectors.h"

#if MD_HOST && MD_VECTORS && defined(__linux__) && __GNUC__ >= 11
#define MD_TILES 1
#else
#define MD_TILES 0
#endif

#if MD_TILES

#include <immintrin.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

#define MD_ON_TILES \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))

enum { MD_TILE_BYTES = 1024, MD_PARTS = 3 };

// Whether the processor has tiles, and the system lets this process use them.
static inline bool md_has_tiles() {
    static const bool has = [] {
        constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16") &&
               syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
    }();
    return has;
}

// Eight tiles of full size, for as long as it lives.
struct md_tile_scope {
    MD_ON_TILES md_tile_scope() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    MD_ON_TILES ~md_tile_scope() { asm volatile("tilerelease" ::: "memory"); }
};

// Tiles FROM up to FROM + COUNT from as many places, or into them.
template <int FROM, int COUNT>
MD_FN void md_load_tiles(char *const *at, ptrdiff_t offset, ptrdiff_t row) {
    if constexpr (COUNT > 0) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(*at + offset), "r"(row), "i"(FROM)
                     : "memory");
        md_load_tiles<FROM + 1, COUNT - 1>(at + 1, offset, row);
    }
}
template <int FROM, int COUNT> MD_FN void md_zero_tiles() {
    if constexpr (COUNT > 0) {
        asm volatile("tilezero %%tmm%c0" ::"i"(FROM));
        md_zero_tiles<FROM + 1, COUNT - 1>();
    }
}
template <int FROM, int COUNT> MD_FN void md_store_tiles(char *const *to, ptrdiff_t row) {
    if constexpr (COUNT > 0) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(*to), "r"(row), "i"(FROM) : "memory");
        md_store_tiles<FROM + 1, COUNT - 1>(to + 1, row);
    }
}

// Every tile of A by every one of B: c[j][i] += a[i] b[j]. What is multiplied by the same b stands
// together, for another one takes its time to get there.
template <int M, int N, int K = 0> MD_FN void md_multiply_tiles() {
    if constexpr (K < M * N) {
        asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(M * N + M + K / M),
                     "i"(M * N + K % M), "i"(K));
        md_multiply_tiles<M, N, K + 1>();
    }
}

// Where some tiles of a matrix are, how far the rows of each are apart, and its parts, in bytes.
struct md_tiled {
    char *at[4];
    ptrdiff_t row, part;
};
struct md_step {
    ptrdiff_t a, b;  // how far from the first tiles of A and B
};

// c = start + the sum over all steps, of M tiles of A by N of B; the tile of a[i] and b[j] is
// c[j * M + i]. Without `start` sums begin with zero.
template <int M, int N>
MD_FN void md_tile_product(const md_tiled &a, const md_tiled &b, const md_step *step,
                           ptrdiff_t steps, const md_tiled *start, const md_tiled &c) {
    constexpr int A = M * N, B = A + M;
    static_assert(B + N <= 8);
    if (start == nullptr)
        md_zero_tiles<0, M * N>();
    else
        md_load_tiles<0, M * N>(start->at, 0, start->row);
    // Small products come first, and from one to the next only one side is loaded.
    for (const md_step *end = step + steps; step != end; ++step) {
        md_load_tiles<A, M>(a.at, step->a + 2 * a.part, a.row);
        md_load_tiles<B, N>(b.at, step->b, b.row);
        md_multiply_tiles<M, N>();
        md_load_tiles<A, M>(a.at, step->a + a.part, a.row);
        md_multiply_tiles<M, N>();
        md_load_tiles<B, N>(b.at, step->b + b.part, b.row);
        md_multiply_tiles<M, N>();
        md_load_tiles<A, M>(a.at, step->a, a.row);
        md_multiply_tiles<M, N>();
        md_load_tiles<B, N>(b.at, step->b + 2 * b.part, b.row);
        md_multiply_tiles<M, N>();
        md_load_tiles<B, N>(b.at, step->b, b.row);
        md_multiply_tiles<M, N>();
    }
    md_store_tiles<0, M * N>(c.at, c.row);
}

// The same for m x n tiles, of which there may be 1 x 1 to 1 x 3, 2 x 1, 2 x 2 and 3 x 1.
MD_ON_TILES static inline void md_tile_products(ptrdiff_t m, ptrdiff_t n, const md_tiled &a,
                                                const md_tiled &b, const md_step *step,
                                                ptrdiff_t steps, const md_tiled *start,
                                                const md_tiled &c) {
    switch (4 * m + n) {
        case 5: return md_tile_product<1, 1>(a, b, step, steps, start, c);
        case 6: return md_tile_product<1, 2>(a, b, step, steps, start, c);
        case 7: return md_tile_product<1, 3>(a, b, step, steps, start, c);
        case 9: return md_tile_product<2, 1>(a, b, step, steps, start, c);
        case 10: return md_tile_product<2, 2>(a, b, step, steps, start, c);
        case 13: return md_tile_product<3, 1>(a, b, step, steps, start, c);
    }
}

typedef uint32_t md_16_words __attribute__((vector_size(64)));

// 16 bfloat16 as the low halves of words. All lanes are masked in, for some compilers take what
// the other form leaves open for a mistake.
MD_ON_TILES static inline md_16_words md_low(__m256i halves) {
    return (md_16_words)_mm512_maskz_cvtepu16_epi32(0xffff, halves);
}

// The parts of 16 numbers, each the nearest to what those before it leave.
struct md_parts {
    __m256i part[MD_PARTS];

    MD_ON_TILES explicit md_parts(const __m512 &numbers) {
        __m512 left = numbers;
        for (__m256i &each : part) {
            each = (__m256i)_mm512_cvtneps_pbh(left);
            left -= (__m512)(md_low(each) << 16);
        }
    }
};

// Store parts, `apart` bytes from each other.
MD_ON_TILES static inline void md_store(const md_parts &of, char *to, ptrdiff_t apart) {
    for (int i = 0; i < MD_PARTS; ++i)
        *reinterpret_cast<__m256i *>(to + i * apart) = of.part[i];
}

// The same for pairs, each of one from the left and one from the right.
MD_ON_TILES static inline void md_store_pairs(const md_parts &left, const md_parts &right,
                                              char *to, ptrdiff_t apart) {
    for (int i = 0; i < MD_PARTS; ++i)
        *reinterpret_cast<md_16_words *>(to + i * apart) =
            md_low(left.part[i]) | md_low(right.part[i]) << 16;
}

// 16 rows become columns: the halves of each 16 x 16, then of each 8 x 8 and so on change places.
MD_ON_TILES static inline void md_transpose(__m512 *rows) {
    const md_16_words place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2) {
        const md_16_words right = (md_16_words)((place & half) != 0);
        const md_16_words top = place + (right & (16 - half)), bottom = top + half;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i & half) continue;
            const __m512 above = rows[i], below = rows[i + half];
            rows[i] = _mm512_permutex2var_ps(above, (__m512i)top, below);
            rows[i + half] = _mm512_permutex2var_ps(above, (__m512i)bottom, below);
        }
    }
}

// Memory that a thread has once, as long as its largest work needs; not cleared.
class md_room {
  public:
    static char *of(size_t bytes) {
        static thread_local md_room mine;
        if (bytes > mine.size) {
            free(mine.memory);
            mine.size = 0;
            mine.memory = static_cast<char *>(aligned_alloc(64, (bytes + 63) / 64 * 64));
            if (mine.memory == nullptr) throw std::bad_alloc();
            mine.size = bytes;
        }
        return mine.memory;
    }
    ~md_room() { free(memory); }

  private:
    char *memory = nullptr;
    size_t size = 0;
};

#endif
#endif
