/* Experts: the choice of each token's, the order of rows by expert, the products of all experts, and weighted sums. A
pair is a token and one of its chosen experts; tokens have `top` pairs each. Pairs of another rank's experts have the
place -1: they have no rows. */
#include "lanes.h"

#include <algorithm>

namespace {

/* Chooses the `top` largest logits of each row, the largest first, of equal ones the first. Their weights are the
   softmax's probabilities, divided by their sum if `normalised`, times the expert's scale (null: 1). A row with a probability that is no number gets the
   first experts, with NaN. Args: logits [rows, experts], weights (fp32) and chosen (int64) [rows, top], rows, experts,
   top, stride, normalised, rows of a chunk, scales (fp32). */
template <class T> void route(const Arg *a, int64_t chunk) {
    const int64_t experts = a[4].integer, top = a[5].integer;
    for (int64_t row = chunk * a[8].integer; row < std::min(a[3].integer, (chunk + 1) * a[8].integer); ++row) {
        const T *x = as<T>(a[0]) + row * a[6].integer;
        float *weights = as<float>(a[1]) + row * top, most = to(x[0]), all_ = 0, some = 0;
        int64_t *chosen = as<int64_t>(a[2]) + row * top;
        for (int64_t i = 1; i < experts; ++i) most = std::max(most, to(x[i]));
        for (int64_t i = 0; i < experts; i += LANES) {
            float one[LANES];
            store(one, exponential(load(x + i, experts - i) - most), LANES);
            for (int64_t j = 0; j < std::min<int64_t>(LANES, experts - i); ++j) all_ += one[j];
        }
        const bool wrong = !(all_ < __builtin_inff());
        int64_t last = -1;
        for (int64_t k = 0; k < top; ++k) {
            int64_t best = -1;
            for (int64_t i = 0; i < experts && !wrong; ++i) { /* those that follow the last one */
                const bool follows = last < 0 || to(x[i]) < to(x[last]) || (to(x[i]) == to(x[last]) && i > last);
                if (follows && (best < 0 || to(x[i]) > to(x[best]))) best = i;
            }
            last = chosen[k] = wrong ? k : best;
            float one[LANES];
            store(one, exponential(all(to(x[last]) - most)), LANES);
            some += weights[k] = wrong ? __builtin_nanf("") : one[0] / all_;
        }
        for (int64_t k = 0; k < top && a[7].integer; ++k) weights[k] /= some;
        for (int64_t k = 0; k < top && a[9].pointer; ++k) weights[k] *= as<float>(a[9])[chosen[k]];
    }
}

/* out [rows, size] = the sum over a token's pairs of weight * y's row of the pair, plus sigmoid(gate) * shared if there
   is a shared expert. Args: y, weights, places (of pairs in y), out, shared (or null), gate, size, top, columns of a
   chunk. A chunk is a part of a row. */
template <class T> void combine(const Arg *a, int64_t chunk) {
    const int64_t size = a[6].integer, top = a[7].integer, part = a[8].integer, parts = (size + part - 1) / part;
    const int64_t row = chunk / parts, begin = chunk % parts * part, end = std::min(begin + part, size);
    const float *weights = as<float>(a[1]) + row * top;
    const int64_t *places = as<int64_t>(a[2]) + row * top;
    const lanes share = a[4].pointer ? sigmoid(all(to(as<T>(a[5])[row]))) : lanes{};
    for (int64_t i = begin; i < end; i += LANES) {
        lanes sum{};
        for (int64_t k = 0; k < top; ++k)
            if (places[k] >= 0) sum += weights[k] * load(as<T>(a[0]) + places[k] * size + i, end - i);
        if (a[4].pointer) sum += share * load(as<T>(a[4]) + row * size + i, end - i);
        store(as<T>(a[3]) + row * size + i, sum, end - i);
    }
}

} // namespace

/* Sorts pairs by expert: those of expert first + e have the places bounds[e] to bounds[e + 1], e < experts. `hit`: the
   numbers e that have pairs, then -1. Args: chosen, bounds, hit, places, pairs, experts, length of `hit`, first; all
   int64. One chunk. */
