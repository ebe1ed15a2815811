/* What the kernels of attention share: where a layer's keys and values are, which positions a token sees, and weights of
a softmax that runs on. */
#pragma once
#include "lanes.h"

/* The first arguments of them all: keys, values, numbers from a page, a head and a token to the next, tokens of a page,
tables, entries from a table to the next, key heads, numbers of a head, query heads. */
constexpr int CACHE_ARGS = 11;

/* Keys and values in 8 bits: a head's numbers, then in fp32 what they are multiplied by. */
template <class K> constexpr bool ROUNDED = std::is_same<K, int8_t>::value;

typedef int8_t quarters __attribute__((vector_size(LANES)));
typedef int16_t doublets __attribute__((vector_size(LANES * 2)));

/* A compiler makes the steps between of plain conversions, and does one number after another without any. */
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

    /* Numbers from the first key on to a head's at this position. */
    int64_t at(int64_t slot, int64_t head, int64_t position) const {
        const int64_t page = tables[slot * table_stride + position / page_tokens];
        return page * page_stride + head * head_stride + position % page_tokens * token_stride;
    }

    /* Have keys and values of these places brought near: they are as far apart as pages are. */
    void fetch(const int64_t *places, int64_t count) const {
        const int64_t cell = dim + (ROUNDED<K> ? 4 : 0);
        for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < cell; d += 64 / int64_t(sizeof(K))) {
                __builtin_prefetch(keys + places[i] + d);
                __builtin_prefetch(values + places[i] + d);
            }
    }

    /* `at` of positions [from, to), one after another. */
    void places(int64_t slot, int64_t head, int64_t from, int64_t to, int64_t *found) const {
        while (from < to) {
            const int64_t left = page_tokens - from % page_tokens, stop = to - from < left ? to : from + left;
            for (int64_t place = at(slot, head, from); from < stop; ++from, place += token_stride) *found++ = place;
        }
    }

    /* What numbers at these places, of `keys` or of `values`, are multiplied by. */
    void scales(const K *numbers, const int64_t *places, int64_t count, float *found) const {
        for (int64_t i = 0; i < count; ++i) std::memcpy(found + i, numbers + places[i] + dim, 4);
    }
};

/* Scores, or weights, each by its own factor. */
static inline void scale_each(float *x, const float *by, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * load(by + i));
}

/* How scores become weights, and what is seen: scale, softcap (0: none), window and chunk (0: none). */
struct Seeing {
    float scale, softcap;
    int64_t window, chunk;

    explicit Seeing(const Arg *a)
        : scale(float(a[0].number)), softcap(float(a[1].number)), window(a[2].integer), chunk(a[3].integer) {}

    /* The first position that a token at this one sees. */
    int64_t oldest(int64_t position) const {
        if (chunk) return position - position % chunk;
        return window && position >= window ? position - window + 1 : 0;
    }

    /* What capped scores, or plain ones, are multiplied by to be powers of two. */
    float by() const { return (softcap > 0 ? 1.0f : scale) * LOG2E; }

    void cap(float *scores) const {
        store(scores, softcap * tanh(load(scores) * (scale / softcap)));
    }
};

/* Where a token at this position is among those that a layer with a budget (0: none) kept of its slot's prompt. */
static inline int64_t kept(int64_t position, int64_t slot, const int64_t *prompts, int64_t budget) {
    if (!prompts || !budget) return position;
    const int64_t prompt = prompts[slot];
    return position < prompt || prompt <= budget ? position : position - (prompt - budget);
}

constexpr float LEAST = -1e30f; /* below any score */

/* One query's weights of N keys: scores become 2^(by * score - best), those outside of [from, to) zero, and with SCALED
each is multiplied by its `scales`, where `best` and `sum` run on without. Returns what the sums before are to be
multiplied by. */
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

constexpr int64_t COMMON_PARTS = 8; /* of what rows have in common, at most */

/* Rows of one query whose first pages are the same ones: tokens of these are attended to once for many of them
(attention_prompt.cpp), each row's other tokens by itself. As int64: how many tiles of rows there are; of each row its
first own token, and the parts before it; rows, those of a tile one after another; and the tiles. */
struct Common {
    struct Tile {
        int64_t first, rows, tokens, size; /* of `order`; tokens of a part */
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

    /* Where a part goes: to the rows' `partial` sums, before those of their own parts. */
    static int64_t part(int64_t row, int64_t part, int64_t head, int64_t heads, int64_t stride) {
        return ((row * COMMON_PARTS + part) * heads + head) * (stride + 2);
    }
};
