/* Sampling: the greedy token of a row of logits, and draws with temperature, min_p, top_k and top_p, as
quire.worker.gumbel defines them.

A token's likelihood, relative to the best token's, which has 1, is represented by the bits of its float, the *key*,
which is monotonic in it. Nothing is sorted: keys are counted by their upper bits, then those of one bin by their lower
bits. Weights are integers, so that sums do not depend on the order of their terms.

Few tokens can have the greatest score, logit / temperature - log E. Since E = -log(1 - u) >= u, vectors compare u with
an upper bound of the E with which a token would have the greatest score so far. The scores of the few tokens below it
are computed in double. */
#include "lanes.h"

#include <cmath>

constexpr int32_t LEAST = 0x2f800000; /* the key of 2^-32, the least likelihood with a weight above 0 */
constexpr int32_t ONE = 0x3f800000;
constexpr int LOW = 14;                /* bits of a key within a bin */
constexpr int64_t BINS = ((ONE - LEAST) >> LOW) + 1, WITHIN = int64_t(1) << LOW;
constexpr int64_t BLOCK = 1024; /* tokens that a search for the greatest compares together */
constexpr int64_t GROUP = 64;   /* tokens whose noise is computed together: 16 counters of 4 words */
constexpr int VECTORS = GROUP / LANES;

static uint64_t weight_of(int32_t key) {
    float likelihood;
    std::memcpy(&likelihood, &key, sizeof key);
    return uint64_t(likelihood * 4294967296.0f);
}

typedef uint64_t longs __attribute__((vector_size(LANES * 4)));

static inline uint64_t product(uint64_t x, uint32_t y) { return uint64_t(uint32_t(x)) * y; }

/* Returns the products of the low 32 bits of each lane of x and y. */
static inline longs product(longs x, uint32_t y) {
#if defined(__AVX512F__)
    return bits<longs>(_mm512_mul_epu32(bits<__m512i>(x), _mm512_set1_epi64(y)));
#elif defined(__AVX2__)
    return bits<longs>(_mm256_mul_epu32(bits<__m256i>(x), _mm256_set1_epi64x(y)));
#else
    return (x & 0xffffffffu) * uint64_t(y);
#endif
}

/* Returns whether a lane is not 0. */
static inline bool any(signs x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(bits<__m512i>(x), bits<__m512i>(x));
#elif defined(__AVX2__)
    return !_mm256_testz_si256(bits<__m256i>(x), bits<__m256i>(x));
#else
    int32_t sum = 0;
    for (int j = 0; j < LANES; ++j) sum |= x[j];
    return sum;
#endif
}

namespace {

/* One row of logits and its sampling parameters. */
template <class T> struct Row {
    const T *x;
    int64_t vocab;
    float best, temperature, min_p;
    int32_t border = 0; /* the least key that min_p, top_k and top_p keep; 0 if they keep all tokens */

    /* Returns the keys of up to LANES tokens from `i` on; 0 for those below min_p and those of weight 0. */
    inline __attribute__((always_inline)) signs keys(int64_t i) const {
        const int64_t n = vocab - i;
        lanes u = load(x + i, n) - best;
        if (temperature != 1.0f) u /= temperature;
        u = exponential(u);
        signs keys = (signs)u & (u >= min_p) & ((signs)u >= LEAST);
        if (n < LANES)
            for (int64_t j = n; j < LANES; ++j) keys[j] = 0;
        return keys;
    }
};

} // namespace

/* The key at which a count or sum from the greatest key down stops. */
struct Place {
    int32_t key;
    uint64_t count, mass; /* of the keys above it */
};

/* Returns the greatest key such that the number, or if `weigh` the weight, of the keys at or above it is at least
   `need`; LEAST if there is none. counts and masses [BINS] are of the row's keys; `within` [WITHIN] is scratch. */
template <class T>
static Place descend(const Row<T> &row, const uint32_t *counts, const uint64_t *masses, uint32_t *within, uint64_t need,
                     bool weigh) {
    Place at{LEAST, 0, 0};
    int64_t bin = BINS - 1;
    for (; bin >= 0; --bin) {
        if ((weigh ? at.mass + masses[bin] : at.count + counts[bin]) >= need) break;
        at.count += counts[bin];
        at.mass += masses[bin];
    }
    if (bin < 0) return at;
    std::memset(within, 0, WITHIN * sizeof *within);
    const int32_t first = LEAST + int32_t(bin << LOW);
    for (int64_t i = 0; i < row.vocab; i += LANES) {
        const signs keys = row.keys(i);
        const signs inside = (keys >= first) & (keys < first + int32_t(WITHIN));
        for (int j = 0; j < LANES; ++j)
            if (inside[j]) ++within[keys[j] - first];
    }
    for (int64_t i = WITHIN - 1; i >= 0; --i) {
        at.key = first + int32_t(i);
        const uint64_t mass = within[i] * weight_of(at.key);
        if ((weigh ? at.mass + mass : at.count + within[i]) >= need) break;
        at.count += within[i];
        at.mass += mass;
    }
    return at;
}

