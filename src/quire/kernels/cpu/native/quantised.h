/* Products of rows with a weight of few bits: how it lies, and how rows of x lie beside it.

A weight [N, K] lies in panels of PANEL of its rows, as a dense one does (linear.h), gated ones too. A panel holds its
numbers, then its scales. Numbers go by steps of four columns: a step holds, of each of the panel's rows in turn, four
numbers in a byte each, which is what vpdpbusd multiplies. Of 4 bits two steps share bytes, the first in the lower
halves; of 6 bits four steps share the upper two bits. Scales go by units, all rows' numbers of one kind side by side:

    a unit of a group of GROUP columns:  scale (fp16), and least (fp16) if there is one
    one of `super` columns:              scale d, and e (fp16); then of each group a, and b (int8)

A number q stands for scale * (q - zero) + least, which are d * a and -e * b where there are a and b. */
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "linear.h"

#include <algorithm>

/* LANES fp16 as fp32. */
static inline wide halves(const char *at) {
#if defined(__AVX512F__)
    return (wide)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
#elif defined(__F16C__)
    return (wide)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
#else
    wide_bits h;
    for (int i = 0; i < LANES; ++i) {
        uint16_t one;
        std::memcpy(&one, at + 2 * i, 2);
        h[i] = one;
    }
    /* The exponent's bias differs by 112: a product with 2^112 is exact, of subnormal ones too. */
    const wide size = (wide)((h & 0x7fffu) << 13) * 5.192296858534828e33f;
    return (wide)((wide_bits)size | (h & 0x8000u) << 16);
#endif
}

/* LANES int8 as fp32. */
static inline wide bytes(const char *at) {
#if defined(__AVX512F__)
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return __builtin_convertvector((wide_int)_mm512_maskz_cvtepi8_epi32(0xffff, some), wide);
#elif defined(__AVX2__)
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at));
    return __builtin_convertvector((wide_int)_mm256_cvtepi8_epi32(some), wide);
#else
    wide out;
    for (int i = 0; i < LANES; ++i) out[i] = float(static_cast<signed char>(at[i]));
    return out;
#endif
}

struct Form {
    int64_t bits, super, zero; /* `super`: columns of a unit, 0: a group's, without a and b */
    bool least;

    int64_t group() const { return bits == 6 ? 16 : 32; }
    int64_t per() const { return super ? super / group() : 1; } /* groups of a unit */
    int64_t unit() const { return PANEL * (least ? 2 : 1) * (2 + (super ? per() : 0)); }
    int64_t numbers(int64_t columns) const { return columns * PANEL * bits / 8; }
    int64_t panel(int64_t columns) const { return numbers(columns) + columns / (per() * group()) * unit(); }

    /* From four arguments: bits, super, zero, least. */
    explicit Form(const Arg *a) : bits(a[0].integer), super(a[1].integer), zero(a[2].integer), least(a[3].integer) {}
};

/* Rows of x in int8, by groups with a scale each. A row is its numbers, then of each group: the scale; -zero times the
   sum of its numbers; and that sum times the scale. */
struct Staged {
    const char *rows;
    int64_t columns, groups;

    static int64_t bytes(int64_t columns, int64_t group) { return (columns + columns / group * 12 + 63) / 64 * 64; }
    Staged(const char *rows, int64_t columns, int64_t group) : rows(rows), columns(columns), groups(columns / group) {}
    const char *row(int64_t i) const { return rows + i * bytes(columns, columns / groups); }
};

/* Columns whose numbers stay in the cache while many rows go over them; whole units of any form. */
constexpr int64_t SPAN = 512;

constexpr int PART = VECTORS <= 2 ? VECTORS : REGISTERS == 32 ? 4 : 2; /* vectors of a pass */
constexpr int ROWS_OF_PASS = (REGISTERS == 32 ? 12 : 4) / PART;

/* Four numbers of LANES rows, those of step `s` of a group. */
template <int BITS> static inline wide_bits numbers(const char *at, int s) {
    if (BITS == 8) return load<wide_bits>(at + s * STEP);
    const wide_bits both = load<wide_bits>(at + s / 2 * STEP);
    const wide_bits low = (s % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
    if (BITS == 4) return low;
    const wide_bits high = load<wide_bits>(at + 2 * STEP);
    return low | ((s < 2 ? high << (4 - 2 * s) : high >> (2 * s - 4)) & 0x30303030u);
}

/* A span of columns: its numbers, and its scales as fp32, [groups][PANEL]. */
struct Span {
    const char *numbers;
    int64_t first, groups; /* the first one of the row's */
    alignas(64) float scale[SPAN / 16 * PANEL], least[SPAN / 32 * PANEL];

    Span(const char *panel, int64_t columns, int64_t k, const Form &form)
        : numbers(panel + form.numbers(k)), first(k / form.group()), groups(std::min(SPAN, columns - k) / form.group()) {
        const char *unit = panel + form.numbers(columns) + first / form.per() * form.unit();
        if (form.super)
            form.least ? read<true, true>(unit, form) : read<true, false>(unit, form);
        else
            form.least ? read<false, true>(unit, form) : read<false, false>(unit, form);
    }

    template <bool SUPER, bool LEAST> void read(const char *unit, const Form &form) {
        const int64_t per = SUPER ? form.per() : 1, bytes_ = form.unit();
        constexpr int64_t EACH = PANEL * (LEAST ? 2 : 1);
        for (int64_t g = 0; g < groups; g += per, unit += bytes_)
            for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                const wide d = halves(unit + 2 * lane), e = LEAST ? halves(unit + 2 * (PANEL + lane)) : wide{};
                const char *a = unit + 2 * EACH + lane;
                for (int64_t i = 0; i < per; ++i, a += EACH) {
                    const int64_t at = (g + i) * PANEL + lane;
                    store(scale + at, SUPER ? d * bytes(a) : d);
                    if (LEAST) store(least + at, SUPER ? -e * bytes(a + PANEL) : e);
                }
            }
    }
};

bool quantised_tiles(const Product &product, const Form &form, void *scratch);