QUIRE_EXPORT void experts_sort(const Arg *a, int64_t, void *) {
    const int64_t *chosen = as<int64_t>(a[0]), pairs = a[4].integer, experts = a[5].integer, first = a[7].integer;
    int64_t *bounds = as<int64_t>(a[1]), *hit = as<int64_t>(a[2]), *places = as<int64_t>(a[3]), hits = 0;
    std::fill(bounds, bounds + experts + 1, 0);
    for (int64_t p = 0; p < pairs; ++p) {
        const int64_t e = chosen[p] - first;
        places[p] = e >= 0 && e < experts ? bounds[e + 1]++ : -1;
    }
    for (int64_t e = 0; e < experts; ++e) {
        if (bounds[e + 1]) hit[hits++] = e;
        bounds[e + 1] += bounds[e];
    }
    std::fill(hit + hits, hit + a[6].integer, -1);
    for (int64_t p = 0; p < pairs; ++p)
        if (places[p] >= 0) places[p] += bounds[chosen[p] - first];
}

/* Copies the row of x of each pair's token to the pair's place in `out`. Args: x, out, places, pairs, top, bytes of a
   row, stride of x in bytes, pairs of a chunk. */
QUIRE_EXPORT void experts_gather(const Arg *a, int64_t chunk, void *) {
    const int64_t bytes = a[5].integer;
    for (int64_t p = chunk * a[7].integer; p < std::min(a[3].integer, (chunk + 1) * a[7].integer); ++p)
        if (const int64_t place = as<int64_t>(a[2])[p]; place >= 0)
            std::memcpy(as<char>(a[1]) + place * bytes, as<char>(a[0]) + p / a[4].integer * a[6].integer,
                        size_t(bytes));
}

/* Multiplies the rows of each expert by its packed weight. Chunks are groups of panels of one expert after another.
   Args: the kernel of one product (linear_bf16, quantised_bf16 ...), bounds, hit, addresses of weights, bytes of a row
   of x, of `out` and of `staged`, addresses of biases (or null), the number of the kernel's arguments, and these, with the first rows of x, `out` and
   `staged`. For a low-bit weight the last one is the fewest rows for which tiles are used, or 0. */
QUIRE_EXPORT void experts_product(const Arg *a, int64_t chunk, void *scratch) {
    constexpr int64_t FIRST = 9, MOST = 21, STAGED = 15, TILED = 20;
    const int64_t count = a[8].integer;
    Arg own[MOST];
    std::copy(a + FIRST, a + FIRST + count, own);
    const int64_t groups = own[10].integer, expert = as<int64_t>(a[2])[chunk / groups];
    if (expert < 0) return;
    const int64_t first = as<int64_t>(a[1])[expert], rows = as<int64_t>(a[1])[expert + 1] - first;
    own[0].pointer = as<char>(own[0]) + first * a[4].integer;
    own[1].integer = as<int64_t>(a[3])[expert];
    if (a[7].pointer) own[2].integer = as<int64_t>(a[7])[expert];
    own[3].pointer = as<char>(own[3]) + first * a[5].integer;
    own[4].integer = rows;
    if (count > TILED) {
        if (own[STAGED].pointer) own[STAGED].pointer = as<char>(own[STAGED]) + first * a[6].integer;
        own[TILED].integer = own[TILED].integer && rows >= own[TILED].integer;
    }
    const int64_t parts = (rows + own[9].integer - 1) / own[9].integer;
    for (int64_t part = 0; part < parts; ++part)
        reinterpret_cast<Kernel>(a[0].pointer)(own, chunk % groups * parts + part, scratch);
}

QUIRE_EXPORT void experts_route_bf16(const Arg *a, int64_t chunk, void *) { route<bf16>(a, chunk); }
QUIRE_EXPORT void experts_route_f32(const Arg *a, int64_t chunk, void *) { route<float>(a, chunk); }
QUIRE_EXPORT void experts_combine_bf16(const Arg *a, int64_t chunk, void *) { combine<bf16>(a, chunk); }
QUIRE_EXPORT void experts_combine_f32(const Arg *a, int64_t chunk, void *) { combine<float>(a, chunk); }
