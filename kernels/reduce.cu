// Sums over replicas, casts, copies, sums of squares and the search for what is not finite, on a
// GPU: each for all tensors in one launch.

#include "grid.cuh"

#ifndef MD_TO
#define MD_TO MD_T
#endif
typedef MD_TO To;  // the type of the results of `sum` and `cast`

// As many elements at a time as fill 16 bytes of the narrower of the two types.
enum { MD_PAIR = 16 / (sizeof(T) < sizeof(To) ? sizeof(T) : sizeof(To)) };

// (((w0 s0 + w1 s1) + w2 s2) ...) scale, in the order of the replicas, rounded once. Columns of the
// table: the destinations, then a source per replica. An element is stored by the thread that has
// read it in all sources, so a destination may be any of these. The sources may be on another GPU.
MD_KERNEL sum(md_grid_table table, int destinations, const W *weights, W scale) {
    md_walk(table, [&](int row, ptrdiff_t first, int count) {
        md_each<MD_PAIR>(table.aligned(row), count, [&](auto width, int i) {
            constexpr int n = decltype(width)::value;
            W total[n];
            auto source = md_load<n>(table.get<const T>(row, destinations, first + i));
            for (int k = 0; k < n; ++k) total[k] = weights[0] * md_widen(source.at[k]);
#pragma unroll 4
            for (int r = 1; r < table.columns - destinations; ++r) {
                source = md_load<n>(table.get<const T>(row, destinations + r, first + i));
                for (int k = 0; k < n; ++k)
                    total[k] = md_term(total[k], md_widen(source.at[k]), weights[r]);
            }
            md_pack<To, n> rounded;
            for (int k = 0; k < n; ++k) md_round(total[k] * scale, rounded.at[k]);
#pragma unroll 1
            for (int d = 0; d < destinations; ++d)
                md_store<n>(table.get<To>(row, d, first + i), rounded);
        });
    });
}

// Columns of the table: the destination, the source.
MD_KERNEL cast(md_grid_table table) {
    md_walk(table, [&](int row, ptrdiff_t first, int count) {
        To *to = table.get<To>(row, 0, first);
        const T *from = table.get<const T>(row, 1, first);
        md_each<MD_PAIR>(table.aligned(row), count, [&](auto width, int i) {
            constexpr int n = decltype(width)::value;
            const auto given = md_load<n>(from + i);
            md_pack<To, n> rounded;
            for (int k = 0; k < n; ++k) md_round(md_widen(given.at[k]), rounded.at[k]);
            md_store<n>(to + i, rounded);
        });
    });
}

// Columns of the table: the destination, the source.
MD_KERNEL copy(md_grid_table table) {
    md_walk(table, [&](int row, ptrdiff_t first, int count) {
        T *to = table.get<T>(row, 0, first);
        const T *from = table.get<const T>(row, 1, first);
        md_each<MD_WIDTH>(table.aligned(row), count, [&](auto width, int i) {
            md_store<decltype(width)::value>(to + i, md_load<decltype(width)::value>(from + i));
        });
    });
}

// Lower *found to the first row with a number that is not finite. It is read without a lock: who
// sees an older value only looks at more than it must.
MD_KERNEL first_nonfinite(md_grid_table table, int *found) {
    md_walk(table, [&](int row, ptrdiff_t first, int count) {
        if (*const_cast<volatile int *>(found) <= row) return;
        const T *x = table.get<const T>(row, 0, first);
        bool finite = true;
        md_each<MD_WIDTH>(table.aligned(row), count, [&](auto width, int i) {
            const auto pack = md_load<decltype(width)::value>(x + i);
            for (const T number : pack.at) finite = finite && md_finite(md_widen(number));
        });
        if (!finite) atomicMin(found, row);
    });
}

// The sum of squares of every chunk, in the order of md_square_chunk on the host: sixteen threads
// are its lanes.
MD_KERNEL square_chunks(md_grid_table table, double *sums) {
    const int lane = threadIdx.x % MD_LANES, at_once = blockDim.x / MD_LANES;
    const unsigned together = 0xffffu << (threadIdx.x & MD_LANES);
    for (int c = blockIdx.x * at_once + threadIdx.x / MD_LANES; c < table.chunks;
         c += gridDim.x * at_once) {
        const md_chunk chunk = table.chunk(c);
        const T *x = table.get<const T>(chunk.row, 0, chunk.first);
        double sum = 0;
#pragma unroll 8
        for (int i = lane; i < chunk.count; i += MD_LANES) sum += md_square(md_widen(x[i]));
        for (int half = MD_LANES / 2; half > 0; half /= 2)
            sum += __shfl_down_sync(together, sum, half, MD_LANES);
        if (lane == 0) sums[c] = sum;
    }
}

// Add up n numbers from the first to the last. One block: its threads fetch, one of them adds.
MD_KERNEL add_in_order(ptrdiff_t n, const double *numbers, double *total) {
    __shared__ double fetched[MD_CHUNK];
    double sum = 0;
    for (ptrdiff_t first = 0; first < n; first += MD_CHUNK) {
        const int count = n - first < MD_CHUNK ? n - first : MD_CHUNK;
        for (int i = threadIdx.x; i < count; i += blockDim.x) fetched[i] = numbers[first + i];
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < count; ++i) sum += fetched[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) *total = sum;
}
