/* Products of rows in bf16 with a packed weight (linear.h), by AMX's tiles. */
#include "linear.h"
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <algorithm>

namespace {

constexpr int64_t ROWS = 16, TILE = ROWS * 64, TILE_STEPS = KTILE / 2, DEEP = 1024; /* steps of a block */
constexpr int64_t AHEAD = 4096;

/* Where 16 or 32 rows of x are; `stride`: bytes from one to the next, `deep`: from a tile's columns to the next one's. */
struct Rows {
    const char *first, *second;
    int64_t stride, deep;
};

/* Sums [16 or 32, PANEL] of rows of x times a panel's `steps`; `more`: added to those that are there. FIRST: nobody has read these steps yet. */
template <int R, bool FIRST>
inline void pass(Rows x, const char *w, int64_t steps, float *sums, bool more) {
    float *below = sums + ROWS * PANEL;
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
    for (int64_t s = 0; s < steps; s += TILE_STEPS, w += TILE_STEPS * STEP) {
        if (FIRST)
            for (int64_t i = 0; i < TILE_STEPS * STEP; i += 64) __builtin_prefetch(w + AHEAD + i);
        _tile_loadd(4, x.first, x.stride);
        x.first += x.deep;
        _tile_loadd(6, w, STEP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, STEP);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
            _tile_loadd(5, x.second, x.stride);
            x.second += x.deep;
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (R == 2) {
        _tile_stored(2, below, PANEL * 4);
        _tile_stored(3, below + 16, PANEL * 4);
    }
}

/* Rows of x from `row` on as tiles, [of 16 rows][of KTILE columns][16][KTILE]: zeros behind the last column. Behind the
   last row is anything, and nobody reads what comes of it. */
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

/* False, and nothing is done, where the process has no tiles. Rows are read where they are, but for those that fill no
   tile. */
bool linear_tiles(const Product &p, void *scratch) {
    if (!tiles()) return false;
    const int64_t steps = steps_of<bf16>(p.columns), deep = steps / TILE_STEPS, rows = p.last - p.first;
    const int64_t count = (rows + ROWS - 1) / ROWS, plain = p.columns % KTILE ? 0 : rows / ROWS;
    float *sums = static_cast<float *>(scratch);
    char *staged = reinterpret_cast<char *>(sums + count * ROWS * PANEL);
    stage(p, p.first + plain * ROWS, staged, deep);
    configure_tiles();
    const auto at = [&](int64_t tile, int64_t k) {
        if (tile >= plain) return staged + ((tile - plain) * deep + k) * TILE;
        return const_cast<char *>(p.x) + ((p.first + tile * ROWS) * p.x_stride + k * KTILE) * 2;
    };
    for (int64_t panel = p.panel; panel < p.end; ++panel) {
        const char *weight = p.weight + panel * steps * STEP;
        for (int64_t s = 0; s < steps; s += DEEP)
            for (int64_t i = 0; i < count;) {
                const bool own = i >= plain, two = own ? i + 1 < count : i + 1 < plain;
                const int64_t k = s / TILE_STEPS, some = std::min(DEEP, steps - s);
                const Rows x = {at(i, k), at(i + 1, k), own ? 64 : p.x_stride * 2, own ? TILE : 64};
                const char *w = weight + s * STEP;
                float *to = sums + (steps > DEEP ? i * ROWS * PANEL : 0);
                if (two)
                    i ? pass<2, false>(x, w, some, to, s > 0) : pass<2, true>(x, w, some, to, s > 0);
                else
                    i ? pass<1, false>(x, w, some, to, s > 0) : pass<1, true>(x, w, some, to, s > 0);
                const int64_t from = p.first + i * ROWS;
                i += two ? 2 : 1;
                if (s + DEEP >= steps) finish<bf16>(p, panel, from, std::min(p.first + i * ROWS, p.last), to);
            }
    }
    _tile_release();
    return true;
}

QUIRE_EXPORT int64_t linear_has_tiles() { return tiles(); }
#else
bool linear_tiles(const Product &, void *) { return false; }
QUIRE_EXPORT int64_t linear_has_tiles() { return 0; }
#endif
