/* Products of rows with a low-bit weight: the layout of the weight, and of rows of x in int8.

A weight [N, K] is stored in panels of PANEL of its rows, as a dense one (linear.h), gated ones too. A panel holds its
numbers, then its scales. Numbers are in steps of four columns: a step holds, for each of the panel's rows in turn, four
numbers of a byte each, an operand of vpdpbusd. With 4 bits two steps share bytes, the first in the lower halves; with 6
bits four steps share the bytes of the upper two bits. Scales are in units, with the numbers of one kind of all rows
adjacent:

    a unit of a group of GROUP columns:  scale (fp16), and least (fp16) if there is one
    one of `super` columns:              scale d, and e (fp16); then of each group a, and b (int8)

A number q represents scale * (q - zero) + least. With a and b, scale is d * a and least is -e * b. With E2M1 the 4 bits
are a floating-point number (MXFP4), and q is twice that plus 12, which is `zero`. */
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "linear.h"

#include <algorithm>

/* Loads LANES fp16 as fp32. */
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
    /* The exponent's bias differs by 112: a product with 2^112 is exact, also for subnormal numbers. */
    const wide size = (wide)((h & 0x7fffu) << 13) * 5.192296858534828e33f;
    return (wide)((wide_bits)size | (h & 0x8000u) << 16);
#endif
}

/* Loads LANES int8 as fp32. */
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

constexpr int E2M1 = -4; /* in place of the bits */
constexpr int width(int64_t bits) { return int(bits < 0 ? -bits : bits); }

struct Form {
    int64_t bits, super, zero; /* `super`: columns of a unit; 0: a unit is a group, without a and b */
    bool least;

    int64_t group() const { return bits == 6 ? 16 : 32; }
    int64_t per() const { return super ? super / group() : 1; } /* groups of a unit */
    int64_t unit() const { return PANEL * (least ? 2 : 1) * (2 + (super ? per() : 0)); }
    int64_t numbers(int64_t columns) const { return columns * PANEL * width(bits) / 8; }
    int64_t panel(int64_t columns) const { return numbers(columns) + columns / (per() * group()) * unit(); }

    /* From four arguments: bits, super, zero, least. */
    explicit Form(const Arg *a) : bits(a[0].integer), super(a[1].integer), zero(a[2].integer), least(a[3].integer) {}
};

/* Rows of x in int8, with a scale for each group. A row is its numbers, then for all groups the scales; -zero times the
   sums of their numbers; and those sums times the scales. */
struct Staged {
    const char *rows;
    int64_t columns, groups;

    static int64_t bytes(int64_t columns, int64_t group) { return (columns + columns / group * 12 + 63) / 64 * 64; }
    Staged(const char *rows, int64_t columns, int64_t group) : rows(rows), columns(columns), groups(columns / group) {}
    const char *row(int64_t i) const { return rows + i * bytes(columns, columns / groups); }
};

/* Columns that all rows multiply before the next ones, so that they stay in the cache; a multiple of every unit. */
constexpr int64_t SPAN = 512;

constexpr int PART = VECTORS <= 2 ? VECTORS : REGISTERS == 32 ? 4 : 2; /* vectors of a pass */
constexpr int ROWS_OF_PASS = (REGISTERS == 32 ? 12 : 4) / PART;

/* Twice the numbers of e2m1, plus 12. */
constexpr unsigned char DOUBLED[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Looks up each byte, below 16, in DOUBLED. */
static inline wide_bits doubled(wide_bits x) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i *>(DOUBLED)));
    return (wide_bits)_mm512_shuffle_epi8(table, (__m512i)x);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(DOUBLED)));
    return (wide_bits)_mm256_shuffle_epi8(table, (__m256i)x);
#else
    wide_bits out{};
    for (int i = 0; i < LANES; ++i)
        for (int b = 0; b < 32; b += 8) out[i] |= uint32_t(DOUBLED[x[i] >> b & 15]) << b;
    return out;
#endif
}

/* Loads the four numbers of step `s` of a group, of LANES rows. */
template <int BITS> static inline wide_bits numbers(const char *at, int s) {
    if (BITS == 8) return load<wide_bits>(at + s * STEP);
    const wide_bits both = load<wide_bits>(at + s / 2 * STEP);
    const wide_bits low = (s % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
    if (BITS == 4) return low;
    if (BITS == E2M1) return doubled(low);
    const wide_bits high = load<wide_bits>(at + 2 * STEP);
    return low | ((s < 2 ? high << (4 - 2 * s) : high >> (2 * s - 4)) & 0x30303030u);
}

/* A span of columns: its numbers, and its scales as fp32, [groups][PANEL]. */
struct Span {
    const char *numbers;
    int64_t first, groups; /* the index of the first group in the row, and their number */
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
