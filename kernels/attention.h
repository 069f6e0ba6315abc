// Causal attention: each token looks at itself and at those before it.
//
//     s[i, j] = q[i] k[j] / sqrt(size)    p[i, j] = e^s[i, j] / sum e^s[i, j'] over j' <= i
//     y[i] = sum of p[i, j] v[j] over j <= i
//
// (Vaswani and others, "Attention Is All You Need", 2017.) All of it is done for one head of one
// sequence at a time, whose queries, keys and values fit into the second-level cache, and of that
// for a block of queries at a time: their scores are made, used and forgotten. Nothing of the size
// tokens x tokens is ever stored, and nothing is kept for the way back, which computes the scores
// again: that costs one product of seven.
//
// What a head has is packed into rows of whole vectors, with zeros around it, in a number of rows
// that is one of whole blocks. So loops have no ends of their own: tokens that are not there add 0
// to everything.
//
// Products are added without rounding in between where the processor can, as in BLAS: the bits
// depend on the shapes and on the kind of processor, and not on the number of threads.

#ifndef MD_ATTENTION_H
#define MD_ATTENTION_H

#include "layer.h"

#if MD_HOST

#include <atomic>
#include <new>
#include <vector>

// Of arrays [sequences, tokens, heads * size]. Of queries, keys and values there are three behind
// each other in each row.
struct md_heads {
    ptrdiff_t sequences, tokens, heads, size;
};

enum { MD_QUERIES = 16, MD_TALL = 4 };  // of a block; rows of a tile

template <class T> struct md_wide_vector {
    static constexpr ptrdiff_t LANES = 64 / sizeof(T);
    typedef T type __attribute__((vector_size(64), aligned(64)));
};

// A matrix: the numbers from one row to the next, and from one column to the next.
template <class T> struct md_factor {
    const T *at;
    ptrdiff_t row, column;
};

// c[MD_TALL, WIDTH vectors] = a @ b, or that is added; the rows of b and c are whole vectors.
template <int WIDTH, class T>
MD_FN void md_tile(ptrdiff_t inner, md_factor<T> a, const T *b, ptrdiff_t b_row, T *c,
                   ptrdiff_t c_row, bool add) {
    using V = typename md_wide_vector<T>::type;
    constexpr ptrdiff_t LANES = md_wide_vector<T>::LANES;
    V sums[MD_TALL][WIDTH];
    for (int i = 0; i < MD_TALL; ++i)
        for (int j = 0; j < WIDTH; ++j)
            sums[i][j] = add ? *reinterpret_cast<V *>(c + i * c_row + j * LANES) : V{};
    for (ptrdiff_t k = 0; k < inner; ++k) {
        V right[WIDTH];
        for (int j = 0; j < WIDTH; ++j)
            right[j] = *reinterpret_cast<const V *>(b + k * b_row + j * LANES);
        for (int i = 0; i < MD_TALL; ++i)
            for (int j = 0; j < WIDTH; ++j)
                sums[i][j] += a.at[i * a.row + k * a.column] * right[j];
    }
    for (int i = 0; i < MD_TALL; ++i)
        for (int j = 0; j < WIDTH; ++j)
            *reinterpret_cast<V *>(c + i * c_row + j * LANES) = sums[i][j];
}

// The same for any number of whole tiles.
template <class T>
MD_FN void md_product(ptrdiff_t rows, ptrdiff_t inner, ptrdiff_t columns, md_factor<T> a,
                      const T *b, ptrdiff_t b_row, T *c, ptrdiff_t c_row, bool add) {
    constexpr ptrdiff_t LANES = md_wide_vector<T>::LANES;
    for (ptrdiff_t j = 0; j < columns;) {
        const bool two = columns - j >= 2 * LANES;
        md_factor<T> left = a;
        for (ptrdiff_t i = 0; i < rows; i += MD_TALL, left.at += MD_TALL * a.row) {
            if (two)
                md_tile<2>(inner, left, b + j, b_row, c + i * c_row + j, c_row, add);
            else
                md_tile<1>(inner, left, b + j, b_row, c + i * c_row + j, c_row, add);
        }
        j += two ? 2 * LANES : LANES;
    }
}

// What the numbers of a vector give, taken together from the first to the last.
template <class T, class Take>
MD_FN T md_over_lanes(const typename md_wide_vector<T>::type &v, Take take) {
    T result = v[0];
    for (int lane = 1; lane < md_wide_vector<T>::LANES; ++lane) result = take(result, v[lane]);
    return result;
}

