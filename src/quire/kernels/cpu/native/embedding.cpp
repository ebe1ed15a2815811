/* Lookup of rows of an embedding table, for tokens or positions. */
#include "lanes.h"

/* out [rows, size] = table[ids + first] * scale, rounded; or, with `onto`, += table[ids + first].
   Args: ids (int64), table, out, rows, rows of a chunk, size, first, onto, scale. */
template <class T> static void embedding(const Arg *a, int64_t chunk) {
    const int64_t rows = a[3].integer, per = a[4].integer, size = a[5].integer;
    const float scale = float(a[8].number);
    for (int64_t row = chunk * per; row < rows && row < (chunk + 1) * per; ++row) {
        const T *from = as<T>(a[1]) + (as<int64_t>(a[0])[row] + a[6].integer) * size;
        T *out = as<T>(a[2]) + row * size;
        if (!a[7].integer && scale == 1.0f) {
            std::memcpy(out, from, size_t(size) * sizeof(T));
            continue;
        }
        for (int64_t i = 0; i < size; i += LANES) {
            lanes some = load(from + i, size - i) * scale;
            if (a[7].integer) some += load(out + i, size - i);
            store(out + i, some, size - i);
        }
    }
}

QUIRE_EXPORT void embedding_bf16(const Arg *a, int64_t chunk, void *) { embedding<bf16>(a, chunk); }
QUIRE_EXPORT void embedding_f32(const Arg *a, int64_t chunk, void *) { embedding<float>(a, chunk); }
