// A product of two matrices on AMX's tiles, packed on the way.
//
// Both operands have *items*, the rows of the left and the columns of the right one, each a vector
// along the *depth* that is summed over. A tile has 16 items and 32 numbers of their depth, number
// j beside number j + 16, in one of two orders: item by item, as a product's first operand, and
// pair by pair, as its second. An operand that lies along its depth comes in the first order by
// itself, the other kind in the second; else tiles are transposed.
//
// One operand is *held*, packed, in the second-level cache. The other passes by in *panels* of 64
// items, each packed while the one before is multiplied: vectors and tiles work at the same time.
// So the weights of a layer, which are new in every step, are read once, where they lie, and split
// numbers are never stored further away than the second-level cache.

#ifndef MD_TILE_PRODUCT_H
#define MD_TILE_PRODUCT_H

#include "tiles.h"

#if MD_TILES

#include <algorithm>

enum : ptrdiff_t {
    MD_SIDE = 16,   // items of a tile, and pairs along the depth
    MD_DEPTH = 32,  // numbers along the depth: a step
    MD_GROUP = 64,  // items that are packed side by side, as four tiles of each part
    MD_STEP_TILES = MD_PARTS * MD_GROUP / MD_SIDE,
    MD_PASS = 8,          // steps in one pass along the depth
    MD_HELD = 1 << 20,    // bytes of held tiles: half of a second-level cache
};

typedef uint32_t md_one_tile[MD_SIDE][MD_SIDE];

struct md_operand {
    const float *from;
    ptrdiff_t items, depth, item_step, depth_step;  // steps in floats, one of them 1

    bool along() const { return depth_step == 1; }
    ptrdiff_t row_step() const { return along() ? item_step : depth_step; }
    const float *at(ptrdiff_t item, ptrdiff_t deep) const {
        return from + item * item_step + deep * depth_step;
    }
};

// Row r of the three parts' tiles, pairs of a low and a high number. What is left of a number
// without its first part has 16 bits at most, so that it can be cut in two: this takes half as
// many operations as rounding does, and no more than 2^-22 of a product is left out.
MD_ON_TILES static inline MD_INLINE void md_split(__m512i low, __m512i high, md_one_tile *parts,
                                                  ptrdiff_t r) {
    const __m512i top = _mm512_set1_epi32(0xffff0000), half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 3
    for (int p = 0; p < MD_PARTS; ++p, parts += MD_GROUP / MD_SIDE) {
        const __m512i a = p > 0 ? low : _mm512_add_epi32(low, half);
        const __m512i b = p > 0 ? high : _mm512_add_epi32(high, half);
        const __m512i pairs =
            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_maskz_srli_epi32(-1, a, 16), b);
        _mm512_store_si512(parts[0][r], pairs);
        low = (__m512i)((__m512)low - (__m512)(a & top));
        high = (__m512i)((__m512)high - (__m512)(b & top));
    }
}

MD_ON_TILES static inline void md_transpose_tile(md_one_tile &tile) {
    __m512 rows[MD_SIDE];
    for (int i = 0; i < MD_SIDE; ++i) rows[i] = _mm512_load_ps(tile[i]);
    md_transpose(rows);
    for (int i = 0; i < MD_SIDE; ++i) _mm512_store_ps(tile[i], rows[i]);
}