// Scores of `seen` keys become e^(score - the largest), and what is behind them, up to `end`, 0;
// their sum is returned.
template <class T> MD_FN T md_exponentials(T *scores, ptrdiff_t seen, ptrdiff_t end) {
    using V = typename md_wide_vector<T>::type;
    constexpr ptrdiff_t LANES = md_wide_vector<T>::LANES;
    for (ptrdiff_t j = seen; j < end; ++j) scores[j] = T(-INFINITY);
    V tops = *reinterpret_cast<V *>(scores);
    for (ptrdiff_t j = LANES; j < end; j += LANES) {
        const V more = *reinterpret_cast<V *>(scores + j);
        tops = more > tops ? more : tops;
    }
    const T top = md_over_lanes<T>(tops, [](T a, T b) MD_INLINE { return b > a ? b : a; });
    MD_IVDEP
    for (ptrdiff_t j = 0; j < end; ++j) scores[j] = md_exp(scores[j] - top);
    V sums = {};
    for (ptrdiff_t j = 0; j < end; j += LANES) sums += *reinterpret_cast<V *>(scores + j);
    return md_over_lanes<T>(sums, [](T a, T b) MD_INLINE { return a + b; });
}

// What the packed rows and columns of one head take, and where they are.
template <class T> struct md_packing {
    static constexpr ptrdiff_t LANES = md_wide_vector<T>::LANES;
    ptrdiff_t tokens, size, row;  // row: of the array that is packed
    ptrdiff_t rows, width;        // of what is packed: tokens and size, rounded up

    md_packing(const md_heads &of, ptrdiff_t parts)
        : tokens(of.tokens), size(of.size), row(parts * of.heads * of.size),
          rows((tokens + MD_QUERIES - 1) / MD_QUERIES * MD_QUERIES),
          width((size + LANES - 1) / LANES * LANES) {}

    // into[rows, width], times a number.
    void pack(const T *from, T *into, T scale) const {
        std::fill(into, into + rows * width, T(0));
        for (ptrdiff_t i = 0; i < tokens; ++i)
            for (ptrdiff_t j = 0; j < size; ++j) into[i * width + j] = from[i * row + j] * scale;
    }
    // into[size, rows]
    void pack_columns(const T *from, T *into) const {
        std::fill(into, into + size * rows, T(0));
        for (ptrdiff_t i = 0; i < tokens; ++i)
            for (ptrdiff_t j = 0; j < size; ++j) into[j * rows + i] = from[i * row + j];
    }
    // Some rows, times a number, to where tokens are.
    void unpack(const T *from, T *into, ptrdiff_t first, ptrdiff_t count, T scale) const {
        for (ptrdiff_t i = first; i < std::min(first + count, tokens); ++i, from += width)
            for (ptrdiff_t j = 0; j < size; ++j) into[i * row + j] = from[j] * scale;
    }
};

// y of one head.
template <class T>
MD_CLONES static void md_attend(const md_packing<T> &in, const md_packing<T> &out, T scale,
                                const T *q_, const T *k_, const T *v_, T *y_, T *room) {
    const ptrdiff_t rows = in.rows, width = in.width;
    T *q = room, *v = q + rows * width, *k = v + rows * width;
    T *scores = k + in.size * rows, *y = scores + MD_QUERIES * rows;
    in.pack(q_, q, scale);
    in.pack(v_, v, 1);
    in.pack_columns(k_, k);
    for (ptrdiff_t first = 0; first < rows; first += MD_QUERIES) {
        const ptrdiff_t end = first + MD_QUERIES;
        const md_factor<T> of = {q + first * width, width, 1};
        md_product<T>(MD_QUERIES, in.size, end, of, k, rows, scores, rows, false);
        T sums[MD_QUERIES];
        for (ptrdiff_t i = 0; i < MD_QUERIES; ++i)
            sums[i] = md_exponentials(scores + i * rows, first + i + 1, end);
        md_product<T>(MD_QUERIES, end, width, {scores, rows, 1}, v, width, y, width, false);
        for (ptrdiff_t i = 0; i < MD_QUERIES; ++i)
            out.unpack(y + i * width, y_, first + i, 1, 1 / sums[i]);
    }
}

