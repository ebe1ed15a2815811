/* The causal convolution of layers with states, along the tokens of each row of a step. */
#include "lanes.h"

constexpr int MAX_EARLIER = 15;

/* out = silu(sum over taps k of weight[k] * x[t - taps + 1 + k] + bias) for each token t of a row and each channel, from
   the inputs before the row that the state in page `read` holds (below 0: zeros). The last inputs at each end of a run
   of page_tokens tokens, and of the row, are stored to a page of `write` (below 0: nothing is). With gates x is
   multiplied by `before` first, and rounded, and the result by `after`. A chunk is a part of a row's channels.
   Args: x, out, weight [channels, taps], bias (null: none), states [pages, channels, taps - 1], offsets, lengths,
   starts, read, write (int64), before and after (null: none), stride of x and gates, channels, taps, stride of pages,
   columns of `write`, page_tokens, whether to apply SiLU, channels of a chunk. */
template <class T> static void convolution(const Arg *a, int64_t chunk) {
    const int64_t channels = a[13].integer, taps = a[14].integer, earlier = taps - 1, part = a[19].integer;
    const int64_t parts = (channels + part - 1) / part, row = chunk / parts, first = chunk % parts * part;
    const int64_t last = first + part < channels ? first + part : channels;
    const int64_t offset = as<int64_t>(a[5])[row], length = as<int64_t>(a[6])[row], start = as<int64_t>(a[7])[row];
    const int64_t read = as<int64_t>(a[8])[row], *write = as<int64_t>(a[9]) + row * a[16].integer;
    const T *weight = as<T>(a[2]), *bias = as<T>(a[3]), *before = as<T>(a[10]), *after = as<T>(a[11]);
    T *states = as<T>(a[4]);
    for (int64_t c = first; c < last; c += LANES) {
        const int64_t count = last - c < LANES ? last - c : LANES;
        lanes inputs[MAX_EARLIER], factors[MAX_EARLIER + 1], shift{};
        for (int64_t k = 0; k < taps; ++k) {
            factors[k] = lanes{};
            for (int64_t i = 0; i < count; ++i) factors[k][i] = to(weight[(c + i) * taps + k]);
        }
        if (bias) shift = load(bias + c, count);
        for (int64_t k = 0; k < earlier; ++k) {
            inputs[k] = lanes{};
            const T *from = states + read * a[15].integer + c * earlier + k;
            for (int64_t i = 0; read >= 0 && i < count; ++i) inputs[k][i] = to(from[i * earlier]);
        }
        int64_t run = 0, end = a[17].integer - start % a[17].integer;
        for (int64_t t = 0; t < length; ++t) {
            const int64_t at = (offset + t) * a[12].integer + c;
            lanes here = load(as<T>(a[0]) + at, count);
            if (before) {
                T rounded[LANES];
                store(rounded, here * load(before + at, count));
                here = load(rounded);
            }
            lanes sum = fused(here, factors[earlier], shift);
            for (int64_t k = 0; k < earlier; ++k) sum = fused(inputs[k], factors[k], sum);
            if (a[18].integer) sum = sum / (1.0f + power(sum * -LOG2E));
            if (after) sum *= load(after + at, count);
            store(as<T>(a[1]) + (offset + t) * channels + c, sum, count);
            for (int64_t k = 0; k + 1 < earlier; ++k) inputs[k] = inputs[k + 1];
            inputs[earlier - 1] = here;
            if (t + 1 < end && t + 1 < length) continue;
            const int64_t page = write[run++];
            end += a[17].integer;
            for (int64_t k = 0; page >= 0 && k < earlier; ++k) {
                T *onto = states + page * a[15].integer + c * earlier + k;
                for (int64_t i = 0; i < count; ++i) onto[i * earlier] = from<T>(inputs[k][i]);
            }
        }
    }
}

/* The plan of a step of one token a row: plan[0] is the row, plan[1] 1, plan[2] the page with the state before the
   token at the row's position, -1 for the first token, and plan[3] that of the state after it.
   Args: plan [4, rows], table [*, width], slots, positions (int64), rows, width, tokens of a page. */
QUIRE_EXPORT void decode_states(const Arg *a, int64_t, void *) {
    const int64_t rows = a[4].integer, width = a[5].integer, run = a[6].integer;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t *pages = as<int64_t>(a[1]) + as<int64_t>(a[2])[row] * width, at = as<int64_t>(a[3])[row];
        int64_t *plan = as<int64_t>(a[0]) + row;
        plan[0] = row;
        plan[rows] = 1;
        plan[2 * rows] = at ? pages[(at - 1) / run] : -1;
        plan[3 * rows] = pages[at / run];
    }
}

QUIRE_EXPORT void convolution_bf16(const Arg *a, int64_t chunk, void *) { convolution<bf16>(a, chunk); }
QUIRE_EXPORT void convolution_f32(const Arg *a, int64_t chunk, void *) { convolution<float>(a, chunk); }