// The first n of 16 lanes.
MD_FN uint16_t md_lanes(ptrdiff_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// The tiles of a group for some steps of the depth; what an operand lacks is zero.
MD_ON_TILES static void md_pack(const md_operand &of, ptrdiff_t item, ptrdiff_t depth,
                                ptrdiff_t steps, bool transposed, md_one_tile *into) {
    for (ptrdiff_t s = 0; s < steps; ++s, depth += MD_DEPTH, into += MD_STEP_TILES)
        for (ptrdiff_t t = 0; t < MD_GROUP / MD_SIDE; ++t) {
            const ptrdiff_t items = of.items - item - t * MD_SIDE, deep = of.depth - depth;
            const ptrdiff_t rows = of.along() ? items : deep, lanes = of.along() ? deep : items;
            const ptrdiff_t high_rows = of.along() ? rows : rows - MD_SIDE;
            const uint16_t low_lanes = md_lanes(lanes);
            const uint16_t high_lanes = md_lanes(of.along() ? lanes - MD_SIDE : lanes);
            const float *from = of.at(item + t * MD_SIDE, depth);
            for (ptrdiff_t r = 0; r < MD_SIDE; ++r, from += of.row_step())
                md_split(_mm512_maskz_loadu_epi32(r < rows ? low_lanes : 0, from),
                         _mm512_maskz_loadu_epi32(r < high_rows ? high_lanes : 0,
                                                  from + MD_SIDE * of.depth_step),
                         into + t, r);
            for (ptrdiff_t p = 0; transposed && p < MD_STEP_TILES; p += MD_GROUP / MD_SIDE)
                md_transpose_tile(into[p + t]);
        }
}

// A panel that is packed between products of tiles: the steps of it that nothing is missing in.
struct md_packing {
    const md_operand &of;
    const float *from;
    ptrdiff_t steps;
    md_one_tile *into;
};

// Some rows of it: four rows of four tiles follow one by one.
struct md_packed_rows {
    const float *from;
    ptrdiff_t row_step, tile_step, high, row;
    md_one_tile *into;

    MD_ON_TILES inline MD_INLINE void pack(ptrdiff_t i) const {
        const float *x = from + i / 4 * row_step + i % 4 * tile_step;
        md_split(_mm512_loadu_si512(x), _mm512_loadu_si512(x + high), into + i % 4, row + i / 4);
    }
};

template <int TO> MD_FN void md_load_tile(const md_one_tile *from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(ptrdiff_t(64)), "i"(TO)
                 : "memory");
}
template <int FROM> MD_FN void md_store_tile(float *to, ptrdiff_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(4 * step), "i"(FROM) : "memory");
}

MD_FN void md_load_sums(const md_one_tile *from) {
    md_load_tile<0>(from);
    md_load_tile<1>(from + 1);
    md_load_tile<2>(from + 2);
    md_load_tile<3>(from + 3);
}

// Tile SUM += the product of tile 7 and tile PANEL.
template <bool PANEL_FIRST, int SUM, int PANEL> MD_FN void md_add_tile_product() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(PANEL_FIRST ? 7 : PANEL),
                 "i"(PANEL_FIRST ? PANEL : 7), "i"(SUM));
}

// Tiles 0 to 3 += one part of 64 held items by those parts of 16 of a panel, in tiles 4 to 6, that
// make a product large enough to matter. Some rows are packed in between.
template <bool PANEL_FIRST, int PART, int I = 0>
MD_ON_TILES static inline MD_INLINE void md_multiply_part(const md_one_tile *held, bool packs,
                                                          const md_packed_rows &rows) {
    if constexpr (I < MD_GROUP / MD_SIDE) {
        md_load_tile<7>(held + PART * 4 + I);
        if constexpr (PART == 0) md_add_tile_product<PANEL_FIRST, I, 6>();
        if (packs) rows.pack((2 - PART) * 4 + I);
        if constexpr (PART <= 1) md_add_tile_product<PANEL_FIRST, I, 5>();
        md_add_tile_product<PANEL_FIRST, I, 4>();
        if (packs && PART == 0) rows.pack(12 + I);
        md_multiply_part<PANEL_FIRST, PART, I + 1>(held, packs, rows);
    }
}

// Tiles 0 to 3 += 64 held items by 16 of a panel along some steps. Meanwhile the quarters of steps
// of the next panel from `quarter` on are packed, one in each step.
template <bool PANEL_FIRST>
MD_ON_TILES static inline MD_INLINE void md_multiply(ptrdiff_t steps, const md_one_tile *held,
                                                     const md_one_tile *panel,
                                                     const md_packing &next, ptrdiff_t quarter) {
    const ptrdiff_t row_step = next.of.row_step(), depth_step = next.of.depth_step;
    const ptrdiff_t tile_step = MD_SIDE * next.of.item_step;
    for (; steps > 0; --steps, ++quarter, held += MD_STEP_TILES, panel += MD_STEP_TILES) {
        const ptrdiff_t step = quarter / 4, row = quarter % 4 * 4;
        const bool packs = step < next.steps;
        const md_packed_rows rows{next.from + step * MD_DEPTH * depth_step + row * row_step,
                                  row_step, tile_step, MD_SIDE * depth_step, row,
                                  next.into + step * MD_STEP_TILES};
        md_load_tile<4>(panel);
        md_load_tile<5>(panel + 4);
        md_load_tile<6>(panel + 8);
        md_multiply_part<PANEL_FIRST, 2>(held, packs, rows);  // small products first
        md_multiply_part<PANEL_FIRST, 1>(held, packs, rows);
        md_multiply_part<PANEL_FIRST, 0>(held, packs, rows);
    }
}

