/* RMS norm of rows, with the sum before it. */
#include "numbers.h"

#include <cmath>

/* x [rows, size] += delta (null: nothing), rounded to T as torch rounds it; out = x / sqrt(mean(x^2) + eps) * weight.
   Args: x, delta, weight, out, size, x_stride, delta_stride, out_stride (in numbers), eps. A chunk is a row. */
template <class T> static void rms_norm(const Arg *a, int64_t row, void *) {
    const int64_t size = a[4].integer;
    T *x = as<T>(a[0]) + row * a[5].integer;
    const T *weight = as<T>(a[2]);
    T *out = as<T>(a[3]) + row * a[7].integer;
    if (a[1].pointer) {
        const T *delta = as<T>(a[1]) + row * a[6].integer;
        for (int64_t i = 0; i < size; ++i) x[i] = from<T>(to(x[i]) + to(delta[i]));
    }
    float sum = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < size; ++i) sum += to(x[i]) * to(x[i]);
    const float by = 1.0f / std::sqrt(sum / float(size) + float(a[8].number));
    for (int64_t i = 0; i < size; ++i) out[i] = from<T>(to(x[i]) * by * to(weight[i]));
}

QUIRE_EXPORT void rms_norm_bf16(const Arg *a, int64_t chunk, void *s) { rms_norm<bf16>(a, chunk, s); }
QUIRE_EXPORT void rms_norm_f32(const Arg *a, int64_t chunk, void *s) { rms_norm<float>(a, chunk, s); }
