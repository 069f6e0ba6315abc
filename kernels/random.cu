// Random numbers on a GPU: every thread makes its own block of the stream, as the host would.

#include "grid.cuh"
#include "random.h"

// n uniform numbers in [0, 1).
MD_KERNEL uniform(ptrdiff_t n, T *out, md_stream stream) {
    constexpr int each = 16 / sizeof(T);  // numbers of one block of the stream
    md_chunks(n, [&](ptrdiff_t first, int count) {
        for (int i = threadIdx.x * each; i < count; i += blockDim.x * each) {
            md_u32 words[4];
            md_philox(stream.key[0], stream.key[1], md_u32((first + i) / each), stream.counter[0],
                      stream.counter[1], stream.counter[2], words);
            for (int k = 0; k < each && i + k < count; ++k)
                if constexpr (each == 4)
                    out[first + i + k] = md_uniform(words[k]);
                else
                    out[first + i + k] = md_uniform(words[2 * k], words[2 * k + 1]);
        }
    });
}
