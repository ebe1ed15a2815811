/* Products of rows with a low-bit weight (quantised.h), by vectors: rows in bf16 are rounded to int8, rows in fp32 are
   not. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "quantised.h"

#include <algorithm>

namespace {

constexpr int64_t AHEAD = 2048; /* prefetch distance in the weight, in bytes */

/* Returns sum + the products, in each lane, of four numbers of a row of the weight, up to 2^BITS - 1, and four of x. */
template <int BITS> inline wide_int add(wide_int sum, wide_bits w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (wide_int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    return (wide_int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32(x);
    if (BITS < 8) { /* a sum of two products fits 16 bits */
        const __m512i two = _mm512_maddubs_epi16((__m512i)w, all);
        return sum + (wide_int)_mm512_madd_epi16(two, _mm512_set1_epi16(1));
    }
    const __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255));
    const __m512i odd = _mm512_srli_epi16((__m512i)w, 8);
    sum += (wide_int)_mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8));
    return sum + (wide_int)_mm512_madd_epi16(odd, _mm512_srai_epi16(all, 8));
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi32(x);
    if (BITS < 8) {
        const __m256i two = _mm256_maddubs_epi16((__m256i)w, all);
        return sum + (wide_int)_mm256_madd_epi16(two, _mm256_set1_epi16(1));
    }
    const __m256i even = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255));
    const __m256i odd = _mm256_srli_epi16((__m256i)w, 8);
    sum += (wide_int)_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    return sum + (wide_int)_mm256_madd_epi16(odd, _mm256_srai_epi16(all, 8));
#else
    for (int i = 0; i < 4; ++i) sum += (wide_int)((w >> (8 * i)) & 255u) * int32_t(int8_t(uint32_t(x) >> (8 * i)));
    return sum;
#endif
}

/* Products of a group's numbers with x in int8. */
template <int BITS> struct Rounded {
    static constexpr int GROUP = BITS == 6 ? 16 : 32, STEPS = GROUP / 4, ROWS = ROWS_OF_PASS;
    const char *x; /* a row (Staged) */
    int64_t columns, groups;
    typedef wide_int Sum;
    float scale, total;

    void at(int64_t row, const Staged &staged) { x = staged.row(row), columns = staged.columns, groups = staged.groups; }
    Sum start(int64_t group, int64_t) {
        const char *more = x + columns + group * 4;
        int32_t first;
        std::memcpy(&scale, more, 4);
        std::memcpy(&first, more + groups * 4, 4);
        std::memcpy(&total, more + groups * 8, 4);
        return first - wide_int{};
    }
    Sum step(Sum sum, wide_bits w, int64_t group, int s) const {
        int32_t four;
        std::memcpy(&four, x + group * GROUP + s * 4, 4);
        return add<BITS>(sum, w, four);
    }
    wide scaled(Sum sum, wide by) const { return __builtin_convertvector(sum, wide) * (by * scale); }
};

/* Products of a group's numbers with x in fp32. */
template <int BITS> struct Exact {
    static constexpr int GROUP = BITS == 6 ? 16 : 32, STEPS = GROUP / 4, ROWS = 2;
    const float *x;
    float zero;
    typedef wide Sum;
    float total;

    void at(int64_t row, const Product &p) { x = reinterpret_cast<const float *>(p.x) + (p.first + row) * p.x_stride; }
    Sum start(int64_t group, int64_t zero_) {
        zero = float(zero_), total = 0;
        for (int i = 0; i < GROUP; ++i) total += x[group * GROUP + i];
        return wide{};
    }
    Sum step(Sum sum, wide_bits w, int64_t group, int s) const {
        for (int i = 0; i < 4; ++i)
            sum += (__builtin_convertvector((wide_int)((w >> (8 * i)) & 255u), wide) - zero) * x[group * GROUP + s * 4 + i];
        return sum;
    }
    wide scaled(Sum sum, wide by) const { return sum * by; }
};

