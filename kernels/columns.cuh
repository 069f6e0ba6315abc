// Passes over [rows, columns] by a grid: what is done down each column, and its sums.
//
// A block is `across` threads wide, each with a pack of columns, and as tall as its threads allow:
// a thread keeps its columns and goes down the rows. Sums are taken in slabs of rows, one for each
// row of the grid, and a second launch, of one row of blocks, takes the slabs together. Who adds
// what, in which order, depends on grid and block alone, which follow from the shape.

#ifndef MD_COLUMNS_CUH
#define MD_COLUMNS_CUH

#include "grid.cuh"
#include "layer.h"

template <int N> struct md_thread {
    int across, tall, y;  // the size of the block, and this thread's place down it
    ptrdiff_t column;     // its first column

    __device__ explicit md_thread(int across_)
        : across(across_), tall(blockDim.x / across_), y(threadIdx.x / across_),
          column((ptrdiff_t(blockIdx.x) * across_ + threadIdx.x % across_) * N) {}
};

// Call body(row) for this thread's rows in the slab of its block.
template <int N, class Body>
MD_GPU void md_down(const md_thread<N> &me, ptrdiff_t rows, Body body) {
    const ptrdiff_t slab = (rows + gridDim.y - 1) / gridDim.y, first = slab * blockIdx.y;
    const ptrdiff_t last = first + slab < rows ? first + slab : rows;
    for (ptrdiff_t row = first + me.y; row < last; row += me.tall) body(row);
}

// What the threads of a column have, taken together by halves; its uppermost thread calls
// store(k, sum) for each of its N columns. All threads of the block must come here.
template <int N, class Sum, class Store>
MD_GPU void md_together(const md_thread<N> &me, ptrdiff_t columns, Sum (&mine)[N], Store store) {
    __shared__ Sum lower[MD_BLOCK];
    for (int k = 0; k < N; ++k) {
        for (int tall = me.tall; tall > 1; tall = (tall + 1) / 2) {
            const int half = (tall + 1) / 2;
            if (me.y >= half && me.y < tall) lower[threadIdx.x] = mine[k];
            __syncthreads();
            if (me.y < tall - half) md_take(mine[k], lower[threadIdx.x + half * me.across]);
            __syncthreads();
        }
        if (me.y == 0 && me.column < columns) store(k, mine[k]);
    }
}

// N gradients from `at` on, 0 where the result y of a ReLU, if there is one, is not above 0.
template <int N> MD_GPU md_pack<T, N> md_behind_relu(const T *dy, const T *y, ptrdiff_t at) {
    auto pack = md_load<N>(dy + at);
    if (y) {
        const auto ys = md_load<N>(y + at);
        for (int k = 0; k < N; ++k) pack.at[k] = md_widen(ys.at[k]) > 0 ? pack.at[k] : T();
    }
    return pack;
}

#endif
