// CRC-32C of bytes: the remainder of their polynomial by Castagnoli's, which finds any burst of up to
// 32 wrong bits (Castagnoli, Bräuer, Herrmann, "Optimization of cyclic redundancy-check codes with 24
// and 32 parity bits", 1993). Bits are taken lowest first, and the remainder begins and ends inverted.
//
// Processors have an instruction for eight bytes; where there is none, eight tables do the same.

#ifndef MD_CHECKSUM_H
#define MD_CHECKSUM_H

#include "base.h"

#if MD_HOST

#if defined(__GNUC__) && defined(__x86_64__)
#define MD_CRC_X86 1
#include <nmmintrin.h>
#else
#define MD_CRC_X86 0
#endif

// of[k][b]: the remainder of byte b with k zero bytes behind it.
struct md_remainders {
    md_u32 of[8][256];
    constexpr md_remainders() : of() {
        for (md_u32 byte = 0; byte < 256; ++byte) {
            md_u32 rest = byte;
            for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? 0x82F63B78u : 0);
            of[0][byte] = rest;
        }
        for (int zeros = 1; zeros < 8; ++zeros)
            for (int byte = 0; byte < 256; ++byte) {
                const md_u32 rest = of[zeros - 1][byte];
                of[zeros][byte] = rest >> 8 ^ of[0][rest & 255];
            }
    }
};
static constexpr md_remainders MD_REMAINDERS;

static md_u32 md_crc32c_tables(const unsigned char *data, size_t count, md_u32 crc) {
    const auto &of = MD_REMAINDERS.of;
    for (; count >= 8; data += 8, count -= 8) {
        md_u32 next = 0;
        for (int i = 0; i < 4; ++i)
            next ^= of[7 - i][data[i] ^ (crc >> 8 * i & 255)] ^ of[3 - i][data[4 + i]];
        crc = next;
    }
    for (; count; ++data, --count) crc = crc >> 8 ^ of[0][(crc ^ *data) & 255];
    return crc;
}

#if MD_CRC_X86
__attribute__((target("sse4.2"))) static md_u32 md_crc32c_x86(const unsigned char *data,
                                                              size_t count, md_u32 crc) {
    md_u64 wide = crc;
    for (; count >= 8; data += 8, count -= 8) {
        md_u64 eight;
        memcpy(&eight, data, 8);
        wide = _mm_crc32_u64(wide, eight);
    }
    crc = md_u32(wide);
    for (; count; ++data, --count) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

static md_u32 md_crc32c(const void *data, size_t count, bool tables) {
    const auto bytes = static_cast<const unsigned char *>(data);
#if MD_CRC_X86
    if (!tables && __builtin_cpu_supports("sse4.2")) return ~md_crc32c_x86(bytes, count, ~0u);
#endif
    return ~md_crc32c_tables(bytes, count, ~0u);
}

#endif
#endif
