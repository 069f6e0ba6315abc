// Sums over replicas, casts, packing, sums of squares, and the search for what is not finite.

#ifndef MD_REDUCE_H
#define MD_REDUCE_H

#include "arrays.h"
#include "narrow.h"

// One more replica's term of a weighted sum; the order of the calls is the order of the sum.
// Without weights and scale these are 1, and multiplying by 1 changes nothing.
template <class T> MD_FN T md_term(T sum, T source, T weight) { return sum + weight * source; }

// x - x is 0 for every number, and NaN for NaN and the infinities.
template <class T> MD_FN bool md_finite(T x) { return x - x == 0; }

// The square of a float is exact in double.
MD_FN double md_square(double x) { return x * x; }

// A sum of squares is that of chunks of one tensor each, in their order, and a chunk's that of
// sixteen lanes; element i is in lane i % 16. So the bits depend on the tensors and nothing else.
enum { MD_CHUNK = 4096, MD_LANES = 16 };

#if MD_HOST

#include <string.h>

// The element types that a column may have.
enum md_type { MD_FLOAT16, MD_BFLOAT16, MD_FLOAT32, MD_FLOAT64 };

// Elements that are summed before the next ones are touched: a block of them stays in the first
// cache while the replicas are added to it, so the sum is one pass over memory for any number of
// replicas.
enum { MD_SUM_BLOCK = 2048 };

// Sources of type In are added up in T, float or double, rounded once to Out, and stored in one
// place or in several.
template <class Out, int Places, class T>
MD_FN void md_store(T sum, Out *const (&out)[Places], ptrdiff_t i) {
    Out rounded;
    md_round(sum, rounded);
    for (int place = 0; place < Places; ++place) out[place][i] = rounded;
}

template <class Out, int Places, class In, class T>
MD_CLONES static void md_sum_one(ptrdiff_t n, Out *const (&out)[Places], const In *a, T wa,
                                 T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) md_store(wa * md_widen(a[i]) * scale, out, i);
}

template <class Out, int Places, class In, class T>
MD_CLONES static void md_sum_two(ptrdiff_t n, Out *const (&out)[Places], const In *a, T wa,
                                 const In *b, T wb, T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        md_store(md_term(wa * md_widen(a[i]), md_widen(b[i]), wb) * scale, out, i);
}

template <class Out, int Places, class In, class T>
MD_CLONES static void md_sum_next(ptrdiff_t n, Out *const (&out)[Places], const T *sum,
                                  const In *a, T wa, T scale) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        md_store(md_term(sum[i], md_widen(a[i]), wa) * scale, out, i);
}

// out = (((w0 s0 + w1 s1) + w2 s2) ...) scale. Only the last replica's loop writes to `out`, each
// element after it was read, so each of its places may be any of the sources.
template <class Out, int Places, class In, class T>
static void md_sum_block(ptrdiff_t n, Out *const (&out)[Places], const In *const *sources,
                         const T *weights, ptrdiff_t replicas, ptrdiff_t first, T scale) {
    const In *a = sources[0] + first;
    if (replicas == 1) return md_sum_one(n, out, a, weights[0], scale);
    const In *b = sources[1] + first;
    if (replicas == 2) return md_sum_two(n, out, a, weights[0], b, weights[1], scale);
    alignas(64) T sum[MD_SUM_BLOCK];
    T *const into[] = {sum};
    md_sum_two(n, into, a, weights[0], b, weights[1], T(1));
    const ptrdiff_t last = replicas - 1;
    for (ptrdiff_t r = 2; r < last; ++r)
        md_sum_next(n, into, sum, sources[r] + first, weights[r], T(1));
    md_sum_next(n, out, sum, sources[last] + first, weights[last], scale);
}