// dq, dk and dv of one head: with dp[i, j] = dy[i] v[j],
//     ds = p (dp - sum of p dp over j)    dq = ds k    dk = ds^T q    dv = p^T dy
// ds is made where dp was.
template <class T>
MD_CLONES static void md_attend_backward(const md_packing<T> &in, const md_packing<T> &out,
                                         T scale, const T *dy_, const T *q_, const T *k_,
                                         const T *v_, T *dq_, T *dk_, T *dv_, T *room) {
    const ptrdiff_t rows = in.rows, width = in.width, all = rows * width;
    T *q = room, *dy = q + all, *k = dy + all, *dk = k + all, *dv = dk + all;
    T *keys = dv + all, *values = keys + in.size * rows;  // by columns
    T *probabilities = values + in.size * rows, *gradients = probabilities + MD_QUERIES * rows;
    T *dq = gradients + MD_QUERIES * rows;
    in.pack(q_, q, scale);
    out.pack(dy_, dy, 1);
    in.pack(k_, k, 1);
    in.pack_columns(k_, keys);
    in.pack_columns(v_, values);
    std::fill(dk, dk + 2 * all, T(0));
    for (ptrdiff_t first = 0; first < rows; first += MD_QUERIES) {
        const ptrdiff_t end = first + MD_QUERIES;
        const T *of_q = q + first * width, *of_dy = dy + first * width;
        md_product<T>(MD_QUERIES, in.size, end, {of_q, width, 1}, keys, rows, probabilities, rows,
                      false);
        md_product<T>(MD_QUERIES, in.size, end, {of_dy, width, 1}, values, rows, gradients, rows,
                      false);
        for (ptrdiff_t i = 0; i < MD_QUERIES; ++i) {
            T *p = probabilities + i * rows, *d = gradients + i * rows;
            const T share = 1 / md_exponentials(p, first + i + 1, end);
            using V = typename md_wide_vector<T>::type;
            V means = {};
            for (ptrdiff_t j = 0; j < end; j += md_wide_vector<T>::LANES) {
                V &probability = *reinterpret_cast<V *>(p + j);
                probability *= share;
                means += probability * *reinterpret_cast<V *>(d + j);
            }
            const T mean = md_over_lanes<T>(means, [](T a, T b) MD_INLINE { return a + b; });
            MD_IVDEP
            for (ptrdiff_t j = 0; j < end; ++j) d[j] = p[j] * (d[j] - mean);
        }
        const md_factor<T> ds = {gradients, rows, 1}, ds_t = {gradients, 1, rows};
        md_product<T>(MD_QUERIES, end, width, ds, k, width, dq, width, false);
        in.unpack(dq, dq_, first, MD_QUERIES, scale);
        md_product<T>(end, MD_QUERIES, width, ds_t, of_q, width, dk, width, true);
        md_product<T>(end, MD_QUERIES, width, {probabilities, 1, rows}, of_dy, width, dv, width,
                      true);
    }
    in.unpack(dk, dk_, 0, rows, 1);
    in.unpack(dv, dv_, 0, rows, 1);
}

// Call head(first, second, room): where a head begins in an array of three parts, and in one of
// one part, and memory for so many numbers. False where there was none.
template <class T, class Head>
static bool md_each_head(md_parallel parallel, int threads, const md_heads &of, ptrdiff_t numbers,
                         Head head) {
    std::atomic<bool> had_memory{true};
    const ptrdiff_t each = of.tokens * of.size;
    md_share(parallel, of.sequences * of.heads, md_grain(4 * sizeof(T) * each), threads,
             [&](ptrdiff_t from, ptrdiff_t to) {
                 T *room = static_cast<T *>(::operator new(numbers * sizeof(T),
                                                           std::align_val_t(64), std::nothrow));
                 if (room == nullptr) had_memory = false;
                 for (; room != nullptr && from < to; ++from) {
                     const ptrdiff_t at = from / of.heads * of.heads * each;
                     const ptrdiff_t beside = from % of.heads * of.size;
                     head(3 * at + beside, at + beside, room);
                 }
                 ::operator delete(room, std::align_val_t(64));
             });
    return had_memory;
}

static inline bool md_attention_all(md_parallel parallel, int threads, bool wide,
                                    const md_heads &of, const void *qkv_, void *y_) {
    bool done = false;
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const T *qkv = static_cast<const T *>(qkv_);
        const md_packing<T> in(of, 3), out(of, 1);
        const ptrdiff_t all = in.rows * in.width, columns = in.size * in.rows;
        const ptrdiff_t block = MD_QUERIES * (in.rows + in.width), part = of.heads * of.size;
        done = md_each_head<T>(
            parallel, threads, of, 2 * all + columns + block,
            [&](ptrdiff_t first, ptrdiff_t second, T *room) {
                const T *q = qkv + first;
                md_attend(in, out, 1 / md_sqrt(T(of.size)), q, q + part, q + 2 * part,
                          static_cast<T *>(y_) + second, room);
            });
    });
    return done;
}

static inline bool md_attention_backward_all(md_parallel parallel, int threads, bool wide,
                                             const md_heads &of, const void *dy_,
                                             const void *qkv_, void *dqkv_) {
    bool done = false;
    md_by_type(wide, [&](auto zero) {
        using T = decltype(zero);
        const T *qkv = static_cast<const T *>(qkv_), *dy = static_cast<const T *>(dy_);
        const md_packing<T> in(of, 3), out(of, 1);
        const ptrdiff_t all = in.rows * in.width, columns = in.size * in.rows;
        const ptrdiff_t block = MD_QUERIES * (2 * in.rows + in.width), part = of.heads * of.size;
        done = md_each_head<T>(
            parallel, threads, of, 5 * all + 2 * columns + block,
            [&](ptrdiff_t first, ptrdiff_t second, T *room) {
                const T *q = qkv + first;
                T *dq = static_cast<T *>(dqkv_) + first;
                md_attend_backward(in, out, 1 / md_sqrt(T(of.size)), dy + second, q, q + part,
                                   q + 2 * part, dq, dq + part, dq + 2 * part, room);
            });
    });
    return done;
}

#endif
#endif
