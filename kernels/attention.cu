// Causal attention on a GPU: what lies between its matrix products, which are cuBLAS's.
//
// Scores are [heads of all sequences, tokens, tokens], so row i is that of token i % tokens, which
// sees itself and those before it.

#include "layer.h"
#include "warp.cuh"

// Scores, times a number, become e^score / sum e^score over what a token sees, and 0 elsewhere.
MD_KERNEL causal_softmax(ptrdiff_t rows, ptrdiff_t tokens, T scale, T *scores) {
    md_warp_rows(rows, [&](ptrdiff_t row, int lane) {
        T *x = scores + row * tokens;
        const ptrdiff_t seen = row % tokens + 1;
        W top = x[0] * scale, sum = 0;
        for (ptrdiff_t i = lane; i < seen; i += MD_WARP) {
            const W score = x[i] * scale;
            top = score > top ? score : top;
        }
        top = md_warp_max(top);
        for (ptrdiff_t i = lane; i < tokens; i += MD_WARP) {
            x[i] = i < seen ? md_exp(x[i] * scale - top) : 0;
            sum += x[i];
        }
        sum = md_warp_sum(sum);
        for (ptrdiff_t i = lane; i < seen; i += MD_WARP) x[i] /= sum;
    });
}

// Gradients of the probabilities become those of the scores, p (dp - sum of p dp) scale.
MD_KERNEL causal_softmax_backward(ptrdiff_t rows, ptrdiff_t tokens, T scale,
                                  const T *probabilities, T *gradients) {
    md_warp_rows(rows, [&](ptrdiff_t row, int lane) {
        const T *p = probabilities + row * tokens;
        T *d = gradients + row * tokens;
        const ptrdiff_t seen = row % tokens + 1;
        W mean = 0;
        for (ptrdiff_t i = lane; i < seen; i += MD_WARP) mean += p[i] * d[i];
        mean = md_warp_sum(mean);
        for (ptrdiff_t i = lane; i < tokens; i += MD_WARP)
            d[i] = i < seen ? p[i] * (d[i] - mean) * scale : 0;
    });
}
