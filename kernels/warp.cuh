// What the threads of a warp have, taken together: every one of them gets the result. All of a warp
// must come here.

#ifndef MD_WARP_CUH
#define MD_WARP_CUH

#include "grid.cuh"

MD_GPU W md_warp_max(W x) {
    for (int other = MD_WARP / 2; other > 0; other /= 2) {
        const W theirs = __shfl_xor_sync(~0u, x, other);
        x = theirs > x ? theirs : x;
    }
    return x;
}
MD_GPU W md_warp_sum(W x) {
    for (int other = MD_WARP / 2; other > 0; other /= 2) x += __shfl_xor_sync(~0u, x, other);
    return x;
}

// Call body(row, lane) for rows [0, rows), a warp a row.
template <class Body> MD_GPU void md_warp_rows(ptrdiff_t rows, Body body) {
    const int lane = threadIdx.x % MD_WARP, warps = blockDim.x / MD_WARP;
    for (ptrdiff_t row = ptrdiff_t(blockIdx.x) * warps + threadIdx.x / MD_WARP; row < rows;
         row += ptrdiff_t(gridDim.x) * warps)
        body(row, lane);
}

#endif
