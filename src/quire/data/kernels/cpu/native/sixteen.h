/* Sixteen numbers at a time, whatever the instruction set: a compiler makes two or four instructions of one where its
vectors are shorter. */
#pragma once
#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
#define INLINE static inline __attribute__((always_inline))

INLINE Floats all(float x) { return x - Floats{}; }

INLINE Floats load(const float *p) {
    Floats out;
    std::memcpy(&out, p, sizeof out);
    return out;
}

INLINE Floats load(const bf16 *p) {
    Shorts bits;
    std::memcpy(&bits, p, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Ints) << 16);
}

INLINE void store(float *p, Floats x) { std::memcpy(p, &x, sizeof x); }

/* As from<bf16>. */
INLINE void store(bf16 *p, Floats x) {
    const Ints wide = (Ints)x;
    const Ints rounded = wide + 0x7fff + ((wide >> 16) & 1);
    const Ints nan = (wide & 0x7fffffff) > 0x7f800000;
    const Ints bits = (nan & (wide | 0x400000)) | (~nan & rounded);
    const Shorts out = __builtin_convertvector(bits >> 16, Shorts);
    std::memcpy(p, &out, sizeof out);
}

/* The first `n` of the lanes: 0 to 16 of them. Others are loaded as zeros, and not stored. */
template <class T> INLINE Floats load(const T *p, int64_t n) {
    if (n >= LANES) return load(p);
    T some[LANES] = {};
    std::memcpy(some, p, size_t(n) * sizeof(T));
    return load(some);
}

template <class T> INLINE void store(T *p, Floats x, int64_t n) {
    if (n >= LANES) return store(p, x);
    T some[LANES];
    store(some, x);
    std::memcpy(p, some, size_t(n) * sizeof(T));
}

/* a * b + c, rounded once. */
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    struct Halves { __m256 low, high; } x, y, z;
    std::memcpy(&x, &a, sizeof x), std::memcpy(&y, &b, sizeof y), std::memcpy(&z, &c, sizeof z);
    z.low = _mm256_fmadd_ps(x.low, y.low, z.low), z.high = _mm256_fmadd_ps(x.high, y.high, z.high);
    std::memcpy(&c, &z, sizeof z);
    return c;
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE Floats nearest(Floats x) { /* |x| < 2^22, ties to even */
    const Floats big = all(12582912.0f);
    return (x + big) - big;
}

INLINE Floats select(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

INLINE float sum(Floats x) {
    float parts[LANES];
    store(parts, x);
    for (int64_t width = LANES / 2; width; width /= 2)
        for (int64_t i = 0; i < width; ++i) parts[i] += parts[i + width];
    return parts[0];
}

/* e^x within one unit in the last place, as SLEEF computes it (Shibata and Petrogalli, 2020; `expf_u10`). 0 below -104,
infinite above 100; NaN stays NaN. */
INLINE Floats exponential(Floats x) {
    const Floats q = nearest(x * 1.4426950408889634f);
    Floats s = fused(q, all(-0.693145751953125f), x);
    s = fused(q, all(-1.428606765330187045e-06f), s);
    Floats u = all(0.000198527617612853646278381f);
    u = fused(u, s, all(0.00139304355252534151077271f));
    u = fused(u, s, all(0.00833336077630519866943359f));
    u = fused(u, s, all(0.0416664853692054748535156f));
    u = fused(u, s, all(0.166666671633720397949219f));
    u = fused(u, s, all(0.5f));
    u = fused(s * s, u, s) + 1.0f;
    const Ints exponent = __builtin_convertvector(select(q == q, q, Floats{}), Ints);
    const Ints half = exponent >> 1;
    u = u * (Floats)((half + 127) << 23) * (Floats)((exponent - half + 127) << 23);
    u = select(x < -104.0f, Floats{}, u);
    u = select(x > 100.0f, all(__builtin_inff()), u);
    return select(x == x, u, x);
}

INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    Floats near = fused(square, all(62.0f / 2835), all(-17.0f / 315)); /* its series, of which the terms fall fast */
    near = fused(near, square, all(2.0f / 15));
    near = fused(near, square, all(-1.0f / 3));
    near = fused(near * square, x, x);
    const Floats far = 2.0f * sigmoid(2.0f * x) - 1.0f;
    return select((x < 0.25f) & (x > -0.25f), near, far);
}
