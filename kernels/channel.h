// What is done to each channel of [rows, channels]: the walks over rows, and bias with ReLU.
//
// Guarantees
//   - Sums are taken in blocks of some rows, in the type of the elements; the blocks of a group of
//     rows, and then the groups, are added up in double. Blocks and groups follow from the shape,
//     so the bits depend on it and on nothing else: not on the number of threads.
//   - Where channels are few, several rows count as one long row, so that the inner loops are long
//     enough to be vectorised: a lane is a place in it, and lane i is of channel i % channels.

#ifndef MD_CHANNEL_H
#define MD_CHANNEL_H

#include "layer.h"

#if MD_HOST

#include <new>
#include <vector>

// Of an array: `together` rows are a long row of so many lanes. What is kept for each lane has
// room for some more, so that another such row behind it begins where a cache line does.
struct md_rows {
    ptrdiff_t rows, channels, together, lanes, room;

    md_rows(ptrdiff_t rows_, ptrdiff_t channels_)
        : rows(rows_), channels(channels_), together(std::max<ptrdiff_t>(256 / channels_, 1)),
          lanes(together * channels_), room((lanes + 15) / 16 * 16) {}

    // Rows of a block: elements for the first cache, or some rows if that is more.
    ptrdiff_t block() const {
        const ptrdiff_t least = std::max<ptrdiff_t>(8192 / channels, 32);
        return (least + together - 1) / together * together;
    }
    // Groups of rows: a few, each of them worth a thread's while, and none without a row, for that
    // has no mean.
    ptrdiff_t groups(ptrdiff_t itemsize) const {
        const ptrdiff_t most = std::clamp<ptrdiff_t>(rows, 1, 16);
        return std::min<ptrdiff_t>(rows * channels * itemsize / (256 << 10) + 1, most);
    }
};

// Run for the element type; false if there was no memory for the sums.
template <class Run> static bool md_with_memory(bool wide, Run run) {
    try {
        md_by_type(wide, run);
        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }
}

// Numbers for lanes, 0 at first. They begin where a cache line does: what is added to is loaded
// and stored all the time, and across two lines that takes three times as long.
template <class T> class md_lanes {
  public:
    explicit md_lanes(ptrdiff_t count) : lines((count * sizeof(T) + 63) / 64) {}
    T *data() { return reinterpret_cast<T *>(lines.data()); }
    T &operator[](ptrdiff_t i) { return data()[i]; }

  private:
    struct alignas(64) line {
        unsigned char bytes[64] = {};
    };
    std::vector<line> lines;
};

// What each channel has, written out for each lane.
template <class T, class At> static md_lanes<T> md_by_lane(md_rows shape, At at) {
    md_lanes<T> values(shape.lanes);
    for (ptrdiff_t i = 0; i < shape.channels; ++i) values[i] = at(i);
    for (ptrdiff_t i = shape.channels; i < shape.lanes; ++i)
        values[i] = values[i - shape.channels];
    return values;
}

template <class T> static md_lanes<T> md_by_lane(md_rows shape, const void *values) {
    return md_by_lane<T>(shape, [&](ptrdiff_t i) { return static_cast<const T *>(values)[i]; });
}

// The sum of each channel's lanes goes into the first of them.
template <class T> MD_CLONES static void md_fold(md_rows shape, T *sums) {
    for (ptrdiff_t at = shape.channels; at < shape.lanes; at += shape.channels)
        for (ptrdiff_t i = 0; i < shape.channels; ++i) sums[i] += sums[at + i];
}

// Share rows among threads where nothing is added up: run(first, last) on some rows, of which
// `bytes` an element are read and written.
template <class Run>
static void md_share_rows(md_parallel parallel, int threads, md_rows shape, ptrdiff_t bytes,
                          Run run) {
    const ptrdiff_t step = shape.together;
    md_share(parallel, (shape.rows + step - 1) / step, md_grain(bytes * shape.lanes), threads,
             [&](ptrdiff_t first, ptrdiff_t last) {
                 run(first * step, std::min(last * step, shape.rows));
             });
}

