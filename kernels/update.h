// Optimizer rules: how one step changes a weight and its slots, each formula once.
//
// A rule is a struct of constants and an md_step: the formula for one element, given the gradient
// that md_gradient has prepared. The loops know the number of slots of a rule and nothing else.

#ifndef MD_UPDATE_H
#define MD_UPDATE_H

#include "arrays.h"
#include "reduce.h"

// What becomes of a gradient before the rules see it: it is scaled (the 1/n of a mean), clipped to
// [-clip, clip], and weight decay is added.
//
// Scaling by 1 and clipping to infinity change nothing; a NaN is neither above nor below the clip,
// and stays. Without decay the term is left out, because adding 0*w would turn -0 into 0, and an
// infinite weight into NaN.
template <class T> struct md_preparation {
    T scale, clip, decay;
};
template <class T> MD_FN T md_gradient(md_preparation<T> before, T g, T w) {
    const T scaled = g * before.scale;
    const T low = scaled < -before.clip ? -before.clip : scaled;
    const T clipped = low > before.clip ? before.clip : low;
    return before.decay != 0 ? clipped + before.decay * w : clipped;
}

// w -= lr g
template <class T> struct md_sgd {
    T lr;
    enum { slots = 0 };
};
template <class T> MD_FN void md_step(md_sgd<T> rule, T g, T &w) { w -= rule.lr * g; }

// m = mu m + g;  w -= lr m,  or with Nesterov  w -= lr (g + mu m)
template <class T> struct md_momentum {
    T lr, momentum;
    bool nesterov;
    enum { slots = 1 };
};
template <class T> MD_FN void md_step(md_momentum<T> rule, T g, T &w, T &m) {
    m = rule.momentum * m + g;
    w -= rule.lr * (rule.nesterov ? g + rule.momentum * m : m);
}

// s = rho s + (1 - rho) g^2;  m = mu m + lr g / sqrt(s + epsilon);  w -= m
template <class T> struct md_rmsprop {
    T lr, decay, rest, momentum, epsilon;  // rest = 1 - decay
    enum { slots = 2 };
};
template <class T> MD_FN void md_step(md_rmsprop<T> rule, T g, T &w, T &s, T &m) {
    s = rule.decay * s + rule.rest * (g * g);
    m = rule.momentum * m + rule.lr * g / md_sqrt(s + rule.epsilon);
    w -= m;
}

// Algorithm 1 of Kingma and Ba, "Adam: a method for stochastic optimization" (2015):
// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr m' / (sqrt(v') + epsilon)
// with m' = m / c1, v' = v / c2, c1 = 1 - b1^t and c2 = 1 - b2^t. As their section 2 says, that is
// w -= rate m / (sqrt(v) + floor)  with  rate = lr sqrt(c2) / c1  and  floor = epsilon sqrt(c2),
// which divides once per element instead of three times.
template <class T> struct md_adam {
    T beta1, rest1, beta2, rest2;  // rest = 1 - beta
    T rate, floor;
    enum { slots = 2 };
};
template <class T> MD_FN void md_step(md_adam<T> rule, T g, T &w, T &m, T &v) {
    m = rule.beta1 * m + rule.rest1 * g;
    v = rule.beta2 * v + rule.rest2 * (g * g);
    w -= rule.rate * m / (md_sqrt(v) + rule.floor);
}

#if MD_HOST

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, md_preparation<T> before, ptrdiff_t n, const T *g, T *w) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) md_step(rule, md_gradient(before, g[i], w[i]), w[i]);
}

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, md_preparation<T> before, ptrdiff_t n, const T *g, T *w,
                              T *a) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) md_step(rule, md_gradient(before, g[i], w[i]), w[i], a[i]);
}

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, md_preparation<T> before, ptrdiff_t n, const T *g, T *w,
                              T *a, T *b) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        md_step(rule, md_gradient(before, g[i], w[i]), w[i], a[i], b[i]);
}

// The constants of a rule, rounded once to the element type.
template <class T> md_sgd<T> md_rounded(const md_sgd<double> &r) { return {T(r.lr)}; }
template <class T> md_momentum<T> md_rounded(const md_momentum<double> &r) {
    return {T(r.lr), T(r.momentum), r.nesterov};
}
template <class T> md_rmsprop<T> md_rounded(const md_rmsprop<double> &r) {
    return {T(r.lr), T(r.decay), T(r.rest), T(r.momentum), T(r.epsilon)};
}
template <class T> md_adam<T> md_rounded(const md_adam<double> &r) {
    return {T(r.beta1), T(r.rest1), T(r.beta2), T(r.rest2), T(r.rate), T(r.floor)};
}

// Go through elements a block at a time, which stays in the first cache. A gradient of several
// replicas is summed there, into `sum`; nobody ever writes it to memory. That of one replica is used
// where it is.
template <class T, class Use>
static void md_summed(const T *const *sources, const std::vector<T> &counts, ptrdiff_t first,
                      ptrdiff_t count, Use use) {
    const bool one = counts.size() == 1 && counts[0] == 1;
    alignas(64) T sum[MD_SUM_BLOCK];
    T *const into[] = {sum};
    for (const ptrdiff_t end = first + count; first < end; first += MD_SUM_BLOCK) {
        const ptrdiff_t n = std::min<ptrdiff_t>(end - first, MD_SUM_BLOCK);
        if (!one) md_sum_block(n, into, sources, counts.data(), counts.size(), first, T(1));
        use(first, n, one ? sources[0] + first : sum);
    }
}

// One step of a rule on all tensors. Columns of the table: weights, the slots, as many more copies
// of the weights as are said, which get the new ones too, and the gradients of as many replicas as
// there are counts, which say how many times each is taken.
template <class Constants>
static void md_update(md_parallel parallel, const md_table &table, const Constants &constants,
                      ptrdiff_t copies, const std::vector<double> &counts, double scale,
                      double clip, const double *decay, int threads) {
    md_by_type(table.wide(), [&](auto zero) {
        using T = decltype(zero);
        const auto rule = md_rounded<T>(constants);
        const std::vector<T> rounded(counts.begin(), counts.end());
        constexpr int slots = decltype(rule)::slots;
        md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t from, ptrdiff_t size) {
            const md_preparation<T> before{T(scale), T(clip), T(decay[row])};
            const T *const *sources = reinterpret_cast<const T *const *>(
                &table.at[row * table.columns + 1 + slots + copies]);
            md_summed(sources, rounded, from, size,
                      [&](ptrdiff_t first, ptrdiff_t count, const T *g) {
                          T *w = table.get<T>(row, 0, first);
                          if constexpr (slots == 0)
                              md_loop(rule, before, count, g, w);
                          else if constexpr (slots == 1)
                              md_loop(rule, before, count, g, w, table.get<T>(row, 1, first));
                          else
                              md_loop(rule, before, count, g, w, table.get<T>(row, 1, first),
                                      table.get<T>(row, 2, first));
                          for (ptrdiff_t i = 1 + slots; i <= slots + copies; ++i)
                              memcpy(table.get<T>(row, i, first), w, count * sizeof(T));
                      });
        });
    });
}

#endif
#endif
