/* Shared by the attention kernels: addresses of keys and values, the positions that a token sees, and the running
softmax. */
#pragma once
#include "lanes.h"

/* The first arguments of all attention kernels: keys, values, strides of pages, heads and tokens (in numbers), tokens
of a page, tables, table stride, key heads, numbers of a head, query heads. */
constexpr int CACHE_ARGS = 11;

/* True for keys and values in int8: a head's numbers are followed by their scale in fp32. */
template <class K> constexpr bool ROUNDED = std::is_same<K, int8_t>::value;

typedef int8_t quarters __attribute__((vector_size(LANES)));
typedef int16_t doublets __attribute__((vector_size(LANES * 2)));

/* By intrinsics where possible. Else by way of 16 bits: compilers vectorize each step, but not a direct conversion. */
static inline lanes load(const int8_t *x) {
#if defined(__AVX512F__)
    const signs wide = bits<signs>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))));
#elif defined(__AVX2__)
    const signs wide = bits<signs>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(x))));
#else
    quarters own;
    std::memcpy(&own, x, sizeof own);
    const signs wide = __builtin_convertvector(__builtin_convertvector(own, doublets), signs);
#endif
    return __builtin_convertvector(wide, lanes);
}

static inline void store(int8_t *to, signs x, int64_t count) {
    const quarters own = __builtin_convertvector(__builtin_convertvector(x, doublets), quarters);
    std::memcpy(to, &own, size_t(count < LANES ? count : LANES));
}

static inline lanes load(const int8_t *x, int64_t count) {
    if (count >= LANES) return load(x);
    int8_t own[LANES];
    for (int i = 0; i < LANES; ++i) own[i] = i < count ? x[i] : int8_t(0);
    return load(own);
}

template <class K> struct Cache {
    K *keys, *values;
    int64_t page_stride, head_stride, token_stride, page_tokens;
    const int64_t *tables;
    int64_t table_stride, kv_heads, dim, heads, shared;

    explicit Cache(const Arg *a)
        : keys(as<K>(a[0])), values(as<K>(a[1])), page_stride(a[2].integer), head_stride(a[3].integer),
          token_stride(a[4].integer), page_tokens(a[5].integer), tables(as<int64_t>(a[6])),
          table_stride(a[7].integer), kv_heads(a[8].integer), dim(a[9].integer), heads(a[10].integer),
          shared(heads / kv_heads) {}

    /* Returns the offset in numbers of a head's key or value at this position. */
    int64_t at(int64_t slot, int64_t head, int64_t position) const {
        const int64_t page = tables[slot * table_stride + position / page_tokens];
        return page * page_stride + head * head_stride + position % page_tokens * token_stride;
    }

    /* Prefetches keys and values at these offsets: pages are too far apart for the hardware to do it. */
    void fetch(const int64_t *places, int64_t count) const {
        const int64_t cell = dim + (ROUNDED<K> ? 4 : 0);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < cell; d += 64 / int64_t(sizeof(K))) {
                __builtin_prefetch(keys + places[i] + d);
                __builtin_prefetch(values + places[i] + d);
            }
    }

    /* Stores to `found` the offsets `at` of positions [from, to). */
    void places(int64_t slot, int64_t head, int64_t from, int64_t to, int64_t *found) const {
        while (from < to) {
            const int64_t left = page_tokens - from % page_tokens, stop = to - from < left ? to : from + left;
            for (int64_t place = at(slot, head, from); from < stop; ++from, place += token_stride) *found++ = place;
        }
    }

    /* Stores to `found` the scales of the keys or values (`numbers`) at these offsets. */
    void scales(const K *numbers, const int64_t *places, int64_t count, float *found) const {
        for (int64_t i = 0; i < count; ++i) std::memcpy(found + i, numbers + places[i] + dim, 4);
    }
};

/* Multiplies each of `count` scores by its factor. */
static inline void scale_each(float *x, const float *by, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * load(by + i));
}

constexpr float LEAST = -1e30f; /* below any score */

/* Parameters of scores and visibility: scale, softcap (0: none), window and chunk (0: none), a sink for each query head
(null: none), which is one more score without a value. */
struct Seeing {
    float scale, softcap;
    int64_t window, chunk;
    const float *sinks;

    explicit Seeing(const Arg *a)
        : scale(float(a[0].number)), softcap(float(a[1].number)), window(a[2].integer), chunk(a[3].integer),
          sinks(as<float>(a[4])) {}

