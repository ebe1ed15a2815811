/* Sampling: the greedy token of a row of logits, and draws with temperature, min_p, top_k and top_p, as
quire.worker.inverse_cdf defines them.

A token's likelihood, relative to the best token's, which has 1, is represented by the bits of its float, the *key*,
which is monotonic in it. Nothing is sorted: keys are counted by their upper bits, then those of one bin by their lower
bits. Weights are integers, so that sums do not depend on the order of their terms. */
#include "lanes.h"

#include <cmath>

constexpr int32_t LEAST = 0x2f800000; /* the key of 2^-32, the least likelihood with a weight above 0 */
constexpr int32_t ONE = 0x3f800000;
constexpr int LOW = 14;                /* bits of a key within a bin */
constexpr int64_t BINS = ((ONE - LEAST) >> LOW) + 1, WITHIN = int64_t(1) << LOW;
constexpr int64_t BLOCK = 1024; /* tokens of each partial sum that a draw reads */

typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef float Half __attribute__((vector_size(LANES * 2)));

static uint64_t weight_of(int32_t key) {
    float likelihood;
    std::memcpy(&likelihood, &key, sizeof key);
    return uint64_t(likelihood * 4294967296.0f);
}

/* Returns the weights of several keys. */
INLINE lanes weights_of(signs keys) {
    const lanes wide = (lanes)keys * 4294967296.0f, whole = (wide + 8388608.0f) - 8388608.0f;
    return wide < 8388608.0f ? whole - (lanes)((signs)all(1.0f) & (whole > wide)) : wide;
}

namespace {

/* One row of logits and its sampling parameters. */
template <class T> struct Row {
    const T *x;
    int64_t vocab;
    float best, temperature, min_p;
    int32_t border = LEAST;

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

    /* Returns the weight of the tokens at or above `border` among the BLOCK tokens from `begin` on. */
    uint64_t mass(int64_t begin) const {
        Doubles total{}; /* exact: a sum of integers below 2^53 */
        for (int64_t i = begin; i < vocab && i < begin + BLOCK; i += LANES) {
            const signs some = keys(i);
            const lanes weights = weights_of(some & (some >= border));
            Half halves[2];
            std::memcpy(halves, &weights, sizeof halves);
            total += __builtin_convertvector(halves[0], Doubles) + __builtin_convertvector(halves[1], Doubles);
        }
        uint64_t sum = 0;
        for (int j = 0; j < LANES / 2; ++j) sum += uint64_t(total[j]);
        return sum;
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
        int32_t any = 0;
        for (int j = 0; j < LANES; ++j) any |= same[j];
        if (any) break;
    }
    while (i < vocab && to(x[i]) != *best) ++i;
    return i;
}

/* Returns the first token, by id, at which the sum of weights exceeds chance times the total. `masses`: of blocks. */
template <class T> static int64_t drawn(const Row<T> &row, const uint64_t *masses, double chance) {
    const int64_t blocks = (row.vocab + BLOCK - 1) / BLOCK;
    uint64_t total = 0, before = 0;
    for (int64_t b = 0; b < blocks; ++b) total += masses[b];
    const uint64_t goal = uint64_t(std::floor(double(total) * chance));
    int64_t block = 0;
    while (block < blocks - 1 && before + masses[block] <= goal) before += masses[block++];
    for (int64_t i = block * BLOCK; i < row.vocab; i += LANES) {
        const signs keys = row.keys(i);
        for (int j = 0; j < LANES; ++j) {
            before += keys[j] >= row.border ? weight_of(keys[j]) : 0;
            if (before > goal) return i + j;
        }
    }
    return row.vocab - 1;
}

/* Draws tokens [draws] from rows owners[d] (ascending) of logits [rows, vocab]; the greatest if the temperature is 0. A
   row with a logit that is NaN or +infinite, or with none above -infinity, gets token 0 and fault 1. The first draw of
   a row is also stored to last[slots[row]]. A chunk is a row. Args: logits, shapes [rows, 4] (double: temperature,
   min_p, top_k, top_p; null: all 0), owners (int64; null: row r has draw r), chances (double), slots, last, tokens,
   faults (all int64), stride, vocab, draws. */
template <class T> static void sample(const Arg *a, int64_t r, void *scratch) {
    const int64_t *owners = as<int64_t>(a[2]), vocab = a[9].integer, draws = a[10].integer;
    const double *shape = as<double>(a[1]);
    int64_t first = owners ? 0 : r, end = owners ? draws : r + 1;
    while (owners && first < draws && owners[first] < r) ++first;
    while (owners && end > first && owners[end - 1] > r) --end;
    Row<T> row{as<T>(a[0]) + r * a[8].integer, vocab, 0, 0, 0};
    const int64_t best = greatest(row.x, vocab, &row.best);
    as<int64_t>(a[7])[r] = best < 0;
    int64_t *tokens = as<int64_t>(a[6]);
    for (int64_t d = first; d < end; ++d) tokens[d] = best < 0 ? 0 : best;
    if (best >= 0 && shape && shape[4 * r] > 0) {
        row.temperature = float(shape[4 * r]), row.min_p = float(shape[4 * r + 1]);
        const uint64_t top_k = uint64_t(shape[4 * r + 2]);
        if (top_k || shape[4 * r + 3] < 1) row.border = border_of(row, top_k, shape[4 * r + 3], scratch);
        uint64_t *masses = static_cast<uint64_t *>(scratch);
        for (int64_t b = 0; b * BLOCK < vocab; ++b) masses[b] = row.mass(b * BLOCK);
        for (int64_t d = first; d < end; ++d) tokens[d] = drawn(row, masses, as<double>(a[3])[d]);
    }
    if (first < end) as<int64_t>(a[5])[as<int64_t>(a[4])[r]] = tokens[first];
}

QUIRE_EXPORT void sample_bf16(const Arg *a, int64_t chunk, void *s) { sample<bf16>(a, chunk, s); }
QUIRE_EXPORT void sample_f32(const Arg *a, int64_t chunk, void *s) { sample<float>(a, chunk, s); }