// One product: which operand is held, and in which order their tiles are. In memory are two packed
// panels, what is held, and the sums of all blocks until the last pass.
class md_tile_matrices {
  public:
    // c [left.items, right.items] = left * right
    md_tile_matrices(const md_operand &left, const md_operand &right, float *c)
        : hold_right(holds_right(left, right)),
          held(hold_right ? right : left),
          panel(hold_right ? left : right),
          c(c),
          columns(right.items) {
        // The left operand comes first, unless panels would have to be transposed for few items.
        const bool by_itself = panel.along() == hold_right;
        transpose_panel = !by_itself && held.items >= 4 * MD_GROUP;
        transpose_sums = !by_itself && !transpose_panel;
        panel_first = hold_right != transpose_sums;
        transpose_held = held.along() == panel_first;

        const ptrdiff_t all = count(held.depth, MD_DEPTH);
        passes = count(all, MD_PASS);
        steps = count(all, passes);
        groups = count(held.items, MD_GROUP);
        some = std::clamp<ptrdiff_t>(MD_HELD / (tiles() * sizeof(md_one_tile)), 1, groups);
        kept = passes > 1 ? count(panel.items, MD_SIDE) : 0;
    }

    MD_ON_TILES void run() const {
        const size_t bytes = ((2 + some) * tiles() + 4 * (some * kept + 1)) * sizeof(md_one_tile);
        auto *const memory = reinterpret_cast<md_one_tile *>(md_room::of(bytes));
        const md_tile_scope scope;
        for (ptrdiff_t group = 0; group < groups; group += some)
            panel_first ? multiply<true>(memory, group) : multiply<false>(memory, group);
    }

  private:
    bool hold_right;
    md_operand held, panel;
    float *c;
    ptrdiff_t columns;
    bool transpose_held, transpose_panel, transpose_sums, panel_first;
    ptrdiff_t passes, steps;  // the depth is passed in so many, of up to so many steps
    ptrdiff_t groups, some;   // of held items, and how many are held at a time
    ptrdiff_t kept;           // sixteens of panel items whose sums are kept from pass to pass

    static ptrdiff_t count(ptrdiff_t n, ptrdiff_t unit) { return (n + unit - 1) / unit; }

    // What makes fewer blocks of 64 by 16 and, if both make as many, what fits or else is smaller.
    static bool holds_right(const md_operand &left, const md_operand &right) {
        const ptrdiff_t hold_left = count(left.items, MD_GROUP) * count(right.items, MD_SIDE);
        const ptrdiff_t hold_right = count(right.items, MD_GROUP) * count(left.items, MD_SIDE);
        if (hold_left != hold_right) return hold_right < hold_left;
        return right.items <= left.items ||
               right.items * right.depth * ptrdiff_t(2 * MD_PARTS) <= MD_HELD;
    }

    ptrdiff_t tiles() const { return steps * MD_STEP_TILES; }  // of a group in one pass

    // Where sums of items of the two belong.
    float *at(ptrdiff_t held_item, ptrdiff_t panel_item) const {
        return hold_right ? c + panel_item * columns + held_item
                          : c + held_item * columns + panel_item;
    }

    // Store in c the sums of up to 64 held items and 16 of a panel, from four tiles.
    MD_ON_TILES void put(md_one_tile *sums, ptrdiff_t held_item, ptrdiff_t panel_item) const {
        const ptrdiff_t panel_left = panel.items - panel_item;
        for (ptrdiff_t t = 0; t < MD_GROUP / MD_SIDE; ++t, held_item += MD_SIDE) {
            const ptrdiff_t held_left = held.items - held_item;
            if (held_left <= 0) return;
            if (transpose_sums) md_transpose_tile(sums[t]);
            const uint16_t lanes = md_lanes(hold_right ? held_left : panel_left);
            const ptrdiff_t rows = hold_right ? panel_left : held_left;
            float *to = at(held_item, panel_item);
            for (ptrdiff_t r = 0; r < MD_SIDE && r < rows; ++r, to += columns)
                _mm512_mask_storeu_epi32(to, lanes, _mm512_load_si512(sums[t][r]));
        }
    }

