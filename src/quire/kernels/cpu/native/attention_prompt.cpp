/* Attention of rows of several queries over pages (FlashAttention): tiles of queries of the heads that share a key
head, by blocks of keys and values, which are packed for products once for all queries of the tile. And attention of
rows of one query to the pages of a shared prefix, in tiles of rows. */
#include "attention.h"
#include "attention_products.h"

namespace {

constexpr int FIELDS = 6; /* of a tile: slot, first query, queries, first position, end position, kind: 1 if all see
                              up to the end, 2 if from their windows on */

constexpr int BLOCK = 128; /* keys at once */

int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by * by; }

/* The layout of a tile in its thread's scratch. `columns`: numbers of a head, padded; `steps`: words of a query. */
template <bool PAIRS> struct Room {
    static constexpr int IN_WORD = PAIRS ? 2 : 1, STEP = LANES * IN_WORD;
    int64_t rows, steps, columns;
    uint32_t *queries, *keys, *values, *weights;
    float *scores, *out, *best, *sum;
    int64_t *first, *stop; /* the positions that each row sees */
    bool tiled;

    Room(void *scratch, int64_t used, int64_t dim) : rows(up(used, HEIGHT)) {
        tiled = PAIRS && tiles();
        steps = up(up(dim, IN_WORD) / IN_WORD, LANES);
        columns = up(dim, LANES);
        queries = static_cast<uint32_t *>(scratch);
        keys = queries + rows * steps;
        values = keys + steps * BLOCK;
        weights = values + BLOCK / IN_WORD * columns;
        scores = reinterpret_cast<float *>(weights + HEIGHT * BLOCK);
        out = scores + HEIGHT * BLOCK;
        best = out + rows * columns;
        sum = best + rows;
        first = reinterpret_cast<int64_t *>(sum + rows);
        stop = first + rows;
    }
};

/* Converts int8 to bf16, which is exact. */
inline words pairs(const int8_t *x, int64_t count) {
    shorts both{};
    if (count >= 2 * LANES) std::memcpy(&both, x, sizeof both);
    else if (count > 0) std::memcpy(&both, x, size_t(count));
    const signs wide = __builtin_convertvector(both, signs);
    const lanes low = __builtin_convertvector((wide << 24) >> 24, lanes);
    const lanes high = __builtin_convertvector((wide << 16) >> 24, lanes);
    return (bits<words>(low) >> 16) | bits<words>(high);
}

template <bool PAIRS, class T> words row_words(const T *x, int64_t count) {
    if constexpr (PAIRS) return pairs(x, count);
    else return bits<words>(load(x, count));
}

/* Packs `tokens` keys from index `before` of the block on, transposed: row s is word s of all BLOCK keys, zeros
elsewhere. */
template <class K, bool PAIRS>
void pack_keys(const Cache<K> &cache, const Room<PAIRS> &room, const int64_t *places, int64_t before, int64_t tokens) {
    constexpr int IN_WORD = PAIRS ? 2 : 1;
    for (int64_t t = 0; t < BLOCK; t += LANES)
        for (int64_t s = 0; s < room.steps; s += LANES) {
            words x[LANES];
            const int64_t left = cache.dim - s * IN_WORD;
            for (int j = 0; j < LANES; ++j) {
                const int64_t at = t + j - before;
                x[j] = at < 0 || at >= tokens ? words{} : row_words<PAIRS>(cache.keys + places[at] + s * IN_WORD, left);
            }
            turn(x);
            for (int j = 0; j < LANES; ++j) std::memcpy(room.keys + (s + j) * BLOCK + t, &x[j], sizeof(words));
        }
}

/* Packs values: word d of row t is number d of token t, or with PAIRS of the tokens 2 t and 2 t + 1. */
template <class K, bool PAIRS>
void pack_values(const Cache<K> &cache, const Room<PAIRS> &room, const int64_t *places, int64_t before, int64_t tokens) {
    constexpr int IN_WORD = PAIRS ? 2 : 1;
    auto value = [&](int64_t t, int64_t d) {
        const int64_t at = t - before;
        return at < 0 || at >= tokens ? words{} : bits<words>(load(cache.values + places[at] + d, cache.dim - d));
    };
    for (int64_t t = 0; t < BLOCK; t += IN_WORD)
        for (int64_t d = 0; d < room.columns; d += LANES) {
            const words x = PAIRS ? (value(t, d) >> 16) | value(t + 1, d) : value(t, d);
            std::memcpy(room.values + t / IN_WORD * room.columns + d, &x, sizeof(words));
        }
}

