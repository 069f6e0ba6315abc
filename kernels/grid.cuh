// The loops of a CUDA grid, into which the .cu files put the formulas of the headers.
//
// A module is compiled for one element type, -DMD_T=float, double, md_float16 or md_bfloat16, and
// some for the type of their results as well, -DMD_TO. Every kernel takes any grid and any block of
// whole warps: the grid strides over what there is to do, and nothing depends on how far.

#ifndef MD_GRID_CUH
#define MD_GRID_CUH

#include "narrow.h"
#include "reduce.h"

#define MD_KERNEL extern "C" __global__ void
#define MD_GPU static __device__ __forceinline__

typedef MD_T T;                         // as it is stored
typedef decltype(md_widen(T())) W;      // as it is computed with: float or double
enum { MD_WIDTH = 16 / sizeof(T) };     // elements that are loaded and stored at a time
enum { MD_BLOCK = 256, MD_WARP = 32 };  // threads of a block, at most; of a warp

// N elements in registers. Whoever asks for more than one knows that the address is a multiple of
// 16 bytes, or of all N if those are fewer. A compiler sees by itself that a load may be one
// access; stores it likes to split, and has to be told.
template <class E, int N> struct md_pack {
    E at[N];
};
template <int N, class E> MD_GPU md_pack<E, N> md_load(const E *from) {
    md_pack<E, N> pack;
    if constexpr (N == 1) {
        pack.at[0] = *from;
    } else if constexpr (sizeof pack == 8) {
        const uint2 word = *reinterpret_cast<const uint2 *>(from);
        memcpy(&pack, &word, sizeof word);
    } else {
        for (int i = 0; i < int(sizeof pack / 16); ++i) {
            const uint4 word = reinterpret_cast<const uint4 *>(from)[i];
            memcpy(reinterpret_cast<char *>(&pack) + 16 * i, &word, sizeof word);
        }
    }
    return pack;
}
template <int N, class E> MD_GPU void md_store(E *into, const md_pack<E, N> &pack) {
    if constexpr (N == 1) {
        *into = pack.at[0];
    } else if constexpr (sizeof pack == 8) {
        uint2 word;
        memcpy(&word, &pack, sizeof word);
        __stwb(reinterpret_cast<uint2 *>(into), word);
    } else {
        for (int i = 0; i < int(sizeof pack / 16); ++i) {
            uint4 word;
            memcpy(&word, reinterpret_cast<const char *>(&pack) + 16 * i, sizeof word);
            __stwb(reinterpret_cast<uint4 *>(into) + i, word);
        }
    }
}
MD_GPU bool md_aligned(const void *address) { return reinterpret_cast<size_t>(address) % 16 == 0; }

// A number that a generic lambda gets as a type, and so knows at compile time.
template <int N> struct md_constant {
    static constexpr int value = N;
};

// Call body(width): MD_WIDTH elements at a time where that is `packed` right, else one.
template <class Body> MD_GPU void md_by_width(bool packed, Body body) {
    if (packed)
        body(md_constant<MD_WIDTH>());
    else
        body(md_constant<1>());
}

// Call body(width, i) on the elements [i, i + width) of n, shared by the threads of a block: N at
// a time if all addresses are aligned, and one by one what is left.
template <int N, class Body> MD_GPU void md_each(bool aligned, int n, Body body) {
    const int packed = aligned ? n / N * N : 0;
    for (int i = threadIdx.x * N; i < packed; i += blockDim.x * N) body(md_constant<N>(), i);
    for (int i = packed + threadIdx.x; i < n; i += blockDim.x) body(md_constant<1>(), i);
}

// Call body(first, count) on chunks that cover [0, n), shared by the blocks of the grid.
template <class Body> MD_GPU void md_chunks(ptrdiff_t n, Body body) {
    const ptrdiff_t chunks = (n + MD_CHUNK - 1) / MD_CHUNK;
    for (ptrdiff_t c = blockIdx.x; c < chunks; c += gridDim.x) {
        const ptrdiff_t first = c * MD_CHUNK;
        body(first, int(n - first < MD_CHUNK ? n - first : MD_CHUNK));
    }
}

// y = formula(x), element by element; y may be x.
template <class Formula> MD_GPU void md_map(ptrdiff_t n, const T *x, T *y, Formula formula) {
    const bool aligned = md_aligned(x) && md_aligned(y);
    md_chunks(n, [&](ptrdiff_t first, int count) {
        md_each<MD_WIDTH>(aligned, count, [&](auto width, int i) {
            constexpr int N = decltype(width)::value;
            auto pack = md_load<N>(x + first + i);
            for (T &number : pack.at) md_round(formula(md_widen(number)), number);
            md_store<N>(y + first + i, pack);
        });
    });
}

// c = formula(a, b), element by element; c may be any of them.
template <class Formula>
MD_GPU void md_map(ptrdiff_t n, const T *a, const T *b, T *c, Formula formula) {
    const bool aligned = md_aligned(a) && md_aligned(b) && md_aligned(c);
    md_chunks(n, [&](ptrdiff_t first, int count) {
        md_each<MD_WIDTH>(aligned, count, [&](auto width, int i) {
            constexpr int N = decltype(width)::value;
            auto pack = md_load<N>(a + first + i);
            const auto other = md_load<N>(b + first + i);
            for (int k = 0; k < N; ++k)
                md_round(formula(md_widen(pack.at[k]), md_widen(other.at[k])), pack.at[k]);
            md_store<N>(c + first + i, pack);
        });
    });
}

// A table of tensors, as arrays.h has it for the host: a row is one tensor in all its roles, a
// column is one role. Its rows, however unequal, are cut into chunks, and a chunk is what a block
// does at a time. So one launch serves all tensors of a model.
struct md_chunk {
    int row, count;
    ptrdiff_t first;  // of `count` elements
};
struct md_grid_table {
    void *const *at;         // at[row * columns + column]
    const ptrdiff_t *size;   // elements of each row
    const ptrdiff_t *begin;  // first chunk of each row
    int rows, columns, chunks;

    template <class E> __device__ E *get(int row, int column, ptrdiff_t first) const {
        return static_cast<E *>(at[ptrdiff_t(row) * columns + column]) + first;
    }
    __device__ bool aligned(int row) const {
        bool all = true;
        for (int column = 0; column < columns; ++column)
            all = all && md_aligned(get<void *>(row, column, 0));
        return all;
    }
    // The chunk of a number belongs to the last row that begins no later.
    __device__ md_chunk chunk(int number) const {
        int row = 0;
        for (int beyond = rows; beyond - row > 1;) {
            const int middle = (row + beyond) / 2;
            (begin[middle] <= number ? row : beyond) = middle;
        }
        const ptrdiff_t first = (number - begin[row]) * MD_CHUNK, rest = size[row] - first;
        return {row, int(rest < MD_CHUNK ? rest : MD_CHUNK), first};
    }
};

// Call body(row, first, count) on pieces that cover every element of the table exactly once.
template <class Body> MD_GPU void md_walk(const md_grid_table &table, Body body) {
    for (int number = blockIdx.x; number < table.chunks; number += gridDim.x) {
        const md_chunk chunk = table.chunk(number);
        body(chunk.row, chunk.first, chunk.count);
    }
}

#endif
