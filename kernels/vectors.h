// The vectors of a processor that multiply and add at once: how long they are, and code for each.
//
// Unlike the clones of MD_CLONES such code rounds once where others round twice, so its bits are
// those of a kind of processor.

#ifndef MD_VECTORS_H
#define MD_VECTORS_H

#include "base.h"

#if MD_HOST

#if defined(__GNUC__) && defined(__x86_64__)
#define MD_VECTORS 1
#define MD_VECTORS_16 __attribute__((target("avx512f,avx512vl,fma")))
#define MD_VECTORS_8 __attribute__((target("avx2,fma")))
#else
#define MD_VECTORS 0
#endif

// Floats in the longest of them; 0 where there are none.
static inline int md_vector_length() {
#if MD_VECTORS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl")) return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    return 0;
}

#endif
#endif