/* The scales of a block's tokens in int8, zeros elsewhere. */
struct Scales {
    float keys[BLOCK], values[BLOCK];

    template <class K> void take(const Cache<K> &cache, const int64_t *places, int64_t before, int64_t tokens) {
        std::memset(this, 0, sizeof *this);
        cache.scales(cache.keys, places, tokens, keys + before);
        cache.scales(cache.values, places, tokens, values + before);
    }
};

template <class T, class K, bool PAIRS> struct Tile {
    static constexpr int IN_WORD = PAIRS ? 2 : 1;
    using Weight = typename std::conditional<PAIRS, bf16, float>::type;
    const Cache<K> cache;
    const Seeing seeing;
    const T *q;
    T *out;
    int64_t q_stride, head, slot, query, queries, position, end, whole;

    Tile(const Arg *a, int64_t chunk)
        : cache(a), seeing(a + CACHE_ARGS + 4), q(as<T>(a[CACHE_ARGS])), out(as<T>(a[CACHE_ARGS + 2])),
          q_stride(a[CACHE_ARGS + 1].integer), head(chunk % cache.kv_heads) {
        const int64_t *tile = as<int64_t>(a[CACHE_ARGS + 3]) + chunk / cache.kv_heads * FIELDS;
        slot = tile[0], query = tile[1], queries = tile[2], position = tile[3], end = tile[4], whole = tile[5];
    }

    /* For rows of one query (attention_decode.cpp): only the cache and Seeing are used. */
    Tile(const Arg *a, int64_t slot_, int64_t head_)
        : cache(a), seeing(a + CACHE_ARGS + 8), q(as<T>(a[CACHE_ARGS])), out(nullptr), q_stride(a[CACHE_ARGS + 1].integer),
          head(head_), slot(slot_), query(0), queries(0), position(0), end(0), whole(0) {}

    int64_t first(int64_t i) const { return whole == 1 ? 0 : seeing.oldest(position + i); }
    int64_t stop(int64_t i) const { return whole ? end : position + i + 1; }

    /* Loads the rows of all queries, for each the heads that share the key head, then rows of zeros, which see the same
       as the last query. */
    void load_queries(const Room<PAIRS> &room) const {
        int64_t r = 0;
        for (int64_t i = 0; i < queries; ++i) r = load_query(room, query + i, r, first(i), stop(i));
        begin(room, r, true);
    }

    /* Loads the heads of a query as rows from `r` on, which see [first, stop); returns the row after them. */
    int64_t load_query(const Room<PAIRS> &room, int64_t query, int64_t r, int64_t first, int64_t stop) const {
        const T *from = q + query * q_stride + head * cache.shared * cache.dim;
        for (int64_t g = 0; g < cache.shared; ++g, ++r, from += cache.dim) {
            for (int64_t s = 0; s < room.steps; s += LANES) {
                const words x = row_words<PAIRS>(from + s * IN_WORD, cache.dim - s * IN_WORD);
                std::memcpy(room.queries + r * room.steps + s, &x, sizeof x);
            }
            room.first[r] = first, room.stop[r] = stop;
        }
        return r;
    }

    void begin(const Room<PAIRS> &room, int64_t r, bool with_sinks) const {
        std::memset(room.queries + r * room.steps, 0, size_t((room.rows - r) * room.steps) * 4);
        for (; r < room.rows; ++r) room.first[r] = room.first[r - 1], room.stop[r] = room.stop[r - 1];
        for (r = 0; r < room.rows; ++r)
            seeing.begin(head * cache.shared + r % cache.shared, with_sinks, room.best[r], room.sum[r]);
        std::memset(room.out, 0, size_t(room.rows * room.columns) * 4);
    }

    /* Attends with HEIGHT rows from `row` on to the block of keys that begins at position `block`. */
    void rows(const Room<PAIRS> &room, const Scales &scales, int64_t row, int64_t block) const {
        const int64_t end = room.stop[row + HEIGHT - 1] - block, seen = end <= BLOCK / 2 ? BLOCK / 2 : BLOCK;
        if (end <= 0 || room.first[row] >= block + BLOCK) return;
        product<PAIRS, false>(room.tiled, room.queries + row * room.steps, room.steps, room.keys, BLOCK, room.scores,
                              BLOCK, room.steps, seen);
        if (ROUNDED<K>)
            for (int r = 0; r < HEIGHT; ++r) scale_each(room.scores + r * BLOCK, scales.keys, seen);
        if (seeing.softcap > 0)
            for (int i = 0; i < HEIGHT * BLOCK; i += LANES) seeing.cap(room.scores + i);
        for (int64_t r = row; r < row + HEIGHT; ++r) {
            const float shrink = seen == BLOCK ? weighed<BLOCK>(room, scales, r, r - row, block)
                                               : weighed<BLOCK / 2>(room, scales, r, r - row, block);
            float *own = room.out + r * room.columns;
            if (shrink != 1.0f)
                for (int64_t d = 0; d < room.columns; d += LANES) store(own + d, load(own + d) * shrink);
        }
        product<PAIRS, true>(room.tiled, room.weights, BLOCK / IN_WORD, room.values, room.columns,
                             room.out + row * room.columns, room.columns, seen / IN_WORD, room.columns);
    }

    template <int N>
    float weighed(const Room<PAIRS> &room, const Scales &scales, int64_t r, int64_t at, int64_t block) const {
        Weight *weights = reinterpret_cast<Weight *>(room.weights);
        return weigh<N, std::is_same<T, bf16>::value, ROUNDED<K>>(
            room.scores + at * BLOCK, weights + at * BLOCK, room.first[r] - block, room.stop[r] - block, seeing.by(),
            room.best[r], room.sum[r], scales.values);
    }

    void answer(const Room<PAIRS> &room) const {
        const float *from = room.out, *sum = room.sum;
        for (int64_t i = 0; i < queries; ++i) {
            T *to = out + ((query + i) * cache.heads + head * cache.shared) * cache.dim;
            for (int64_t g = 0; g < cache.shared; ++g, to += cache.dim, from += room.columns) {
                const float by = 1.0f / *sum++;
                for (int64_t d = 0; d < cache.dim; d += LANES) store(to + d, load(from + d) * by, cache.dim - d);
            }
        }
    }
};

