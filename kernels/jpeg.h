// JPEG, as far as photographs need it: Huffman codes, sequential or progressive, 8 bits, grey or
// colour (ITU-T T.81). Only the blocks that a wanted part of the image needs are kept.
//
// The way of a block: bits -> coefficients (`jpeg_bits.h`) -> samples (inverse cosine
// transform) -> samples of all pixels (upsampling) -> red, green, blue. From the coefficients on
// the arithmetic is that of libjpeg's defaults, bit for bit: its "islow" transform, triangle
// upsampling, and fixed-point colours.
//
// Input is not trusted: every read is bounded, every code, count and size is checked, and memory is
// at most in proportion to the bytes that there are.

#ifndef MD_JPEG_H
#define MD_JPEG_H

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "jpeg_bits.h"
#include "jpeg_blocks.h"

#if MD_HOST

struct md_component {
    int id = 0, h = 1, v = 1;          // samples in a unit of the scan, across and down
    int table = 0;                     // of quantisation
    bool seen = false;                 // by a scan
    int dc = 0, ac = 0;                // tables of the present scan
    int last_dc = 0;
    ptrdiff_t width = 0, height = 0;   // samples
    ptrdiff_t across = 0, down = 0;    // blocks, whole units
    // Blocks that are kept: [top, bottom) x [left, right).
    ptrdiff_t top = 0, bottom = 0, left = 0, right = 0;
    // Coefficients of rows of blocks from `begin` on: all that are kept, or a unit's at a time.
    ptrdiff_t begin = 0, rows = 0;
    std::vector<int16_t> coefficients;
    std::vector<unsigned char> samples;

    ptrdiff_t stride() const { return 8 * (right - left); }
    int16_t *block(ptrdiff_t row, ptrdiff_t column) {
        if (row < top || row >= bottom || column < left || column >= right) return nullptr;
        return &coefficients[64 * ((row - begin) * (right - left) + column - left)];
    }
    const unsigned char *row(ptrdiff_t y) const { return &samples[(y - 8 * top) * stride()]; }
};

class md_jpeg {
public:
    ptrdiff_t width = 0, height = 0;
    bool supported = true;  // else it is a kind of JPEG that is not decoded here

    // Read up to the first scan.
    md_jpeg(const unsigned char *data, size_t size)
        : bits_(data, size), at_(data), begin_(data), end_(data + size) {
        if (size < 2 || data[0] != 0xFF || data[1] != 0xD8)
            fail(at_, "expected FF D8, the start of a JPEG");
        at_ += 2;
        if (!next_scan()) fail(at_, "the image ends before its first scan");
        if (!supported) return;
        // A block takes two codes of a bit or more; of a progressive image one in its first scan.
        ptrdiff_t blocks = 0;
        for (const auto &c : components_) blocks += c.across * c.down;
        if (blocks / (progressive_ ? 8 : 4) > end_ - at_)
            fail(at_, "the file is too short for so large an image");
    }

    // Decode the part of h x w pixels from (top, left) on into out [h, w, 3]. Once.
    void decode(ptrdiff_t top, ptrdiff_t left, ptrdiff_t h, ptrdiff_t w, unsigned char *out) {
        const bool whole = progressive_ || scan_.size() < components_.size();
        for (auto &c : components_) keep(c, whole, top, left, h, w);
        if (whole) {
            do
                scan([](ptrdiff_t) {});
            while (next_scan());
            for (auto &c : components_) {
                if (!c.seen) fail(at_, "the image ends before all of its colours have come");
                transform(c);
            }
        } else {
            scan([&](ptrdiff_t unit) {
                for (auto &c : components_) {
                    if (unit) transform(c);
                    c.begin = unit * c.v;
                }
            });
            find_end();
        }
        assemble(top, left, h, w, out);
    }

private:
    md_bit_reader bits_;
    const unsigned char *at_, *begin_, *end_;
    bool progressive_ = false, adobe_rgb_ = false;
    int h_max_ = 1, v_max_ = 1;
    ptrdiff_t units_across_ = 0, units_down_ = 0, restart_ = 0;
    md_quantisation quantisation_[4];
    md_huffman dc_[4], ac_[4];
    std::vector<md_component> components_;
    std::vector<int> scan_;                       // components of the present scan
    int first_ = 0, last_ = 63, high_ = 0, low_ = 0;  // its band of coefficients, and their bits
    ptrdiff_t end_of_band_ = 0;                   // blocks whose band is over
    enum { MOST_SCANS = 256 };
    int scans_ = 0;

    [[noreturn]] void fail(const unsigned char *where, const char *what) const {
        throw md_damage{size_t(where - begin_), what};
    }

    // --- segments ---

    int word(const unsigned char *p) const { return p[0] << 8 | p[1]; }

