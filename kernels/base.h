// The only place that knows the target: host C++17 or CUDA.
//
// Every other header is written once for both. A formula is an MD_FN (in a struct, an MD_METHOD): a
// function of single elements. The loops over formulas, and everything from std::, stand between
// `#if MD_HOST` and `#endif`, because a CUDA file brings loops of its own; `grid.cuh` has those.

#ifndef MD_BASE_H
#define MD_BASE_H

#ifdef __CUDACC__

#define MD_HOST 0
#define MD_METHOD __host__ __device__ __forceinline__
#define MD_FN static MD_METHOD

#else

#define MD_HOST 1
#define MD_INLINE __attribute__((always_inline))  // of a lambda, between its parameters and body
#define MD_METHOD inline MD_INLINE
#define MD_FN static MD_METHOD

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// A loop marked MD_CLONES is compiled for plain x86-64, for AVX2 and for AVX-512, and the loader
// picks the best one, so that one wheel is fast on every machine. All clones give the same bits:
// the build forbids contraction and reassociation, and the formulas are inlined into each clone.
// Where it allows contraction (CONTRACTED in setup.py) those of processors that have it round less.
// A build for one fixed target defines MD_CLONES as nothing.
#ifndef MD_CLONES
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define MD_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define MD_CLONES
#endif
#endif

// Stands before a loop whose arrays are the very same or apart, but never shifted against each
// other: no element depends on an earlier one, so that the loop may be vectorised.
#ifdef __clang__
#define MD_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define MD_IVDEP _Pragma("GCC ivdep")
#endif

#endif

typedef unsigned int md_u32;
typedef unsigned long long md_u64;

MD_FN float md_sqrt(float x) { return sqrtf(x); }
MD_FN double md_sqrt(double x) { return sqrt(x); }
MD_FN float md_log(float x) { return logf(x); }
MD_FN double md_log(double x) { return log(x); }

// The bits of a number, and the number that has these bits.
MD_FN md_u32 md_bits(float x) {
    md_u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
MD_FN md_u64 md_bits(double x) {
    md_u64 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
MD_FN float md_number(md_u32 bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
MD_FN double md_number(md_u64 bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
