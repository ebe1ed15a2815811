/* Vectors of fp32 of the instruction set's width, by portable vector extensions of compilers. First loads, which read
no number beyond the requested ones, stores, sums across lanes, transposition; then mathematical functions and
activations. */
#pragma once
#include "numbers.h"

#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized" /* false alarms in GCC's immintrin.h */
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
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

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t signs __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));

template <class To, class From> static inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To out;
    std::memcpy(&out, &x, sizeof out);
    return out;
}

static inline lanes all(float x) { return x - lanes{}; }

/* Loads a vector from unaligned memory, without conversion. */
template <class V> static inline V load(const void *x) {
    V out;
    std::memcpy(&out, x, sizeof out);
    return out;
}

static inline lanes load(const float *x) { return load<lanes>(x); }

static inline lanes load(const bf16 *x) {
    return bits<lanes>(__builtin_convertvector(load<shorts>(x), words) << 16);
}

/* Loads the first `count` numbers, then zeros; reads nothing after them. */
template <class T> static inline lanes load(const T *x, int64_t count) {
    if (count >= LANES) return load(x);
#if defined(__AVX512F__)
    const uint32_t mask = (1u << (count < 0 ? 0 : count)) - 1u;
    if (std::is_same<T, float>::value) return bits<lanes>(_mm512_maskz_loadu_ps(__mmask16(mask), x));
    const words wide = bits<words>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(mask), x)));
    return bits<lanes>(wide << 16);
#else
    T own[LANES] = {};
    if (count > 0) std::memcpy(own, x, size_t(count) * sizeof(T));
    return load(own);
#endif
}

static inline void store(float *to, lanes x) { std::memcpy(to, &x, sizeof x); }

