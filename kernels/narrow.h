// float16 and bfloat16: types to store numbers in, never to compute in.
//
// A narrow number is widened to float32, which is exact, and a result is rounded once, to the
// nearest, of two equally near to the even one. NaN stays NaN; what is too large becomes infinite;
// subnormals are numbers like any others. Everything is done on bits, and so vectorised everywhere
// with the same result; the processor's own instructions for float16 give these bits too.

#ifndef MD_NARROW_H
#define MD_NARROW_H

#include "base.h"

typedef unsigned short md_u16;

// 1 bit of sign, 5 of exponent, 10 of mantissa.
struct md_float16 {
    md_u16 bits;
};

// The upper half of a float32: 1 bit of sign, 8 of exponent, 7 of mantissa.
struct md_bfloat16 {
    md_u16 bits;
};

MD_FN double md_widen(double x) { return x; }
MD_FN float md_widen(float x) { return x; }
MD_FN float md_widen(md_bfloat16 x) { return md_number(md_u32(x.bits) << 16); }
MD_FN float md_widen(md_float16 x) {
    // With the fields where float32 has them, only the exponent is wrong, by 112.
    const md_u32 sign = md_u32(x.bits & 0x8000) << 16, size = md_u32(x.bits & 0x7fff) << 13;
    const md_u32 normal = size + 0x38000000;
    // Zero and subnormals: 2^-14 (1 + mantissa), less 2^-14.
    const md_u32 small = md_bits(md_number(size + 0x38800000) - md_number(md_u32(0x38800000)));
    const md_u32 special = (size + 0x70000000) | (size > 0x0f800000 ? 0x00400000 : 0);
    return md_number(sign | (size < 0x00800000 ? small : size < 0x0f800000 ? normal : special));
}

MD_FN void md_round(double x, double &into) { into = x; }
MD_FN void md_round(float x, double &into) { into = x; }
MD_FN void md_round(double x, float &into) { into = float(x); }
MD_FN void md_round(float x, float &into) { into = x; }
MD_FN void md_round(float x, md_bfloat16 &into) {
    const md_u32 bits = md_bits(x);
    const md_u32 nearest = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x00400000;
    into.bits = md_u16((x == x ? nearest : quiet) >> 16);
}
MD_FN void md_round(float x, md_float16 &into) {
    const md_u32 bits = md_bits(x), sign = bits & 0x80000000, size = bits ^ sign;
    // A carry out of the mantissa rightly raises the exponent, also to that of infinity.
    const md_u32 normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    // Below 2^-14: in the sum with 0.5 the last bit is worth 2^-24, as in a subnormal float16, so
    // the addition itself rounds.
    const md_u32 small = md_bits(md_number(size) + 0.5f) - 0x3f000000;
    const md_u32 special = size > 0x7f800000 ? 0x7e00 | (size >> 13 & 0x1ff) : 0x7c00;
    const md_u32 rounded = size < 0x38800000 ? small : size < 0x47800000 ? normal : special;
    into.bits = md_u16(sign >> 16 | rounded);
}

// A double as the float that is rounded to 16 bits as the double itself would be. What a float
// cannot hold becomes the neighbour whose last bit is 1, which stays on its side of each halfway
// point (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
MD_FN float md_to_odd(double x) {
    const float nearest = float(x);
    const md_u32 bits = md_bits(nearest);
    const bool below = nearest < 0 ? nearest > x : nearest < x;
    const bool exact = nearest == x || !(nearest - nearest == 0);
    return exact || bits & 1 ? nearest : md_number(below || bits << 1 == 0 ? bits + 1 : bits - 1);
}
MD_FN void md_round(double x, md_float16 &into) { md_round(md_to_odd(x), into); }
MD_FN void md_round(double x, md_bfloat16 &into) { md_round(md_to_odd(x), into); }

#endif