    /* Returns the first position that a token at `position` sees. */
    int64_t oldest(int64_t position) const {
        if (chunk) return position - position % chunk;
        return window && position >= window ? position - window + 1 : 0;
    }

    /* Returns the factor that makes scores (after a softcap, if any) exponents of 2. */
    float by() const { return (softcap > 0 ? 1.0f : scale) * LOG2E; }

    /* Begins the running softmax of a query head: with its sink, if it has one and that is asked for. */
    void begin(int64_t head, bool with_sink, float &best, float &sum) const {
        const bool has = sinks && with_sink;
        best = has ? sinks[head] * LOG2E : LEAST;
        sum = has ? 1.0f : 0.0f;
    }

    void cap(float *scores) const {
        store(scores, softcap * tanh(load(scores) * (scale / softcap)));
    }
};

/* Returns a token's position in the cache of a layer with a budget (0: none) for its slot's prompt. */
static inline int64_t kept(int64_t position, int64_t slot, const int64_t *prompts, int64_t budget) {
    if (!prompts || !budget) return position;
    const int64_t prompt = prompts[slot];
    return position < prompt || prompt <= budget ? position : position - (prompt - budget);
}

/* Computes one query's weights of N keys, 2^(by * score - best), zero outside of [from, to), and updates `best` and
`sum`. With SCALED each weight is then multiplied by its scale, which `sum` does not include. Returns the factor for
earlier sums. */
template <int N, bool COARSE, bool SCALED, class P>
static inline float weigh(const float *scores, P *weights, int64_t from, int64_t to, float by, float &best, float &sum,
                          const float *scales) {
    constexpr int COUNT = N / LANES;
    lanes x[COUNT], high = all(-__builtin_inff());
    if (from <= 0 && to >= N) {
        for (int i = 0; i < COUNT; ++i) high = maximum(high, x[i] = load(scores + i * LANES));
    } else {
        signs at;
        for (int i = 0; i < LANES; ++i) at[i] = i;
        for (int i = 0; i < COUNT; ++i, at += LANES) {
            const signs seen = (at >= int32_t(from)) & (at < int32_t(to));
            high = maximum(high, x[i] = seen ? load(scores + i * LANES) : all(-__builtin_inff()));
        }
    }
    const float now = by * highest(high), most = now > best ? now : best;
    lanes more{};
    for (int i = 0; i < COUNT; i += 2) {
        lanes one = power<COARSE>(x[i] * by - most), two = power<COARSE>(x[i + 1] * by - most);
        more += one + two;
        if (SCALED) one *= load(scales + i * LANES), two *= load(scales + (i + 1) * LANES);
        store(weights + i * LANES, one, two);
    }
    const float shrink = best == most ? 1.0f : power(all(best - most))[0];
    best = most;
    sum = sum * shrink + total(more);
    return shrink;
}

constexpr int64_t COMMON_PARTS = 8; /* the most parts of a shared prefix */

/* Rows of one query that share a prefix of pages: attention to the prefix is computed for tiles of rows
(attention_prompt.cpp), to a row's other tokens for each row. As int64: the number of tiles; for each row its first
token after the prefix, then for each row the parts of its prefix (0: none); the row indices, tile after tile; the
tiles. */
struct Common {
    struct Tile {
        int64_t first, rows, tokens, size; /* rows in `order` from `first` on; tokens of the prefix, and of a part */
        int64_t parts() const { return (tokens + size - 1) / size; }
    };
    int64_t *numbers, rows;

    Common(const Arg &a, int64_t rows_) : numbers(as<int64_t>(a)), rows(rows_) {}

    explicit operator bool() const { return numbers != nullptr; }
    int64_t &tiles() const { return *numbers; }
    int64_t &begin(int64_t row) const { return numbers[1 + row]; }
    int64_t &parts(int64_t row) const { return numbers[1 + rows + row]; }
    int64_t *order() const { return numbers + 1 + 2 * rows; }
    Tile &tile(int64_t i) const { return reinterpret_cast<Tile *>(numbers + 1 + 3 * rows)[i]; }

    /* Returns the offset of a prefix's part in the `partial` sums, which precede those of the rows' other parts. */
    static int64_t part(int64_t row, int64_t part, int64_t head, int64_t heads, int64_t stride) {
        return ((row * COMMON_PARTS + part) * heads + head) * (stride + 2);
    }
};