/* Rounds to nearest, ties to even; NaN stays NaN. */
static inline void store(bf16 *to, lanes x) {
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh(bits<__m512>(x));
    std::memcpy(to, &narrow, sizeof narrow);
#else
    const words wide = bits<words>(x);
    const words rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const words kept = x == x ? rounded : (wide >> 16) | 0x40u;
    const shorts narrow = __builtin_convertvector(kept, shorts);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

/* Stores two vectors, one after the other. */
template <class T> static inline void store(T *to, lanes x, lanes y) {
#if defined(__AVX512BF16__)
    if (std::is_same<T, bf16>::value) {
        const __m512bh narrow = _mm512_cvtne2ps_pbh(bits<__m512>(y), bits<__m512>(x));
        std::memcpy(to, &narrow, sizeof narrow);
        return;
    }
#endif
    store(to, x);
    store(to + LANES, y);
}

template <class T> static inline void store(T *to, lanes x, int64_t count) {
    if (count >= LANES) return store(to, x);
    T own[LANES];
    store(own, x);
    if (count > 0) std::memcpy(to, own, size_t(count) * sizeof(T));
}

/* Returns the larger number of each lane; y's if either is NaN. */
static inline lanes maximum(lanes x, lanes y) {
#if defined(__AVX512F__)
    return bits<lanes>(_mm512_max_ps(bits<__m512>(x), bits<__m512>(y)));
#else
    return x > y ? x : y;
#endif
}

template <int... I, class V> static inline V picked(V x, V y, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(x, y, I...);
#else
    return __builtin_shuffle(x, y, signs{I...});
#endif
}

/* Interleaves the lanes of x and y: of their first halves, or with FROM = LANES / 2 of their second halves. */
template <int FROM, int... I, class V> static inline V zipped(V x, V y, std::integer_sequence<int, I...>) {
    return picked(x, y, std::integer_sequence<int, (FROM + I / 2 + (I % 2) * LANES)...>());
}

/* Transposes LANES x LANES words. */
template <class V> static inline void turn(V (&x)[LANES]) {
    constexpr auto order = std::make_integer_sequence<int, LANES>();
    V y[LANES];
    for (int stage = 1; stage < LANES; stage *= 2) {
        for (int i = 0; i < LANES / 2; ++i) {
            y[2 * i] = zipped<0>(x[i], x[i + LANES / 2], order);
            y[2 * i + 1] = zipped<LANES / 2>(x[i], x[i + LANES / 2], order);
        }
        for (int i = 0; i < LANES; ++i) x[i] = y[i];
    }
}

/* Returns every second lane of x, then of y, from lane FROM on. */
template <int FROM, int... I> static inline lanes thinned(lanes x, lanes y, std::integer_sequence<int, I...>) {
    return picked(x, y, std::integer_sequence<int, (FROM + 2 * I)...>());
}

/* Returns in lane i the sum of vector i's lanes. */
static inline lanes sums(lanes (&x)[LANES]) {
    constexpr auto order = std::make_integer_sequence<int, LANES>();
    for (int left = LANES; left > 1; left /= 2)
        for (int i = 0; i < left / 2; ++i)
            x[i] = thinned<0>(x[2 * i], x[2 * i + 1], order) + thinned<1>(x[2 * i], x[2 * i + 1], order);
    return x[0];
}

static inline float total(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(bits<__m512>(x));
#else
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += x[i];
    return sum;
#endif
}

static inline float highest(lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(bits<__m512>(x));
#else
    float best = x[0];
    for (int i = 1; i < LANES; ++i) best = best < x[i] ? x[i] : best;
    return best;
#endif
}

/* Loads LANES words of two bf16 each from a row that has `count` numbers left; zeros after them. */
static inline words pairs(const bf16 *x, int64_t count) {
    words out{};
    if (count >= 2 * LANES) {
        std::memcpy(&out, x, sizeof out);
        return out;
    }
#if defined(__AVX512F__)
    const __mmask32 mask = count <= 0 ? 0 : (uint32_t(1) << count) - 1u;
    return bits<words>(_mm512_maskz_loadu_epi16(mask, x));
#else
    if (count > 0) std::memcpy(&out, x, size_t(count) * 2);
    return out;
#endif
}

/* Mathematical functions. */

constexpr float LOG2E = 1.44269504f;

/* Returns 2^x for x <= 127 with a relative error of 1e-7, with COARSE 1e-4; 0 for x <= -127; NaN stays NaN. */
template <bool COARSE = false> static inline lanes power(lanes x) {
#if defined(__AVX512DQ__)
    const lanes rest = bits<lanes>(_mm512_reduce_ps(bits<__m512>(x), 9)); /* x - floor(x) */
    lanes sum = all(7.802452e-2f) * rest + 2.2606716e-1f;
    if (!COARSE) {
        sum = all(1.8775767e-3f) * rest + 8.9893402e-3f;
        sum = sum * rest + 5.5826318e-2f;
        sum = sum * rest + 2.4015362e-1f;
    }
    sum = sum * rest + (COARSE ? 6.9583354e-1f : 6.9315307e-1f);
    sum = sum * rest + (COARSE ? 9.9992522e-1f : 9.9999993e-1f);
    return bits<lanes>(_mm512_scalef_ps(bits<__m512>(sum), bits<__m512>(x)));
#else
    x = maximum(all(-127.0f), x);
    const lanes whole = x + 12582912.0f; /* 1.5 * 2^23: the lowest bits are x, rounded to an integer */
    const lanes rest = x - (whole - 12582912.0f);
    lanes sum = all(5.500891e-2f) * rest + 2.4221118e-1f;
    if (!COARSE) {
        sum = all(1.3276472e-3f) * rest + 9.6755413e-3f;
        sum = sum * rest + 5.5507133e-2f;
        sum = sum * rest + 2.4022120e-1f;
    }
    sum = sum * rest + (COARSE ? 6.9328295e-1f : 6.9314697e-1f);
    sum = sum * rest + 1.0f; /* exactly 1 if x is an integer */
    return bits<lanes>(bits<words>(sum) + (bits<words>(whole) << 23));
#endif
}

/* Returns tanh(x) with an error of 1e-7. */
static inline lanes tanh(lanes x) {
    x = x > 15.0f ? all(15.0f) : x < -15.0f ? all(-15.0f) : x;
    return 1.0f - 2.0f / (1.0f + power(x * (2 * LOG2E)));
}

/* Returns a * b + c, rounded once. */
static inline lanes fused(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return bits<lanes>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(__AVX2__) && defined(__FMA__)
    return bits<lanes>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Returns e^x within one unit in the last place, as SLEEF computes it (Shibata and Petrogalli, 2020; `expf_u10`). 0
below -104, infinite above 100; NaN stays NaN. */
INLINE lanes exponential(lanes x) {
    x = maximum(all(-104.0f), x);
    x = x > 100.0f ? all(100.0f) : x;
    const lanes shifted = x * LOG2E + 12582912.0f, q = shifted - 12582912.0f; /* the lowest bits are q, ties to even */
    lanes s = fused(q, all(-0.693145751953125f), x);
    s = fused(q, all(-1.428606765330187045e-06f), s);
    lanes u = all(0.000198527617612853646278381f);
    u = fused(u, s, all(0.00139304355252534151077271f));
    u = fused(u, s, all(0.00833336077630519866943359f));
    u = fused(u, s, all(0.0416664853692054748535156f));
    u = fused(u, s, all(0.166666671633720397949219f));
    u = fused(u, s, all(0.5f));
    u = fused(s * s, u, s) + 1.0f;
#if defined(__AVX512F__)
    return bits<lanes>(_mm512_scalef_ps(bits<__m512>(u), bits<__m512>(q)));
#else
    const signs exponent = bits<signs>(shifted) - 0x4b400000, half = exponent >> 1; /* two factors: one would overflow */
    return u * bits<lanes>((half + 127) << 23) * bits<lanes>((exponent - half + 127) << 23);
#endif
}

INLINE lanes sigmoid(lanes x) { return 1.0f / (1.0f + exponential(-x)); }

/* Returns tanh(x) with a relative error of 1e-6, also for small x. */
INLINE lanes hyperbolic_tangent(lanes x) {
    const lanes square = x * x;
    lanes near = fused(square, all(62.0f / 2835), all(-17.0f / 315)); /* Taylor series, whose terms decrease fast */
    near = fused(near, square, all(2.0f / 15));
    near = fused(near, square, all(-1.0f / 3));
    near = fused(near * square, x, x);
    const lanes far = 2.0f * sigmoid(2.0f * x) - 1.0f;
    return (x < 0.25f) & (x > -0.25f) ? near : far;
}

/* Returns erf(x) with an error of 2e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE lanes erf_of(lanes x) {
    const lanes z = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * z);
    const lanes p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const lanes y = 1.0f - p * exponential(-z * z);
    return x < 0 ? -y : y;
}

/* Activations; ACTIVATIONS of linear.py has the same numbers. */
enum Activation { NONE, SILU, RELU, GELU, GELU_TANH, GELU_QUICK, CLAMPED_SWIGLU };

INLINE lanes activate(lanes x, int64_t kind) {
    switch (kind) {
    case SILU: return x * sigmoid(x);
    case RELU: return x < 0 ? lanes{} : x; /* NaN stays NaN */
    case GELU: return 0.5f * x * (1.0f + erf_of(x * 0.70710678f));
    case GELU_TANH: /* 0.5 (1 + tanh u) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3) */
        return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case GELU_QUICK: return x * sigmoid(1.702f * x);
    case CLAMPED_SWIGLU: x = x > 7.0f ? all(7.0f) : x; return x * sigmoid(1.702f * x);
    default: return x;
    }
}

/* The factor by which an activated gate is multiplied, from up. NaN stays NaN. */
INLINE lanes up_factor(lanes up, int64_t kind) {
    if (kind != CLAMPED_SWIGLU) return up;
    up = up > 7.0f ? all(7.0f) : up;
    return 1.0f + (up < -7.0f ? all(-7.0f) : up);
}
