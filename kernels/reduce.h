// Sums over replicas, packing, and the search for numbers that are not finite.

#ifndef MD_REDUCE_H
#define MD_REDUCE_H

#include "arrays.h"

// One more replica's term of a weighted sum; the order of the calls is the order of the sum.
// Without weights and scale these are 1, and multiplying by 1 changes nothing.
template <class T> MD_FN T md_term(T sum, T source, T weight) { return sum + weight * source; }

// x - x is 0 for every number, and NaN for NaN and the infinities.
template <class T> MD_FN bool md_finite(T x) { return x - x == 0; }

#if MD_HOST

#include <string.h>

// Elements that are summed before the next ones are touched: a block of them stays in the first
// cache while the replicas are added to it, so the sum is one pass over memory for any number of
// replicas.
enum { MD_SUM_BLOCK = 2048 };

template <class T>
MD_CLONES static void md_sum_one(ptrdiff_t n, T *out, const T *a, T wa, T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = wa * a[i] * scale;
}

template <class T>
MD_CLONES static void md_sum_two(ptrdiff_t n, T *out, const T *a, T wa, const T *b, T wb,
                                 T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = md_term(wa * a[i], b[i], wb) * scale;
}

template <class T>
MD_CLONES static void md_sum_next(ptrdiff_t n, T *out, const T *sum, const T *a, T wa, T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) out[i] = md_term(sum[i], a[i], wa) * scale;
}

// out = (((w0 s0 + w1 s1) + w2 s2) ...) scale. Only the last replica's loop writes to `out`, each
// element after it was read, so `out` may be any of the sources.
template <class T>
static void md_sum_block(ptrdiff_t n, T *out, const T *const *sources, const T *weights,
                         ptrdiff_t replicas, ptrdiff_t first, T scale) {
    if (replicas == 1) return md_sum_one(n, out, sources[0] + first, weights[0], scale);
    alignas(64) T sum[MD_SUM_BLOCK];
    T *into = replicas == 2 ? out : sum;
    md_sum_two(n, into, sources[0] + first, weights[0], sources[1] + first, weights[1],
               replicas == 2 ? scale : T(1));
    for (ptrdiff_t r = 2; r < replicas; ++r) {
        const bool last = r == replicas - 1;
        md_sum_next(n, last ? out : sum, sum, sources[r] + first, weights[r],
                    last ? scale : T(1));
    }
}

// Columns of the table: the destinations, then one per replica.
static inline void md_sum(md_parallel parallel, const md_table &table, ptrdiff_t destinations,
                   const double *weights, double scale, int threads) {
    const ptrdiff_t replicas = table.columns - destinations;
    md_by_type(table.wide(), [&](auto zero) {
        using T = decltype(zero);
        const std::vector<T> rounded(weights, weights + replicas);
        md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
            T *const *out = reinterpret_cast<T *const *>(&table.at[row * table.columns]);
            const T *const *sources = out + destinations;
            for (const ptrdiff_t end = first + count; first < end; first += MD_SUM_BLOCK) {
                const ptrdiff_t n = std::min<ptrdiff_t>(end - first, MD_SUM_BLOCK);
                md_sum_block(n, out[0] + first, sources, rounded.data(), replicas, first,
                             T(scale));
                for (ptrdiff_t d = 1; d < destinations; ++d)
                    if (out[d] != out[0]) memcpy(out[d] + first, out[0] + first, n * sizeof(T));
            }
        });
    });
}

// Copy between two columns of the table.
static inline void md_copy(md_parallel parallel, const md_table &table, int threads) {
    md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
        const ptrdiff_t at = first * table.itemsize;
        memcpy(table.get<char>(row, 0, at), table.get<char>(row, 1, at), count * table.itemsize);
    });
}

template <class T> MD_CLONES static bool md_all_finite(ptrdiff_t n, const T *x) {
    int bad = 0;
    for (ptrdiff_t i = 0; i < n; ++i) bad |= !md_finite(x[i]);
    return !bad;
}

// The first row with a number that is not finite, or -1.
static inline ptrdiff_t md_first_nonfinite(md_parallel parallel, const md_table &table, int threads) {
    const ptrdiff_t rows = table.size.size();
    std::atomic<ptrdiff_t> found{rows};
    md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
        ptrdiff_t best = found.load(std::memory_order_relaxed);
        if (best <= row) return;
        const bool finite = table.wide() ? md_all_finite(count, table.get<double>(row, 0, first))
                                         : md_all_finite(count, table.get<float>(row, 0, first));
        while (!finite && row < best && !found.compare_exchange_weak(best, row)) {}
    });
    return found == rows ? -1 : found.load();
}

#endif
#endif
