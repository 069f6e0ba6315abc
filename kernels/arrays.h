// A table of tensors, and the walk of several threads over all of its elements as one long row.
//
// A row of the table is one tensor in all its roles (its weights, its gradients, its momenta; or
// the same tensor of every replica); a column is one role. Threads split the whole list evenly,
// however unequal the tensors are: each tensor counts in blocks of 64 bytes, and pieces begin
// where a block begins, so no two threads write into one cache line of an aligned tensor.

#ifndef MD_ARRAYS_H
#define MD_ARRAYS_H

#include "team.h"

#if MD_HOST

#include <vector>

enum { MD_BLOCK = 64 };

// How many units of work, each over so many bytes, are worth waking a thread for. Waking costs some
// tens of microseconds, in which one thread streams about a mebibyte.
static inline ptrdiff_t md_grain(ptrdiff_t bytes) { return (1 << 20) / (bytes + 1) + 1; }

// Call run with a zero of the element type, double or float: `using T = decltype(zero)`.
template <class Run> static void md_by_type(bool wide, Run run) {
    if (wide)
        run(double());
    else
        run(float());
}

struct md_table {
    ptrdiff_t columns = 0, itemsize = 1, elements = 0;  // itemsize: that of the narrowest column
    std::vector<void *> at;         // at[row * columns + column]
    std::vector<ptrdiff_t> size;    // elements of each row
    std::vector<ptrdiff_t> begin;   // first block of each row, and at last the number of blocks

    void start(ptrdiff_t rows, ptrdiff_t columns_, ptrdiff_t itemsize_) {
        columns = columns_;
        itemsize = itemsize_;
        at.reserve(rows * columns);
        size.reserve(rows);
        begin.reserve(rows + 1);
        begin.push_back(0);
    }
    void add_row(ptrdiff_t count) {
        size.push_back(count);
        elements += count;
        begin.push_back(begin.back() + (count * itemsize + MD_BLOCK - 1) / MD_BLOCK);
    }
    bool wide() const { return itemsize == sizeof(double); }
    template <class T> T *get(ptrdiff_t row, ptrdiff_t column, ptrdiff_t first) const {
        return static_cast<T *>(at[row * columns + column]) + first;
    }
};

// Call body(row, first, count) on pieces that cover every element of the table exactly once.
template <class Body>
static void md_walk(md_parallel parallel, const md_table &table, int threads, Body body) {
    if (table.elements == 0) return;
    const ptrdiff_t step = MD_BLOCK / table.itemsize;  // elements in a block
    auto blocks = [&](ptrdiff_t first, ptrdiff_t last) {
        auto after = std::upper_bound(table.begin.begin(), table.begin.end(), first);
        for (ptrdiff_t row = after - table.begin.begin() - 1; first < last; ++row) {
            const ptrdiff_t stop = std::min(last, table.begin[row + 1]);
            if (first >= stop) continue;  // an empty tensor
            const ptrdiff_t from = (first - table.begin[row]) * step;
            const ptrdiff_t to = std::min((stop - table.begin[row]) * step, table.size[row]);
            body(row, from, to - from);
            first = stop;
        }
    };
    md_share(parallel, table.begin.back(), md_grain(MD_BLOCK * table.columns), threads, blocks);
}

#endif
#endif
