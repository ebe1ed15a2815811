/* Normalises (Qwen3) and rotates (RoFormer) queries and keys, normalises values (Gemma 4), and writes keys and values to
their pages, in one pass: in fp32, rounded once at the end, to int8 if the pages are in int8. */
#include "attention.h"

#include <cmath>

namespace {

/* Normalises a head, if `weight`, and rotates it, if `angles`. `to` may be `x`. */
template <class T, class O, class W>
void head(const T *x, O *to, int64_t dim, const W *weight, float eps, const float *angles) {
    const int64_t half = dim / 2;
    float by = 1.0f;
    if (weight) {
        lanes squares{};
        for (int64_t i = 0; i < dim; i += LANES) {
            const lanes part = load(x + i, dim - i);
            squares += part * part;
        }
        by = 1.0f / std::sqrt(total(squares) / float(dim) + eps);
    }
    if (!angles) {
        for (int64_t i = 0; i < dim; i += LANES) {
            lanes part = load(x + i, dim - i);
            if (weight) part = part * by * load(weight + i, dim - i);
            store(to + i, part, dim - i);
        }
        return;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        lanes low = load(x + i, left), high = load(x + half + i, left);
        if (weight) {
            low = low * by * load(weight + i, left);
            high = high * by * load(weight + half + i, left);
        }
        const lanes cos = load(angles + i, left), sin = load(angles + half + i, left);
        store(to + i, low * cos - high * sin, left);
        store(to + half + i, high * cos + low * sin, left);
    }
}

/* Rounds a head's numbers to multiples of 1/127 of the largest magnitude, followed by the scale. A number that is not
finite makes the scale NaN; a head whose largest magnitude is at most 1e-30 becomes zeros. */
inline void round_to(int8_t *cell, const float *x, int64_t dim) {
    lanes high{}, wrong{};
    for (int64_t i = 0; i < dim; i += LANES) {
        const lanes part = load(x + i, dim - i);
        high = maximum(high, part < 0 ? -part : part);
        wrong += part * 0.0f;
    }
    const float most = highest(high), by = most > 1e-30f ? 127.0f / most : 0.0f;
    const float scale = (by > 0 ? most / 127.0f : 0.0f) + total(wrong);
    for (int64_t i = 0; i < dim; i += LANES) {
        const lanes whole = load(x + i, dim - i) * by + 12582912.0f; /* its lowest bits are the number, rounded */
        store(cell + i, bits<signs>(whole), dim - i);
    }
    std::memcpy(cell + dim, &scale, 4);
}

/* Args after the cache's: q, k, v, q_out (null: queries are not changed), their token strides; slots, positions (for
   angles), cells (positions in the pages; null: `positions`); rotary, q_weight, k_weight, eps; tokens, chunks, whether
   to write keys and values; prompt lengths of slots and a budget (null and 0: none); whether the weights are in fp32,
   like Gemma's, instead of the cache's dtype; v_weight. */
template <class T, class K, class W> void write(const Arg *a, const Cache<K> &cache, int64_t chunk, float *wide) {
    const int64_t *slots = as<int64_t>(a[8]), *positions = as<int64_t>(a[9]), *cells = as<int64_t>(a[10]);
    const int64_t tokens = a[15].integer, chunks = a[16].integer, *prompts = as<int64_t>(a[18]), dim = cache.dim;
    const float eps = float(a[14].number);
    for (int64_t t = tokens * chunk / chunks; t < tokens * (chunk + 1) / chunks; ++t) {
        const float *angles = a[11].pointer ? as<float>(a[11]) + positions[t] * (dim / 2 * 2) : nullptr;
        if (a[3].pointer)
            for (int64_t h = 0; h < cache.heads; ++h)
                head(as<T>(a[0]) + t * a[4].integer + h * dim, as<T>(a[3]) + t * a[7].integer + h * dim, dim,
                     as<W>(a[12]), eps, angles);
        if (!a[17].integer) continue;
        const int64_t cell = kept(cells ? cells[t] : positions[t], slots[t], prompts, a[19].integer);
        for (int64_t h = 0; h < cache.kv_heads; ++h) {
            const int64_t place = cache.at(slots[t], h, cell);
            const T *k = as<T>(a[1]) + t * a[5].integer + h * dim, *v = as<T>(a[2]) + t * a[6].integer + h * dim;
            if constexpr (ROUNDED<K>) {
                head(k, wide, dim, as<W>(a[13]), eps, angles);
                round_to(cache.keys + place, wide, dim);
                head(v, wide, dim, as<W>(a[21]), eps, nullptr);
                round_to(cache.values + place, wide, dim);
            } else {
                head(k, cache.keys + place, dim, as<W>(a[13]), eps, angles);
                if (a[21].pointer) head(v, cache.values + place, dim, as<W>(a[21]), eps, nullptr);
                else std::memcpy(cache.values + place, v, size_t(dim) * sizeof(T));
            }
        }
    }
}

template <class T, class K> void write(const Arg *a, int64_t chunk, void *scratch) {
    const Cache<K> cache(a);
    a += CACHE_ARGS;
    if (a[20].integer) write<T, K, float>(a, cache, chunk, static_cast<float *>(scratch));
    else write<T, K, T>(a, cache, chunk, static_cast<float *>(scratch));
}

} // namespace

QUIRE_EXPORT void attention_write_bf16(const Arg *a, int64_t chunk, void *s) { write<bf16, bf16>(a, chunk, s); }
QUIRE_EXPORT void attention_write_f32(const Arg *a, int64_t chunk, void *s) { write<float, float>(a, chunk, s); }
QUIRE_EXPORT void attention_write_bf16_int8(const Arg *a, int64_t chunk, void *s) { write<bf16, int8_t>(a, chunk, s); }
QUIRE_EXPORT void attention_write_f32_int8(const Arg *a, int64_t chunk, void *s) { write<float, int8_t>(a, chunk, s); }