// Share rows among threads to add something up, `width` sums for each channel, which are returned
// one behind the other. block(first, last, sums) leaves what some rows have in the first lanes of
// `width` long rows, which begin as 0; join(totals, rows, more, apart, more_rows) puts something
// more, whose sums are so far apart from each other, to the totals of so many rows.
template <class T, class Block, class Join>
static md_lanes<double> md_totals(md_parallel parallel, int threads, md_rows shape,
                                  ptrdiff_t bytes, int width, Block block, Join join) {
    const ptrdiff_t groups = shape.groups(sizeof(T)), step = shape.block();
    const ptrdiff_t size = width * shape.channels, room = width * shape.room;
    const auto border = [&](ptrdiff_t group) { return shape.rows * group / groups; };
    md_lanes<double> totals(groups * size);
    md_lanes<T> rooms(groups * room);
    md_share(parallel, groups, md_grain(bytes * shape.channels * (shape.rows / groups + 1)),
             threads, [&](ptrdiff_t from, ptrdiff_t to) {
                 for (ptrdiff_t group = from; group < to; ++group) {
                     T *sums = rooms.data() + group * room;
                     const ptrdiff_t begin = border(group), end = border(group + 1);
                     for (ptrdiff_t row = begin; row < end; row += step) {
                         const ptrdiff_t next = std::min(row + step, end);
                         std::fill(sums, sums + room, T(0));
                         block(row, next, sums);
                         join(totals.data() + group * size, row - begin, sums, shape.room,
                              next - row);
                     }
                 }
             });
    for (ptrdiff_t group = 1; group < groups; ++group)
        join(totals.data(), border(group), totals.data() + group * size, shape.channels,
             border(group + 1) - border(group));
    return totals;
}

// The `join` of sums that are added up.
template <class From>
MD_CLONES static void md_add_totals(ptrdiff_t channels, int width, double *totals,
                                    const From *more, ptrdiff_t apart) {
    for (int k = 0; k < width; ++k)
        for (ptrdiff_t i = 0; i < channels; ++i) totals[k * channels + i] += more[k * apart + i];
}

// Call each(at, i) for all elements of some rows: at is where one lies, i its lane. Long rows come
// one after the other, and within one no element depends on another. `each` is MD_INLINE, so that
// it is compiled into every clone of who calls.
template <class Each>
MD_FN void md_walk(md_rows shape, ptrdiff_t first, ptrdiff_t last, Each each) {
    const ptrdiff_t end = last * shape.channels;
    for (ptrdiff_t row = first * shape.channels; row < end; row += shape.lanes) {
        const ptrdiff_t count = std::min(shape.lanes, end - row);
        MD_IVDEP
        for (ptrdiff_t i = 0; i < count; ++i) each(row + i, i);
    }
}

// -- bias and ReLU -----------------------------------------------------------------------------

template <class T>
MD_CLONES static void md_bias_rows(md_rows shape, ptrdiff_t first, ptrdiff_t last, const T *x,
                                   const T *bias, bool relu, T *y) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        const T biased = x[at] + bias[i];
        y[at] = relu ? md_relu(biased) : biased;
    });
}

static inline bool md_bias_all(md_parallel parallel, int threads, bool wide, md_rows shape,
                               const void *x, const void *bias, bool relu, void *y) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        auto biases = md_by_lane<T>(shape, bias);
        md_share_rows(parallel, threads, shape, 2 * sizeof(T),
                      [&](ptrdiff_t first, ptrdiff_t last) {
                          md_bias_rows(shape, first, last, static_cast<const T *>(x),
                                       biases.data(), relu, static_cast<T *>(y));
                      });
    });
}

template <class T>
MD_CLONES static void md_row_sums(md_rows shape, ptrdiff_t first, ptrdiff_t last, const T *x,
                                  T *sums) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        sums[i] += x[at];
    });
}

template <class T>
MD_CLONES static void md_relu_sums(md_rows shape, ptrdiff_t first, ptrdiff_t last, const T *dy,
                                   const T *y, T *dz, T *sums) {
    md_walk(shape, first, last, [=](ptrdiff_t at, ptrdiff_t i) MD_INLINE {
        const T d = md_relu_backward(dy[at], y[at]);
        dz[at] = d;
        sums[i] += d;
    });
}

// With y, the gradient that ReLU lets through is stored in dz, and its sums in dbias; else those
// of dy.
static inline bool md_bias_backward_all(md_parallel parallel, int threads, bool wide,
                                        md_rows shape, const void *dy, const void *y, void *dz,
                                        void *dbias) {
    return md_with_memory(wide, [&](auto zero) {
        using T = decltype(zero);
        auto totals = md_totals<T>(
            parallel, threads, shape, (y == nullptr ? 1 : 3) * sizeof(T), 1,
            [&](ptrdiff_t first, ptrdiff_t last, T *sums) {
                if (y == nullptr)
                    md_row_sums(shape, first, last, static_cast<const T *>(dy), sums);
                else
                    md_relu_sums(shape, first, last, static_cast<const T *>(dy),
                                 static_cast<const T *>(y), static_cast<T *>(dz), sums);
                md_fold(shape, sums);
            },
            [&](double *totals, ptrdiff_t, const auto *more, ptrdiff_t apart, ptrdiff_t) {
                md_add_totals(shape.channels, 1, totals, more, apart);
            });
        for (ptrdiff_t i = 0; i < shape.channels; ++i) static_cast<T *>(dbias)[i] = T(totals[i]);
    });
}

#endif
#endif