/* Returns the row's threshold: the key of the first token, in descending order and among the first k, at which the sum
   of weights reaches top_p of that of the first k. */
template <class T> static int32_t border_of(const Row<T> &row, uint64_t top_k, double top_p, void *scratch) {
    uint64_t *masses = static_cast<uint64_t *>(scratch), total = 0, many = 0;
    uint32_t *counts = reinterpret_cast<uint32_t *>(masses + BINS), *within = counts + BINS;
    std::memset(scratch, 0, BINS * (sizeof *masses + sizeof *counts));
    for (int64_t i = 0; i < row.vocab; i += LANES) {
        const signs keys = row.keys(i);
        for (int j = 0; j < LANES; ++j) {
            if (!keys[j]) continue;
            const int64_t bin = (keys[j] - LEAST) >> LOW;
            ++counts[bin];
            masses[bin] += weight_of(keys[j]);
        }
    }
    for (int64_t bin = 0; bin < BINS; ++bin) total += masses[bin], many += counts[bin];
    int32_t border = LEAST;
    if (top_k && top_k < many) {
        const Place kth = descend(row, counts, masses, within, top_k, false);
        border = kth.key;
        total = kth.mass + (top_k - kth.count) * weight_of(kth.key);
    }
    if (top_p < 1) {
        const Place reached = descend(row, counts, masses, within, uint64_t(std::ceil(double(total) * top_p)), true);
        border = reached.key > border ? reached.key : border;
    }
    return border;
}

/* Returns the lowest id of the greatest logit; -1 if one is NaN or +infinite, or none is above -infinity. */
template <class T> static int64_t greatest(const T *x, int64_t vocab, float *best) {
    const lanes least = all(-__builtin_inff());
    lanes most[4] = {least, least, least, least}, odd{}; /* four, so that comparisons do not wait for each other */
    const auto look = [&](lanes some, lanes &most) {
        most = some > most ? some : most;
        odd = some == some ? odd : some;
    };
    int64_t i = 0;
    for (; i + 4 * LANES <= vocab; i += 4 * LANES)
        for (int j = 0; j < 4; ++j) look(load(x + i + j * LANES), most[j]);
    for (; i < vocab; i += LANES) {
        lanes some = load(x + i, vocab - i);
        for (int64_t j = vocab - i; j < LANES; ++j) some[j] = -__builtin_inff();
        look(some, most[0]);
    }
    bool fault = false;
    *best = -__builtin_inff();
    for (const lanes &some : most)
        for (int j = 0; j < LANES; ++j) *best = some[j] > *best ? some[j] : *best;
    for (int j = 0; j < LANES; ++j) fault |= odd[j] != odd[j];
    fault |= *best == __builtin_inff();
    if (fault || !(*best > -__builtin_inff())) return -1;
    const lanes wanted = all(*best);
    for (i = 0; i + BLOCK <= vocab; i += BLOCK) { /* find the block that contains it */
        signs same{};
        for (int64_t j = 0; j < BLOCK; j += LANES) same |= load(x + i + j) == wanted;
        if (any(same)) break;
    }
    while (i < vocab && to(x[i]) != *best) ++i;
    return i;
}

/* Philox4x32-10 (Salmon et al. 2011), for the counters (c[0], position, position >> 32, 0): replaces c by the four
   words. A word is in the low 32 bits of 64. */
template <class W> static inline void philox(W (&c)[4], int64_t seed, int64_t position) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
    c[1] = uint64_t(uint32_t(position)) + W{}, c[2] = (uint64_t(position) >> 32) + W{}, c[3] = W{};
    for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
        const W first = product(c[0], 0xd2511f53u), second = product(c[2], 0xcd9e8d57u);
        c[0] = (second >> 32) ^ c[1] ^ uint64_t(k0), c[1] = second;
        c[2] = (first >> 32) ^ c[3] ^ uint64_t(k1), c[3] = first;
    }
}

/* A token and its score. */
struct Choice {
    int64_t token;
    double score;

    void take(int64_t other, double its) {
        if (its > score || (its == score && other < token)) token = other, score = its;
    }
};

/* Returns logit / temperature - log E. `bits`: the token's noise. */
static double score_of(float logit, double temperature, uint32_t bits) {
    return double(logit) / temperature - std::log(-std::log1p((bits + 0.5) * -0x1p-32));
}

