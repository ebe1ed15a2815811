/* Activations of feed-forward blocks, gated and plain, and the softcap of logits. In fp32, rounded once. */
#include "lanes.h"

/* out [rows, size] = act(x) * up. Args: x, out, size, columns of a chunk, strides of x and out (in numbers), kind, up and
   its stride. A chunk is a part of a row. */
template <class T> static void gate(const Arg *a, int64_t chunk) {
    const int64_t size = a[2].integer, part = a[3].integer, parts = (size + part - 1) / part;
    const int64_t row = chunk / parts, begin = chunk % parts * part, end = begin + part < size ? begin + part : size;
    const T *x = as<T>(a[0]) + row * a[4].integer, *up = as<T>(a[7]) + row * a[8].integer;
    T *out = as<T>(a[1]) + row * a[5].integer;
    for (int64_t i = begin; i < end; i += LANES)
        store(out + i, activate(load(x + i, end - i), a[6].integer) * load(up + i, end - i), end - i);
}

/* x [rows, size] = act(x + bias), in place; bias may be null. Args: x, bias, size, columns of a chunk, stride, kind. */
template <class T> static void act(const Arg *a, int64_t chunk) {
    const int64_t size = a[2].integer, part = a[3].integer, parts = (size + part - 1) / part;
    const int64_t row = chunk / parts, begin = chunk % parts * part, end = begin + part < size ? begin + part : size;
    T *x = as<T>(a[0]) + row * a[4].integer;
    const T *bias = as<T>(a[1]);
    for (int64_t i = begin; i < end; i += LANES) {
        lanes some = load(x + i, end - i);
        if (bias) some += load(bias + i, end - i);
        store(x + i, activate(some, a[5].integer), end - i);
    }
}

/* x [rows, size] = cap * tanh(x / cap), in place. Args: x, size, columns of a chunk, stride, cap. */
template <class T> static void softcap(const Arg *a, int64_t chunk) {
    const int64_t size = a[1].integer, part = a[2].integer, parts = (size + part - 1) / part;
    const int64_t row = chunk / parts, begin = chunk % parts * part, end = begin + part < size ? begin + part : size;
    T *x = as<T>(a[0]) + row * a[3].integer;
    const float cap = float(a[4].number);
    for (int64_t i = begin; i < end; i += LANES)
        store(x + i, cap * hyperbolic_tangent(load(x + i, end - i) / cap), end - i);
}

QUIRE_EXPORT void gate_bf16(const Arg *a, int64_t chunk, void *) { gate<bf16>(a, chunk); }
QUIRE_EXPORT void gate_f32(const Arg *a, int64_t chunk, void *) { gate<float>(a, chunk); }
QUIRE_EXPORT void act_bf16(const Arg *a, int64_t chunk, void *) { act<bf16>(a, chunk); }
QUIRE_EXPORT void act_f32(const Arg *a, int64_t chunk, void *) { act<float>(a, chunk); }
QUIRE_EXPORT void softcap_bf16(const Arg *a, int64_t chunk, void *) { softcap<bf16>(a, chunk); }
QUIRE_EXPORT void softcap_f32(const Arg *a, int64_t chunk, void *) { softcap<float>(a, chunk); }
