// The vectors of a processor that multiply and add at once: how long they are, and code for each.
//
// Where a build lets it do both in one operation, such code rounds once where others round twice,
// so its bits are those of a kind of processor. Else all of them give the same.

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

// A vector of so many bytes, wherever its elements lie.
template <int BYTES, class T> struct md_vector_of {
    typedef T type __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
};

// A number that a generic lambda gets as a type, and so knows at compile time.
template <int N> struct md_bytes {
    static constexpr int value = N;
};

#if MD_VECTORS
template <class Body> MD_VECTORS_16 static void md_in_vectors_64(const Body &body) {
    body(md_bytes<64>());
}
template <class Body> MD_VECTORS_8 static void md_in_vectors_32(const Body &body) {
    body(md_bytes<32>());
}
#endif

// Call body(bytes) in code for this processor: bytes::value is how long its vectors are. `body` is
// MD_INLINE.
template <class Body> static void md_in_vectors(const Body &body) {
#if MD_VECTORS
    if (md_vector_length() == 16) return md_in_vectors_64(body);
    if (md_vector_length() == 8) return md_in_vectors_32(body);
#endif
    body(md_bytes<16>());
}

#endif
#endif