/* Attends with all rows of the tile to the tokens [from, end). Blocks begin at multiples of BLOCK, so that a query's
   result does not depend on its tile. */
template <class T, class K, bool PAIRS>
void over(const Tile<T, K, PAIRS> &tile, const Room<PAIRS> &room, int64_t from, int64_t end) {
    Scales scales;
    int64_t places[2][BLOCK], to = from / BLOCK * BLOCK + BLOCK < end ? from / BLOCK * BLOCK + BLOCK : end;
    tile.cache.places(tile.slot, tile.head, from, to, places[0]);
    tile.cache.fetch(places[0], to - from);
    if (room.tiled) begin_tiles();
    for (int64_t i = 0; from < end; i ^= 1) {
        const int64_t block = from / BLOCK * BLOCK, next = to + BLOCK < end ? to + BLOCK : end;
        tile.cache.places(tile.slot, tile.head, to, next, places[i ^ 1]);
        tile.cache.fetch(places[i ^ 1], next - to);
        pack_keys(tile.cache, room, places[i], from - block, to - from);
        pack_values(tile.cache, room, places[i], from - block, to - from);
        if (ROUNDED<K>) scales.take(tile.cache, places[i], from - block, to - from);
        for (int64_t row = 0; row < room.rows; row += HEIGHT) tile.rows(room, scales, row, block);
        from = to;
        to = next;
    }
    if (room.tiled) end_tiles();
}

/* Args after the cache's: q, token stride of q, out, tiles, the five of Seeing. A chunk is a tile for a key head. */
template <class T, class K, bool PAIRS> void prompt(const Arg *a, int64_t chunk, void *scratch) {
    const Tile<T, K, PAIRS> tile(a, chunk);
    const Room<PAIRS> room(scratch, tile.queries * tile.cache.shared, tile.cache.dim);
    tile.load_queries(room);
    over(tile, room, tile.first(0), tile.stop(tile.queries - 1));
    tile.answer(room);
}

/* Stores a head's sums in the order of attention_decode.cpp: in steps, for keys in bf16 first the even, then the odd
ones. */
template <class K> void store_part(const float *from, int64_t columns, float *to, int64_t stride) {
    constexpr auto order = std::make_integer_sequence<int, LANES>();
    constexpr int64_t STEP = std::is_same<K, bf16>::value ? 2 * LANES : LANES;
    for (int64_t i = 0; i < stride; i += STEP) {
        const lanes one = i < columns ? load(from + i) : lanes{};
        if (STEP == LANES) {
            store(to + i, one);
            continue;
        }
        const lanes two = i + LANES < columns ? load(from + i + LANES) : lanes{};
        store(to + i, thinned<0>(one, two, order));
        store(to + i + LANES, thinned<1>(one, two, order));
    }
}

