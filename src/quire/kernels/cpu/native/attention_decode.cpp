/* Attention of rows of one query over pages. A row's context, without a shared prefix (attention_prompt.cpp), is split
into parts by its own length, so that its result depends neither on threads nor on rows with which it shares no prefix.
A second operation joins the parts. */
#include "attention.h"

namespace {

constexpr int64_t PART = 256; /* the fewest tokens of a part */
constexpr int64_t MOST = 16;  /* the most parts of a row */
constexpr int BLOCK = 64;     /* keys at once */
constexpr int ROW = BLOCK + LANES;

/* Args of both operations after the cache's: q, token stride of q, out, slots, positions, query indices of the rows
   (null: in order), rows, chunks, the five of Seeing, `partial` (COMMON_PARTS, then MOST parts for all rows and heads,
   each dim padded to 32, and 2 numbers), prompt lengths of slots and a budget (null and 0: none), Common (null: not
   computed). */
template <class T, class K> struct Rows {
    Cache<K> cache;
    Seeing seeing;
    const T *q;
    T *out;
    const int64_t *slots, *positions, *places, *prompts;
    float *partial;
    int64_t q_stride, rows, chunks, budget, stride;
    Common common;

    explicit Rows(const Arg *all)
        : cache(all), seeing(all + CACHE_ARGS + 8), q(as<T>(all[CACHE_ARGS])), out(as<T>(all[CACHE_ARGS + 2])),
          slots(as<int64_t>(all[CACHE_ARGS + 3])), positions(as<int64_t>(all[CACHE_ARGS + 4])),
          places(as<int64_t>(all[CACHE_ARGS + 5])), prompts(as<int64_t>(all[CACHE_ARGS + 14])),
          partial(as<float>(all[CACHE_ARGS + 13])), q_stride(all[CACHE_ARGS + 1].integer),
          rows(all[CACHE_ARGS + 6].integer), chunks(all[CACHE_ARGS + 7].integer),
          budget(all[CACHE_ARGS + 15].integer), stride((cache.dim + 31) / 32 * 32), common(all[CACHE_ARGS + 16], rows) {}

    int64_t place(int64_t row) const { return places ? places[row] : row; }

    float *part(int64_t row, int64_t part, int64_t head) const {
        return before(rows, 0, 0) + ((row * MOST + part) * cache.heads + head) * (stride + 2);
    }

    /* The same for the parts of a shared prefix. */
    float *before(int64_t row, int64_t part, int64_t head) const {
        return partial + Common::part(row, part, head, cache.heads, stride);
    }

    /* Stores a query head's result: its sums, `stride` numbers in steps, times `by`. */
    void answer(int64_t row, int64_t head, const float *sums, float by) const;
};

/* The tokens [first, end) of a row after its shared prefix, the number of their parts, and of the prefix's parts. */
struct Span {
    int64_t first, end, size, parts, before;

