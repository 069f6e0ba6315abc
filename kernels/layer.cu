// What layers compute element by element or row by row, on a GPU: ReLU, dropout, softmax and its
// cross-entropy, and rows that are added to others.

#include "layer.h"
#include "warp.cuh"

MD_KERNEL relu(ptrdiff_t n, const T *x, T *y) {
    md_map(n, x, y, [](W number) { return md_relu(number); });
}

MD_KERNEL relu_backward(ptrdiff_t n, const T *dy, const T *y, T *dx) {
    md_map(n, dy, y, dx, [](W d, W at) { return md_relu_backward(d, at); });
}

MD_KERNEL relu6(ptrdiff_t n, const T *x, T *y) {
    md_map(n, x, y, [](W number) { return md_relu6(number); });
}

MD_KERNEL relu6_backward(ptrdiff_t n, const T *dy, const T *y, T *dx) {
    md_map(n, dy, y, dx, [](W d, W at) { return md_relu6_backward(d, at); });
}

// Word i of the stream decides on element i, so a thread has the four elements of a block of it.
MD_KERNEL dropout(ptrdiff_t n, const T *x, T *y, md_stream stream, int dropped, W scale) {
    const bool aligned = md_aligned(x) && md_aligned(y);
    md_chunks(n, [&](ptrdiff_t first, int count) {
        for (int i = threadIdx.x * 4; i < count; i += blockDim.x * 4) {
            const T *from = x + first + i;
            T *to = y + first + i;
            md_u32 words[4];
            md_philox(stream.key[0], stream.key[1], md_u32((first + i) / 4), stream.counter[0],
                      stream.counter[1], stream.counter[2], words);
            const auto kept = [&](T number, int k) {
                md_round(md_dropout(md_widen(number), words[k], dropped, scale), number);
                return number;
            };
            if (aligned && i + 4 <= count) {
                auto pack = md_load<4>(from);
                for (int k = 0; k < 4; ++k) pack.at[k] = kept(pack.at[k], k);
                md_store<4>(to, pack);
            } else {
                for (int k = 0; k < 4; ++k)
                    if (i + k < count) to[k] = kept(from[k], k);
            }
        }
    });
}

// Call body(row, lane, top, sum) for the rows of x, a warp a row: top is the row's largest number,
// sum that of e^(x - top). Where one is NaN the sum is.
template <class Body>
MD_GPU void md_softmax(ptrdiff_t rows, ptrdiff_t classes, const T *x, Body body) {
    md_warp_rows(rows, [&](ptrdiff_t row, int lane) {
        const T *numbers = x + row * classes;
        W top = md_widen(numbers[0]), sum = 0;
        for (ptrdiff_t i = lane; i < classes; i += MD_WARP) {
            const W number = md_widen(numbers[i]);
            top = number > top ? number : top;
        }
        top = md_warp_max(top);
        for (ptrdiff_t i = lane; i < classes; i += MD_WARP)
            sum += md_exp(md_widen(numbers[i]) - top);
        body(row, lane, top, md_warp_sum(sum));
    });
}

MD_KERNEL softmax(ptrdiff_t rows, ptrdiff_t classes, const T *x, T *y) {
    md_softmax(rows, classes, x, [&](ptrdiff_t row, int lane, W top, W sum) {
        for (ptrdiff_t i = row * classes + lane; i < (row + 1) * classes; i += MD_WARP)
            md_round(md_exp(md_widen(x[i]) - top) / sum, y[i]);
    });
}

MD_KERNEL log_softmax(ptrdiff_t rows, ptrdiff_t classes, const T *x, T *y) {
    md_softmax(rows, classes, x, [&](ptrdiff_t row, int lane, W top, W sum) {
        const W log_sum = md_log(sum);
        for (ptrdiff_t i = row * classes + lane; i < (row + 1) * classes; i += MD_WARP)
            md_round(md_widen(x[i]) - top - log_sum, y[i]);
    });
}

// See md_softmax_rows on the host. A label that is none of the classes makes the loss NaN: a GPU
// cannot say more. `d` may be the logits themselves.
MD_KERNEL softmax_cross_entropy(ptrdiff_t rows, ptrdiff_t classes, const T *logits,
                                const long long *labels, T *losses, T *d) {
    md_softmax(rows, classes, logits, [&](ptrdiff_t row, int lane, W top, W sum) {
        const long long label = labels[row];
        if (lane == 0 && (label < 0 || label >= classes)) md_round(W(0) / W(0), losses[row]);
        for (ptrdiff_t i = lane; i < classes; i += MD_WARP) {
            const W x = md_widen(logits[row * classes + i]) - top;
            if (i == label) md_round(md_log(sum) - x, losses[row]);
            md_round(md_exp(x) / sum - (i == label ? 1 : 0), d[row * classes + i]);
        }
    });
}

// a[index[i]] += rows[i], in the order of i, given the indices in ascending order and for each of
// them its i, those of equals ascending. The first of equals adds them all, so no two threads write
// to one place, and the order is always the same.
MD_KERNEL scatter_add(ptrdiff_t count, ptrdiff_t width, const long long *ascending,
                      const long long *order, const T *rows, T *a) {
    const ptrdiff_t threads = ptrdiff_t(gridDim.x) * blockDim.x;
    for (ptrdiff_t e = ptrdiff_t(blockIdx.x) * blockDim.x + threadIdx.x; e < count * width;
         e += threads) {
        const ptrdiff_t first = e / width, column = e % width;
        const long long index = ascending[first];
        if (first > 0 && ascending[first - 1] == index) continue;
        T &into = a[index * width + column];
        W total = md_widen(into);
        for (ptrdiff_t i = first; i < count && ascending[i] == index; ++i)
            total += md_widen(rows[order[i] * width + column]);
        md_round(total, into);
    }
}