/* sums [R, PANEL] += R rows of x times a span, for PART vectors of lanes from `lane` on. */
template <template <int> class X, int BITS, bool LEAST, int R>
inline void part(X<BITS> *x, const Span &span, int64_t zero, int64_t lane, float *sums) {
    constexpr int GROUP = X<BITS>::GROUP, STEPS = X<BITS>::STEPS;
    constexpr int64_t BYTES = GROUP * PANEL * width(BITS) / 8;
    wide sum[R][PART];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < PART; ++v) sum[r][v] = load<wide>(sums + r * PANEL + lane + v * LANES);
    const char *at = span.numbers + lane * 4;
    for (int64_t g = 0; g < span.groups; ++g, at += BYTES) {
        typename X<BITS>::Sum own[R][PART];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const auto first = x[r].start(span.first + g, zero);
#pragma GCC unroll 8
            for (int v = 0; v < PART; ++v) own[r][v] = first;
        }
#pragma GCC unroll 8
        for (int s = 0; s < STEPS; ++s) {
            wide_bits w[PART];
#pragma GCC unroll 8
            for (int v = 0; v < PART; ++v) w[v] = numbers<BITS>(at + v * LANES * 4, s);
            if (BITS == 8 || s % 2 == 0) {
                __builtin_prefetch(at + AHEAD + (BITS == 8 ? s : s / 2) * STEP);
                if (PART == VECTORS) __builtin_prefetch(at + AHEAD + (BITS == 8 ? s : s / 2) * STEP + 64);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < PART; ++v) own[r][v] = x[r].step(own[r][v], w[v], span.first + g, s);
        }
#pragma GCC unroll 8
        for (int v = 0; v < PART; ++v) {
            const int64_t place = g * PANEL + lane + v * LANES;
            const wide scale = load<wide>(span.scale + place), least = LEAST ? load<wide>(span.least + place) : wide{};
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                sum[r][v] += x[r].scaled(own[r][v], scale);
                if (LEAST) sum[r][v] += least * x[r].total;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < PART; ++v) store(sums + r * PANEL + lane + v * LANES, sum[r][v]);
}

template <template <int> class X, int BITS, bool LEAST, int R = X<BITS>::ROWS>
inline void pass(int64_t rows, X<BITS> *x, const Span &span, int64_t zero, float *sums) {
    if (rows == R)
        for (int64_t lane = 0; lane < PANEL; lane += PART * LANES) part<X, BITS, LEAST, R>(x, span, zero, lane, sums);
    else if constexpr (R > 1)
        pass<X, BITS, LEAST, R - 1>(rows, x, span, zero, sums);
}

/* X: Rounded or Exact, made of a row by `at(row, from)`; T: the dtype of `out`. */
template <class T, template <int> class X, int BITS, bool LEAST, class From>
void product(const Product &p, const Form &form, const From &from, float *sums) {
    constexpr int ROWS = X<BITS>::ROWS;
    const int64_t rows = p.last - p.first, blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t panel = p.panel; panel < p.end; ++panel) {
        const char *weight = p.weight + panel * form.panel(p.columns);
        std::fill(sums, sums + rows * PANEL, 0.0f);
        for (int64_t k = 0; k < p.columns; k += SPAN) {
            const Span span(weight, p.columns, k, form);
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t first = rows * b / blocks, last = rows * (b + 1) / blocks;
                X<BITS> x[ROWS];
                for (int64_t r = first; r < last; ++r) x[r - first].at(r, from);
                pass<X, BITS, LEAST>(last - first, x, span, form.zero, sums + first * PANEL);
            }
        }
        finish<T>(p, panel, p.first, p.last, sums);
    }
}

template <class T, template <int> class X, class From>
void product_of(const Product &p, const Form &form, const From &from, float *sums) {
    if (form.bits == 8) form.least ? product<T, X, 8, true>(p, form, from, sums) : product<T, X, 8, false>(p, form, from, sums);
    if (form.bits == 4) form.least ? product<T, X, 4, true>(p, form, from, sums) : product<T, X, 4, false>(p, form, from, sums);
    if (form.bits == 6) product<T, X, 6, false>(p, form, from, sums);
    if (form.bits == E2M1) product<T, X, E2M1, false>(p, form, from, sums);
}

