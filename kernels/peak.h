// How fast a core can multiply and add at all: chains of fused multiply-adds that never leave the
// registers. What a kernel reaches of it is a fair grade, whatever the machine.
//
// A fused multiply-add takes some four cycles and a core begins two in each, so that eight chains
// are the least that keep it busy; here are twelve.

#ifndef MD_PEAK_H
#define MD_PEAK_H

#include "vectors.h"

#if MD_HOST

#if MD_VECTORS
#include <immintrin.h>
#endif

enum { MD_CHAINS = 12 };

// x = x·b + c with 0 < b < 1 stays where it is: no overflow, and nothing denormal.
static const float MD_PEAK_B = 0.5f, MD_PEAK_C = 0.25f;

#if MD_VECTORS
MD_VECTORS_16 static float md_peak_512(ptrdiff_t steps) {
    __m512 x[MD_CHAINS];
    for (int k = 0; k < MD_CHAINS; k++) x[k] = _mm512_set1_ps((float)k);
    const __m512 b = _mm512_set1_ps(MD_PEAK_B), c = _mm512_set1_ps(MD_PEAK_C);
    for (ptrdiff_t i = 0; i < steps; i++)
        for (int k = 0; k < MD_CHAINS; k++) x[k] = _mm512_fmadd_ps(x[k], b, c);
    for (int k = 1; k < MD_CHAINS; k++) x[0] = _mm512_add_ps(x[0], x[k]);
    return _mm512_cvtss_f32(x[0]);
}

MD_VECTORS_8 static float md_peak_256(ptrdiff_t steps) {
    __m256 x[MD_CHAINS];
    for (int k = 0; k < MD_CHAINS; k++) x[k] = _mm256_set1_ps((float)k);
    const __m256 b = _mm256_set1_ps(MD_PEAK_B), c = _mm256_set1_ps(MD_PEAK_C);
    for (ptrdiff_t i = 0; i < steps; i++)
        for (int k = 0; k < MD_CHAINS; k++) x[k] = _mm256_fmadd_ps(x[k], b, c);
    for (int k = 1; k < MD_CHAINS; k++) x[0] = _mm256_add_ps(x[0], x[k]);
    return _mm256_cvtss_f32(x[0]);
}
#endif

// Where a processor has no fused multiply-add, or none that is known here: lanes of four.
static float md_peak_plain(ptrdiff_t steps) {
    float x[MD_CHAINS][4];
    for (int k = 0; k < MD_CHAINS; k++)
        for (int j = 0; j < 4; j++) x[k][j] = (float)k;
    for (ptrdiff_t i = 0; i < steps; i++)
        for (int k = 0; k < MD_CHAINS; k++)
            for (int j = 0; j < 4; j++) x[k][j] = x[k][j] * MD_PEAK_B + MD_PEAK_C;
    float sum = 0;
    for (int k = 0; k < MD_CHAINS; k++)
        for (int j = 0; j < 4; j++) sum += x[k][j];
    return sum;
}

// Do `steps` steps of all chains; return how many operations these were.
static double md_peak(ptrdiff_t steps) {
    const int vector = md_vector_length(), lanes = vector > 0 ? vector : 4;
    volatile float seen;  // so that the compiler cannot leave out what nobody wants to know
#if MD_VECTORS
    if (vector == 16)
        seen = md_peak_512(steps);
    else if (vector == 8)
        seen = md_peak_256(steps);
    else
#endif
        seen = md_peak_plain(steps);
    (void)seen;
    return 2.0 * MD_CHAINS * lanes * (double)steps;
}

#endif
#endif
