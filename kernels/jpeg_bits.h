// The bits of a JPEG's scan, and the Huffman codes that they are.

#ifndef MD_JPEG_BITS_H
#define MD_JPEG_BITS_H

#include "base.h"

#if MD_HOST

// Thrown where the data cannot be what they should be.
struct md_damage {
    size_t byte;
    const char *what;
};

// Reads bits; those that are next are the highest of `ahead_`. A zero byte behind FF is stuffing,
// anything else a marker, before which it stops: behind that there are zeros, and `check` finds
// whether any of them were taken.
class md_bit_reader {
public:
    md_bit_reader(const unsigned char *begin, size_t size) : begin_(begin), end_(begin + size) {}

    void start(const unsigned char *at) { at_ = at, ahead_ = 0, count_ = made_up_ = 0; }
    const unsigned char *position() const { return at_; }

    // Have 32 bits or more ready.
    void fill() {
        if (count_ < 32) refill();
    }
    md_u32 peek(int n) const { return md_u32(ahead_ >> (64 - n)); }  // n from 1 to 32
    void skip(int n) { ahead_ <<= n, count_ -= n; }
    md_u32 take(int n) {
        const md_u32 bits = peek(n);
        skip(n);
        return bits;
    }
    // A number of n bits, 1 to 15, whose first bit is 0 for a negative one; `behind` so many.
    int peek_signed(int n, int behind) const {
        const uint64_t bits = ahead_ << behind;
        const int negative = int(~(int64_t(bits) >> 63));  // all ones
        return int(bits >> (64 - n)) + (negative & (1 - (1 << n)));
    }
    int take_signed(int n) {
        const int number = peek_signed(n, 0);
        skip(n);
        return number;
    }
    void check() const {
        if (count_ < made_up_) fail("the data of a scan end early");
    }
    // Go behind the restart marker of that number, 0 to 7.
    void restart(int number) {
        check();
        const unsigned char *p = at_;
        while (p < end_ && *p == 0xFF) ++p;  // any number of FF is one
        if (count_ - made_up_ >= 8 || p == at_ || p >= end_ || *p != 0xD0 + number)
            fail("expected a restart marker");
        start(p + 1);
    }
    [[noreturn]] __attribute__((noinline)) void fail(const char *what) const {
        throw md_damage{size_t(at_ - begin_), what};
    }

private:
    const unsigned char *at_ = nullptr, *begin_, *end_;
    uint64_t ahead_ = 0;
    int count_ = 0, made_up_ = 0;  // bits in `ahead_`, and how many of the last are made up

    void refill() {
        uint64_t word;
        if (end_ - at_ >= 8) {
            memcpy(&word, at_, 8);
            word = __builtin_bswap64(word);
            const uint64_t flipped = ~word;  // has a byte of zeros where there is an FF
            if (((flipped - 0x0101010101010101) & word & 0x8080808080808080) == 0) {
                const int bytes = (64 - count_) / 8;
                ahead_ |= word >> count_;
                at_ += bytes, count_ += 8 * bytes;
                ahead_ &= ~uint64_t(0) << (64 - count_);
                return;
            }
        }
        while (count_ <= 56) {
            unsigned char byte = 0;
            if (at_ < end_ && (*at_ != 0xFF || (end_ - at_ > 1 && at_[1] == 0))) {
                byte = *at_;
                at_ += byte == 0xFF ? 2 : 1;
            } else {
                made_up_ += 8;
            }
            ahead_ |= uint64_t(byte) << (56 - count_);
            count_ += 8;
        }
    }
};

// A Huffman table: codes of up to 16 bits, of which those of up to LOOK bits are looked up.
struct md_huffman {
    enum { LOOK = 10 };
    bool known = false;

    // counts [16]: how many codes there are of each length. False where they are too many.
    bool make(const unsigned char *counts, const unsigned char *symbols, int count) {
        memset(found_, 0, sizeof found_);
        memcpy(symbols_, symbols, count);
        md_u32 code = 0;
        for (int length = 1, i = 0; length <= 16; ++length, code <<= 1) {
            offset_[length] = i - int(code);
            for (int n = counts[length - 1]; n > 0; --n, ++i, ++code) {
                if (code >> length) return false;
                if (length > LOOK) continue;
                const int rest = LOOK - length, all = length + (symbols[i] & 15);
                for (md_u32 j = code << rest; j < (code + 1) << rest; ++j)
                    found_[j] = length << 16 | all << 8 | symbols[i];
            }
            beyond_[length] = code;
        }
        known = true;
        return true;
    }

    // The next symbol; 16 bits must be ready.
    int symbol(md_bit_reader &bits) const {
        const int found = look(bits);
        if (found) {
            bits.skip(found >> 16);
            return found & 255;
        }
        for (int length = LOOK + 1; length <= 16; ++length) {
            const md_u32 code = bits.peek(length);
            if (code < beyond_[length]) {
                bits.skip(length);
                return symbols_[(int(code) + offset_[length]) & 255];
            }
        }
        bits.check();
        bits.fail("there is no such Huffman code");
    }

    // What the next bits are: a symbol, in the lower 8 bits; then, in 8 each, how many bits it has
    // together with the number that its lower half says follows it, and without. 0 if it is longer
    // than LOOK.
    int look(const md_bit_reader &bits) const { return found_[bits.peek(LOOK)]; }

private:
    int found_[1 << LOOK];
    unsigned char symbols_[256];
    int offset_[17];      // from a code of this length to the place of its symbol
    md_u32 beyond_[17];   // the first number of this length that is no code
};

#endif
#endif
