// Batch normalisation of [rows, channels]: loops over what norm.h says of one element.
//
// Moments are one pass over memory: each block of rows is gone over twice while it is cached, for
// its mean and for its squares around that, and the blocks are joined. Going back takes two passes,
// because every element needs the sums over all rows.

#ifndef MD_BATCH_NORM_H
#define MD_BATCH_NORM_H

#include "channel.h"
#include "norm.h"

#if MD_HOST

template <class T>
MD_CLONES static void md_square_sums(md_rows shape, ptrdiff_t first, ptrdiff_t last, const T *x,
                                     const T *mean, T *sums) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        const T apart = x[at] - mean[i];
        sums[i] += apart * apart;
    });
}

// Sums become means, of each lane's channel.
template <class T> MD_CLONES static void md_means(md_rows shape, T count, T *sums) {
    for (ptrdiff_t i = 0; i < shape.channels; ++i) sums[i] /= count;
    for (ptrdiff_t i = shape.channels; i < shape.lanes; ++i) sums[i] = sums[i - shape.channels];
}

// The `join` of moments: means, and behind them squares.
template <class From>
MD_CLONES static void md_join_moments(ptrdiff_t channels, double *totals, ptrdiff_t rows,
                                      const From *more, ptrdiff_t apart, ptrdiff_t more_rows) {
    const double part = double(more_rows) / double(rows + more_rows), both = double(rows) * part;
    double *squares = totals + channels;
    MD_IVDEP
    for (ptrdiff_t i = 0; i < channels; ++i)
        md_join(totals[i], squares[i], double(more[i]), double(more[apart + i]), part, both);
}

static inline bool md_moments_all(md_parallel parallel, int threads, bool wide, md_rows shape,
                                  const void *x_, void *mean, void *variance) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        const T *x = static_cast<const T *>(x_);
        auto totals = md_totals<T>(
            parallel, threads, shape, sizeof(T), 2,
            [&](ptrdiff_t first, ptrdiff_t last, T *sums) {
                T *squares = sums + shape.room;
                md_row_sums(shape, first, last, x, sums);
                md_fold(shape, sums);
                md_means(shape, T(last - first), sums);
                md_square_sums(shape, first, last, x, sums, squares);
                md_fold(shape, squares);
            },
            [&](double *totals, ptrdiff_t rows, const auto *more, ptrdiff_t apart,
                ptrdiff_t more_rows) {
                md_join_moments(shape.channels, totals, rows, more, apart, more_rows);
            });
        const double rows = double(std::max<ptrdiff_t>(shape.rows, 1));
        for (ptrdiff_t i = 0; i < shape.channels; ++i) {
            static_cast<T *>(mean)[i] = T(totals[i]);
            static_cast<T *>(variance)[i] = T(totals[shape.channels + i] / rows);
        }
    });
}

// Of each lane's channel what md_channel has.
template <class T> struct md_channels {
    md_lanes<T> mean, inverse, factor;

    md_channels(md_rows shape, const void *means, const void *variances, const void *scales,
                T epsilon)
        : mean(md_by_lane<T>(shape, means)),
          inverse(md_by_lane<T>(shape,
                                [&](ptrdiff_t i) {
                                    const T *variance = static_cast<const T *>(variances);
                                    return 1 / md_sqrt(variance[i] + epsilon);
                                })),
          factor(md_by_lane<T>(shape, [&](ptrdiff_t i) {
              return static_cast<const T *>(scales)[i] * inverse[i];
          })) {}
};

template <class T>
MD_CLONES static void md_normalize_rows(md_rows shape, ptrdiff_t first, ptrdiff_t last, const T *x,
                                        const T *mean, const T *factor, const T *offset,
                                        const T *add, bool relu, T *y) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        T one = md_normalize(md_channel<T>{mean[i], 0, factor[i]}, x[at], offset[i]);
        if (add != nullptr) one += add[at];
        y[at] = relu ? md_relu(one) : one;
    });
}

