/* Products of many rows in bf16 with a low-bit weight (quantised.h), by AMX tiles: a panel is converted to bf16, and
   stays in the cache while all rows of a chunk are multiplied by it. */
#include "quantised.h"

#if defined(__AMX_BF16__)
#include "tiles.h"

namespace {

/* Returns 16 rows' numbers of two columns, interleaved, in bf16. */
inline __m512i pairs(wide even, wide odd) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both);
}

/* Unpacks a panel to the layout of a dense one in bf16, [columns / 2 steps][PANEL][2]. */
template <int BITS> void unpack(const char *panel, int64_t columns, const Form &form, char *out) {
    constexpr int GROUP = BITS == 6 ? 16 : 32;
    for (int64_t k = 0; k < columns; k += SPAN) {
        const Span span(panel, columns, k, form);
        const char *at = span.numbers;
        for (int64_t g = 0; g < span.groups; ++g, at += GROUP * PANEL * width(BITS) / 8)
            for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                const wide scale = load<wide>(span.scale + g * PANEL + lane);
                const wide least = form.least ? load<wide>(span.least + g * PANEL + lane) : wide{};
                char *to = out + (k + g * GROUP) / 2 * STEP + lane * 4;
#pragma GCC unroll 8
                for (int s = 0; s < GROUP / 4; ++s, to += 2 * STEP) {
                    const wide_bits w = numbers<BITS>(at + lane * 4, s);
                    wide four[4];
#pragma GCC unroll 4
                    for (int i = 0; i < 4; ++i) {
                        const wide_int q = (wide_int)((w >> (8 * i)) & 255u) - int32_t(form.zero);
                        four[i] = __builtin_convertvector(q, wide) * scale + least;
                    }
                    _mm512_storeu_si512(to, pairs(four[0], four[1]));
                    _mm512_storeu_si512(to + STEP, pairs(four[2], four[3]));
                }
            }
    }
}

} // namespace

/* Returns false, without effect, if the process has no tiles. */
bool quantised_tiles(const Product &p, const Form &form, void *scratch) {
    if (!tiles()) return false;
    char *plain = static_cast<char *>(scratch), *rest = plain + p.columns * PANEL * 2;
    Product one = p;
    for (int64_t panel = p.panel; panel < p.end; ++panel) {
        const char *weight = p.weight + panel * form.panel(p.columns);
        (form.bits == 8   ? unpack<8>
         : form.bits == 4 ? unpack<4>
         : form.bits == 6 ? unpack<6>
                          : unpack<E2M1>)(weight, p.columns, form, plain);
        one.panel = panel, one.end = panel + 1;
        one.weight = plain - panel * p.columns * PANEL * 2;
        linear_tiles(one, rest);
    }
    return true;
}
#else
bool quantised_tiles(const Product &, const Form &, void *) { return false; }
#endif