// What there is to store beyond the second place is copied, while it is in the first cache.
template <class Out, class In>
static void md_sum_of(md_parallel parallel, const md_table &table, ptrdiff_t destinations,
                      const double *weights, double scale, int threads) {
    using T = decltype(md_widen(In()));
    const ptrdiff_t replicas = table.columns - destinations;
    const std::vector<T> rounded(weights, weights + replicas);
    md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
        void *const *column = &table.at[row * table.columns];
        Out *const *out = reinterpret_cast<Out *const *>(column);
        const In *const *sources = reinterpret_cast<const In *const *>(column + destinations);
        for (const ptrdiff_t end = first + count; first < end; first += MD_SUM_BLOCK) {
            const ptrdiff_t n = std::min<ptrdiff_t>(end - first, MD_SUM_BLOCK);
            if (destinations == 1) {
                Out *const one[] = {out[0] + first};
                md_sum_block(n, one, sources, rounded.data(), replicas, first, T(scale));
            } else {
                Out *const two[] = {out[0] + first, out[1] + first};
                md_sum_block(n, two, sources, rounded.data(), replicas, first, T(scale));
            }
            for (ptrdiff_t d = 2; d < destinations; ++d)
                if (out[d] != out[0]) memcpy(out[d] + first, out[0] + first, n * sizeof(Out));
        }
    });
}

// Columns of the table: the destinations of type `to`, then a source of type `from` per replica.
// Both are the same, or the destinations are float32 and the sources narrower.
static inline void md_sum(md_parallel parallel, const md_table &table, md_type to, md_type from,
                          ptrdiff_t destinations, const double *weights, double scale,
                          int threads) {
    const auto sum = to == MD_FLOAT64    ? md_sum_of<double, double>
                     : to == MD_FLOAT16  ? md_sum_of<md_float16, md_float16>
                     : to == MD_BFLOAT16 ? md_sum_of<md_bfloat16, md_bfloat16>
                     : from == MD_FLOAT16  ? md_sum_of<float, md_float16>
                     : from == MD_BFLOAT16 ? md_sum_of<float, md_bfloat16>
                                           : md_sum_of<float, float>;
    sum(parallel, table, destinations, weights, scale, threads);
}

template <class Out, class In>
MD_CLONES static void md_cast_loop(ptrdiff_t n, Out *out, const In *in) {
    for (ptrdiff_t i = 0; i < n; ++i) md_round(md_widen(in[i]), out[i]);
}

template <class Out, class In>
static void md_cast_of(md_parallel parallel, const md_table &table, int threads) {
    md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
        md_cast_loop(count, table.get<Out>(row, 0, first), table.get<In>(row, 1, first));
    });
}

// Columns of the table: the destination of type `to` and the source of type `from`, of which one
// is float32 and the other narrower.
static inline void md_cast(md_parallel parallel, const md_table &table, md_type to, md_type from,
                           int threads) {
    const auto cast = to == MD_FLOAT16    ? md_cast_of<md_float16, float>
                      : to == MD_BFLOAT16 ? md_cast_of<md_bfloat16, float>
                      : from == MD_FLOAT16 ? md_cast_of<float, md_float16>
                                           : md_cast_of<float, md_bfloat16>;
    cast(parallel, table, threads);
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

template <class T> MD_CLONES static double md_square_chunk(ptrdiff_t n, const T *x) {
    double lanes[MD_LANES] = {};
    ptrdiff_t i = 0;
    for (; i + MD_LANES <= n; i += MD_LANES)
        for (int lane = 0; lane < MD_LANES; ++lane) lanes[lane] += md_square(x[i + lane]);
    for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += md_square(x[i]);
    for (int half = MD_LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static inline double md_sum_squares(md_parallel parallel, const md_table &table, int threads) {
    struct chunk {
        ptrdiff_t row, first;
    };
    std::vector<chunk> chunks;
    for (ptrdiff_t row = 0; row < ptrdiff_t(table.size.size()); ++row)
        for (ptrdiff_t first = 0; first < table.size[row]; first += MD_CHUNK)
            chunks.push_back({row, first});
    std::vector<double> sums(chunks.size());
    const auto body = [&](ptrdiff_t from, ptrdiff_t to) {
        for (; from < to; ++from) {
            const auto [row, first] = chunks[from];
            const ptrdiff_t n = std::min<ptrdiff_t>(table.size[row] - first, MD_CHUNK);
            sums[from] = table.wide() ? md_square_chunk(n, table.get<double>(row, 0, first))
                                      : md_square_chunk(n, table.get<float>(row, 0, first));
        }
    };
    md_share(parallel, chunks.size(), md_grain(MD_CHUNK * table.itemsize), threads, body);
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

#endif
#endif
