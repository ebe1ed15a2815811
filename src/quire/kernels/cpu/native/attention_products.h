/* Products of small blocks of words for attention to prompts: sums [16, columns] of words [16, steps] by words [steps,
columns]. A word is an fp32, or with PAIRS two bf16, which are multiplied and summed at once: by AMX tiles where there
are any, else by vectors. */
#pragma once
#include "lanes.h"

constexpr int HEIGHT = 16; /* rows of a block */

#if defined(__AMX_BF16__) && defined(__linux__)
#include "tiles.h"

/* Called before the first product of a chunk. */
static inline void begin_tiles() { configure_tiles(); }
static inline void end_tiles() { _tile_release(); }

template <bool MORE>
static inline void tile_product(const uint32_t *x, int64_t ldx, const uint32_t *y, int64_t ldy, float *sums, int64_t lds,
                                int64_t steps, int64_t columns) {
    int64_t c = 0;
    in_memory();
    for (; c + 64 <= columns; c += 64) {
        if (MORE) {
            _tile_loadd(0, sums + c, size_t(lds) * 4);
            _tile_loadd(1, sums + c + 16, size_t(lds) * 4);
            _tile_loadd(2, sums + c + 32, size_t(lds) * 4);
            _tile_loadd(3, sums + c + 48, size_t(lds) * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t s = 0; s < steps; s += 16) {
            const uint32_t *from = y + s * ldy + c;
            _tile_loadd(4, x + s, size_t(ldx) * 4);
            _tile_loadd(5, from, size_t(ldy) * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, from + 16, size_t(ldy) * 4);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, from + 32, size_t(ldy) * 4);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, from + 48, size_t(ldy) * 4);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, sums + c, size_t(lds) * 4);
        _tile_stored(1, sums + c + 16, size_t(lds) * 4);
        _tile_stored(2, sums + c + 32, size_t(lds) * 4);
        _tile_stored(3, sums + c + 48, size_t(lds) * 4);
    }
    for (; c < columns; c += 16) {
        if (MORE) _tile_loadd(0, sums + c, size_t(lds) * 4);
        else _tile_zero(0);
        for (int64_t s = 0; s < steps; s += 16) {
            _tile_loadd(4, x + s, size_t(ldx) * 4);
            _tile_loadd(5, y + s * ldy + c, size_t(ldy) * 4);
            _tile_dpbf16ps(0, 4, 5);
        }
        _tile_stored(0, sums + c, size_t(lds) * 4);
    }
}
#else
static inline bool tiles() { return false; }
static inline void begin_tiles() {}
static inline void end_tiles() {}
template <bool MORE>
static inline void tile_product(const uint32_t *, int64_t, const uint32_t *, int64_t, float *, int64_t, int64_t, int64_t) {}
#endif

/* Returns whether to multiply bf16 in pairs: with tiles, and with vectors on AMD (an Intel CPU without tiles takes four
times as long for a vector of pairs as for one of fp32). */
static inline bool paired() {
#if defined(__AVX512BF16__)
    return tiles() || __builtin_cpu_is("amd") != 0;
#else
    return false;
#endif
}

/* Returns sum + the products of x and y, word by word. */
template <bool PAIRS> static inline lanes fold(lanes sum, words x, words y) {
#if defined(__AVX512BF16__)
    if (PAIRS) return bits<lanes>(_mm512_dpbf16_ps(bits<__m512>(sum), bits<__m512bh>(x), bits<__m512bh>(y)));
#endif
    return sum + bits<lanes>(x) * bits<lanes>(y);
}

template <bool PAIRS, int R, int C, bool MORE>
static inline void panel(const uint32_t *x, int64_t ldx, const uint32_t *y, int64_t ldy, float *sums, int64_t lds,
                         int64_t steps) {
    lanes sum[R][C];
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int c = 0; c < C; ++c) sum[r][c] = MORE ? load(sums + r * lds + c * LANES) : lanes{};
    for (int64_t s = 0; s < steps; ++s) {
        words right[C];
        UNROLL
        for (int c = 0; c < C; ++c) std::memcpy(&right[c], y + s * ldy + c * LANES, sizeof(words));
        UNROLL
        for (int r = 0; r < R; ++r) {
            const words left = words{} + x[r * ldx + s];
            UNROLL
            for (int c = 0; c < C; ++c) sum[r][c] = fold<PAIRS>(sum[r][c], left, right[c]);
        }
    }
    UNROLL
    for (int r = 0; r < R; ++r)
        UNROLL
        for (int c = 0; c < C; ++c) store(sums + r * lds + c * LANES, sum[r][c]);
}

/* Computes sums [16, columns] = x [16, steps] y [steps, columns], or += with MORE; `steps` is a multiple of 16 if
   `tiled`, `columns` of LANES. */
template <bool PAIRS, bool MORE>
static inline void product(bool tiled, const uint32_t *x, int64_t ldx, const uint32_t *y, int64_t ldy, float *sums,
                           int64_t lds, int64_t steps, int64_t columns) {
    if (tiled) return tile_product<MORE>(x, ldx, y, ldy, sums, lds, steps, columns);
    constexpr int R = LANES == 16 ? 8 : 4, C = 2;
    int64_t c = 0;
    for (; c + C * LANES <= columns; c += C * LANES)
        for (int r = 0; r < HEIGHT; r += R)
            panel<PAIRS, R, C, MORE>(x + r * ldx, ldx, y + c, ldy, sums + r * lds + c, lds, steps);
    for (; c < columns; c += LANES)
        for (int r = 0; r < HEIGHT; r += R)
            panel<PAIRS, R, 1, MORE>(x + r * ldx, ldx, y + c, ldy, sums + r * lds + c, lds, steps);
}
