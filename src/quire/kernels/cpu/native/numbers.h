/* Conversions between the dtypes in memory and fp32, in which everything is computed. */
#pragma once
#include "quire.h"

#include <cstring>

struct bf16 {
    uint16_t bits;
};

static inline float to(float x) { return x; }

static inline float to(bf16 x) {
    const uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

template <class T> static inline T from(float x);

template <> inline float from<float>(float x) { return x; }

/* Rounds to nearest, ties to even; NaN stays NaN. */
template <> inline bf16 from<bf16>(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    const bool nan = (wide & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    return bf16{uint16_t(nan ? (wide >> 16) | 0x40u : rounded)};
}