/* Returns the token of the greatest score, given the token of the greatest logit. */
template <class T>
static int64_t drawn(const Row<T> &row, double temperature, int64_t best, int64_t seed, int64_t position) {
    uint64_t c[4] = {uint64_t(best / GROUP * 16 + best % 16)};
    philox(c, seed, position);
    Choice choice{best, score_of(row.best, temperature, uint32_t(c[best / 16 % 4]))};
    /* The bound is 2^t with t = (logit / temperature - score) log2 e. As the bits of a float, (t + 127) 2^23 are
       linear between powers of two, so not below 2^t; `bias` has 24 more for the comparison with u 2^24, and more than
       the rounding errors of logits that are near the score. */
    const float scale = float(LOG2E / temperature) * 0x1p23f;
    float bias, floor = -__builtin_inff(); /* of logits that are kept */
    const auto set_bias = [&] {
        const double t = -choice.score * 1.4426950408889634;
        bias = float((t + 151 + (std::abs(t) + 256) * 0x1p-21) * 0x1p23);
    };
    set_bias();
    if (row.border) {
        float likelihood;
        std::memcpy(&likelihood, &row.border, sizeof likelihood);
        likelihood = likelihood < row.min_p ? row.min_p : likelihood;
        floor = row.best + row.temperature * (std::log(likelihood) - 1e-3f);
    }
    constexpr float NEVER = (127 - 10) * 0x1p23f; /* (the least u) 2^24, and half of it */
    for (int64_t begin = 0; begin < row.vocab; begin += GROUP) {
        signs bounds[VECTORS], possible{};
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t i = begin + v * LANES;
            const lanes x = load(row.x + i, row.vocab - i);
            lanes bound = fused(x, all(scale), all(bias));
            bound = bound < 0x1.3p30f ? bound : all(0x1.3p30f);
            bound = (bound > NEVER) & (x >= floor) ? bound : lanes{};
            bounds[v] = __builtin_convertvector(bound, signs);
            possible |= bounds[v];
        }
        if (!any(possible)) continue;
        words noise[VECTORS];
        for (int half = 0; half < 16 / LANES; ++half) {
            longs even[4], odd[4];
            for (int i = 0; i < LANES / 2; ++i) {
                even[0][i] = uint64_t(begin / 4 + half * LANES + 2 * i);
                odd[0][i] = even[0][i] + 1;
            }
            philox(even, seed, position), philox(odd, seed, position);
            for (int word = 0; word < 4; ++word)
                noise[word * (16 / LANES) + half] = bits<words>((even[word] & 0xffffffffu) | odd[word] << 32);
        }
        possible = signs{};
        for (int v = 0; v < VECTORS; ++v) {
            bounds[v] = __builtin_convertvector((signs)(noise[v] >> 8), lanes) < (lanes)bounds[v];
            possible |= bounds[v];
        }
        if (!any(possible)) continue;
        for (int v = 0; v < VECTORS && begin + v * LANES < row.vocab; ++v) {
            const int64_t i = begin + v * LANES;
            if (row.border) bounds[v] &= row.keys(i) >= row.border;
            for (int j = 0; j < LANES; ++j)
                if (bounds[v][j] && i + j < row.vocab)
                    choice.take(i + j, score_of(to(row.x[i + j]), temperature, noise[v][j]));
        }
        set_bias();
    }
    return choice.token;
}

/* Draws tokens [draws] from rows owners[d] (ascending) of logits [rows, vocab]; the greatest if the temperature is 0. A
   row with a logit that is NaN or +infinite, or with none above -infinity, gets token 0 and fault 1. The first draw of
   a row is also stored to last[slots[row]]. A chunk is a row. Args: logits, shapes [rows, 4] (double: temperature,
   min_p, top_k, top_p; null: all 0), owners (int64; null: row r has draw r), seeds, positions, slots, last, tokens,
   faults (all int64), stride, vocab, draws. */
template <class T> static void sample(const Arg *a, int64_t r, void *scratch) {
    const int64_t *owners = as<int64_t>(a[2]), vocab = a[10].integer, draws = a[11].integer;
    const double *shape = as<double>(a[1]);
    int64_t first = owners ? 0 : r, end = owners ? draws : r + 1;
    while (owners && first < draws && owners[first] < r) ++first;
    while (owners && end > first && owners[end - 1] > r) --end;
    Row<T> row{as<T>(a[0]) + r * a[9].integer, vocab, 0, 0, 0};
    const int64_t best = greatest(row.x, vocab, &row.best);
    as<int64_t>(a[8])[r] = best < 0;
    int64_t *tokens = as<int64_t>(a[7]);
    for (int64_t d = first; d < end; ++d) tokens[d] = best < 0 ? 0 : best;
    if (best >= 0 && shape && shape[4 * r] > 0) {
        row.temperature = float(shape[4 * r]), row.min_p = float(shape[4 * r + 1]);
        const uint64_t top_k = uint64_t(shape[4 * r + 2]);
        if (top_k || shape[4 * r + 3] < 1) row.border = border_of(row, top_k, shape[4 * r + 3], scratch);
        else if (row.min_p > 0) row.border = LEAST;
        for (int64_t d = first; d < end; ++d)
            tokens[d] = drawn(row, shape[4 * r], best, as<int64_t>(a[3])[d], as<int64_t>(a[4])[d]);
    }
    if (first < end) as<int64_t>(a[6])[as<int64_t>(a[5])[r]] = tokens[first];
}

QUIRE_EXPORT void sample_bf16(const Arg *a, int64_t chunk, void *s) { sample<bf16>(a, chunk, s); }
QUIRE_EXPORT void sample_f32(const Arg *a, int64_t chunk, void *s) { sample<float>(a, chunk, s); }
