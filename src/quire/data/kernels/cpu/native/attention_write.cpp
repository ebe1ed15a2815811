/* Queries and keys normalised a head (Qwen3) and rotated (RoFormer), keys and values written to their pages, in one pass:
in fp32, rounded once at the end. */
#include "attention.h"

#include <cmath>

namespace {

/* One head, normalised if it has a weight, and rotated. `to` may be `x`. */
template <class T, class W>
void head(const T *x, T *to, int64_t dim, const W *weight, float eps, const float *angles) {
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

/* Args behind the cache's: q, k, v, q_out (null: queries stay), numbers from a token of each to its next one; slots,
   positions (for angles), cells (where in the pages; null: positions); rotary, q_weight, k_weight, eps; tokens, chunks,
   whether keys and values are written; the slots' prompts and a budget (null and 0: none); whether the weights are in
   fp32, as Gemma's are, and not as the cache is. */
template <class T, class W> void write(const Arg *a, const Cache<T> &cache, int64_t chunk) {
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
            head(as<T>(a[1]) + t * a[5].integer + h * dim, cache.keys + place, dim, as<W>(a[13]), eps, angles);
            std::memcpy(cache.values + place, as<T>(a[2]) + t * a[6].integer + h * dim, size_t(dim) * sizeof(T));
        }
    }
}

template <class T> void write(const Arg *a, int64_t chunk) {
    const Cache<T> cache(a);
    a += CACHE_ARGS;
    if (a[20].integer) write<T, float>(a, cache, chunk);
    else write<T, T>(a, cache, chunk);
}

} // namespace

QUIRE_EXPORT void attention_write_bf16(const Arg *a, int64_t chunk, void *) { write<bf16>(a, chunk); }
QUIRE_EXPORT void attention_write_f32(const Arg *a, int64_t chunk, void *) { write<float>(a, chunk); }
