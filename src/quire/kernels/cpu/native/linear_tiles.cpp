/* Products of rows in bf16 with a packed weight (linear.h), by AMX tiles. */
#include "linear.h"
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <algorithm>

namespace {

constexpr int64_t ROWS = 16, TILE = ROWS * 64, TILE_STEPS = KTILE / 2, TILE_LINES = TILE_STEPS * STEP / 64;
constexpr int64_t DEEP = 8;     /* tiles of a block, which stays in the L1 cache while all rows are multiplied by it */
constexpr int64_t AHEAD = 4096; /* with few rows: prefetch distance in the weight, in bytes, into the L1 cache, */
constexpr int64_t FAR = 16384;  /* and further on into the L2 cache, so that misses of x do not wait for the weight's */

/* 16 rows of x; `stride`: bytes from row to row, `deep`: from a tile to the next one of the same rows. */
struct Rows {
    const char *at;
    int64_t stride, deep;
};

/* Memory that a pass prefetches: `lines` cache lines of the weight at each tile, and `outs` rows of outputs. */
struct Ahead {
    const char *weight;
    int64_t lines;
    const char *out;
    int64_t outs, stride;
};

/* Rows whose sums are complete, but whose outputs are not stored yet. */
struct Waiting {
    int64_t panel = 0, row = 0, last = 0;
    const float *sums = nullptr;

    void finish_some(const Product &p, int64_t count) {
        const int64_t end = std::min(row + count, last);
        if (row == end) return;
        finish<bf16>(p, panel, row, end, sums);
        sums += (end - row) * PANEL, row = end;
    }
};

/* Computes sums [16 or 32, PANEL] of rows of x times some tiles of a panel; `more`: adds to the sums there. Meanwhile
   it finishes all waiting rows, by units that tiles do not use. FEW: prefetches more of the weight. */
template <int R, bool FEW>
inline void pass(const Product &p, Rows a, Rows b, const char *w, int64_t tiles, float *sums, bool more, Ahead ahead,
                 Waiting &waiting) {
    float *below = sums + ROWS * PANEL;
    const int64_t each = (2 * ROWS + tiles - 1) / tiles;
    if (more) {
        _tile_loadd(0, sums, PANEL * 4);
        _tile_loadd(1, sums + 16, PANEL * 4);
        if (R == 2) {
            _tile_loadd(2, below, PANEL * 4);
            _tile_loadd(3, below + 16, PANEL * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < tiles; ++k, w += TILE_STEPS * STEP) {
        for (int64_t i = 0; i < ahead.lines; ++i, ahead.weight += 64) {
            __builtin_prefetch(ahead.weight);
            if (FEW) __builtin_prefetch(ahead.weight + FAR, 0, 2);
        }
        for (int64_t i = 0; i < each && ahead.outs > 0; ++i, --ahead.outs, ahead.out += ahead.stride)
            __builtin_prefetch(ahead.out, 1);
        _tile_loadd(4, a.at, a.stride);
        a.at += a.deep;
        _tile_loadd(6, w, STEP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, STEP);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
            _tile_loadd(5, b.at, b.stride);
            b.at += b.deep;
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        waiting.finish_some(p, each);
    }
    waiting.finish_some(p, 2 * ROWS);
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (R == 2) {
        _tile_stored(2, below, PANEL * 4);
        _tile_stored(3, below + 16, PANEL * 4);
    }
}

/* Copies rows of x from `row` on as tiles, [of 16 rows][of KTILE columns][16][KTILE], with zeros after the last column.
   After the last row the tile is not initialised, and its results are not used. */
inline void stage(const Product &p, int64_t row, char *staged, int64_t deep) {
    for (int64_t i = 0; row < p.last; ++i, ++row) {
        const bf16 *x = reinterpret_cast<const bf16 *>(p.x) + row * p.x_stride;
        char *at = staged + i / ROWS * deep * TILE + i % ROWS * 64;
        for (int64_t k = 0; k < p.columns / KTILE; ++k, at += TILE) std::memcpy(at, x + k * KTILE, 64);
        if (const int64_t left = p.columns % KTILE) {
            std::memset(at, 0, 64);
            std::memcpy(at, x + p.columns - left, size_t(left) * 2);
        }
    }
}

} // namespace

/* Returns false, without effect, if the process has no tiles. Rows are read in place, except an incomplete tile's. */
bool linear_tiles(const Product &p, void *scratch) {
    if (!tiles()) return false;
    const int64_t steps = steps_of<bf16>(p.columns), deep = steps / TILE_STEPS, rows = p.last - p.first;
    const int64_t count = (rows + ROWS - 1) / ROWS, plain = p.columns % KTILE ? 0 : rows / ROWS;
    float *sums = static_cast<float *>(scratch);
    char *staged = reinterpret_cast<char *>(sums + count * ROWS * PANEL);
    stage(p, p.first + plain * ROWS, staged, deep);
    configure_tiles();
    const auto at = [&](int64_t tile, int64_t k) {
        if (tile >= plain) return Rows{staged + ((tile - plain) * deep + k) * TILE, 64, TILE};
        return Rows{p.x + ((p.first + tile * ROWS) * p.x_stride + k * KTILE) * 2, p.x_stride * 2, 64};
    };
    const int64_t passes = (count + 1) / 2, lines = (TILE_LINES + passes - 1) / passes;
    const int64_t block = passes > 1 ? DEEP : deep;
    Waiting waiting;
    for (int64_t panel = p.panel; panel < p.end; ++panel)
        for (int64_t k = 0; k < deep; k += block) {
            const int64_t some = std::min(block, deep - k);
            const bool ends = k + block >= deep;
            const char *w = p.weight + (panel * deep + k) * TILE_STEPS * STEP;
            for (int64_t i = 0; i < count; i += 2) {
                const int64_t from = p.first + i * ROWS, last = std::min(from + 2 * ROWS, p.last);
                const char *soon = w + (passes > 1 ? some * (TILE_STEPS * STEP + i / 2 * lines * 64) : AHEAD);
                const char *out = p.out + (from * p.out_stride + panel * PANEL / (p.gated ? 2 : 1)) * 2;
                const Ahead ahead = {soon, lines, out, ends ? last - from : 0, p.out_stride * 2};
                float *to = sums + i * ROWS * PANEL;
                if (i + 1 == count) pass<1, false>(p, at(i, k), at(i, k), w, some, to, k > 0, ahead, waiting);
                else if (passes > 2) pass<2, false>(p, at(i, k), at(i + 1, k), w, some, to, k > 0, ahead, waiting);
                else pass<2, true>(p, at(i, k), at(i + 1, k), w, some, to, k > 0, ahead, waiting);
                if (ends) waiting = {panel, from, last, to};
            }
        }
    waiting.finish_some(p, 2 * ROWS);
    _tile_release();
    return true;
}

QUIRE_EXPORT int64_t linear_has_tiles() { return tiles(); }
#else
bool linear_tiles(const Product &, void *) { return false; }
QUIRE_EXPORT int64_t linear_has_tiles() { return 0; }
#endif