/* Rounds a row of x [columns] to the layout of Staged. A number that is not finite makes its group's scale NaN. */
template <int GROUP> void stage(const bf16 *x, int64_t columns, int64_t zero, char *out) {
    const int64_t groups = columns / GROUP;
    int8_t *numbers = reinterpret_cast<int8_t *>(out);
    float *scales = reinterpret_cast<float *>(out + columns), *totals = scales + 2 * groups;
    int32_t *starts = reinterpret_cast<int32_t *>(scales + groups);
    for (int64_t g = 0; g < groups; ++g, x += GROUP, numbers += GROUP) {
        uint32_t largest = 0;
        for (int i = 0; i < GROUP; ++i) largest = std::max(largest, uint32_t(x[i].bits & 0x7fffu));
        const float most = to(bf16{uint16_t(largest)});
        const bool some = !(most < 1e-30f); /* NaN too */
        const float scale = largest >= 0x7f80u ? to(bf16{0x7fc0}) : some ? most / 127.0f : 0.0f, by = some ? 127.0f / most : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < GROUP; ++i) {
            const float shifted = to(x[i]) * by + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            const int8_t q = int8_t(bits - 0x4b400000);
            numbers[i] = q;
            sum += q;
        }
        scales[g] = scale, starts[g] = int32_t(-zero) * sum, totals[g] = scale * float(sum);
    }
}

void stage(const bf16 *x, int64_t columns, const Form &form, char *out) {
    form.group() == 16 ? stage<16>(x, columns, form.zero, out) : stage<32>(x, columns, form.zero, out);
}

/* Returns the number in row `lane` and column `k` of a packed panel. */
inline int number(const char *panel, const Form &form, int64_t lane, int64_t k) {
    const int64_t group = form.group(), s = k % group / 4;
    const unsigned char *at = reinterpret_cast<const unsigned char *>(panel) + form.numbers(k / group * group) + lane * 4 + k % 4;
    if (form.bits == 8) return at[s * STEP];
    const int low = at[s / 2 * STEP] >> (s % 2 * 4) & 15;
    if (form.bits == E2M1) return DOUBLED[low];
    return form.bits == 4 ? low : low | (at[2 * STEP] >> (2 * s) & 3) << 4;
}

/* Args: numbers uint8 [rows, columns], d and e fp16 [rows, units], a and b int8 [rows, groups], packed, rows, columns,
   gated, the form. e, a and b may be null. A chunk is a panel. */
void pack(const Arg *a, int64_t panel) {
    const int64_t rows = a[6].integer, columns = a[7].integer;
    const Form form(a + 9);
    const int64_t group = form.group(), units = columns / (group * form.per()), groups = columns / group;
    char *out = as<char>(a[5]) + panel * form.panel(columns);
    std::memset(out, 0, size_t(form.panel(columns)));
    for (int64_t lane = 0; lane < PANEL; ++lane) {
        const int64_t row = source(panel * PANEL + lane, rows, a[8].integer);
        if (row < 0) continue;
        const unsigned char *q = as<unsigned char>(a[0]) + row * columns;
        for (int64_t k = 0; k < columns; ++k) {
            const int64_t s = k % group / 4;
            unsigned char *at = reinterpret_cast<unsigned char *>(out) + form.numbers(k / group * group) + lane * 4 + k % 4;
            if (form.bits == 8) at[s * STEP] = q[k];
            else at[s / 2 * STEP] |= static_cast<unsigned char>((q[k] & 15) << (s % 2 * 4));
            if (form.bits == 6) at[2 * STEP] |= static_cast<unsigned char>(q[k] >> 4 << (2 * s));
        }
        for (int64_t u = 0; u < units; ++u) {
            char *at = out + form.numbers(columns) + u * form.unit();
            std::memcpy(at + 2 * lane, as<char>(a[1]) + (row * units + u) * 2, 2);
            if (form.least) std::memcpy(at + 2 * (PANEL + lane), as<char>(a[2]) + (row * units + u) * 2, 2);
            if (!form.super) continue;
            at += PANEL * (form.least ? 4 : 2) + lane;
            for (int64_t g = u * form.per(); g < (u + 1) * form.per(); ++g, at += PANEL * (form.least ? 2 : 1)) {
                at[0] = as<char>(a[3])[row * groups + g];
                if (form.least) at[PANEL] = as<char>(a[4])[row * groups + g];
            }
        }
    }
}