    // Read segments up to the data of a scan; false at the end of the image.
    bool next_scan() {
        for (;;) {
            const unsigned char *from = at_;
            while (at_ < end_ && *at_ != 0xFF) ++at_;  // what is left of a scan
            while (at_ < end_ && *at_ == 0xFF) ++at_;
            if (at_ >= end_) fail(end_, "the file ends before the end of the image, FF D9");
            const int marker = *at_++;
            if (marker == 0xD9) return false;
            if (marker == 0 || marker == 1 || (marker >= 0xD0 && marker <= 0xD7)) {
                if (scan_.empty()) fail(from, "expected a marker");
                continue;
            }
            if (end_ - at_ < 2) fail(at_, "the file ends in a marker's length");
            const int length = word(at_);
            if (length < 2 || length > end_ - at_) fail(at_, "a segment is longer than the file");
            const unsigned char *p = at_ + 2, *stop = at_ + length;
            at_ = stop;
            switch (marker) {
            case 0xDB: read_quantisation(p, stop); break;
            case 0xC4: read_huffman(p, stop); break;
            case 0xDD:
                if (stop - p != 2) fail(p, "a restart interval of a wrong length");
                restart_ = word(p);
                break;
            case 0xEE:
                adobe_rgb_ = stop - p >= 12 && memcmp(p, "Adobe", 5) == 0 && p[11] == 0;
                break;
            case 0xDA:
                if (!supported) return true;
                read_scan(p, stop);
                return true;
            case 0xC0: case 0xC1: case 0xC2: case 0xC3: case 0xC5: case 0xC6: case 0xC7:
            case 0xC9: case 0xCA: case 0xCB: case 0xCD: case 0xCE: case 0xCF:
                read_frame(marker, p, stop);
                break;
            }
        }
    }

    void read_quantisation(const unsigned char *p, const unsigned char *stop) {
        while (p < stop) {
            const int wide = *p >> 4, id = *p & 15, bytes = wide ? 128 : 64;
            if (wide > 1 || id > 3 || stop - p < 1 + bytes)
                fail(p, "a quantisation table is damaged");
            ++p;
            for (int i = 0; i < 64; ++i, p += 1 + wide) {
                const int step = wide ? word(p) : *p;
                if (step == 0) fail(p, "a step of quantisation is 0");
                quantisation_[id].step[md_natural[i]] = md_u32(step);
            }
            quantisation_[id].known = true;
        }
    }

    void read_huffman(const unsigned char *p, const unsigned char *stop) {
        while (p < stop) {
            const int kind = *p >> 4, id = *p & 15;
            if (kind > 1 || id > 3 || stop - p < 17) fail(p, "a Huffman table is damaged");
            int count = 0;
            for (int i = 1; i <= 16; ++i) count += p[i];
            if (count > 256 || stop - p < 17 + count) fail(p, "a Huffman table is damaged");
            if (!(kind ? ac_ : dc_)[id].make(p + 1, p + 17, count))
                fail(p, "a Huffman table has too many codes");
            p += 17 + count;
        }
    }

    void read_frame(int marker, const unsigned char *p, const unsigned char *stop) {
        if (!components_.empty() || !supported) fail(p, "a second frame begins");
        if (stop - p < 6) fail(p, "the frame's header is too short");
        height = word(p + 1), width = word(p + 3);
        const int count = p[5];
        if (height == 0 || width == 0) fail(p + 1, "the image has no height or no width");
        if (stop - p < 6 + 3 * count || count == 0) fail(p, "the frame's header is too short");
        progressive_ = marker == 0xC2;
        supported = marker <= 0xC2 && p[0] == 8 && (count == 1 || count == 3);
        if (!supported) return;
        for (int i = 0; i < count; ++i) {
            const unsigned char *q = p + 6 + 3 * i;
            md_component c;
            c.id = q[0], c.h = q[1] >> 4, c.v = q[1] & 15, c.table = q[2];
            if (c.h < 1 || c.h > 4 || c.v < 1 || c.v > 4 || c.table > 3)
                fail(q, "a component is damaged");
            components_.push_back(c);
            h_max_ = std::max(h_max_, c.h), v_max_ = std::max(v_max_, c.v);
        }
        if (count == 1) components_[0].h = components_[0].v = h_max_ = v_max_ = 1;
        units_across_ = (width + 8 * h_max_ - 1) / (8 * h_max_);
        units_down_ = (height + 8 * v_max_ - 1) / (8 * v_max_);
        for (auto &c : components_) {
            supported = supported && h_max_ % c.h == 0 && v_max_ % c.v == 0;
            c.across = units_across_ * c.h, c.down = units_down_ * c.v;
            c.width = (width * c.h + h_max_ - 1) / h_max_;
            c.height = (height * c.v + v_max_ - 1) / v_max_;
        }
    }