/* Attends with a tile of rows to one part of their shared prefix, for a key head. Args as for attention_parts. */
template <class T, class K, bool PAIRS>
void common_part(const Arg *a, const Common &common, const Common::Tile &which, int64_t head, int64_t part, void *scratch) {
    const int64_t *slots = as<int64_t>(a[CACHE_ARGS + 3]), *places = as<int64_t>(a[CACHE_ARGS + 5]);
    const int64_t *order = common.order() + which.first;
    float *partial = as<float>(a[CACHE_ARGS + 13]);
    const Tile<T, K, PAIRS> tile(a, slots[order[0]], head);
    const int64_t shared = tile.cache.shared, stride = up(tile.cache.dim, 32), from = part * which.size;
    const int64_t end = from + which.size < which.tokens ? from + which.size : which.tokens;
    const Room<PAIRS> room(scratch, which.rows * shared, tile.cache.dim);
    int64_t r = 0;
    for (int64_t i = 0; i < which.rows; ++i)
        r = tile.load_query(room, places ? places[order[i]] : order[i], r, from, end);
    tile.begin(room, r, false);
    over(tile, room, from, end);
    for (int64_t i = 0; i < r; ++i) {
        float *to = partial + Common::part(order[i / shared], part, head * shared + i % shared, tile.cache.heads, stride);
        store_part<K>(room.out + i * room.columns, room.columns, to, stride);
        to[stride] = room.best[i], to[stride + 1] = room.sum[i];
    }
}

/* Items are the parts of tiles, each for all key heads in order; chunks have equal numbers of items. */
template <class T, class K, bool PAIRS> void common(const Arg *a, int64_t chunk, void *scratch) {
    const Common found(a[CACHE_ARGS + 16], a[CACHE_ARGS + 6].integer);
    const int64_t kv_heads = a[8].integer, chunks = a[CACHE_ARGS + 7].integer;
    int64_t items = 0, before = 0;
    for (int64_t i = 0; i < found.tiles(); ++i) items += found.tile(i).parts() * kv_heads;
    const int64_t begin = items * chunk / chunks, stop = items * (chunk + 1) / chunks;
    for (int64_t i = 0; i < found.tiles() && before < stop; ++i) {
        const Common::Tile &tile = found.tile(i);
        const int64_t own = tile.parts() * kv_heads;
        for (int64_t k = begin > before ? begin - before : 0; k < own && before + k < stop; ++k)
            common_part<T, K, PAIRS>(a, found, tile, k % kv_heads, k / kv_heads, scratch);
        before += own;
    }
}

} // namespace

/* Makes tiles of rows of one query. Args: slots, positions, rows, tiles, prompt lengths of slots, a budget. */
QUIRE_EXPORT void attention_tiles(const Arg *a, int64_t, void *) {
    for (int64_t row = 0; row < a[2].integer; ++row) {
        int64_t *tile = as<int64_t>(a[3]) + row * FIELDS;
        tile[0] = as<int64_t>(a[0])[row], tile[1] = row, tile[2] = 1, tile[5] = 0;
        tile[3] = kept(as<int64_t>(a[1])[row], tile[0], as<int64_t>(a[4]), a[5].integer);
        tile[4] = tile[3] + 1;
    }
}

#define EXPORTED(NAME, T, K)                                                                                        \
    QUIRE_EXPORT void attention_prompt_##NAME(const Arg *a, int64_t chunk, void *s) {                               \
        constexpr bool PAIRS = std::is_same<T, bf16>::value;                                                        \
        PAIRS && paired() ? prompt<T, K, PAIRS>(a, chunk, s) : prompt<T, K, false>(a, chunk, s);                    \
    }                                                                                                               \
    QUIRE_EXPORT void attention_common_##NAME(const Arg *a, int64_t chunk, void *s) {                               \
        constexpr bool PAIRS = std::is_same<T, bf16>::value;                                                        \
        PAIRS && paired() ? common<T, K, PAIRS>(a, chunk, s) : common<T, K, false>(a, chunk, s);                    \
    }

EXPORTED(bf16, bf16, bf16)
EXPORTED(f32, float, float)
EXPORTED(bf16_int8, bf16, int8_t)
EXPORTED(f32_int8, float, int8_t)