/* Reads rows `ids` (int64) of a packed weight that is not gated, times `scale`. Args: ids, packed, out, count, columns,
   out_stride (in numbers), scale, rows of a chunk, the form. */
template <class T> void rows_of(const Arg *a, int64_t chunk) {
    const int64_t columns = a[4].integer;
    const Form form(a + 8);
    const int64_t group = form.group();
    for (int64_t i = chunk * a[7].integer; i < std::min(a[3].integer, (chunk + 1) * a[7].integer); ++i) {
        const int64_t row = as<int64_t>(a[0])[i], lane = row % PANEL;
        const char *panel = as<char>(a[1]) + row / PANEL * form.panel(columns);
        T *out = as<T>(a[2]) + i * a[5].integer;
        for (int64_t from_ = 0; from_ < columns; from_ += SPAN) {
            const Span span(panel, columns, from_, form);
            for (int64_t k = from_; k < std::min(from_ + SPAN, columns); ++k) {
                const int64_t at = (k - from_) / group * PANEL + lane;
                const float scaled = float(number(panel, form, lane, k) - form.zero) * span.scale[at];
                out[k] = from<T>((scaled + (form.least ? span.least[at] : 0.0f)) * float(a[6].number));
            }
        }
    }
}

} // namespace

/* Args: x, staged, count, columns, x_stride (in numbers), rows of a chunk, the form. */
QUIRE_EXPORT void quantised_stage(const Arg *a, int64_t chunk, void *) {
    const Form form(a + 6);
    const int64_t columns = a[3].integer, bytes = Staged::bytes(columns, form.group());
    for (int64_t i = chunk * a[5].integer; i < std::min(a[2].integer, (chunk + 1) * a[5].integer); ++i)
        stage(as<bf16>(a[0]) + i * a[4].integer, columns, form, as<char>(a[1]) + i * bytes);
}

/* Args: those of linear_bf16, then `staged` (all rows of x, or null), the form, and whether to use tiles. */
QUIRE_EXPORT void quantised_bf16(const Arg *a, int64_t chunk, void *scratch) {
    const Product p(a, chunk);
    const Form form(a + 16);
    if (a[20].integer && quantised_tiles(p, form, scratch)) return;
    float *sums = static_cast<float *>(scratch);
    const int64_t bytes = Staged::bytes(p.columns, form.group());
    char *staged = reinterpret_cast<char *>(sums + (p.last - p.first) * PANEL);
    if (a[15].pointer)
        staged = as<char>(a[15]) + p.first * bytes;
    else
        for (int64_t row = p.first; row < p.last; ++row)
            stage(reinterpret_cast<const bf16 *>(p.x) + row * p.x_stride, p.columns, form, staged + (row - p.first) * bytes);
    product_of<bf16, Rounded>(p, form, Staged(staged, p.columns, form.group()), sums);
}

QUIRE_EXPORT void quantised_f32(const Arg *a, int64_t chunk, void *scratch) {
    const Product p(a, chunk);
    product_of<float, Exact>(p, Form(a + 16), p, static_cast<float *>(scratch));
}

QUIRE_EXPORT void pack_quantised(const Arg *a, int64_t chunk, void *) { pack(a, chunk); }
QUIRE_EXPORT void quantised_rows_bf16(const Arg *a, int64_t chunk, void *) { rows_of<bf16>(a, chunk); }
QUIRE_EXPORT void quantised_rows_f32(const Arg *a, int64_t chunk, void *) { rows_of<float>(a, chunk); }