    void read_scan(const unsigned char *p, const unsigned char *stop) {
        const int count = p < stop ? *p : 0;
        if (count < 1 || count > 4 || stop - p != 4 + 2 * count)
            fail(p, "a scan's header is damaged");
        if (++scans_ > MOST_SCANS) fail(p, "there are more scans than any program writes");
        scan_.clear();
        for (int i = 0; i < count; ++i) {
            const int id = p[1 + 2 * i], tables = p[2 + 2 * i];
            int which = 0;
            while (which < int(components_.size()) && components_[which].id != id) ++which;
            if (which == int(components_.size()) || (tables >> 4) > 3 || (tables & 15) > 3 ||
                std::count(scan_.begin(), scan_.end(), which))
                fail(p + 1 + 2 * i, "a scan is of a component that there is not");
            components_[which].dc = tables >> 4, components_[which].ac = tables & 15;
            scan_.push_back(which);
        }
        p += 1 + 2 * count;
        first_ = p[0], last_ = p[1], high_ = p[2] >> 4, low_ = p[2] & 15;
        const bool sound = progressive_ ? first_ <= last_ && last_ <= 63 && low_ <= 13 &&
                                              (high_ == 0 || high_ == low_ + 1) &&
                                              (first_ ? count == 1 : last_ == 0)
                                        : first_ == 0 && last_ == 63 && high_ == 0 && low_ == 0;
        if (!sound) fail(p, "a scan's band of coefficients is damaged");
        for (int which : scan_) {
            const auto &c = components_[which];
            const bool dc = first_ == 0 && high_ == 0, ac = last_ > 0;
            if ((dc && !dc_[c.dc].known) || (ac && !ac_[c.ac].known))
                fail(p, "a scan's Huffman table is missing");
            if (!quantisation_[c.table].known)
                fail(p, "a component's quantisation table is missing");
            components_[which].seen = true;
        }
    }

    // --- scans ---

    // Decide which blocks of a component are needed for a part of the image.
    void keep(md_component &c, bool whole, ptrdiff_t top, ptrdiff_t left, ptrdiff_t h,
              ptrdiff_t w) {
        // Upsampling looks one sample around.
        auto blocks = [&](ptrdiff_t from, ptrdiff_t count, int part, int all, ptrdiff_t limit,
                          ptrdiff_t &first, ptrdiff_t &beyond) {
            first = std::max<ptrdiff_t>(0, from * part / all - 1) / 8;
            beyond = std::min(limit, ((from + count) * part / all + 1) / 8 + 1);
        };
        blocks(top, h, c.v, v_max_, c.down, c.top, c.bottom);
        blocks(left, w, c.h, h_max_, c.across, c.left, c.right);
        if (whole) c.top = c.left = 0, c.bottom = c.down, c.right = c.across;
        c.begin = 0, c.rows = whole ? c.down : c.v;
        c.coefficients.assign(64 * c.rows * (c.right - c.left), 0);
        c.samples.resize(64 * (c.bottom - c.top) * (c.right - c.left));
    }

    // Read the data of the present scan, down to the last row of blocks that is kept. `next` is
    // called before each row of units, and behind the last.
    template <class Next> void scan(Next next) {
        bits_.start(at_);
        end_of_band_ = 0;
        for (auto &c : components_) c.last_dc = 0;
        md_component &only = components_[scan_[0]];
        const bool single = scan_.size() == 1;
        const ptrdiff_t across = single ? (only.width + 7) / 8 : units_across_;
        ptrdiff_t down = single ? std::min(only.bottom, (only.height + 7) / 8) : 0;
        if (!single)
            for (int which : scan_) {
                const auto &c = components_[which];
                down = std::max(down, (c.bottom + c.v - 1) / c.v);
            }
        ptrdiff_t left = restart_, expected = 0;
        for (ptrdiff_t y = 0; y < down; ++y) {
            next(y);
            for (ptrdiff_t x = 0; x < across; ++x) {
                if (restart_ && left-- == 0) {
                    bits_.restart(int(expected++ & 7));
                    left = restart_ - 1;
                    end_of_band_ = 0;
                    for (auto &c : components_) c.last_dc = 0;
                }
                if (single) {
                    block(only, y, x);
                    continue;
                }
                for (int which : scan_) {
                    auto &c = components_[which];
                    for (int v = 0; v < c.v; ++v)
                        for (int h = 0; h < c.h; ++h) block(c, y * c.v + v, x * c.h + h);
                }
            }
        }
        next(down);
        at_ = bits_.position();
    }

    void block(md_component &c, ptrdiff_t row, ptrdiff_t column) {
        int16_t elsewhere[64];  // a block that is not kept must be read over all the same
        int16_t *to = c.block(row, column);
        if (!to) to = elsewhere;
        if (!progressive_)
            md_read_block(bits_, dc_[c.dc], ac_[c.ac], c.last_dc, to);
        else if (first_ == 0)
            high_ ? md_refine_dc(bits_, low_, to)
                  : md_read_dc(bits_, dc_[c.dc], c.last_dc, low_, to);
        else
            (high_ ? md_refine_band : md_read_band)(bits_, ac_[c.ac], first_, last_, low_,
                                                    end_of_band_, to);
    }