    // Store tiles 0 to 3, sums of a block, in c, or in `own` for as long as more will be added.
    MD_ON_TILES void store(md_one_tile *own, ptrdiff_t held_item, ptrdiff_t panel_item,
                           bool last) const {
        const bool fits = passes == 1 && !transpose_sums && held_item + MD_GROUP <= held.items &&
                          panel_item + MD_SIDE <= panel.items;
        float *const to = fits ? at(held_item, panel_item) : reinterpret_cast<float *>(own);
        const ptrdiff_t step = fits ? columns : MD_SIDE;
        const ptrdiff_t apart = fits && hold_right ? MD_SIDE : MD_SIDE * step;
        md_store_tile<0>(to, step);
        md_store_tile<1>(to + apart, step);
        md_store_tile<2>(to + 2 * apart, step);
        md_store_tile<3>(to + 3 * apart, step);
        if (last && !fits) put(own, held_item, panel_item);
    }

    // Multiply the groups from one on by all panels.
    template <bool PANEL_FIRST>
    MD_ON_TILES void multiply(md_one_tile *memory, ptrdiff_t group) const {
        md_one_tile *now = memory, *then = now + tiles(), *const holds = then + tiles();
        md_one_tile *const sums = holds + some * tiles();
        const ptrdiff_t many_groups = std::min(some, groups - group);
        const ptrdiff_t all = count(held.depth, MD_DEPTH);
        for (ptrdiff_t pass = 0; pass < passes; ++pass) {
            const ptrdiff_t step = all * pass / passes, depth = step * MD_DEPTH;
            const ptrdiff_t many = all * (pass + 1) / passes - step;
            for (ptrdiff_t g = 0; g < many_groups; ++g)
                md_pack(held, (group + g) * MD_GROUP, depth, many, transpose_held,
                        holds + g * tiles());
            md_pack(panel, 0, depth, many, transpose_panel, now);
            for (ptrdiff_t item = 0; item < panel.items; item += MD_SIDE) {
                const ptrdiff_t quarter = item / MD_SIDE % 4;
                const ptrdiff_t next_item = item + MD_GROUP - quarter * MD_SIDE;
                const md_packing next = packing(next_item, depth, many, then);
                for (ptrdiff_t g = 0; g < many_groups; ++g) {
                    md_one_tile *const own = sums + 4 * (kept ? g * kept + item / MD_SIDE : 0);
                    pass > 0 ? md_load_sums(own) : md_zero_tiles<0, 4>();
                    md_multiply<PANEL_FIRST>(many, holds + g * tiles(), now + quarter, next,
                                             g > 0 ? 4 * many : quarter * many);
                    store(own, (group + g) * MD_GROUP, item, pass == passes - 1);
                }
                if (quarter < 3) continue;
                finish(next, next_item, depth, many);
                std::swap(now, then);
            }
        }
    }

    // What can be packed of a panel while the one before is multiplied: steps that are whole.
    md_packing packing(ptrdiff_t item, ptrdiff_t depth, ptrdiff_t many, md_one_tile *into) const {
        const bool whole = item + MD_GROUP <= panel.items;
        return {panel, panel.at(whole ? item : 0, depth),
                whole ? std::min(many, (panel.depth - depth) / MD_DEPTH) : 0, into};
    }

    // Pack what is left of it.
    MD_ON_TILES void finish(const md_packing &of, ptrdiff_t item, ptrdiff_t depth,
                         ptrdiff_t many) const {
        if (item >= panel.items) return;
        for (ptrdiff_t t = 0; transpose_panel && t < of.steps * MD_STEP_TILES; ++t)
            md_transpose_tile(of.into[t]);
        md_pack(panel, item, depth + of.steps * MD_DEPTH, many - of.steps, transpose_panel,
                of.into + of.steps * MD_STEP_TILES);
    }
};

// c [n, m] = a [n, k] * b [k, m], either of them given transposed if so said; false where there was
// no memory.
static inline bool md_multiply_by_tiles(const float *a, const float *b, float *c, ptrdiff_t n,
                                        ptrdiff_t k, ptrdiff_t m, bool transpose_a,
                                        bool transpose_b) {
    if (k == 0) memset(c, 0, n * m * sizeof(float));
    if (n * k * m == 0) return true;
    const md_operand left{a, n, k, transpose_a ? 1 : k, transpose_a ? n : 1};
    const md_operand right{b, m, k, transpose_b ? k : 1, transpose_b ? 1 : m};
    try {
        md_tile_matrices(left, right, c).run();
        return true;
    } catch (const std::bad_alloc &) {
        return false;
    }
}

#elif MD_HOST

static inline bool md_multiply_by_tiles(const float *, const float *, float *, ptrdiff_t,
                                        ptrdiff_t, ptrdiff_t, bool, bool) {
    return false;
}

#endif
#endif
