/* RMS norm and layer norm of rows, with the residual addition before them, and an optional norm of what is added. */
#include "lanes.h"

#include <cmath>

/* Returns 1 / sqrt(mean((x - mean)^2) + eps) of `size` numbers. */
template <class T> static float inverse_root(const T *x, int64_t size, float mean, float eps) {
    lanes squares{};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes some = load(x + i, size - i);
        if (mean != 0 && size - i >= LANES) some -= mean;
        else if (mean != 0)
            for (int64_t j = 0; j < size - i; ++j) some[j] -= mean;
        squares = fused(some, some, squares);
    }
    return 1.0f / std::sqrt(total(squares) / float(size) + eps);
}

template <class T> static float mean_of(const T *x, int64_t size) {
    lanes sum{};
    for (int64_t i = 0; i < size; i += LANES) sum += load(x + i, size - i);
    return total(sum) / float(size);
}

/* x [rows, size] += delta (null: nothing), or += the RMS norm of delta with the weight `behind`, and *= scale, each rounded to T; out
   = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias. Without bias the mean counts as 0. Args: x, delta,
   behind, weight, bias, out, rows, rows of a chunk, size, strides of x, delta and out (in numbers), eps, scale. */
template <class T, class W> static void norm(const Arg *a, int64_t chunk) {
    const int64_t rows = a[6].integer, per = a[7].integer, size = a[8].integer;
    const W *behind = as<W>(a[2]), *weight = as<W>(a[3]), *bias = as<W>(a[4]);
    const float eps = float(a[12].number), scale = float(a[13].number);
    for (int64_t row = chunk * per; row < rows && row < (chunk + 1) * per; ++row) {
        T *x = as<T>(a[0]) + row * a[9].integer, *out = as<T>(a[5]) + row * a[11].integer;
        if (a[1].pointer) {
            const T *delta = as<T>(a[1]) + row * a[10].integer;
            const float by = behind ? inverse_root(delta, size, 0, eps) : 1.0f;
            for (int64_t i = 0; i < size; i += LANES) {
                lanes added = load(delta + i, size - i);
                if (behind) {
                    T rounded[LANES];
                    store(rounded, added * by * load(behind + i, size - i));
                    added = load(rounded);
                }
                store(x + i, load(x + i, size - i) + added, size - i);
                if (scale != 1) store(x + i, load(x + i, size - i) * scale, size - i);
            }
        }
        const float mean = bias ? mean_of(x, size) : 0.0f;
        const float by = inverse_root(x, size, mean, eps);
        for (int64_t i = 0; i < size; i += LANES) {
            lanes result = (load(x + i, size - i) - mean) * by * load(weight + i, size - i);
            if (bias) result += load(bias + i, size - i);
            store(out + i, result, size - i);
        }
    }
}

QUIRE_EXPORT void norm_bf16(const Arg *a, int64_t chunk, void *) { norm<bf16, bf16>(a, chunk); }
QUIRE_EXPORT void norm_bf16_f32(const Arg *a, int64_t chunk, void *) { norm<bf16, float>(a, chunk); }
QUIRE_EXPORT void norm_f32(const Arg *a, int64_t chunk, void *) { norm<float, float>(a, chunk); }
