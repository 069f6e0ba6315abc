// Batch normalisation: moments that may be taken in parts, and what is done to each element.

#ifndef MD_NORM_H
#define MD_NORM_H

#include "base.h"

// How many numbers, their mean, and the sum of the squares of their distances from it.
template <class T> struct md_moments {
    T count, mean, squares;
};

// One more number: Welford, "Note on a method for calculating corrected sums of squares and
// products" (1962). It never subtracts large sums from each other. `share` is 1 / the new count.
template <class T> MD_FN void md_take(md_moments<T> &m, T x, T share) {
    const T before = x - m.mean;
    m.count += 1;
    m.mean += before * share;
    m.squares += before * (x - m.mean);
}

// The numbers of both: Chan, Golub and LeVeque, "Algorithms for computing the sample variance"
// (1983). `part` is which part of them all the others are, `both` that times how many the first are.
template <class T>
MD_FN void md_join(T &mean, T &squares, T other_mean, T other_squares, T part, T both) {
    const T apart = other_mean - mean;
    squares += other_squares + apart * apart * both;
    mean += apart * part;
}
template <class T> MD_FN void md_take(md_moments<T> &m, const md_moments<T> &other) {
    if (other.count == 0) return;
    const T count = m.count + other.count, part = other.count / count;
    md_join(m.mean, m.squares, other.mean, other.squares, part, m.count * part);
    m.count = count;
}

// Two sums that are taken in one go.
template <class T> struct md_sums {
    T first, second;
};
template <class T> MD_FN void md_take(md_sums<T> &sums, const md_sums<T> &more) {
    sums.first += more.first;
    sums.second += more.second;
}

// One channel of a batch: 1/sqrt(variance + epsilon) is the inverse, and scale times that the
// factor.
template <class T> struct md_channel {
    T mean, inverse, factor;
};

template <class T> MD_FN T md_normal(md_channel<T> c, T x) { return (x - c.mean) * c.inverse; }

// y = (x - mean) (scale / sqrt(variance + epsilon)) + offset
template <class T> MD_FN T md_normalize(md_channel<T> c, T x, T offset) {
    return (x - c.mean) * c.factor + offset;
}

// dx = scale/sqrt(variance + epsilon) (dy - normal * dscale - doffset), given the means over the
// batch of what the gradients of scale and offset are sums of; with moments that do not depend on x
// these are 0.
template <class T> MD_FN T md_normalize_backward(md_channel<T> c, T dy, T x, T dscale, T doffset) {
    return ((dy - md_normal(c, x) * dscale) - doffset) * c.factor;
}

#endif