static inline bool md_normalize_all(md_parallel parallel, int threads, bool wide, md_rows shape,
                                    const void *x, const void *mean, const void *variance,
                                    const void *scale, const void *offset, double epsilon,
                                    const void *add, bool relu, void *y) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        md_channels<T> lanes(shape, mean, variance, scale, T(epsilon));
        auto offsets = md_by_lane<T>(shape, offset);
        md_share_rows(parallel, threads, shape, (add == nullptr ? 2 : 3) * sizeof(T),
                      [&](ptrdiff_t first, ptrdiff_t last) {
                          md_normalize_rows(shape, first, last, static_cast<const T *>(x),
                                            lanes.mean.data(), lanes.factor.data(), offsets.data(),
                                            static_cast<const T *>(add), relu,
                                            static_cast<T *>(y));
                      });
    });
}

// The sums of dz * normal(x), and behind them those of dz. With y, dz is stored, else it is dy.
template <class T>
MD_CLONES static void md_normalize_sums(md_rows shape, ptrdiff_t first, ptrdiff_t last,
                                        const T *dy, const T *y, T *dz, const T *x, const T *mean,
                                        const T *inverse, T *sums) {
    T *plain = sums + shape.room;
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        T d = dy[at];
        if (y != nullptr) dz[at] = d = md_relu_backward(d, y[at]);
        sums[i] += d * md_normal(md_channel<T>{mean[i], inverse[i], 0}, x[at]);
        plain[i] += d;
    });
}

template <class T>
MD_CLONES static void md_normalize_backward_rows(md_rows shape, ptrdiff_t first, ptrdiff_t last,
                                                 const T *dz, const T *x, const T *mean,
                                                 const T *inverse, const T *factor,
                                                 const T *dscale, const T *doffset, T *dx) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        dx[at] = md_normalize_backward(md_channel<T>{mean[i], inverse[i], factor[i]},
                                       dz[at], x[at], dscale[i], doffset[i]);
    });
}

// `moments` says that mean and variance are those of x itself. dz may be dx.
static inline bool md_normalize_backward_all(md_parallel parallel, int threads, bool wide,
                                             md_rows shape, const void *dy, const void *y,
                                             const void *x_, const void *mean,
                                             const void *variance, const void *scale,
                                             double epsilon, bool moments, void *dx, void *dscale_,
                                             void *doffset_, void *dz) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        const T *x = static_cast<const T *>(x_);
        T *dscale = static_cast<T *>(dscale_), *doffset = static_cast<T *>(doffset_);
        md_channels<T> lanes(shape, mean, variance, scale, T(epsilon));
        auto totals = md_totals<T>(
            parallel, threads, shape, (y == nullptr ? 2 : 4) * sizeof(T), 2,
            [&](ptrdiff_t first, ptrdiff_t last, T *sums) {
                md_normalize_sums(shape, first, last, static_cast<const T *>(dy),
                                  static_cast<const T *>(y), static_cast<T *>(dz), x,
                                  lanes.mean.data(), lanes.inverse.data(), sums);
                md_fold(shape, sums);
                md_fold(shape, sums + shape.room);
            },
            [&](double *totals, ptrdiff_t, const auto *more, ptrdiff_t apart, ptrdiff_t) {
                md_add_totals(shape.channels, 2, totals, more, apart);
            });
        for (ptrdiff_t i = 0; i < shape.channels; ++i) {
            dscale[i] = T(totals[i]);
            doffset[i] = T(totals[shape.channels + i]);
        }
        const T share = moments && shape.rows > 0 ? T(1) / T(shape.rows) : T(0);
        auto scales = md_by_lane<T>(shape, [&](ptrdiff_t i) { return dscale[i] * share; });
        auto offsets = md_by_lane<T>(shape, [&](ptrdiff_t i) { return doffset[i] * share; });
        const T *d = static_cast<const T *>(y == nullptr ? dy : dz);
        md_share_rows(parallel, threads, shape, 3 * sizeof(T),
                      [&](ptrdiff_t first, ptrdiff_t last) {
                          md_normalize_backward_rows(shape, first, last, d, x, lanes.mean.data(),
                                                     lanes.inverse.data(), lanes.factor.data(),
                                                     scales.data(), offsets.data(),
                                                     static_cast<T *>(dx));
                      });
    });
}

#endif
#endif
