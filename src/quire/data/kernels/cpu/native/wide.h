/* Vectors as wide as the machine's registers, of fp32 lanes; the compiler knows them on every machine. */
#pragma once
#include "numbers.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

typedef float wide __attribute__((vector_size(LANES * 4)));
typedef int32_t wide_int __attribute__((vector_size(LANES * 4)));
typedef uint32_t wide_bits __attribute__((vector_size(LANES * 4)));

template <class V> static inline V load(const void *from) {
    V out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

static inline void store(void *at, wide x) { std::memcpy(at, &x, sizeof x); }

static inline void put(float *at, wide x) { store(at, x); }

/* To the nearest, ties to even; what is not a number stays so. */
static inline void put(bf16 *at, wide x) {
#if defined(__AVX512BF16__)
    const __m256bh out = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(at, &out, sizeof out);
#else
    typedef uint16_t narrow __attribute__((vector_size(LANES * 2)));
    const wide_bits bits = (wide_bits)x, kept = (bits >> 16) | 0x40u, near = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const narrow out = __builtin_convertvector(x == x ? near : kept, narrow);
    std::memcpy(at, &out, sizeof out);
#endif
}

static inline wide all(float x) { return x - wide{}; }

/* e^x to 2 units in the last place; x is cut to [-87, 88]; NaN stays so. */
static inline wide exp_of(wide x) {
    const wide low = all(-87.0f), high = all(88.0f), magic = all(12582912.0f); /* 1.5 * 2^23: integers lie there */
    x = x < low ? low : x;
    x = x > high ? high : x;
    const wide shifted = x * 1.44269504f + magic, n = shifted - magic;
    const wide r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    wide p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (wide)(((wide_int)shifted - (wide_int)magic + 127) << 23);
}

static inline wide sigmoid(wide x) { return 1.0f / (1.0f + exp_of(-x)); }

/* erf to 2e-7 (Abramowitz and Stegun, 7.1.26). */
static inline wide erf_of(wide x) {
    const wide z = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * z);
    const wide p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const wide y = 1.0f - p * exp_of(-z * z);
    return x < 0 ? -y : y;
}

/* What configs call activations; the numbers are those of linear.py. */
enum Activation { NONE, SILU, RELU, GELU, GELU_TANH, GELU_QUICK };

static inline wide activate(wide x, int64_t kind) {
    switch (kind) {
    case SILU: return x * sigmoid(x);
    case RELU: return x < 0 ? wide{} : x; /* NaN stays NaN */
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
    case GELU_TANH: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case GELU_QUICK: return x * sigmoid(1.702f * x);
    default: return x;
    }
}