    // An image that was read in part must be whole all the same.
    void find_end() {
        for (const unsigned char *p = end_ - 1; p > at_; --p)
            if (*p == 0xD9 && p[-1] == 0xFF) return;
        fail(end_, "the file ends before the end of the image, FF D9");
    }

    // --- pixels ---

    // Turn the coefficients that there are into samples, and make room for the next.
    void transform(md_component &c) {
        const ptrdiff_t blocks = c.right - c.left;
        const ptrdiff_t first = std::max(c.begin, c.top);
        const ptrdiff_t beyond = std::min(c.begin + c.rows, c.bottom);
        for (ptrdiff_t y = first; y < beyond; ++y)
            md_inverse_cosines(blocks, &c.coefficients[64 * (y - c.begin) * blocks],
                               quantisation_[c.table].step, c.stride(),
                               &c.samples[64 * (y - c.top) * blocks]);
        std::fill(c.coefficients.begin(), c.coefficients.end(), 0);
    }

    void assemble(ptrdiff_t top, ptrdiff_t left, ptrdiff_t h, ptrdiff_t w, unsigned char *out) {
        const ptrdiff_t room = 8 * (units_across_ + 2) * h_max_;
        std::vector<unsigned char> rows[3];
        for (auto &row : rows) row.resize(room);
        std::vector<uint16_t> sums(room);
        for (ptrdiff_t y = top; y < top + h; ++y, out += 3 * w) {
            const unsigned char *channels[3];
            for (size_t i = 0; i < components_.size(); ++i)
                channels[i] = row_of(components_[i], y, left, w, rows[i], sums);
            if (components_.size() == 1)
                md_grey_row(w, channels[0], out);
            else if (adobe_rgb_)
                md_rgb_row(w, channels[0], channels[1], channels[2], out);
            else
                md_ycc_row(w, channels[0], channels[1], channels[2], out);
        }
    }

    // A component's samples for the w pixels of row y from column `left` on.
    const unsigned char *row_of(const md_component &c, ptrdiff_t y, ptrdiff_t left, ptrdiff_t w,
                                std::vector<unsigned char> &room,
                                std::vector<uint16_t> &sums) const {
        const int across = h_max_ / c.h, down = v_max_ / c.v;
        const ptrdiff_t base = 8 * c.left, sample = y / down;
        const unsigned char *row = c.row(sample);
        if (across == 1 && down == 1) return row + left - base;
        const bool wide = across == 2 && down <= 2 && c.width > 2, tall = across == 1 && down == 2;
        if (!wide && !tall) {
            for (ptrdiff_t x = 0; x < w; ++x) room[x] = row[(left + x) / across - base];
            return room.data();
        }
        // Each sample has a weight of 3, and the one on the pixel's other side of 1.
        const ptrdiff_t other = std::max<ptrdiff_t>(
            0, std::min(sample + (y % 2 ? 1 : -1), c.height - 1));
        if (tall) {
            md_mix_rows(w, row + left - base, c.row(other) + left - base, y % 2 ? 2 : 1,
                        room.data());
            return room.data();
        }
        const ptrdiff_t first = std::max<ptrdiff_t>(left / 2 - 1, 0);
        const ptrdiff_t beyond = std::min((left + w - 1) / 2 + 2, c.width), n = beyond - first;
        uint16_t *sum = sums.data() + 1;
        md_sum_rows(n, row + first - base, (down == 2 ? c.row(other) : row) + first - base,
                    down == 2, sum);
        sum[-1] = sum[0], sum[n] = sum[n - 1];
        md_widen_row(n, sum, down == 2, room.data());
        return room.data() + left - 2 * first;
    }
};

// For callers without exceptions: `what` is null where all went well, and empty without memory.
template <class Run> static md_damage md_guarded(Run run) {
    try {
        run();
        return {0, nullptr};
    } catch (const md_damage &damage) {
        return damage;
    } catch (const std::bad_alloc &) {
        return {0, ""};
    }
}

static inline md_damage md_open_jpeg(const unsigned char *data, size_t size,
                                     std::unique_ptr<md_jpeg> &jpeg) {
    return md_guarded([&] { jpeg = std::make_unique<md_jpeg>(data, size); });
}

static inline md_damage md_decode_jpeg(md_jpeg &jpeg, ptrdiff_t top, ptrdiff_t left, ptrdiff_t h,
                                       ptrdiff_t w, unsigned char *out) {
    return md_guarded([&] { jpeg.decode(top, left, h, w, out); });
}

#endif
#endif