    template <class T, class K> Span(const Rows<T, K> &x, int64_t row) {
        const int64_t position = kept(x.positions[row], x.slots[row], x.prompts, x.budget);
        before = x.common ? x.common.parts(row) : 0;
        first = before ? x.common.begin(row) : x.seeing.oldest(position);
        end = position + 1;
        const int64_t tokens = end - first, even = (tokens + MOST - 1) / MOST;
        size = even <= PART ? PART : (even + BLOCK - 1) / BLOCK * BLOCK;
        parts = (tokens + size - 1) / size;
    }
};

/* Numbers of a head are processed in steps: a vector of fp32 or of int8, or of words of two bf16, which become two
vectors: the first numbers of all words, then the second ones. Queries and sums are in the same order. */
template <class K> constexpr int PARTS = std::is_same<K, bf16>::value ? 2 : 1;
template <class K> constexpr int STEP = PARTS<K> * LANES;

template <class T> inline void load_step(lanes (&x)[1], const T *from, int64_t count) { x[0] = load(from, count); }
inline void load_step(lanes (&x)[2], const bf16 *from, int64_t count) {
    const words both = pairs(from, count);
    x[0] = bits<lanes>(both << 16);
    x[1] = bits<lanes>(both & 0xffff0000u);
}
template <int P, class T> inline void store_step(T *to, const float *x, float by, int64_t count) {
    if constexpr (P == 1) {
        store(to, load(x) * by, count);
    } else {
        constexpr auto order = std::make_integer_sequence<int, LANES>();
        const lanes one = load(x) * by, two = load(x + LANES) * by;
        store(to, zipped<0>(one, two, order), count);
        store(to + LANES, zipped<LANES / 2>(one, two, order), count - LANES);
    }
}

template <class T, class K> void Rows<T, K>::answer(int64_t row, int64_t head, const float *sums, float by) const {
    T *to = out + (place(row) * cache.heads + head) * cache.dim;
    for (int64_t i = 0; i < stride; i += STEP<K>) store_step<PARTS<K>>(to + i, sums + i, by, cache.dim - i);
}

/* Computes scores [G, ROW] of G queries, each of `steps` steps, with LANES / G keys. */
template <class K, int G>
inline void products(const float *queries, int64_t steps, const K *keys, const int64_t *places, int64_t dim, float *scores) {
    constexpr int TOKENS = LANES / G < 1 ? 1 : LANES / G;
    lanes sum[LANES] = {};
    for (int64_t s = 0; s < steps; ++s) {
        const float *query = queries + s * STEP<K>;
        const int64_t left = dim - s * STEP<K>;
        UNROLL
        for (int t = 0; t < TOKENS; ++t) {
            lanes key[PARTS<K>];
            load_step(key, keys + places[t] + s * STEP<K>, left);
            UNROLL
            for (int i = 0; i < PARTS<K>; ++i)
                UNROLL
                for (int g = 0; g < G; ++g)
                    sum[t * G + g] += key[i] * load(query + g * steps * STEP<K> + i * LANES);
        }
    }
    float found[LANES];
    store(found, sums(sum));
    UNROLL
    for (int t = 0; t < TOKENS; ++t)
        UNROLL
        for (int g = 0; g < G; ++g) scores[g * ROW + t] = found[t * G + g];
}

/* out [G, C steps] = out * shrink + weights [G, tokens] values [tokens, C steps]. */
template <class K, int G, int C>
inline void gather(float *out, int64_t stride, const float *shrink, const float *weights, const K *values,
                   const int64_t *places, int64_t tokens, int64_t left) {
    constexpr int P = PARTS<K>;
    lanes sum[G][C * P];
    UNROLL
    for (int g = 0; g < G; ++g)
        UNROLL
        for (int c = 0; c < C * P; ++c) sum[g][c] = load(out + g * stride + c * LANES) * shrink[g];
    for (int64_t t = 0; t < tokens; ++t) {
        UNROLL
        for (int c = 0; c < C; ++c) {
            lanes value[P];
            load_step(value, values + places[t] + c * STEP<K>, left - c * STEP<K>);
            UNROLL
            for (int i = 0; i < P; ++i)
                UNROLL
                for (int g = 0; g < G; ++g) sum[g][c * P + i] += value[i] * weights[g * ROW + t];
        }
    }
    UNROLL
    for (int g = 0; g < G; ++g)
        UNROLL
        for (int c = 0; c < C * P; ++c) store(out + g * stride + c * LANES, sum[g][c]);
}

/* The running softmax of a key head's queries: out [shared, stride], best and sum of each. */
template <class T, class K> struct Running {
    const Rows<T, K> &x;
    int64_t shared, steps, stride;
    float *query, *scores, *out, *best, *sum, *shrink;

    Running(const Rows<T, K> &rows, void *scratch)
        : x(rows), shared(rows.cache.shared), steps(rows.stride / STEP<K>), stride(rows.stride) {
        query = static_cast<float *>(scratch);
        scores = query + shared * stride;
        out = scores + shared * ROW;
        best = out + shared * stride;
        sum = best + shared;
        shrink = sum + shared;
    }

    /* Only one part of a row has the sinks, if the layer has any: its `first` one. */
    void begin(int64_t row, int64_t head, bool first) {
        const int64_t dim = x.cache.dim;
        const T *q = x.q + x.place(row) * x.q_stride + head * shared * dim;
        for (int64_t g = 0; g < shared; ++g) {
            for (int64_t i = 0; i < stride; i += STEP<K>) {
                lanes part[PARTS<K>];
                load_step(part, q + g * dim + i, dim - i);
                for (int j = 0; j < PARTS<K>; ++j) store(query + g * stride + i + j * LANES, part[j]);
            }
            x.seeing.begin(head * shared + g, first, best[g], sum[g]);
        }
        std::memset(out, 0, size_t(shared * stride) * 4);
    }

    /* Attends to up to BLOCK keys. ROW - BLOCK further places are read too, and do not affect the result. */
    void block(const int64_t *places, int64_t tokens) {
        float key_scales[ROW], value_scales[ROW] = {};
        each<true>(places, tokens);
        if (ROUNDED<K>) {
            x.cache.scales(x.cache.keys, places, tokens + LANES, key_scales);
            x.cache.scales(x.cache.values, places, tokens, value_scales);
        }
        for (int64_t g = 0; g < shared; ++g) {
            float *own = scores + g * ROW;
            if (ROUNDED<K>) scale_each(own, key_scales, tokens);
            if (x.seeing.softcap > 0)
                for (int64_t t = 0; t < tokens; t += LANES) x.seeing.cap(own + t);
            shrink[g] = weigh<BLOCK, std::is_same<T, bf16>::value, ROUNDED<K>>(own, own, 0, tokens, x.seeing.by(), best[g],
                                                                               sum[g], value_scales);
        }
        each<false>(places, tokens);
    }

    /* Computes scores (PRODUCTS), or sums of values, for up to four heads at a time. */
    template <bool PRODUCTS> void each(const int64_t *places, int64_t tokens) {
        int64_t g = 0;
        for (; g + 4 <= shared; g += 4) heads<PRODUCTS, 4>(g, places, tokens);
        if (shared - g == 3) heads<PRODUCTS, 3>(g, places, tokens);
        else if (shared - g == 2) heads<PRODUCTS, 2>(g, places, tokens);
        else if (shared - g == 1) heads<PRODUCTS, 1>(g, places, tokens);
    }

    template <bool PRODUCTS, int G> void heads(int64_t g, const int64_t *places, int64_t tokens) {
        const Cache<K> &cache = x.cache;
        float *own = scores + g * ROW;
        if constexpr (PRODUCTS) {
            for (int64_t t = 0; t < tokens; t += LANES / G)
                products<K, G>(query + g * stride, steps, cache.keys, places + t, cache.dim, own + t);
        } else {
            constexpr int C = (LANES == 16 ? 4 : 2) / PARTS<K>;
            int64_t i = 0;
            for (; i + C * STEP<K> <= stride; i += C * STEP<K>)
                gather<K, G, C>(out + g * stride + i, stride, shrink + g, own, cache.values + i, places, tokens,
                                cache.dim - i);
            for (; i < stride; i += STEP<K>)
                gather<K, G, 1>(out + g * stride + i, stride, shrink + g, own, cache.values + i, places, tokens,
                                cache.dim - i);
        }
    }

    /* Stores the results, or, if the row has other parts, this part's sums for `join`. */
    void end(int64_t row, int64_t head, int64_t part, bool alone) {
        for (int64_t g = 0; g < shared; ++g) {
            const int64_t at = head * shared + g;
            if (alone) {
                x.answer(row, at, out + g * stride, 1.0f / sum[g]);
                continue;
            }
            float *to = x.part(row, part, at);
            std::memcpy(to, out + g * stride, size_t(stride) * 4);
            to[stride] = best[g];
            to[stride + 1] = sum[g];
        }
    }
};

/* Attends to one part of a row for one key head. */
template <class T, class K> void item(Running<T, K> &running, int64_t row, int64_t head, int64_t part, const Span &span) {
    const int64_t from = span.first + part * span.size;
    const int64_t to = from + span.size < span.end ? from + span.size : span.end;
    const Cache<K> &cache = running.x.cache;
    int64_t places[2][ROW], tokens = to - from < BLOCK ? to - from : BLOCK;
    cache.places(running.x.slots[row], head, from, from + tokens, places[0]);
    cache.fetch(places[0], tokens);
    running.begin(row, head, part == 0);
    for (int64_t at = from, i = 0; at < to; at += BLOCK, i ^= 1) {
        const int64_t after = to - at - tokens < BLOCK ? to - at - tokens : BLOCK;
        cache.places(running.x.slots[row], head, at + tokens, at + tokens + after, places[i ^ 1]);
        cache.fetch(places[i ^ 1], after);
        for (int64_t t = tokens; t < tokens + LANES; ++t) places[i][t] = places[i][tokens - 1];
        running.block(places[i], tokens);
        tokens = after;
    }
    running.end(row, head, part, span.parts + span.before == 1);
}

/* Items are the parts of rows, each for all key heads in order; chunks have equal numbers of items. */
template <class T, class K> void parts(const Arg *a, int64_t chunk, void *scratch) {
    const Rows<T, K> x(a);
    Running<T, K> running(x, scratch);
    int64_t items = 0;
    for (int64_t row = 0; row < x.rows; ++row) items += Span(x, row).parts * x.cache.kv_heads;
    const int64_t begin = items * chunk / x.chunks, stop = items * (chunk + 1) / x.chunks;
    int64_t before = 0;
    for (int64_t row = 0; row < x.rows && before < stop; ++row) {
        const Span span(x, row);
        const int64_t own = span.parts * x.cache.kv_heads;
        for (int64_t i = begin > before ? begin - before : 0; i < own && before + i < stop; ++i)
            item(running, row, i % x.cache.kv_heads, i / x.cache.kv_heads, span);
        before += own;
    }
}

/* Joins the parts of rows that have several, in order; a chunk computes some (row, query head). */
template <class T, class K> void join(const Arg *a, int64_t chunk, void *scratch) {
    const Rows<T, K> x(a);
    float *out = static_cast<float *>(scratch);
    const int64_t heads = x.cache.heads, items = x.rows * heads;
    for (int64_t i = items * chunk / x.chunks; i < items * (chunk + 1) / x.chunks; ++i) {
        const int64_t row = i / heads, head = i % heads;
        const Span span(x, row);
        const int64_t parts = span.before + span.parts;
        if (parts == 1) continue;
        const auto part = [&](int64_t p) {
            return p < span.before ? x.before(row, p, head) : x.part(row, p - span.before, head);
        };
        float best = LEAST, sum = 0;
        for (int64_t p = 0; p < parts; ++p) {
            const float own = part(p)[x.stride];
            best = own > best ? own : best;
        }
        std::memset(out, 0, size_t(x.stride) * 4);
        for (int64_t p = 0; p < parts; ++p) {
            const float *from = part(p);
            const float by = power(all(from[x.stride] - best))[0];
            sum += by * from[x.stride + 1];
            for (int64_t d = 0; d < x.stride; d += LANES) store(out + d, load(out + d) + load(from + d) * by);
        }
        x.answer(row, head, out, 1.0f / sum);
    }
}

} // namespace

#define EXPORTED(NAME, T, K)                                                                                        \
    QUIRE_EXPORT void attention_parts_##NAME(const Arg *a, int64_t chunk, void *s) { parts<T, K>(a, chunk, s); }    \
    QUIRE_EXPORT void attention_join_##NAME(const Arg *a, int64_t chunk, void *s) { join<T, K>(a, chunk, s); }

EXPORTED(bf16, bf16, bf16)
EXPORTED(f32, float, float)
EXPORTED(bf16_int8, bf16, int8_t)
EXPORTED(f32_int8, float, int8_t)
