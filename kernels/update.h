// Optimizer rules: how one step changes a weight and its slots, each formula once.
//
// A rule is a struct of constants and an md_step: the formula for one element, given the gradient
// that md_gradient has prepared. The loops know the number of slots of a rule and nothing else.

#ifndef MD_UPDATE_H
#define MD_UPDATE_H

#include "arrays.h"

// The gradient as the rules see it: scaled first (the 1/n of a mean), then weight decay added.
// Without decay the term is left out, because adding 0*w would turn -0 into 0, and an infinite
// weight into NaN. Scaling by 1 changes nothing.
template <class T> MD_FN T md_gradient(T g, T w, T scale, T decay) {
    const T scaled = g * scale;
    return decay != 0 ? scaled + decay * w : scaled;
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
    T lr, decay, rest, momentum, epsilon;  // rest = 1 - decay, rounded once
    enum { slots = 2 };
};
template <class T> MD_FN void md_step(md_rmsprop<T> rule, T g, T &w, T &s, T &m) {
    s = rule.decay * s + rule.rest * (g * g);
    m = rule.momentum * m + rule.lr * g / md_sqrt(s + rule.epsilon);
    w -= m;
}

// Algorithm 1 of Kingma and Ba, "Adam: a method for stochastic optimization" (2015):
// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr m' / (sqrt(v') + epsilon)
// with m' = m / (1 - b1^t) and v' = v / (1 - b2^t)
template <class T> struct md_adam {
    T lr, beta1, rest1, beta2, rest2, epsilon;  // rest = 1 - beta, rounded once
    T bias1, bias2;                             // 1 - beta^t, rounded once
    enum { slots = 2 };
};
template <class T> MD_FN void md_step(md_adam<T> rule, T g, T &w, T &m, T &v) {
    m = rule.beta1 * m + rule.rest1 * g;
    v = rule.beta2 * v + rule.rest2 * (g * g);
    w -= rule.lr * (m / rule.bias1) / (md_sqrt(v / rule.bias2) + rule.epsilon);
}

#if MD_HOST

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, ptrdiff_t n, T scale, T decay, const T *g, T *w) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i) md_step(rule, md_gradient(g[i], w[i], scale, decay), w[i]);
}

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, ptrdiff_t n, T scale, T decay, const T *g, T *w, T *a) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        md_step(rule, md_gradient(g[i], w[i], scale, decay), w[i], a[i]);
}

template <class T, class Rule>
MD_CLONES static void md_loop(Rule rule, ptrdiff_t n, T scale, T decay, const T *g, T *w, T *a,
                              T *b) {
    MD_IVDEP
    for (ptrdiff_t i = 0; i < n; ++i)
        md_step(rule, md_gradient(g[i], w[i], scale, decay), w[i], a[i], b[i]);
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
    return {T(r.lr),    T(r.beta1),   T(r.rest1), T(r.beta2),
            T(r.rest2), T(r.epsilon), T(r.bias1), T(r.bias2)};
}

// One step of a rule on all tensors. Columns of the table: weights, the slots, gradients.
template <class Constants>
static void md_update(md_parallel parallel, const md_table &table, const Constants &constants,
                      double scale, const double *decay, int threads) {
    md_by_type(table.wide(), [&](auto zero) {
        using T = decltype(zero);
        const auto rule = md_rounded<T>(constants);
        constexpr int slots = decltype(rule)::slots;
        md_walk(parallel, table, threads, [&](ptrdiff_t row, ptrdiff_t first, ptrdiff_t count) {
            T *w = table.get<T>(row, 0, first);
            const T *g = table.get<T>(row, slots + 1, first);
            if constexpr (slots == 0)
                md_loop(rule, count, T(scale), T(decay[row]), g, w);
            else if constexpr (slots == 1)
                md_loop(rule, count, T(scale), T(decay[row]), g, w, table.get<T>(row, 1, first));
            else
                md_loop(rule, count, T(scale), T(decay[row]), g, w, table.get<T>(row, 1, first),
                        table.get<T>(row, 2, first));
        });
    });
}

#endif
#endif
